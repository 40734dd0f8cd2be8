//! Checkpoints: from a folder, a GGUF file or a cached hub id to a configuration and named weights.
//!
//! * [`ModelSource`] finds the place, [`Checkpoint`] opens it.
//! * Whatever the source, tensors go by the names that Hugging Face's text models have, and hold what those hold.
//! * Nothing in a folder is ever run: pickles are not read, and models that need their own code are refused.

mod error;
mod folder;
mod gguf;
mod names;
mod quantization;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use lmx_tensor::files::{DType, FileError, FileTensor, GgufFile, SafetensorsFile};
use lmx_tensor::formats::mlx::MlxTensors;
use lmx_tensor::kernels::Exec;
use lmx_tensor::{Linear, Rows};

pub use error::CheckpointError;
pub(crate) use folder::Folder;
pub(crate) use names::canonical;
pub use source::{ModelSource, OpenOptions, cached_dataset};

use crate::models::{Config, ConfigError, DecoderConfig, families};
use folder::Shards;
use quantization::Declared;

/// How a checkpoint is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A folder as transformers writes it.
    HuggingFace,
    /// A folder as mlx-lm writes it.
    Mlx,
    /// A GGUF file.
    Gguf,
}

/// An open checkpoint: its configuration, and its weights by name.
#[derive(Debug)]
pub struct Checkpoint {
    source: ModelSource,
    kind: Kind,
    config: Config,
    generation_config: Option<Config>,
    files: Vec<File>,
    /// Where each tensor is, by the text model's name for it.
    places: BTreeMap<String, Place>,
    declared: Declared,
    /// What llama.cpp's converters did to the tensors of this architecture.
    converted: Converted,
    notices: Vec<String>,
    taken: Mutex<BTreeSet<String>>,
}

#[derive(Debug)]
enum File {
    Safetensors(SafetensorsFile),
    Gguf(GgufFile),
}

#[derive(Debug)]
struct Place {
    /// Index into the checkpoint's files.
    file: usize,
    /// The name in that file.
    name: String,
}

/// One of a layer's experts, whose weights lie in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPlace {
    /// Which one.
    pub index: usize,
    /// How many there are.
    pub count: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Converted {
    /// Rows of q and k are permuted within heads of this width.
    permuted_heads: Option<usize>,
    /// Norm weights are stored with 1 added.
    norms_plus_one: bool,
}

impl Checkpoint {
    /// Opens what `name` means: a folder, a `.gguf` file, or a hub id in the local cache. Every file of weights is
    /// checked, none is read.
    ///
    /// # Errors
    /// [`CheckpointError`], which names the folder, file, tensor or key.
    pub fn open(name: &str, options: &OpenOptions) -> Result<Self, CheckpointError> {
        let source = ModelSource::resolve(name, options)?;
        let mut checkpoint = match &source {
            ModelSource::Folder(path) | ModelSource::Hub(path) => Self::open_folder(&source, path)?,
            ModelSource::Gguf(path) => Self::open_gguf(&source, path)?,
        };
        if let (Some(revision), false) = (&options.revision, matches!(source, ModelSource::Hub(_))) {
            checkpoint.notices.push(format!("revision {revision} has no effect: {name} is a local path"));
        }
        Ok(checkpoint)
    }

    fn open_folder(source: &ModelSource, path: &Path) -> Result<Self, CheckpointError> {
        let folder = Folder::open(path)?;
        let origin = |name: &str| path.join(name).display().to_string();
        let Some(text) = folder.text("config.json")? else {
            return Err(CheckpointError::NoConfig {
                folder: path.to_owned(),
                hint: folder.hint_without_config(),
            });
        };
        let config = Config::from_json(&text, &origin("config.json"))?;
        let generation = folder.text("generation_config.json")?;
        let generation_config =
            generation.map(|text| Config::from_json(&text, &origin("generation_config.json"))).transpose()?;
        let declared = Declared::read(&config)?;
        if folder.has("hf_quant_config.json") && config.get("quantization").is_none() {
            let allowed = "absent: the ModelOpt quantization that it describes is not supported";
            return Err(ConfigError::Invalid {
                origin: path.display().to_string(),
                key: "hf_quant_config.json".to_owned(),
                value: "present".to_owned(),
                allowed: allowed.to_owned(),
            }
            .into());
        }
        // Before the weights are looked at, so that an unknown model is called that.
        families::describe(&config)?;
        let shards = folder.shards()?;
        let (files, places, dropped) = index_shards(&shards)?;
        let mut notices = Vec::new();
        if !shards.stray.is_empty() {
            notices.push(format!("not part of the checkpoint, so not read: {}", shards.stray.join(", ")));
        }
        if dropped > 0 {
            notices.push(format!("only the text model is loaded; {dropped} vision tensors are left out"));
        }
        let by_mlx =
            |file: &SafetensorsFile| file.metadata().get("format").is_some_and(|format| format == "mlx");
        let kind = if files.iter().any(by_mlx) { Kind::Mlx } else { Kind::HuggingFace };
        Ok(Self {
            source: source.clone(),
            kind,
            config,
            generation_config,
            files: files.into_iter().map(File::Safetensors).collect(),
            places,
            declared,
            converted: Converted::default(),
            notices,
            taken: Mutex::default(),
        })
    }

