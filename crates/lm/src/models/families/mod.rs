//! The model families: each reads a [`Config`] and fills a [`DecoderConfig`]. A new family is a file here and a line
//! in `FAMILIES`.

mod dims;
mod gemma2;
mod gemma3;
mod keys;
mod llama;
mod phi3;
mod qwen;
mod smollm3;

pub(crate) use dims::LAYERS_MAX;

use super::config::{Config, ConfigError};
use super::description::{Activation, DecoderConfig};

type Describe = fn(&Config) -> Result<DecoderConfig, ConfigError>;

/// The families by `model_type`.
const FAMILIES: &[(&str, Describe)] = &[
    ("gemma2", gemma2::describe),
    ("gemma3_text", gemma3::describe),
    ("iquestcoder", llama::describe),
    ("llama", llama::describe),
    ("mistral", llama::describe_mistral),
    ("phi3", phi3::describe),
    ("qwen2", qwen::describe_qwen2),
    ("qwen3", qwen::describe_qwen3),
    ("smollm3", smollm3::describe),
    ("xverse", llama::describe),
];

/// Describes the decoder of a configuration. Keys that would change the computation without having been read are
/// errors; other unread keys that no writer is known to add idly are noticed in [`Config::notices`].
pub fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    keys::refuse_code(config, |model_type| FAMILIES.iter().any(|(name, _)| *name == model_type))?;
    let model_type = config.model_type()?;
    let Some((_, describe)) = FAMILIES.iter().find(|(name, _)| *name == model_type) else {
        return Err(config.invalid("model_type", &format!("one of {}", known_types().join(", "))));
    };
    let description = describe(config)?;
    keys::check_unread(config, model_type)?;
    Ok(description)
}

/// Every `model_type` that is known, in alphabetical order.
pub fn known_types() -> Vec<&'static str> {
    FAMILIES.iter().map(|(name, _)| *name).collect()
}

/// The activation at `key`, or `default` where the key is absent.
fn activation(config: &Config, key: &str, default: Activation) -> Result<Activation, ConfigError> {
    match config.text_opt(key)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast") => Ok(Activation::GeluTanh),
        Some(_) => Err(config.invalid(key, "one of silu, swish, gelu_pytorch_tanh, gelu_new, gelu_fast")),
    }
}

/// What a layer type says: whether each of the `layers` slides its window, where `layer_types` is present.
fn sliding_layers(config: &Config, layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    config.list_opt("layer_types", layers, "texts (full_attention or sliding_attention)", |value| match value
        .as_str()
    {
        Some("full_attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    })
}

/// One window per layer from what [`sliding_layers`] says; a sliding layer needs a `sliding_window`.
fn windows(
    config: &Config,
    sliding: &[bool],
    window: Option<usize>,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let needed = sliding.iter().any(|sliding| *sliding);
    if needed && window.is_none() {
        return Err(config
            .missing("sliding_window", "a whole number of at least 1, since layers use sliding attention"));
    }
    Ok(sliding.iter().map(|sliding| window.filter(|_| *sliding)).collect())
}
