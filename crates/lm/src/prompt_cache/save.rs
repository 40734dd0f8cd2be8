//! Writing a prompt-cache file.

use super::layers::{dtype, narrow};
use super::notes::Notes;
use super::{PromptCache, PromptCacheError};
use crate::cache::{Held, Policy};
use lmx_tensor::files::{DType, TensorHead, write_safetensors};
use std::collections::BTreeMap;
use std::path::Path;

/// What a tensor of the file is.
enum Part {
    /// A layer's keys, or its values.
    Rows { layer: usize, values: bool },
    /// A number.
    Scalar(usize),
}

impl PromptCache {
    /// Writes the cache in mlx-lm's layout, with `notes`. The file at `path` is replaced in one step.
    ///
    /// A window's layer is written as a ring that has just been filled: its kept entries, then all that is held of
    /// the last positions, which may be more than the window has. So the cache can be trimmed after it is read.
    ///
    /// # Errors
    /// [`PromptCacheError::Empty`], [`PromptCacheError::Unsupported`], or a file that cannot be written.
    pub fn save(&self, path: &Path, notes: &Notes) -> Result<(), PromptCacheError> {
        if self.is_empty() {
            return Err(PromptCacheError::Empty);
        }
        let spec = self.spec();
        if !spec.states.is_empty() {
            return Err(PromptCacheError::Unsupported { what: "recurrent state" });
        }
        let held = (0..spec.groups.len()).map(|group| self.kv.held(self.id, group));
        let held = held.collect::<Result<Vec<Held>, _>>()?;
        let mut metadata: BTreeMap<String, String> = notes
            .entries(self.tokens(), self.long_context)
            .into_iter()
            .map(|(key, value)| (format!("0.{key}"), value))
            .collect();
        metadata.insert("2.0".to_owned(), String::new());
        let (mut heads, mut parts, mut scalars) = (Vec::new(), Vec::new(), 0);
        for (layer, &(group, _)) in spec.layers.iter().enumerate() {
            let (own, held) = (&spec.groups[group], &held[group]);
            let (class, numbers) = match own.policy {
                Policy::Full => ("KVCache", vec![self.len()]),
                Policy::Window(window) => {
                    ("RotatingKVCache", vec![self.len(), window.keep(), window.size(), held.count()])
                }
                Policy::Chunk(_) => return Err(PromptCacheError::Unsupported { what: "layers with chunks" }),
            };
            metadata.insert(format!("1.{layer}"), class.to_owned());
            for (i, values) in [false, true].into_iter().enumerate() {
                let shape = vec![1, own.shape.kv_heads, held.count(), own.shape.head_dim];
                heads.push(TensorHead { name: format!("{layer}.{i}"), dtype: dtype(own.shape.ty), shape });
                parts.push(Part::Rows { layer, values });
            }
            for (i, number) in numbers.into_iter().enumerate() {
                let name = format!("{layer}.{}", i + 2);
                scalars += 1;
                metadata.insert(format!("2.{scalars}.0"), name.clone());
                metadata.insert(format!("2.{scalars}.1"), "scalar".to_owned());
                heads.push(TensorHead { name, dtype: DType::I32, shape: Vec::new() });
                parts.push(Part::Scalar(number));
            }
        }
        let mut data = |index: usize| match parts[index] {
            Part::Scalar(number) => (number as i32).to_le_bytes().to_vec(),
            Part::Rows { layer, values } => self.rows(layer, values, &held[spec.layers[layer].0]),
        };
        Ok(write_safetensors(path, &metadata, &heads, &mut data)?)
    }

    /// A layer's keys or values, `[kv_heads][positions][head_dim]`.
    fn rows(&self, layer: usize, values: bool, held: &Held) -> Vec<u8> {
        let shape = self.spec().groups[self.spec().layers[layer].0].shape;
        let width = shape.kv_heads * shape.head_dim;
        let mut rows = Vec::with_capacity(held.count() * width);
        let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
        for position in held.positions() {
            // A position that is not held would leave the data short, which the writer refuses.
            if self.kv.read(self.id, layer, position, &mut k, &mut v) == Ok(true) {
                rows.extend_from_slice(if values { &v } else { &k });
            }
        }
        let mut bytes = Vec::with_capacity(rows.len() * shape.ty.bytes());
        for head in 0..shape.kv_heads {
            for row in rows.chunks_exact(width) {
                narrow(shape.ty, &row[head * shape.head_dim..][..shape.head_dim], &mut bytes);
            }
        }
        bytes
    }
}
