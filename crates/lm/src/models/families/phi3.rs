//! Phi 3: fused q/k/v and gate/up matrices, rotary encoding over part of a head in some sizes, longrope.
//!
//! References: `modeling_phi3.py` of transformers; `models/phi3.py` of mlx-lm, which has neither window nor short factors.

use super::activation;
use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormPlacement,
};
use crate::models::rope::{Rope, RopeDefaults};

const DEFAULTS: Defaults =
    Defaults { heads: None, kv_heads: None, head_dim: None, vocab: None, positions: 4096, eps: 1e-5 };

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let rope_defaults =
        RopeDefaults { partial: true, original_context: 4096, ..rope_defaults(&dims, 10_000.0) };
    let rope = Rope::from_config(config, &rope_defaults)?;
    let attention = AttentionConfig {
        fused_qkv: true,
        policy: Policy::of_layer(config.size_opt("sliding_window")?),
        ..plain_attention(&dims)
    };
    let mlp = MlpConfig {
        intermediate: dims.intermediate,
        activation: activation(config, "hidden_act", Activation::Silu)?,
        bias: false,
        fused_gate_up: true,
    };
    let layer = LayerConfig { mixer: attention.into(), feed_forward: mlp.into(), norms: NormPlacement::Pre };
    Ok(DecoderConfig {
        layers: vec![layer; dims.layers],
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        ..plain_decoder(&dims, rope)
    })
}
