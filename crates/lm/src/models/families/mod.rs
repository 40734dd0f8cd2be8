//! The model families: each reads a [`Config`] and fills a [`DecoderConfig`]. A new family is a file here and a line
//! in `FAMILIES`.

mod baichuan_m1;
mod dims;
mod gemma2;
mod gemma3;
mod gpt_oss;
mod keys;
mod lfm2;
mod llama;
mod llama4;
mod phi3;
mod qwen;
mod smollm3;

pub(crate) use dims::LAYERS_MAX;

use super::config::{Config, ConfigError};
use super::description::{Activation, DecoderConfig};

/// The largest number of experts of a layer; known models have up to 512.
const EXPERTS_MAX: usize = 1 << 12;

type Describe = fn(&Config) -> Result<DecoderConfig, ConfigError>;

/// The families by `model_type`.
const FAMILIES: &[(&str, Describe)] = &[
    ("baichuan_m1", baichuan_m1::describe),
    ("gemma2", gemma2::describe),
    ("gemma3_text", gemma3::describe),
    ("gpt_oss", gpt_oss::describe),
    ("iquestcoder", llama::describe),
    ("lfm2", lfm2::describe),
    ("llama", llama::describe),
    ("llama4_text", llama4::describe),
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

/// Refuses a number of experts in `num_local_experts`, or of those that a token goes through, that cannot be.
fn check_experts(config: &Config, count: usize, per_token: usize) -> Result<(), ConfigError> {
    if count == 0 || count > EXPERTS_MAX {
        let allowed = format!("from 1 to {EXPERTS_MAX}, since layers have experts");
        return Err(config.invalid("num_local_experts", &allowed));
    }
    if per_token > count {
        return Err(config.invalid("num_experts_per_tok", &format!("at most num_local_experts, {count}")));
    }
    Ok(())
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

/// Whether each of the `layers` is in the list of layer numbers, counted from 0, at `key`, where that is present.
fn listed_layers(config: &Config, key: &str, layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(value) = config.get(key) else { return Ok(None) };
    let invalid = || config.invalid(key, &format!("a list of layers, each from 0 to {}", layers - 1));
    let mut listed = vec![false; layers];
    for layer in value.as_array().ok_or_else(invalid)? {
        let layer = layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
        *layer.and_then(|layer| listed.get_mut(layer)).ok_or_else(invalid)? = true;
    }
    Ok(Some(listed))
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