    fn open_gguf(source: &ModelSource, path: &Path) -> Result<Self, CheckpointError> {
        let file = GgufFile::open(path)?;
        let architecture = gguf::architecture(&file)?.to_owned();
        let config = Config::from_values(gguf::config_values(&file)?, &path.display().to_string());
        families::describe(&config)?;
        let converted = match architecture.as_str() {
            "llama" | "smollm3" => {
                Converted { permuted_heads: config.size_opt("head_dim")?, norms_plus_one: false }
            }
            "gemma2" | "gemma3" => Converted { permuted_heads: None, norms_plus_one: true },
            _ => Converted::default(),
        };
        let weights = file.names().filter(|name| !gguf::is_configuration(name));
        let places = weights
            .map(|name| (names::from_gguf(name, &architecture), Place { file: 0, name: name.to_owned() }))
            .collect();
        Ok(Self {
            source: source.clone(),
            kind: Kind::Gguf,
            config,
            generation_config: None,
            files: vec![File::Gguf(file)],
            places,
            declared: Declared::default(),
            converted,
            notices: Vec::new(),
            taken: Mutex::default(),
        })
    }

    /// Where the checkpoint was found.
    #[must_use]
    pub fn source(&self) -> &ModelSource {
        &self.source
    }

    /// How it is stored.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// `generation_config.json`, if the folder has one.
    #[must_use]
    pub fn generation_config(&self) -> Option<&Config> {
        self.generation_config.as_ref()
    }

