//! SmolLM 3: a Llama in which every fourth layer has no position encoding.
//!
//! References: `modeling_smollm3.py` of transformers, `models/smollm3.py` of mlx-lm.

use super::dims::{Defaults, Dims};
use super::{llama, sliding_layers, windows};
use crate::models::config::{Config, ConfigError};
use crate::models::description::{DecoderConfig, MixerConfig};

const DEFAULTS: Defaults =
    Defaults { heads: None, kv_heads: Some(4), head_dim: None, vocab: None, positions: 32_768, eps: 1e-6 };

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let interval = config.size_or("no_rope_layer_interval", 4)?;
    let roped = config.list_opt(
        "no_rope_layers",
        dims.layers,
        "numbers, 1 for a layer with position encoding and 0 for one without",
        |value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1),
    )?;
    let roped =
        roped.unwrap_or_else(|| (1..=dims.layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    let window = config.size_opt("sliding_window")?;
    let window = if config.flag_or("use_sliding_window", false)? { window } else { None };
    let sliding = match sliding_layers(config, dims.layers)? {
        // transformers: the list alone slides nothing while the window is off.
        Some(sliding) => sliding.iter().map(|sliding| *sliding && window.is_some()).collect(),
        None => roped.iter().map(|roped| window.is_some() && !roped).collect::<Vec<_>>(),
    };
    let windows = windows(config, &sliding, window)?;
    let mut decoder = llama::describe_with(config, &dims, &windows, 2e6)?;
    decoder.tied_head = config.flag_or("tie_word_embeddings", true)?;
    for (layer, roped) in decoder.layers.iter_mut().zip(roped) {
        if let MixerConfig::Attention(attention) = &mut layer.mixer {
            attention.rope = Some(0).filter(|_| roped);
        }
    }
    Ok(decoder)
}
