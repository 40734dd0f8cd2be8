//! Reading a prompt-cache file: mlx-lm's flattened tree in safetensors, checked as a whole before any of it is used.
//!
//! Tensor `i.0` and `i.1` are layer i's keys and values, `i.2` and on its numbers. The metadata has the texts `0.KEY`,
//! the classes `1.i`, and a list `2.n` of the tensors that stand for what is no array.

use super::layers::{LayerFile, dtype};
use super::notes::{Notes, Said};
use super::{Identity, PromptCache, PromptCacheError};
use crate::adapter::Adapter;
use crate::cache::{BlockBudget, Held, KvQuantization, KvSpec, KvStore, KvWindow, LayerKv, Policy};
use lmx_tensor::files::{Bytes, DType, FileTensor, SafetensorsFile};
use lmx_tensor::kernels::attention::{KvCodes, KvType};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A checked prompt-cache file. The file itself is never changed.
#[derive(Debug)]
pub struct PromptCacheFile {
    path: PathBuf,
    layers: Vec<LayerFile>,
    notes: Notes,
    tokens: Option<Vec<u32>>,
    long_context: bool,
    quantization: Option<KvQuantization>,
}

/// The file's tensors and entries while it is read, so that what nobody asks for can be refused.
pub(super) struct Entries {
    file: SafetensorsFile,
    /// The tensors that the metadata lists as something else than an array, with what they are.
    listed: BTreeMap<String, String>,
    taken: RefCell<BTreeSet<String>>,
}

impl PromptCacheFile {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// [`PromptCacheError`] naming the entry or tensor.
    pub fn open(path: &Path) -> Result<Self, PromptCacheError> {
        Self::read(SafetensorsFile::open(path)?)
    }

    /// Checks a file that is in memory. `path` is for messages.
    ///
    /// # Errors
    /// As [`PromptCacheFile::open`].
    pub fn parse(path: &Path, bytes: &Bytes) -> Result<Self, PromptCacheError> {
        Self::read(SafetensorsFile::parse(path, bytes)?)
    }

    fn read(file: SafetensorsFile) -> Result<Self, PromptCacheError> {
        let mut entries = Entries { file, listed: BTreeMap::new(), taken: RefCell::default() };
        let (texts, classes) = entries.split()?;
        let layers = classes.iter().enumerate().map(|(i, class)| LayerFile::read(&entries, i, class));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        entries.expect_all_taken()?;
        let Some(first) = layers.first() else {
            return Err(entries.wrong("the number of layers", 0, "at least 1"));
        };
        for (i, layer) in layers.iter().enumerate() {
            if layer.offset != first.offset || layer.offset == 0 {
                let allowed = format!("that of layer 0, {}, and not 0", first.offset);
                return Err(entries.wrong(&format!("the offset \"{i}.2\""), layer.offset, allowed));
            }
            if layer.ty != first.ty {
                let allowed = format!("that of layer 0, {}", dtype(first.ty));
                return Err(entries.wrong(&format!("the float type of layer {i}"), dtype(layer.ty), allowed));
            }
            if layer.quantized() != first.quantized() {
                let [found, wanted] = [layer, first].map(|layer| match layer.quantized() {
                    Some(quant) => format!("{} bits in groups of {}", quant.bits(), quant.group()),
                    None => "none".to_owned(),
                });
                let allowed = format!("that of layer 0, {wanted}");
                return Err(entries.wrong(&format!("the quantization of layer {i}"), found, allowed));
            }
        }
        let said = Said::read(&entries, &texts, first.offset)?;
        let quantization = match (first.quantized(), said.quantized_start) {
            (None, Some(start)) => {
                let allowed = "absent, since no layer is quantized";
                return Err(entries.wrong(&Said::field_of_start(), start, allowed));
            }
            // mlx-lm does not tell: then all positions are to read what is quantized.
            (quant, start) => quant.map(|quant| KvQuantization::from_position(quant, start.unwrap_or(0))),
        };
        let Said { notes, tokens, long_context, .. } = said;
        let path = entries.file.path().to_owned();
        Ok(Self { path, layers, notes, tokens, long_context, quantization })
    }

