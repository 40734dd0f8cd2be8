//! Gemma 3, text only: five windowed layers to each global one, with rotary bases of their own, norms on q and k.
//!
//! References: `modeling_gemma3.py` of transformers, `models/gemma3_text.py` of mlx-lm.

use half::bf16;

use super::dims::{Defaults, Dims};
use super::llama::rope_defaults;
use super::{gemma2, sliding_layers, windows};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{AttentionConfig, DecoderConfig, LayerConfig, NormPlacement, QkNorm};
use crate::models::rope::{Rope, RopeDefaults};

const DEFAULTS: Defaults = Defaults {
    heads: Some(8),
    kv_heads: Some(4),
    head_dim: Some(256),
    vocab: Some(262_208),
    positions: 131_072,
    eps: 1e-6,
};
/// Indices into the decoder's ropes.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let (global, local) = ropes(config, &dims)?;
    let pattern = config.size_or("sliding_window_pattern", config.size_or("_sliding_window_pattern", 6)?)?;
    let by_pattern = || (1..=dims.layers).map(|layer| !layer.is_multiple_of(pattern)).collect();
    let sliding = sliding_layers(config, dims.layers)?.unwrap_or_else(by_pattern);
    let window = config.size_or("sliding_window", 4096)?;
    let attention = AttentionConfig { qk_norm: QkNorm::Weighted, ..gemma2::attention(config, &dims)? };
    let mlp = gemma2::mlp(config, &dims)?;
    let layer = |window: Option<usize>| LayerConfig {
        mixer: AttentionConfig {
            policy: Policy::of_layer(window),
            rope: Some(if window.is_some() { LOCAL } else { GLOBAL }),
            ..attention.clone()
        }
        .into(),
        feed_forward: mlp.into(),
        norms: NormPlacement::PreAndPost,
    };
    let mut decoder = gemma2::gemma_decoder(config, &dims, global)?;
    decoder.ropes.push(local);
    decoder.layers = windows(config, &sliding, Some(window))?.into_iter().map(layer).collect();
    // Rounded to bfloat16 whatever the weights' type, as the model was trained and as mlx-lm does.
    decoder.embedding_scale = bf16::from_f32((dims.hidden as f32).sqrt()).to_f32();
    decoder.logit_softcap = gemma2::softcap(config, "final_logit_softcapping", None)?;
    Ok(decoder)
}

/// The encodings of global and of local layers. transformers 5 nests an object for each under `rope_parameters`;
/// before, `rope_scaling` was meant for the global layers only.
fn ropes(config: &Config, dims: &Dims) -> Result<(Rope, Rope), ConfigError> {
    let global = rope_defaults(dims, 1e6);
    let local = RopeDefaults { base_key: "rope_local_base_freq", ..rope_defaults(dims, 10_000.0) };
    let [full, sliding] = ["rope_parameters.full_attention", "rope_parameters.sliding_attention"];
    let nested = config.get(full).is_some() || config.get(sliding).is_some();
    let global = match nested && config.get("rope_scaling").is_none() {
        true => Rope::from_section(config, full, &global)?,
        false => Rope::from_config(config, &global)?,
    };
    Ok((global, Rope::from_section(config, sliding, &local)?))
}
