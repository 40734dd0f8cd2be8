//! An adapter's tensors, as additions to the matrices of a model.

use super::{Adapter, AdapterError, AdapterFiles, Loaded, Method};
use crate::checkpoint::canonical;
use crate::models::{LinearRole, Model};
use lmx_tensor::adapter::{AdapterWeights, LowRank};
use lmx_tensor::files::FileTensor;
use lmx_tensor::{Device, Linear};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A matrix, and what it is of its module.
type Part<'a> = (LinearRole, &'a Linear);
/// The matrices of each module, by its name.
type Modules<'a> = BTreeMap<String, Vec<Part<'a>>>;

impl AdapterFiles {
    /// Loads the adapter for `model`: all of its tensors, for exactly the modules that its configuration names.
    ///
    /// # Errors
    /// [`AdapterError`] naming the file, and the key, module or tensor.
    pub fn fit(&self, model: &dyn Model) -> Result<Adapter, AdapterError> {
        let mut modules = Modules::new();
        model.visit_linears(&mut |name, role, linear| {
            modules.entry(name.to_owned()).or_default().push((role, linear));
        });
        let chosen = self.choose(&modules)?;
        let mut tensors = Tensors::of(self)?;
        let mut weights = AdapterWeights::default();
        for (&module, &matrices) in &chosen {
            self.add_module(module, matrices, model.device(), &mut tensors, &mut weights)?;
        }
        let fingerprint = tensors.finish(self)?;
        let layers: BTreeSet<usize> =
            chosen.keys().filter_map(|module| in_layer(module)).map(|(layer, _)| layer).collect();
        Ok(Adapter(Arc::new(Loaded {
            name: self.name.clone(),
            method: self.method,
            rank: self.rank,
            modules: chosen.len(),
            layers: layers.len(),
            fingerprint,
            weights: Arc::new(weights),
        })))
    }

    /// The modules that the configuration names.
    fn choose<'m, 'a>(
        &self,
        modules: &'m Modules<'a>,
    ) -> Result<BTreeMap<&'m str, &'m [Part<'a>]>, AdapterError> {
        let layers = modules.keys().filter_map(|module| in_layer(module)).map(|(layer, _)| layer + 1).max();
        let first = layers.unwrap_or(0).saturating_sub(self.last_layers.unwrap_or(usize::MAX));
        let changed = |module: &str| in_layer(module).is_some_and(|(layer, _)| layer >= first);
        let is = |key: &str, module: &str| {
            let inner = in_layer(module).is_some_and(|(_, name)| name == key);
            inner && changed(module) || canonical(key).is_some_and(|whole| whole == module)
        };
        let lost = |key: &&String| !modules.keys().any(|module| is(key, module));
        if let Some(key) = self.keys.iter().flatten().find(lost) {
            let where_ = match self.last_layers {
                Some(last) => format!(", in the last {last} layers or outside of them"),
                None => String::new(),
            };
            return Err(AdapterError::Key { config: self.origin.clone(), key: key.clone(), where_ });
        }
        let chosen = modules.iter().map(|(module, matrices)| (module.as_str(), matrices.as_slice()));
        let chosen = chosen.filter(|(module, _)| match &self.keys {
            None => changed(module),
            Some(keys) => keys.iter().any(|key| is(key, module)),
        });
        match chosen.collect::<BTreeMap<_, _>>() {
            none if none.is_empty() => Err(AdapterError::Nothing { config: self.origin.clone() }),
            chosen => Ok(chosen),
        }
    }