    /// The path, as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says beside the keys and values.
    #[must_use]
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Tokens held, at least 1.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.offset)
    }

    /// Which tokens are held; `None` if the file does not say.
    #[must_use]
    pub fn tokens(&self) -> Option<&[u32]> {
        self.tokens.as_deref()
    }

    /// How keys and values are stored; if they are quantized, their scales and biases.
    #[must_use]
    pub fn kv_type(&self) -> KvType {
        self.layers.first().map_or(KvType::F32, |layer| layer.ty)
    }

    /// How keys and values are quantized, and from which position on queries read them so; `None` for floats.
    #[must_use]
    pub fn quantization(&self) -> Option<KvQuantization> {
        self.quantization
    }

    /// The windows of its layers, each once.
    #[must_use]
    pub fn windows(&self) -> Vec<KvWindow> {
        let mut windows = Vec::new();
        for layer in &self.layers {
            if let Policy::Window(window) = layer.policy()
                && !windows.contains(&window)
            {
                windows.push(window);
            }
        }
        windows
    }

    /// The bound under which the file was made (`--max-kv-size`): the window in the file of those layers that
    /// `model` gives none.
    #[must_use]
    pub fn bound(&self, model: &[LayerKv]) -> Option<KvWindow> {
        let layers = self.layers.iter().zip(model);
        let mut bounded =
            layers.filter(|(_, own)| own.policy == Policy::Full).map(|(layer, _)| layer.policy());
        // If they differ, or the others have another window, loading tells which layer does not fit.
        match bounded.next() {
            Some(Policy::Window(window)) => Some(window),
            _ => None,
        }
    }

    /// Checks that the file belongs to what `here` identifies; a file without an identity passes.
    ///
    /// # Errors
    /// [`PromptCacheError::Mismatch`] naming the first difference.
    pub fn check_identity(&self, here: &Identity) -> Result<(), PromptCacheError> {
        match self.notes.identity.as_ref().and_then(|made_with| made_with.difference(here)) {
            None => Ok(()),
            Some((field, found, expected)) => {
                Err(PromptCacheError::Mismatch { file: self.path.clone(), field, found, expected })
            }
        }
    }

    /// Checks that the file was made with `adapter`; one that does not say passes.
    fn check_adapter(&self, adapter: Option<&Adapter>) -> Result<(), PromptCacheError> {
        let other = self.notes.identity.as_ref().and_then(|made_with| made_with.other_adapter(adapter));
        other.map_or(Ok(()), |(found, expected)| {
            let found: String = found.chars().take(80).collect();
            let (file, field) = (self.path.clone(), Identity::ADAPTER_FIELD.to_owned());
            Err(PromptCacheError::Mismatch { file, field, found, expected })
        })
    }

    /// Reads the keys and values, which were made without an adapter, into blocks that count against `budget`.
    ///
    /// # Errors
    /// [`PromptCacheError`] naming the layer that does not fit `spec`, the adapter that the file was made with, or if the
    /// budget is spent.
    pub fn load(&self, spec: &KvSpec, budget: &Arc<BlockBudget>) -> Result<PromptCache, PromptCacheError> {
        self.load_with(spec, budget, None)
    }

    /// [`PromptCacheFile::load`] of a file that was made with `adapter`.
    pub(crate) fn load_with(
        &self,
        spec: &KvSpec,
        budget: &Arc<BlockBudget>,
        adapter: Option<&Adapter>,
    ) -> Result<PromptCache, PromptCacheError> {
        self.check_adapter(adapter)?;
        let held = self.fit(spec)?;
        let mut kv = KvStore::with_budget(spec.clone(), Arc::clone(budget));
        let id = kv.add_holding(self.token_count(), &held, self.quantization.is_some())?;
        for (i, layer) in self.layers.iter().enumerate() {
            let shape = spec.groups[spec.layers[i].0].shape;
            let held = layer.held();
            let places = held.positions().zip(layer.order());
            if let Some(quant) = layer.quantized() {
                let (mut k, mut v) = (KvCodes::zeroed(&shape, quant), KvCodes::zeroed(&shape, quant));
                for (position, entry) in places {
                    layer.codes(entry, &mut k, &mut v);
                    kv.put_codes(id, i, position, &k, &v)?;
                }
                continue;
            }
            let width = shape.kv_heads * shape.head_dim;
            let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
            for (position, entry) in places {
                layer.entry(entry, &mut k, &mut v);
                kv.put(id, i, position, &k, &v)?;
            }
        }
        let cache = PromptCache::of(&kv, id, self.tokens.clone(), self.long_context)?;
        Ok(cache.made_with(adapter.cloned()))
    }

    /// The positions that each group of `spec` will hold.
    fn fit(&self, spec: &KvSpec) -> Result<Vec<Held>, PromptCacheError> {
        let mismatch = |field: String, found: String, expected: String| PromptCacheError::Mismatch {
            file: self.path.clone(),
            field,
            found,
            expected,
        };
        if self.layers.len() != spec.layers.len() {
            let (found, expected) = (self.layers.len().to_string(), spec.layers.len().to_string());
            return Err(mismatch("a number of layers of".to_owned(), found, expected));
        }
        // Floats may be quantized later; codes are what they are.
        if self.quantization.is_some() && self.quantization != spec.quantization {
            let words = |how: Option<KvQuantization>| how.map_or("floats".to_owned(), |how| how.to_string());
            let (found, expected) = (words(self.quantization), words(spec.quantization));
            return Err(mismatch("keys and values of".to_owned(), found, expected));
        }
        let mut groups: Vec<Option<Held>> = vec![None; spec.groups.len()];
        for (i, (layer, &(group, _))) in self.layers.iter().zip(&spec.layers).enumerate() {
            let (own, held) = (&spec.groups[group], layer.held());
            let heads = [own.shape.kv_heads, own.shape.head_dim];
            let found = [layer.kv_heads, layer.head_dim];
            if found != heads {
                return Err(mismatch(
                    format!("heads and head size in layer {i} of"),
                    format!("{found:?}"),
                    format!("{heads:?}"),
                ));
            }
            if layer.ty != own.shape.ty {
                let (found, expected) = (dtype(layer.ty), dtype(own.shape.ty));
                return Err(mismatch("a KV type of".to_owned(), found.to_string(), expected.to_string()));
            }
            if layer.policy() != own.policy {
                let (found, expected) = (layer.policy().to_string(), own.policy.to_string());
                return Err(mismatch(format!("a layer {i} that is"), found, expected));
            }
            match groups[group].replace(held.clone()) {
                Some(other) if other != held => {
                    let list = |held: &Held| format!("positions {:?} and {:?}", held.first, held.last);
                    return Err(mismatch(format!("in layer {i}"), list(&held), list(&other)));
                }
                _ => {}
            }
        }
        Ok(groups.into_iter().map(|held| held.unwrap_or(Held::all(0))).collect())
    }
}

