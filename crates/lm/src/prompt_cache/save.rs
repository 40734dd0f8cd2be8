//! Writing a prompt-cache file.

use super::layers::{dtype, narrow};
use super::notes::Notes;
use super::{PromptCache, PromptCacheError};
use crate::cache::{Held, KvQuantization, KvSpec, LayerGroup, Policy};
use lmx_tensor::files::{DType, TensorHead, write_safetensors};
use lmx_tensor::kernels::attention::{KvCodes, KvQuant};
use std::collections::BTreeMap;
use std::path::Path;

/// What a tensor of the file is.
#[derive(Clone, Copy)]
enum Part {
    /// A layer's keys, or its values, as floats.
    Rows { layer: usize, values: bool },
    /// The codes (0), the scales (1) or the biases (2) of a layer's keys, or its values.
    Codes { layer: usize, values: bool, which: usize },
    /// A number.
    Scalar(usize),
}

/// The file's tensors, and the entries of the metadata that describe them.
#[derive(Default)]
struct Layout {
    metadata: BTreeMap<String, String>,
    heads: Vec<TensorHead>,
    parts: Vec<Part>,
    scalars: usize,
}

/// Whether files have a place for a cache of this form; quantized if the spec says so, from whichever position on.
///
/// # Errors
/// [`PromptCacheError::Unsupported`] naming what they have none for.
pub fn check_savable(spec: &KvSpec) -> Result<(), PromptCacheError> {
    check(spec, spec.quantization.is_some())
}

fn check(spec: &KvSpec, quantized: bool) -> Result<(), PromptCacheError> {
    let policy = |which: fn(Policy) -> bool| spec.groups.iter().any(|group| which(group.policy));
    let what = if !spec.states.is_empty() {
        "recurrent state"
    } else if policy(|policy| matches!(policy, Policy::Chunk(_))) {
        "layers with chunks"
    } else if quantized && policy(|policy| matches!(policy, Policy::Window(_))) {
        "quantized keys and values in a window"
    } else {
        return Ok(());
    };
    Err(PromptCacheError::Unsupported { what })
}

impl Layout {
    fn tensor(&mut self, name: String, dtype: DType, shape: Vec<usize>, part: Part) {
        self.heads.push(TensorHead { name, dtype, shape });
        self.parts.push(part);
    }

    /// A layer's keys or values.
    fn rows(&mut self, layer: usize, values: bool, group: &LayerGroup, held: &Held, quant: Option<KvQuant>) {
        let shape = group.shape;
        let name = format!("{layer}.{}", usize::from(values));
        let dims = |width: usize| vec![1, shape.kv_heads, held.count(), width];
        let Some(quant) = quant else {
            let part = Part::Rows { layer, values };
            return self.tensor(name, dtype(shape.ty), dims(shape.head_dim), part);
        };
        let (words, groups) = (shape.head_dim * quant.bits() / 32, shape.head_dim / quant.group());
        let widths = [(DType::U32, words), (dtype(shape.ty), groups), (dtype(shape.ty), groups)];
        for (which, (dtype, width)) in widths.into_iter().enumerate() {
            let part = Part::Codes { layer, values, which };
            self.tensor(format!("{name}.{which}"), dtype, dims(width), part);
        }
    }

    /// A layer's numbers.
    fn scalars(&mut self, layer: usize, numbers: &[usize]) {
        for (i, &number) in numbers.iter().enumerate() {
            let name = format!("{layer}.{}", i + 2);
            self.scalars += 1;
            self.metadata.insert(format!("2.{}.0", self.scalars), name.clone());
            self.metadata.insert(format!("2.{}.1", self.scalars), "scalar".to_owned());
            self.tensor(name, DType::I32, Vec::new(), Part::Scalar(number));
        }
    }
}

impl PromptCache {
    /// Writes the cache in mlx-lm's layout, with `notes`. The file at `path` is replaced in one step.
    ///
    /// A window's layer is written as a ring that has just been filled: its kept entries, then all that is held of
    /// the last positions, which may be more than the window has. So the cache can be trimmed after it is read. What
    /// is quantized is written code by code as it is held.
    ///
    /// # Errors
    /// [`PromptCacheError::Empty`], [`PromptCacheError::Unsupported`], or a file that cannot be written.
    pub fn save(&self, path: &Path, notes: &Notes) -> Result<(), PromptCacheError> {
        if self.is_empty() {
            return Err(PromptCacheError::Empty);
        }
        let (spec, quant) = (self.spec(), self.kv.quant(self.id));
        check(spec, quant.is_some())?;
        let held = (0..spec.groups.len()).map(|group| self.kv.held(self.id, group));
        let held = held.collect::<Result<Vec<Held>, _>>()?;
        let start = spec.quantization.filter(|_| quant.is_some()).map(KvQuantization::start);
        // Whatever the identity was made for, the tokens were run with this adapter.
        let identity = notes.identity.clone().map(|identity| identity.with_adapter(self.adapter()));
        let notes = Notes { identity, ..notes.clone() };
        let entries = notes.entries(self.tokens(), self.long_context, start);
        let mut layout = Layout::default();
        layout.metadata.extend(entries.into_iter().map(|(key, value)| (format!("0.{key}"), value)));
        layout.metadata.insert("2.0".to_owned(), String::new());
        for (layer, &(group, _)) in spec.layers.iter().enumerate() {
            let (own, held) = (&spec.groups[group], &held[group]);
            let (class, numbers) = match (own.policy, quant) {
                (Policy::Window(window), _) => {
                    ("RotatingKVCache", vec![self.len(), window.keep(), window.size(), held.count()])
                }
                (_, None) => ("KVCache", vec![self.len()]),
                (_, Some(quant)) => ("QuantizedKVCache", vec![self.len(), quant.group(), quant.bits()]),
            };
            layout.metadata.insert(format!("1.{layer}"), class.to_owned());
            for values in [false, true] {
                layout.rows(layer, values, own, held, quant);
            }
            layout.scalars(layer, &numbers);
        }
        let held = |layer: usize| &held[spec.layers[layer].0];
        let mut data = |index: usize| match layout.parts[index] {
            Part::Scalar(number) => (number as i32).to_le_bytes().to_vec(),
            Part::Rows { layer, values } => self.rows(layer, values, held(layer)),
            Part::Codes { layer, values, which } => self.codes(layer, values, which, held(layer)),
        };
        Ok(write_safetensors(path, &layout.metadata, &layout.heads, &mut data)?)
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

    /// A layer's codes, scales or biases, `[kv_heads][positions][width]`.
    fn codes(&self, layer: usize, values: bool, which: usize, held: &Held) -> Vec<u8> {
        let shape = self.spec().groups[self.spec().layers[layer].0].shape;
        let Some(quant) = self.kv.quant(self.id) else { return Vec::new() };
        let (mut k, mut v) = (KvCodes::zeroed(&shape, quant), KvCodes::zeroed(&shape, quant));
        let mut rows = Vec::new();
        let mut width = 0;
        for position in held.positions() {
            // As with floats.
            if self.kv.read_codes(self.id, layer, position, &mut k, &mut v) == Ok(true) {
                let KvCodes { codes, scales, biases } = if values { &v } else { &k };
                let row = [codes, scales, biases][which];
                rows.extend_from_slice(row);
                width = row.len();
            }
        }
        let head = width / shape.kv_heads.max(1);
        let heads = (0..shape.kv_heads).map(|index| index * head);
        heads
            .flat_map(|at| rows.chunks_exact(width.max(1)).flat_map(move |row| &row[at..][..head]))
            .copied()
            .collect()
    }
}