    /// The folder, for the tokenizer's files; `None` for a GGUF file.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            ModelSource::Folder(path) | ModelSource::Hub(path) => Some(path),
            ModelSource::Gguf(_) => None,
        }
    }

    /// The GGUF file, for the tokenizer's metadata; `None` for a folder.
    #[must_use]
    pub fn gguf(&self) -> Option<&GgufFile> {
        match self.files.as_slice() {
            [File::Gguf(file)] => Some(file),
            _ => None,
        }
    }

    /// What the user should be told about the checkpoint and its configuration.
    #[must_use]
    pub fn notices(&self) -> Vec<String> {
        self.notices.iter().cloned().chain(self.config.notices()).collect()
    }

    /// The model's own float type: the configuration's, else that of its embedding; F16 for GGUF files.
    ///
    /// # Errors
    /// A type that is not a float of 16 or 32 bits.
    pub fn float_type(&self) -> Result<DType, CheckpointError> {
        if self.kind == Kind::Gguf {
            return Ok(DType::F16);
        }
        for key in ["dtype", "torch_dtype"] {
            match self.config.text_opt(key)? {
                None | Some("auto") => {}
                Some("float32") => return Ok(DType::F32),
                Some("float16") => return Ok(DType::F16),
                Some("bfloat16") => return Ok(DType::Bf16),
                Some(_) => return Err(self.config.invalid(key, "float32, float16 or bfloat16").into()),
            }
        }
        let stored = ["scales", "weight"].iter().find_map(|kind| self.lookup(&format!("{EMBEDDING}.{kind}")));
        match stored.transpose()?.map(|tensor| tensor.dtype()) {
            Some(dtype @ (DType::F16 | DType::F32)) => Ok(dtype),
            _ => Ok(DType::Bf16),
        }
    }

    /// Describes the decoder, with the head tied or not as configuration and weights together say:
    ///
    /// * tied, and a head is stored: if it is the embedding again it is left aside, else it is used, as transformers does;
    /// * not tied, and no head is stored: an error, unless the configuration has no `tie_word_embeddings`.
    ///
    /// # Errors
    /// [`CheckpointError::Config`], or a missing head.
    pub fn describe(&self) -> Result<DecoderConfig, CheckpointError> {
        let mut decoder = families::describe(&self.config)?;
        let stored = self.has(&format!("{HEAD}.weight"));
        if decoder.tied_head && stored {
            decoder.tied_head = self.head_is_embedding()?;
            if !decoder.tied_head {
                self.config.notice(
                    "tie_word_embeddings is true, but lm_head differs from the embedding: lm_head is used"
                        .to_owned(),
                );
            }
        } else if !decoder.tied_head && !stored {
            let why = match self.config.get("tie_word_embeddings") {
                Some(_) => Some(", though tie_word_embeddings is false"),
                // The embedding's rows are not what such a head's are made from.
                None => decoder.normed_head.then_some(""),
            };
            if let Some(why) = why {
                return Err(self.missing(&format!("{HEAD}.weight"), why));
            }
            self.config.notice("there is no lm_head: the embedding is taken for it".to_owned());
            decoder.tied_head = true;
        }
        Ok(decoder)
    }

    /// Whether every tensor of the head equals the embedding's; they are then counted as taken.
    fn head_is_embedding(&self) -> Result<bool, CheckpointError> {
        let heads: Vec<&String> = self.places.keys().filter(|name| name.starts_with("lm_head.")).collect();
        for name in &heads {
            let kind = name.strip_prefix(HEAD).unwrap_or_default();
            let (Some(head), Some(embedding)) =
                (self.lookup(name), self.lookup(&format!("{EMBEDDING}{kind}")))
            else {
                return Ok(false);
            };
            let (head, embedding) = (head?, embedding?);
            let same = head.dtype() == embedding.dtype() && head.shape() == embedding.shape();
            if !same || head.data()[..] != embedding.data()[..] {
                return Ok(false);
            }
        }
        heads.into_iter().for_each(|name| self.take(name));
        Ok(true)
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// A vector such as a norm's weight, widened. `name` is the whole name, `len` what the model expects.
    ///
    /// # Errors
    /// A missing tensor, or one of another shape or type.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        let mut vector = self.tensor(name)?.to_f32(&[len])?;
        if self.converted.norms_plus_one && name.ends_with("norm.weight") {
            vector.iter_mut().for_each(|weight| *weight -= 1.0);
        }
        Ok(vector)
    }

    /// A tensor of floats of shape `shape`, widened.
    ///
    /// # Errors
    /// A missing tensor, or one of another shape or type.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        Ok(self.tensor(name)?.to_f32(shape)?)
    }

    /// The weights `[taps][features]` of a convolution of each feature with itself: `[features, 1, taps]` as
    /// transformers stores them, or `[features, taps, 1]` as mlx-lm does.
    ///
    /// # Errors
    /// A missing tensor, or one of another shape or type.
    pub fn conv_taps(&self, name: &str, features: usize, taps: usize) -> Result<Vec<f32>, CheckpointError> {
        let tensor = self.tensor(name)?;
        let by_mlx = tensor.shape() == [features, taps, 1];
        let weight = tensor.to_f32(&if by_mlx { [features, taps, 1] } else { [features, 1, taps] })?;
        let tap = |tap: usize| weight.iter().skip(tap).step_by(taps.max(1)).copied();
        Ok((0..taps).flat_map(tap).collect())
    }

    /// The weights `[out, inp]` of one expert of `module`, whose matrices are stacked: `[experts, out, inp]`.
    ///
    /// # Errors
    /// As [`Checkpoint::linear`].
    ///
    /// # Panics
    /// If the expert's index is not below their number.
    pub fn expert(
        &self,
        exec: &Exec,
        module: &str,
        expert: ExpertPlace,
        out: usize,
        inp: usize,
    ) -> Result<Linear, CheckpointError> {
        let rows = Rows::range(expert.index * out..(expert.index + 1) * out, expert.count * out);
        self.build(exec, module, &rows, inp, false, Some(expert.count))
    }

    /// The weights of one expert from the stack of mxfp4 matrices that `name` has in the original files of gpt-oss:
    /// codes `[experts, total, inp / 32, 16]` in `name_blocks`, scales `[experts, total, inp / 32]` in `name_scales`.
    /// Its rows are those of the `total` that `rows` lists.
    ///
    /// # Errors
    /// As [`Checkpoint::linear`].
    ///
    /// # Panics
    /// If the expert's index is not below their number.
    pub fn expert_blocks(
        &self,
        exec: &Exec,
        name: &str,
        expert: ExpertPlace,
        rows: &[usize],
        total: usize,
        inp: usize,
    ) -> Result<Linear, CheckpointError> {
        let tensors = MlxTensors {
            weight: self.tensor(&format!("{name}_blocks"))?.stacked_blocks(expert.count)?,
            scales: self.tensor(&format!("{name}_scales"))?.stacked(expert.count)?,
            biases: None,
            global_scale: None,
        };
        let rows = rows.iter().map(|row| expert.index * total + row).collect();
        let rows = Rows::reordered(rows, expert.count * total);
        Ok(Linear::from_mlx(exec, &tensors, &rows, inp, None)?)
    }

    /// The weights of one expert from the stack `name` of transposed matrices, `[experts, inp, total]`: the `rows` of
    /// those `total`. Only floats are stored in this way.
    ///
    /// # Errors
    /// As [`Checkpoint::linear`].
    ///
    /// # Panics
    /// If the expert's index is not below their number, or one of `rows` is not within `0..total`.
    pub fn expert_transposed(
        &self,
        name: &str,
        expert: ExpertPlace,
        rows: &[usize],
        total: usize,
        inp: usize,
    ) -> Result<Linear, CheckpointError> {
        let columns = Rows::reordered(rows.to_vec(), total);
        Ok(Linear::from_transposed(&self.tensor(name)?, expert.index, expert.count, &columns, inp)?)
    }

    /// The weights of module `module` (`model.layers.0.mlp.up_proj`), `[out, inp]`, with its bias if it is to have one.
    ///
    /// # Errors
    /// A missing tensor, one of another shape or type, or a quantization that contradicts the configuration.
    pub fn linear(
        &self,
        exec: &Exec,
        module: &str,
        out: usize,
        inp: usize,
        bias: bool,
    ) -> Result<Linear, CheckpointError> {
        let permuted = module.ends_with(".q_proj") || module.ends_with(".k_proj");
        let rows = match self
            .converted
            .permuted_heads
            .filter(|head_dim| permuted && out.is_multiple_of(*head_dim))
        {
            Some(head_dim) => gguf::neighbours_apart(out, head_dim),
            None => Rows::all(out),
        };
        self.build(exec, module, &rows, inp, bias, None)
    }

    /// A cut of a fused matrix of `total` rows: one of q, k, v or of gate and up.
    ///
    /// # Errors
    /// As [`Checkpoint::linear`].
    ///
    /// # Panics
    /// If `rows` is not within `0..total`.
    pub fn linear_rows(
        &self,
        exec: &Exec,
        module: &str,
        rows: Range<usize>,
        total: usize,
        inp: usize,
        bias: bool,
    ) -> Result<Linear, CheckpointError> {
        self.build(exec, module, &Rows::range(rows, total), inp, bias, None)
    }

    /// With `stack`, the tensors are stacks of so many matrices, which `rows` counts below one another.
    fn build(
        &self,
        exec: &Exec,
        module: &str,
        rows: &Rows,
        inp: usize,
        bias: bool,
        stack: Option<usize>,
    ) -> Result<Linear, CheckpointError> {
        let named = |kind: &str| format!("{module}.{kind}");
        let matrix = |name: &str| match stack {
            None => self.tensor(name),
            Some(count) => Ok(self.tensor(name)?.stacked(count)?),
        };
        let declared = self.declared.module(module);
        let linear = match declared {
            None if !self.has(&named("scales")) => {
                Linear::from_tensor(exec, &matrix(&named("weight"))?, rows, inp)?
            }
            Some(None) => Linear::from_tensor(exec, &matrix(&named("weight"))?, rows, inp)?,
            _ => {
                let (biases, global_scale) = (named("biases"), named("global_scale"));
                let tensors = MlxTensors {
                    weight: matrix(&named("weight"))?,
                    scales: matrix(&named("scales"))?,
                    biases: self.has(&biases).then(|| matrix(&biases)).transpose()?,
                    global_scale: self.has(&global_scale).then(|| self.tensor(&global_scale)).transpose()?,
                };
                Linear::from_mlx(exec, &tensors, rows, inp, declared.flatten())?
            }
        };
        if bias { Ok(linear.with_bias(&self.tensor(&named("bias"))?, rows)?) } else { Ok(linear) }
    }

    /// Bytes of all tensors of `decoder` in the files.
    ///
    /// # Errors
    /// A damaged file.
    pub fn stored_bytes(&self, decoder: &DecoderConfig) -> Result<u64, CheckpointError> {
        // A stored head that repeats the embedding is not loaded.
        let loaded = |name: &&String| !(decoder.tied_head && name.starts_with("lm_head."));
        let tensors = self.places.keys().filter(loaded).filter_map(|name| self.lookup(name));
        let bytes = tensors.map(|tensor| tensor.map(|tensor| tensor.data().len() as u64));
        Ok(bytes.sum::<Result<u64, FileError>>()?)
    }

    /// Visits every tensor as it is stored, in the order of the text model's names.
    ///
    /// # Errors
    /// A damaged file.
    pub fn visit_tensors(&self, visit: &mut dyn FnMut(&str, &FileTensor)) -> Result<(), CheckpointError> {
        for name in self.places.keys() {
            if let Some(tensor) = self.lookup(name) {
                visit(name, &tensor?);
            }
        }
        Ok(())
    }

    /// The tensors that nothing has asked for, by the text model's names.
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        self.places.keys().filter(|name| !taken.contains(*name)).cloned().collect()
    }

    /// Checks, once the model is built, that it has asked for every tensor: a bias or a norm that is left over would
    /// mean that the model computes something else than what was trained.
    ///
    /// # Errors
    /// [`CheckpointError::ExtraTensors`].
    pub fn expect_all_used(&self) -> Result<(), CheckpointError> {
        match self.unused() {
            unused if unused.is_empty() => Ok(()),
            tensors => Err(CheckpointError::ExtraTensors { tensors, place: self.source.path().to_owned() }),
        }
    }

    fn tensor(&self, name: &str) -> Result<FileTensor, CheckpointError> {
        let tensor = self.lookup(name).ok_or_else(|| self.missing(name, ""))??;
        self.take(name);
        Ok(tensor)
    }

    fn lookup(&self, name: &str) -> Option<Result<FileTensor, FileError>> {
        let place = self.places.get(name)?;
        Some(match self.files.get(place.file)? {
            File::Safetensors(file) => file.tensor(&place.name),
            File::Gguf(file) => file.tensor(&place.name),
        })
    }

    fn take(&self, name: &str) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
    }

    fn missing(&self, name: &str, why: &str) -> CheckpointError {
        CheckpointError::MissingTensor {
            tensor: name.to_owned(),
            place: self.source.path().to_owned(),
            why: why.to_owned(),
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// Opened shards, where each tensor is, and how many were dropped as belonging to vision parts.
type IndexedShards = (Vec<SafetensorsFile>, BTreeMap<String, Place>, usize);

/// Opens the shards and finds out where each tensor is.
fn index_shards(shards: &Shards) -> Result<IndexedShards, CheckpointError> {
    let mut files: Vec<SafetensorsFile> = Vec::with_capacity(shards.files.len());
    let mut places: BTreeMap<String, Place> = BTreeMap::new();
    let mut dropped = 0;
    for (path, listed) in &shards.files {
        let file = SafetensorsFile::open(path)?;
        // The file says it itself, with its name, where the index promises a tensor that it lacks.
        listed.iter().find(|name| !file.contains(name)).map_or(Ok(()), |name| file.tensor(name).map(drop))?;
        for name in file.names() {
            let Some(canonical) = names::canonical(name) else {
                dropped += usize::from(!name.ends_with(names::ROTARY));
                continue;
            };
            let place = Place { file: files.len(), name: name.to_owned() };
            if let Some(first) = places.insert(canonical, place) {
                let first = files.get(first.file).map_or_else(PathBuf::new, |file| file.path().to_owned());
                return Err(CheckpointError::Duplicate {
                    tensor: name.to_owned(),
                    first,
                    second: path.clone(),
                });
            }
        }
        files.push(file);
    }
    Ok((files, places, dropped))
}
