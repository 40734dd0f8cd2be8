//! From a model's name to something that generates.

use crate::cache::{KvQuantError, KvQuantization};
use crate::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use crate::models::{Config, ConfigError, Decoder, Model};
use crate::text::{EosSet, EosSource, Tokenizer, TokenizerError};
use lmx_tensor::Device;
use lmx_tensor::files::DType;
use lmx_tensor::kernels::attention::KvType;
use std::sync::Arc;

/// How to load a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: Device,
    /// Where it is looked for.
    pub open: OpenOptions,
    /// Further end-of-sequence tokens, as words or ids.
    pub extra_eos: Vec<String>,
    /// How keys and values will be quantized: whether the model's can be is known before its weights are read.
    pub kv_quantization: Option<KvQuantization>,
}

impl LoadOptions {
    /// Loads onto `device`, from folders and files only.
    #[must_use]
    pub fn new(device: Device) -> Self {
        Self { device, open: OpenOptions::default(), extra_eos: Vec::new(), kv_quantization: None }
    }
}

/// A loaded model with all that turns text into tokens and back.
pub struct Loaded {
    /// The network.
    pub model: Box<dyn Model>,
    /// Text to tokens and back, and the chat template.
    pub tokenizer: Arc<Tokenizer>,
    /// The tokens that end a reply, each with its source.
    pub eos: EosSet,
    /// The checkpoint's own float type, which `--kv-dtype auto` stands for; f16 for GGUF files.
    pub kv_type: KvType,
    /// The files and their configuration.
    pub checkpoint: Checkpoint,
    /// What the user may not expect, a line each.
    pub notices: Vec<String>,
}

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its keys and values cannot be quantized as asked.
    #[error(transparent)]
    KvQuant(#[from] KvQuantError),
    /// The tokenizer could not be read because its thread died.
    #[error("the tokenizer's thread ended early")]
    Thread,
}

/// Loads a model: a folder, a `.gguf` file, or a hub id that is in one of the given caches.
///
/// # Errors
/// [`LoadError`] naming the file and the tensor, key or token.
pub fn load(source: &str, options: &LoadOptions) -> Result<Loaded, LoadError> {
    load_with_progress(source, options, &mut |_, _| {})
}

/// [`load`], telling `progress(done, total)` as layers are read.
///
/// # Errors
/// As [`load`].
pub fn load_with_progress(
    source: &str,
    options: &LoadOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Loaded, LoadError> {
    let checkpoint = Checkpoint::open(source, &options.open)?;
    let config = checkpoint.describe()?;
    if let Some(how) = options.kv_quantization {
        how.check(&config.layer_kv())?;
    }
    // Large vocabularies take about as long as mapping the weights.
    let (decoder, tokenizer) = std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| read_tokenizer(&checkpoint));
        let decoder = Decoder::load(&checkpoint, config, &options.device, progress);
        (decoder, tokenizer.join().unwrap_or(Err(LoadError::Thread)))
    });
    let (decoder, tokenizer) = (decoder?, tokenizer?);
    checkpoint.expect_all_used()?;
    let eos = eos_set(&checkpoint, &tokenizer, &options.extra_eos)?;
    let notices = checkpoint.notices();
    let kv_type = kv_type(&checkpoint)?;
    let (model, tokenizer) = (Box::new(decoder), Arc::new(tokenizer));
    Ok(Loaded { model, tokenizer, eos, kv_type, checkpoint, notices })
}

pub(crate) fn read_tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer, LoadError> {
    match (checkpoint.gguf(), checkpoint.folder()) {
        (Some(gguf), _) => Ok(Tokenizer::from_gguf(gguf)?),
        (None, Some(folder)) => Ok(Tokenizer::from_folder(folder)?),
        (None, None) => Err(LoadError::Thread),
    }
}

/// The union of what the configuration, the generation configuration, the tokenizer and the user name.
pub(crate) fn eos_set(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    extra: &[String],
) -> Result<EosSet, LoadError> {
    let mut set = EosSet::default();
    let configs = [
        (Some(checkpoint.config()), EosSource::Config),
        (checkpoint.generation_config(), EosSource::GenerationConfig),
    ];
    for (config, source) in configs {
        for id in config.map_or(Ok(Vec::new()), eos_ids)? {
            set.insert(id, source);
        }
    }
    for id in tokenizer.eos_ids() {
        set.insert(id, EosSource::Tokenizer);
    }
    for word in extra {
        set.insert(tokenizer.lookup(word)?, EosSource::User);
    }
    Ok(set)
}

/// `eos_token_id`: an id, a list of ids, null or absent.
fn eos_ids(config: &Config) -> Result<Vec<u32>, ConfigError> {
    let invalid = || config.invalid("eos_token_id", "a token id, a list of token ids, or null");
    let id =
        |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(invalid);
    match config.get("eos_token_id") {
        None | Some(serde_json::Value::Null) => Ok(Vec::new()),
        Some(serde_json::Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

pub(crate) fn kv_type(checkpoint: &Checkpoint) -> Result<KvType, CheckpointError> {
    Ok(match checkpoint.float_type()? {
        DType::F32 => KvType::F32,
        DType::Bf16 => KvType::Bf16,
        _ => KvType::F16,
    })
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("source", self.checkpoint.source()).finish_non_exhaustive()
    }
}