impl Entries {
    /// The texts by key, and the classes by layer; remembers what the other entries list.
    fn split(&mut self) -> Result<(BTreeMap<String, String>, Vec<String>), PromptCacheError> {
        let (mut texts, mut classes) = (BTreeMap::new(), BTreeMap::new());
        let (mut names, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in self.file.metadata() {
            let parts: Vec<&str> = key.splitn(3, '.').collect();
            let number = |text: &str| text.parse::<usize>().ok().filter(|n| n.to_string() == text);
            match (parts.as_slice(), parts.get(1).and_then(|text| number(text))) {
                (["0", _, ..], _) => drop(texts.insert(key["0.".len()..].to_owned(), value.clone())),
                (["1", _], Some(layer)) => drop(classes.insert(layer, value.clone())),
                (["2", "0"], _) if value.is_empty() => {}
                (["2", _, "0"], Some(n)) => drop(names.insert(n, value.clone())),
                (["2", _, "1"], Some(n)) => drop(kinds.insert(n, value.clone())),
                _ => {
                    let allowed = "those of mlx-lm 0.32.1 or later: 0.KEY, 1.LAYER, 2.N.0, 2.N.1";
                    return Err(self.wrong("a metadata key", format!("{key:?}"), allowed));
                }
            }
        }
        if let Some((layer, _)) = classes.keys().enumerate().find(|(i, layer)| i != *layer) {
            return Err(self.wrong(&format!("entry \"1.{layer}\", a layer's class,"), "missing", "present"));
        }
        for (n, name) in names {
            let Some(kind) = kinds.remove(&n) else {
                return Err(self.wrong(&format!("entry \"2.{n}.1\""), "missing", "present"));
            };
            self.listed.insert(name, kind);
        }
        if let Some(n) = kinds.keys().next() {
            return Err(self.wrong(&format!("entry \"2.{n}.0\""), "missing", "present"));
        }
        Ok((texts, classes.into_values().collect()))
    }

    /// The error that `field` is `found`.
    pub(super) fn wrong(
        &self,
        field: &str,
        found: impl ToString,
        allowed: impl Into<String>,
    ) -> PromptCacheError {
        // Texts of a file may be long.
        let found: String = found.to_string().chars().take(120).collect();
        let (file, field) = (self.file.path().to_owned(), field.to_owned());
        PromptCacheError::Entry { file, field, found, allowed: allowed.into() }
    }

    /// A tensor that is an array.
    pub(super) fn tensor(&self, name: &str) -> Result<FileTensor, PromptCacheError> {
        self.taken.borrow_mut().insert(name.to_owned());
        match self.listed.get(name) {
            None => Ok(self.file.tensor(name)?),
            Some(kind) => Err(self.wrong(&format!("tensor {name:?}"), format!("a {kind:?}"), "an array")),
        }
    }

    /// How a tensor's keys or values are stored.
    pub(super) fn float(&self, tensor: &FileTensor) -> Result<KvType, PromptCacheError> {
        match tensor.dtype() {
            DType::F32 => Ok(KvType::F32),
            DType::F16 => Ok(KvType::F16),
            DType::Bf16 => Ok(KvType::Bf16),
            other => {
                let field = format!("the type of tensor {:?}", tensor.name());
                Err(self.wrong(&field, other, "F32, F16 or BF16"))
            }
        }
    }

    /// A number from 0 to `max`, which the metadata must list as one.
    pub(super) fn scalar(&self, name: &str, max: usize) -> Result<usize, PromptCacheError> {
        self.taken.borrow_mut().insert(name.to_owned());
        let tensor = self.file.tensor(name)?;
        let field = format!("tensor {name:?}");
        if self.listed.get(name).map(String::as_str) != Some("scalar") {
            return Err(self.wrong(&field, "not listed as a scalar in the metadata", "a scalar"));
        }
        let bytes = match (tensor.dtype(), tensor.shape()) {
            (DType::I32, []) => tensor.data().first_chunk(),
            _ => None,
        };
        let Some(&bytes) = bytes else {
            let found = format!("{} {:?}", tensor.dtype(), tensor.shape());
            return Err(self.wrong(&field, found, "I32 []"));
        };
        let value = i32::from_le_bytes(bytes);
        let small = usize::try_from(value).ok().filter(|&value| value <= max);
        small.ok_or_else(|| self.wrong(&field, value, format!("from 0 to {max}")))
    }

    fn expect_all_taken(&self) -> Result<(), PromptCacheError> {
        let taken = self.taken.borrow();
        let other =
            self.file.names().chain(self.listed.keys().map(String::as_str)).find(|&n| !taken.contains(n));
        other
            .map_or(Ok(()), |name| Err(self.wrong("a tensor", format!("{name:?}"), "none that no layer has")))
    }
}
