//! An adapter's folder, read before any model is loaded.

use super::{AdapterError, Method};
use crate::checkpoint::{Folder, ModelSource, OpenOptions};
use crate::models::{Config, ConfigError};
use lmx_tensor::files::SafetensorsFile;
use serde_json::Value;

pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapters.safetensors";
/// What PEFT writes in the place of [`WEIGHTS`].
const PEFT_WEIGHTS: &str = "adapter_model.safetensors";

/// The files of an adapter: what they say is in range, but not yet compared with a model.
#[derive(Debug)]
pub struct AdapterFiles {
    pub(super) name: String,
    /// How errors call the configuration.
    pub(super) origin: String,
    pub(super) weights: SafetensorsFile,
    pub(super) method: Method,
    /// Layers at the end of the model that it changes; `None` for all.
    pub(super) last_layers: Option<usize>,
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// The modules that it changes, as they are called within a layer or in the model; `None` for all of the layers.
    pub(super) keys: Option<Vec<String>>,
}

impl AdapterFiles {
    /// Opens a folder in mlx-lm's format, or a hub id that is in one of the caches of `options`.
    ///
    /// # Errors
    /// [`AdapterError`] naming the file, and the key or tensor.
    pub fn open(name: &str, options: &OpenOptions) -> Result<Self, AdapterError> {
        let path = match ModelSource::resolve(name, options)? {
            ModelSource::Folder(path) | ModelSource::Hub(path) => path,
            ModelSource::Gguf(path) => return Err(AdapterError::NotAFolder(path)),
        };
        let folder = Folder::open(&path)?;
        if folder.has(PEFT_WEIGHTS) && !folder.has(WEIGHTS) {
            return Err(AdapterError::Peft(path));
        }
        let missing = |file| AdapterError::NoFile { folder: path.clone(), file };
        let text = folder.text(CONFIG)?.ok_or_else(|| missing(CONFIG))?;
        let config = Config::from_json(&text, &path.join(CONFIG).display().to_string())?;
        if config.get("peft_type").is_some() {
            return Err(AdapterError::Peft(path));
        }
        let method = method(&config)?;
        let (last_layers, rank, scale, keys) =
            (last_layers(&config)?, rank(&config)?, scale(&config)?, keys(&config)?);
        check_parameters(&config)?;
        if !folder.has(WEIGHTS) {
            return Err(missing(WEIGHTS));
        }
        let weights = SafetensorsFile::open(&path.join(WEIGHTS))?;
        let origin = config.origin().to_owned();
        Ok(Self { name: name.to_owned(), origin, weights, method, last_layers, rank, scale, keys })
    }

    /// The adapter's name, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn method(config: &Config) -> Result<Method, ConfigError> {
    const KEY: &str = "fine_tune_type";
    match config.text_opt(KEY)? {
        None | Some("lora") => Ok(Method::Lora),
        Some("dora") => Ok(Method::Dora),
        Some("full") => Err(config.invalid(
            KEY,
            "lora or dora: a full fine-tune has weights in place of the model's and no adapter; fuse it into the model",
        )),
        Some(_) => Err(config.invalid(KEY, "lora or dora")),
    }
}

/// As mlx-lm takes it: no positive number means all, and so does one beyond the model's layers.
fn last_layers(config: &Config) -> Result<Option<usize>, ConfigError> {
    const KEY: &str = "num_layers";
    const ALLOWED: &str = "a whole number of layers, or -1 for all";
    match config.get(KEY) {
        None => Err(config.missing(KEY, ALLOWED)),
        Some(value) => match value.as_i64() {
            Some(number) => Ok(usize::try_from(number).ok().filter(|&layers| layers > 0)),
            None => Err(config.invalid(KEY, ALLOWED)),
        },
    }
}

fn rank(config: &Config) -> Result<usize, ConfigError> {
    const KEY: &str = "lora_parameters";
    match config.get(KEY) {
        None => Err(config.missing(KEY, "an object with rank and scale")),
        Some(Value::Object(_)) => config.size("lora_parameters.rank"),
        Some(_) => Err(config.invalid(KEY, "an object with rank and scale")),
    }
}

fn scale(config: &Config) -> Result<f32, ConfigError> {
    const KEY: &str = "lora_parameters.scale";
    if let Some(scale) = config.number_opt(KEY)? {
        return Ok(scale as f32);
    }
    let allowed = match config.get("lora_parameters.alpha") {
        None => "a number",
        Some(_) => {
            "a number, by which the addition is multiplied; alpha, which others divide by the rank, is not read"
        }
    };
    Err(config.missing(KEY, allowed))
}

fn keys(config: &Config) -> Result<Option<Vec<String>>, ConfigError> {
    const KEY: &str = "lora_parameters.keys";
    let text = |value: &Value| value.as_str().map(str::to_owned);
    match config.get(KEY) {
        None => Ok(None),
        Some(value) => {
            let keys = value.as_array().and_then(|keys| keys.iter().map(text).collect());
            keys.map(Some).ok_or_else(|| config.invalid(KEY, "a list of module names, or null"))
        }
    }
}

/// Refuses parameters that mlx-lm does not have: whoever wrote them meant something by them. Dropout acts in training
/// only.
fn check_parameters(config: &Config) -> Result<(), ConfigError> {
    const DROPOUT: &str = "lora_parameters.dropout";
    if config.number_opt(DROPOUT)?.is_some_and(|dropout| !(0.0..1.0).contains(&dropout)) {
        return Err(config.invalid(DROPOUT, "a number from 0 to below 1"));
    }
    match config.unread().into_iter().find(|key| key.starts_with("lora_parameters.")) {
        Some(key) => Err(config.invalid(&key, "absent: mlx-lm has rank, scale, dropout and keys here")),
        None => Ok(()),
    }
}
