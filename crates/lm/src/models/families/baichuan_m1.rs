//! Baichuan M1: keys and values are mixed with those of the token before; windows, with heads of their own, in some
//! layers; the head's rows have length 1.
//!
//! Reference: `models/baichuan_m1.py` of mlx-lm.

use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use super::{activation, listed_layers};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, Names, NormPlacement,
};
use crate::models::rope::Rope;

const DEFAULTS: Defaults =
    Defaults { heads: None, kv_heads: None, head_dim: None, vocab: None, positions: 32_768, eps: 1e-6 };
const NAMES: Names = Names { fused_qkv: "W_pack", ..Names::LLAMA };
/// Tokens that the keys' and values' convolutions reach over; the reference has no other.
const CONV_WINDOW: usize = 2;

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    if config.size("conv_window")? != CONV_WINDOW {
        return Err(config.invalid("conv_window", &CONV_WINDOW.to_string()));
    }
    if config.flag_or("tie_word_embeddings", false)? {
        return Err(config.invalid("tie_word_embeddings", "false: the head is not the embedding"));
    }
    let rope = |dims: &Dims| Rope::from_config(config, &rope_defaults(dims, 10_000.0));
    let sliding = listed_layers(config, "sliding_window_layers", dims.layers)?;
    let sliding = sliding.unwrap_or_else(|| vec![false; dims.layers]);
    let windows = super::windows(config, &sliding, config.size_opt("sliding_window")?)?;
    let window_dims = window_dims(config, &dims)?;
    let mut ropes = vec![rope(&dims)?];
    if window_dims.head_dim != dims.head_dim {
        ropes.push(rope(&window_dims)?);
    }
    let window_rope = ropes.len() - 1;
    let mlp = MlpConfig {
        intermediate: dims.intermediate,
        activation: activation(config, "hidden_act", Activation::Silu)?,
        bias: false,
        fused_gate_up: false,
    };
    let layer = |window: Option<usize>| LayerConfig {
        mixer: AttentionConfig {
            policy: Policy::of_layer(window),
            fused_qkv: true,
            kv_conv: true,
            rope: Some(if window.is_some() { window_rope } else { 0 }),
            ..plain_attention(if window.is_some() { &window_dims } else { &dims })
        }
        .into(),
        feed_forward: mlp.into(),
        norms: NormPlacement::Pre,
    };
    Ok(DecoderConfig {
        layers: windows.into_iter().map(layer).collect(),
        normed_head: true,
        names: NAMES,
        ropes,
        ..plain_decoder(&dims, rope(&dims)?)
    })
}

/// The heads of layers with a window: their own numbers where the configuration has some, as wide as the hidden size
/// makes them.
fn window_dims(config: &Config, dims: &Dims) -> Result<Dims, ConfigError> {
    let or = |key: &str, default: usize| match config.count_or(key, 0)? {
        0 => Ok(default),
        count => Ok(count),
    };
    let (heads_key, kv_key) = ("num_swa_attention_heads", "num_swa_key_value_heads");
    let (heads, kv_heads) = (or(heads_key, dims.heads)?, or(kv_key, dims.kv_heads)?);
    if !dims.hidden.is_multiple_of(heads) {
        return Err(config.invalid(heads_key, &format!("a divisor of hidden_size, {}", dims.hidden)));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.invalid(kv_key, &format!("a divisor of the windows' heads, {heads}")));
    }
    Ok(Dims { heads, kv_heads, head_dim: dims.hidden / heads, ..*dims })
}
