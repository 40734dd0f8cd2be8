//! Gemma 2: norms around both blocks, soft caps on scores and logits, a window in every other layer.
//!
//! References: `modeling_gemma2.py` of transformers; `models/gemma2.py` of mlx-lm, which has no window.

use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use super::{activation, sliding_layers, windows};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormConfig, NormPlacement,
};
use crate::models::rope::Rope;

const DEFAULTS: Defaults =
    Defaults { heads: None, kv_heads: Some(4), head_dim: Some(256), vocab: None, positions: 8192, eps: 1e-6 };

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let rope = Rope::from_config(config, &rope_defaults(&dims, 10_000.0))?;
    let window =
        if config.is_null("sliding_window") { None } else { Some(config.size_or("sliding_window", 4096)?) };
    let alternating = || (0..dims.layers).map(|layer| layer % 2 == 0 && window.is_some()).collect();
    let sliding = sliding_layers(config, dims.layers)?.unwrap_or_else(alternating);
    let attention = AttentionConfig {
        softcap: softcap(config, "attn_logit_softcapping", Some(50.0))?,
        ..attention(config, &dims)?
    };
    let mlp = mlp(config, &dims)?;
    let layer = |window: Option<usize>| LayerConfig {
        mixer: AttentionConfig { policy: Policy::of_layer(window), ..attention.clone() }.into(),
        feed_forward: mlp.into(),
        norms: NormPlacement::PreAndPost,
    };
    Ok(DecoderConfig {
        layers: windows(config, &sliding, window)?.into_iter().map(layer).collect(),
        embedding_scale: (dims.hidden as f32).sqrt(),
        logit_softcap: softcap(config, "final_logit_softcapping", Some(30.0))?,
        ..gemma_decoder(config, &dims, rope)?
    })
}

/// Attention scaled by `query_pre_attn_scalar^-½`.
pub(super) fn attention(config: &Config, dims: &Dims) -> Result<AttentionConfig, ConfigError> {
    let bias = config.flag_or("attention_bias", false)?;
    Ok(AttentionConfig {
        scale: config.positive_or("query_pre_attn_scalar", 256.0)?.sqrt().recip() as f32,
        qkv_bias: bias,
        output_bias: bias,
        ..plain_attention(dims)
    })
}

/// A Gemma's MLP. Old files carry a `hidden_act` that transformers passes over in favour of `hidden_activation`.
pub(super) fn mlp(config: &Config, dims: &Dims) -> Result<MlpConfig, ConfigError> {
    Ok(MlpConfig {
        intermediate: dims.intermediate,
        activation: activation(config, "hidden_activation", Activation::GeluTanh)?,
        bias: false,
        fused_gate_up: false,
    })
}

/// A decoder without layers, whose norms have weights around 0 and whose head is tied unless told otherwise.
pub(super) fn gemma_decoder(config: &Config, dims: &Dims, rope: Rope) -> Result<DecoderConfig, ConfigError> {
    Ok(DecoderConfig {
        norm: NormConfig { eps: dims.eps, offset: 1.0 },
        tied_head: config.flag_or("tie_word_embeddings", true)?,
        ..plain_decoder(dims, rope)
    })
}

/// A soft cap: null switches it off, absence gives the default.
pub(super) fn softcap(config: &Config, key: &str, default: Option<f64>) -> Result<Option<f32>, ConfigError> {
    let default = default.filter(|_| !config.is_null(key));
    Ok(config.positive_opt(key)?.or(default).map(|cap| cap as f32))
}