    fn add_module(
        &self,
        module: &str,
        matrices: &[Part<'_>],
        device: &Device,
        tensors: &mut Tensors<'_>,
        weights: &mut AdapterWeights,
    ) -> Result<(), AdapterError> {
        let Some(&(role, linear)) = matrices.first() else { return Ok(()) };
        let unfit =
            |why| AdapterError::Module { config: self.origin.clone(), module: module.to_owned(), why };
        let (rank, inputs, outputs) = (self.rank, linear.in_features(), linear.out_features());
        // The shapes of lora_a and lora_b, and the outputs of the module.
        let (a, b, outputs) = match role {
            LinearRole::Normed => return Err(unfit("whose rows this model brings to length 1")),
            LinearRole::Expert(_) if self.method == Method::Dora => {
                return Err(unfit("which are experts; DoRA is not defined for them"));
            }
            LinearRole::Expert(place) => {
                (vec![place.count, rank, inputs], vec![place.count, outputs, rank], outputs)
            }
            LinearRole::Embedding => (vec![outputs, rank], vec![rank, inputs], outputs),
            LinearRole::Whole => (vec![inputs, rank], vec![rank, outputs], outputs),
            LinearRole::Outputs { of, .. } => (vec![inputs, rank], vec![rank, of], of),
        };
        let a = tensors.take(module, "lora_a")?.to_f32(&a)?;
        let b = tensors.take(module, "lora_b")?.to_f32(&b)?;
        let lengths = match self.method {
            Method::Lora => None,
            Method::Dora => Some(tensors.take(module, "m")?.to_f32(&[outputs])?),
        };
        for &(role, linear) in matrices {
            let (out, inp) = (linear.out_features(), linear.in_features());
            let (down, mut up) = match role {
                LinearRole::Embedding => (b.clone(), a.clone()),
                LinearRole::Expert(place) => {
                    let part =
                        |of: &[f32], len: usize| of[place.index * len..(place.index + 1) * len].to_vec();
                    (part(&a, rank * inp), part(&b, out * rank))
                }
                _ => (transposed(&a, rank, 0..rank), transposed(&b, outputs, rows(role, out))),
            };
            up.iter_mut().for_each(|value| *value *= self.scale);
            let part =
                LowRank::new(Linear::from_values(rank, inp, &down), Linear::from_values(out, rank, &up))?;
            let part = match &lengths {
                None => part,
                Some(lengths) => part.with_row_lengths(device, linear, &lengths[rows(role, out)])?,
            };
            weights.insert(linear.id(), part);
        }
        Ok(())
    }
}

/// The outputs of a module that are those of one of its matrices, which has `out`.
fn rows(role: LinearRole, out: usize) -> Range<usize> {
    match role {
        LinearRole::Outputs { first, .. } => first..first + out,
        _ => 0..out,
    }
}

/// Some columns of a matrix with rows of `width` as rows.
fn transposed(values: &[f32], width: usize, columns: Range<usize>) -> Vec<f32> {
    columns.flat_map(|column| values.iter().skip(column).step_by(width).copied()).collect()
}

/// A module's layer and its name there.
fn in_layer(module: &str) -> Option<(usize, &str)> {
    let (layer, name) = module.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, name))
}

/// The file's tensors by the model's names; whoever takes one adds it to the fingerprint.
struct Tensors<'a> {
    files: &'a AdapterFiles,
    /// Those that nobody has taken, with their names in the file.
    left: BTreeMap<String, String>,
    hash: blake3::Hasher,
}

impl<'a> Tensors<'a> {
    fn of(files: &'a AdapterFiles) -> Result<Self, AdapterError> {
        let mut left = BTreeMap::new();
        for name in files.weights.names() {
            let canonical = canonical(name).unwrap_or_else(|| name.to_owned());
            if let Some(first) = left.insert(canonical, name.to_owned()) {
                let file = files.weights.path().to_owned();
                return Err(AdapterError::Duplicate { file, first, second: name.to_owned() });
            }
        }
        Ok(Self { files, left, hash: blake3::Hasher::new() })
    }

    fn take(&mut self, module: &str, kind: &str) -> Result<FileTensor, AdapterError> {
        let name = format!("{module}.{kind}");
        let Some(stored) = self.left.remove(&name) else {
            let file = self.files.weights.path().to_owned();
            return Err(AdapterError::MissingTensor { file, tensor: name, module: module.to_owned() });
        };
        let tensor = self.files.weights.tensor(&stored)?;
        // Lengths first, so that no two sequences of parts are the same bytes.
        let head = format!("{} {name} {} {:?} ", name.len(), tensor.dtype(), tensor.shape());
        self.hash.update(head.as_bytes()).update(tensor.data());
        Ok(tensor)
    }

    /// The fingerprint, if all tensors were taken.
    fn finish(mut self, files: &AdapterFiles) -> Result<u64, AdapterError> {
        if let Some(tensor) = self.left.into_values().next() {
            return Err(AdapterError::ExtraTensor { file: files.weights.path().to_owned(), tensor });
        }
        self.hash.update(files.method.to_string().as_bytes()).update(&files.scale.to_le_bytes());
        let mut bytes = [0; 8];
        self.hash.finalize_xof().fill(&mut bytes);
        Ok((u64::from_le_bytes(bytes) >> 2).max(1))
    }
}
