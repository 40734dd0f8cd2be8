//! The `quantization` block of a configuration: which modules are quantized, and how.

use std::collections::BTreeMap;

use lmx_tensor::formats::mlx::{Mode, Quantization};
use serde_json::{Map, Value};

use super::names::canonical;
use crate::models::{Config, ConfigError};

/// The quantization methods of transformers whose tensors are stored as MLX stores them.
const METHODS: &str = "mxfp4 or mxfp8; convert the checkpoint with mlx-lm, or use its unquantized original";

/// What the configuration declares.
#[derive(Debug, Default)]
pub(super) struct Declared {
    /// By module path: how it is quantized, or `None` for a module that must not be.
    modules: BTreeMap<String, Option<Quantization>>,
}

impl Declared {
    /// Reads `quantization`, else `quantization_config`.
    ///
    /// # Errors
    /// An unknown mode or method, or parameters of the wrong kind, by name.
    pub(super) fn read(config: &Config) -> Result<Self, ConfigError> {
        let (key, block) = match (config.get("quantization"), config.get("quantization_config")) {
            (Some(block), _) => ("quantization", block),
            (None, Some(block)) => ("quantization_config", block),
            (None, None) => return Ok(Self::default()),
        };
        let Some(block) = block.as_object() else { return Err(config.invalid(key, "an object")) };
        if let Some(method) = block.get("quant_method") {
            return match method.as_str() {
                // Which modules are quantized then follows from the tensors alone.
                Some("mxfp4" | "mxfp8") => Ok(Self::default()),
                _ => Err(config.invalid(&format!("{key}.quant_method"), METHODS)),
            };
        }
        let top = parameters(config, key, block)?;
        let mut modules = BTreeMap::new();
        for (path, value) in block {
            let declared = match value {
                Value::Object(own) => Some(parameters(config, &format!("{key}.{path}"), own)?),
                Value::Bool(true) => Some(top),
                Value::Bool(false) => None,
                // The block's own parameters and other texts and numbers.
                _ => continue,
            };
            modules.insert(canonical(path).unwrap_or_else(|| path.clone()), declared);
        }
        Ok(Self { modules })
    }

    /// What is said about a module: `None` if nothing, `Some(None)` that it is not quantized.
    pub(super) fn module(&self, path: &str) -> Option<Option<Quantization>> {
        self.modules.get(path).copied()
    }
}

/// Mode, bits and group of an object, with MLX's defaults for each mode where they are absent or null. An entry of a
/// module does not inherit the block's own parameters.
fn parameters(
    config: &Config,
    place: &str,
    object: &Map<String, Value>,
) -> Result<Quantization, ConfigError> {
    let invalid = |name: &str, value: &Value, allowed: &str| ConfigError::Invalid {
        origin: config.origin().to_owned(),
        key: format!("{place}.{name}"),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    };
    let present = |name: &str| object.get(name).filter(|value| !value.is_null());
    let mode = match present("mode") {
        None => Mode::Affine,
        Some(value) => match value.as_str() {
            Some("affine") => Mode::Affine,
            Some("mxfp4") => Mode::Mxfp4,
            Some("nvfp4") => Mode::Nvfp4,
            Some("mxfp8") => Mode::Mxfp8,
            _ => return Err(invalid("mode", value, "affine, mxfp4, nvfp4 or mxfp8")),
        },
    };
    let (group, bits) = match mode {
        Mode::Affine => (64, 4),
        Mode::Mxfp4 => (32, 4),
        Mode::Nvfp4 => (16, 4),
        Mode::Mxfp8 => (32, 8),
    };
    let number = |name: &str, default: u8, allowed: &str| match present(name) {
        None => Ok(default),
        Some(value) => {
            let whole = value.as_u64().and_then(|number| u8::try_from(number).ok());
            whole.ok_or_else(|| invalid(name, value, allowed))
        }
    };
    Ok(Quantization {
        mode,
        bits: number("bits", bits, "a whole number of bits from 2 to 8")?,
        group: number("group_size", group, "16, 32, 64 or 128")?.into(),
    })
}
