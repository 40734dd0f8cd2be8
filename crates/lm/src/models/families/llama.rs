//! Llama and Mistral: norms before attention and MLP, rotary encoding over the whole head.
//!
//! References: `modeling_llama.py` and `modeling_mistral.py` of transformers, `models/llama.py` of mlx-lm.

use super::dims::{Defaults, Dims};
use super::{activation, sliding_layers, windows};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, Names, NormConfig, NormPlacement,
    QkNorm,
};
use crate::models::rope::{Rope, RopeDefaults};

const LLAMA: Defaults =
    Defaults { heads: None, kv_heads: None, head_dim: None, vocab: None, positions: 2048, eps: 1e-6 };
const MISTRAL: Defaults = Defaults { positions: 131_072, ..LLAMA };
/// transformers' window of a Mistral configuration that has no `sliding_window` key.
const MISTRAL_WINDOW: usize = 4096;

/// Llama. Windows act where `layer_types` asks for them, as in mlx-lm; transformers has none here.
pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &LLAMA)?;
    let sliding = sliding_layers(config, dims.layers)?.unwrap_or_else(|| vec![false; dims.layers]);
    let window = config.size_opt("sliding_window")?;
    if window.is_some() && !sliding.contains(&true) {
        config.notice(
            "sliding_window is not in effect: no layer of this Llama has sliding attention".to_owned(),
        );
    }
    let windows = windows(config, &sliding, window)?;
    describe_with(config, &dims, &windows, 10_000.0)
}

/// Mistral: the window applies to every layer, unless `layer_types` says which.
pub(super) fn describe_mistral(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &MISTRAL)?;
    let window = match config.is_null("sliding_window") {
        true => None,
        false => Some(config.size_or("sliding_window", MISTRAL_WINDOW)?),
    };
    let windows = match sliding_layers(config, dims.layers)? {
        Some(sliding) => windows(config, &sliding, window)?,
        None => vec![window; dims.layers],
    };
    describe_with(config, &dims, &windows, 10_000.0)
}

/// A Llama-like decoder with the given window in each layer.
pub(super) fn describe_with(
    config: &Config,
    dims: &Dims,
    windows: &[Option<usize>],
    rope_base: f64,
) -> Result<DecoderConfig, ConfigError> {
    let rope = Rope::from_config(config, &rope_defaults(dims, rope_base))?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let mlp = MlpConfig {
        intermediate: dims.intermediate,
        activation: activation(config, "hidden_act", Activation::Silu)?,
        bias: config.flag_or("mlp_bias", false)?,
        fused_gate_up: false,
    };
    let layer = |window: &Option<usize>| LayerConfig {
        mixer: AttentionConfig {
            policy: Policy::of_layer(*window),
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            ..plain_attention(dims)
        }
        .into(),
        feed_forward: mlp.into(),
        norms: NormPlacement::Pre,
    };
    Ok(DecoderConfig {
        layers: windows.iter().map(layer).collect(),
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        ..plain_decoder(dims, rope)
    })
}

/// What a family's rotary encoding has unless it says otherwise.
pub(super) fn rope_defaults(dims: &Dims, base: f64) -> RopeDefaults {
    RopeDefaults {
        head_dim: dims.head_dim,
        base,
        base_key: "rope_theta",
        traditional: false,
        partial: false,
        max_positions: dims.positions,
        original_context: dims.positions,
    }
}

/// Attention without biases, norms, caps, sinks or window, in rope 0, scaled by `head_dim^-½`.
pub(super) fn plain_attention(dims: &Dims) -> AttentionConfig {
    AttentionConfig {
        heads: dims.heads,
        kv_heads: dims.kv_heads,
        head_dim: dims.head_dim,
        scale: (dims.head_dim as f32).sqrt().recip(),
        softcap: None,
        policy: Policy::Full,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        output_bias: false,
        fused_qkv: false,
        rope: Some(0),
        temperature: None,
        sinks: false,
        kv_conv: false,
    }
}

/// A decoder without layers, one rope, an untied head and nothing scaled.
pub(super) fn plain_decoder(dims: &Dims, rope: Rope) -> DecoderConfig {
    DecoderConfig {
        hidden: dims.hidden,
        vocab: dims.vocab,
        layers: Vec::new(),
        context_length: rope.context_length(dims.positions),
        ropes: vec![rope],
        norm: NormConfig { eps: dims.eps, offset: 0.0 },
        embedding_scale: 1.0,
        logit_softcap: None,
        tied_head: false,
        normed_head: false,
        names: Names::LLAMA,
    }
}
