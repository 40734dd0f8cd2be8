//! Qwen 2 (biases on q, k and v) and Qwen 3 (norms on q and k).
//!
//! References: `modeling_qwen2.py` and `modeling_qwen3.py` of transformers, which have windows; mlx-lm has none here.

use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use super::{activation, sliding_layers, windows};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormPlacement, QkNorm,
};
use crate::models::rope::Rope;

const QWEN2: Defaults =
    Defaults { heads: None, kv_heads: None, head_dim: None, vocab: None, positions: 32_768, eps: 1e-6 };
const QWEN3: Defaults = Defaults { head_dim: Some(128), ..QWEN2 };

pub(super) fn describe_qwen2(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &QWEN2)?;
    describe(config, &dims, 1e6, AttentionConfig { qkv_bias: true, ..plain_attention(&dims) })
}

pub(super) fn describe_qwen3(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &QWEN3)?;
    let bias = config.flag_or("attention_bias", false)?;
    let attention = AttentionConfig {
        qk_norm: QkNorm::Weighted,
        qkv_bias: bias,
        output_bias: bias,
        ..plain_attention(&dims)
    };
    describe(config, &dims, 1e6, attention)
}

fn describe(
    config: &Config,
    dims: &Dims,
    rope_base: f64,
    attention: AttentionConfig,
) -> Result<DecoderConfig, ConfigError> {
    let rope = Rope::from_config(config, &rope_defaults(dims, rope_base))?;
    let mlp = MlpConfig {
        intermediate: dims.intermediate,
        activation: activation(config, "hidden_act", Activation::Silu)?,
        bias: false,
        fused_gate_up: false,
    };
    let layer = |window: Option<usize>| LayerConfig {
        mixer: AttentionConfig { policy: Policy::of_layer(window), ..attention.clone() }.into(),
        feed_forward: mlp.into(),
        norms: NormPlacement::Pre,
    };
    Ok(DecoderConfig {
        layers: read_windows(config, dims)?.into_iter().map(layer).collect(),
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        ..plain_decoder(dims, rope)
    })
}

/// The window acts only under `use_sliding_window`, from layer `max_window_layers` on unless `layer_types` says which.
fn read_windows(config: &Config, dims: &Dims) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = config.size_or("sliding_window", 4096)?;
    let first = config.count_or("max_window_layers", 28)?;
    let sliding = sliding_layers(config, dims.layers)?;
    if !config.flag_or("use_sliding_window", false)? {
        return match sliding {
            Some(sliding) if sliding.contains(&true) => {
                Err(config.invalid("use_sliding_window", "true, since layer_types names sliding layers"))
            }
            _ => Ok(vec![None; dims.layers]),
        };
    }
    let sliding = sliding.unwrap_or_else(|| (0..dims.layers).map(|layer| layer >= first).collect());
    windows(config, &sliding, Some(window))
}
