//! LFM 2: short gated convolutions, and attention in some layers.
//!
//! References: `modeling_lfm2.py` of transformers, `models/lfm2.py` of mlx-lm.

use super::dims::{Defaults, Dims, check_width};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MixerConfig, MlpConfig, Names, NormPlacement,
    QkNorm, ShortConvConfig,
};
use crate::models::rope::Rope;

const DEFAULTS: Defaults = Defaults {
    heads: Some(32),
    kv_heads: Some(8),
    head_dim: None,
    vocab: Some(65_536),
    positions: 128_000,
    eps: 1e-5,
};
const NAMES: Names = Names {
    final_norm: "model.embedding_norm",
    pre_norms: ["operator_norm", "ffn_norm"],
    attention_output: "out_proj",
    qk_norms: ["q_layernorm", "k_layernorm"],
    feed_forward: "feed_forward",
    projections: ["w1", "w3", "w2"],
    ..Names::LLAMA
};
/// The longest convolution; known models have 3 taps.
const TAPS_MAX: usize = 256;

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    // Old files call the width of the feed-forward block `block_ff_dim`, which transformers lets win.
    let (width, width_key) = match (config.size_opt("block_ff_dim")?, config.size_opt("intermediate_size")?) {
        (Some(width), _) => (width, "block_ff_dim"),
        (None, Some(width)) => (width, "intermediate_size"),
        (None, None) => return Err(config.missing("intermediate_size", "a whole number of at least 1")),
    };
    check_width(config, width_key, width)?;
    let dims = Dims::with(config, &DEFAULTS, width, "norm_eps")?;
    check_repeated(config, &dims)?;
    let rope = Rope::from_config(config, &rope_defaults(&dims, 1e6))?;
    let mlp = MlpConfig {
        intermediate: adjusted(config, width)?,
        activation: Activation::Silu,
        bias: false,
        fused_gate_up: false,
    };
    let taps = config.size_or("conv_L_cache", 3)?;
    if !(2..=TAPS_MAX).contains(&taps) {
        return Err(config.invalid("conv_L_cache", &format!("from 2 to {TAPS_MAX}")));
    }
    let conv = ShortConvConfig { taps, bias: config.flag_or("conv_bias", false)? };
    let attention = AttentionConfig { qk_norm: QkNorm::Weighted, ..plain_attention(&dims) };
    let layer = |attends: bool| LayerConfig {
        mixer: if attends { attention.clone().into() } else { MixerConfig::ShortConv(conv) },
        feed_forward: mlp.into(),
        norms: NormPlacement::Pre,
    };
    let tied = config.flag_or("tie_embedding", true)?;
    Ok(DecoderConfig {
        layers: attention_layers(config, dims.layers)?.into_iter().map(layer).collect(),
        tied_head: config.flag_or("tie_word_embeddings", tied)?,
        names: NAMES,
        ..plain_decoder(&dims, rope)
    })
}

/// Keys of old files that say again what others say, or that what there is only one of is in use.
fn check_repeated(config: &Config, dims: &Dims) -> Result<(), ConfigError> {
    let (hidden, heads) = (("hidden_size", dims.hidden), ("num_attention_heads", dims.heads));
    for (key, (of, value)) in
        [("block_dim", hidden), ("conv_dim", hidden), ("conv_dim_out", hidden), ("num_heads", heads)]
    {
        if config.size_or(key, value)? != value {
            return Err(config.invalid(key, &format!("{of}, {value}")));
        }
    }
    for key in ["block_use_swiglu", "use_pos_enc"] {
        if !config.flag_or(key, true)? {
            return Err(config.invalid(key, "true"));
        }
    }
    if config.positive_or("block_norm_eps", dims.eps.into())? as f32 != dims.eps {
        return Err(config.invalid("block_norm_eps", &format!("norm_eps, {}", dims.eps)));
    }
    Ok(())
}

/// The width of the feed-forward block: two thirds of the configured one, times a factor, rounded up to a multiple.
fn adjusted(config: &Config, width: usize) -> Result<usize, ConfigError> {
    let factor = config.positive_or("block_ffn_dim_multiplier", 1.0)?;
    let multiple = config.size_or("block_multiple_of", 256)?;
    if !config.flag_or("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    check_width(config, "block_multiple_of", multiple)?;
    let adjusted = (factor * (2 * width / 3) as f64) as usize;
    let adjusted = adjusted.div_ceil(multiple).saturating_mul(multiple);
    check_width(config, "block_ffn_dim_multiplier", adjusted)?;
    match adjusted {
        0 => {
            Err(config
                .invalid("block_ffn_dim_multiplier", "so large that the feed-forward block has a width"))
        }
        adjusted => Ok(adjusted),
    }
}

/// Whether each layer has attention: `layer_types`, else the layers that `full_attn_idxs` lists, else all.
fn attention_layers(config: &Config, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let listed = super::listed_layers(config, "full_attn_idxs", layers)?;
    let typed =
        config.list_opt("layer_types", layers, "texts (full_attention or conv)", |value| {
            match value.as_str() {
                Some("full_attention") => Some(true),
                Some("conv") => Some(false),
                _ => None,
            }
        })?;
    match (typed, listed) {
        (Some(typed), Some(listed)) if typed != listed => {
            Err(config.invalid("full_attn_idxs", "the full_attention layers of layer_types"))
        }
        (Some(layers), _) | (None, Some(layers)) => Ok(layers),
        (None, None) => Ok(vec![true; layers]),
    }
}
