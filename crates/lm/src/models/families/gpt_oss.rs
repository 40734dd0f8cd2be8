//! gpt-oss: windowed and global layers in turn, attention with a learned sink for each head, experts everywhere.
//!
//! References: `modeling_gpt_oss.py` and `configuration_gpt_oss.py` of transformers, `models/gpt_oss.py` of mlx-lm.

use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use super::{sliding_layers, windows};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, LayerConfig, MlpConfig,
    NormPlacement, Routing,
};
use crate::models::rope::{Rope, RopeScaling};

const DEFAULTS: Defaults = Defaults {
    heads: Some(64),
    kv_heads: Some(8),
    head_dim: Some(64),
    vocab: Some(201_088),
    positions: 131_072,
    eps: 1e-5,
};
/// The scaling of the released models, which transformers takes where the configuration has none.
const YARN_FACTOR: f64 = 32.0;
const ORIGINAL_CONTEXT: usize = 4096;

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let rope = rope(config, &dims)?;
    let in_turn = || (0..dims.layers).map(|layer| layer.is_multiple_of(2)).collect();
    let sliding = sliding_layers(config, dims.layers)?.unwrap_or_else(in_turn);
    let key = "sliding_window";
    let window = if config.is_null(key) { None } else { Some(config.size_or(key, 128)?) };
    let bias = config.flag_or("attention_bias", true)?;
    let feed_forward = FeedForwardConfig::Experts(experts(config, &dims)?);
    let layer = |window: Option<usize>| LayerConfig {
        mixer: AttentionConfig {
            policy: Policy::of_layer(window),
            qkv_bias: bias,
            output_bias: bias,
            sinks: true,
            ..plain_attention(&dims)
        }
        .into(),
        feed_forward,
        norms: NormPlacement::Pre,
    };
    Ok(DecoderConfig {
        layers: windows(config, &sliding, window)?.into_iter().map(layer).collect(),
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        ..plain_decoder(&dims, rope)
    })
}

fn experts(config: &Config, dims: &Dims) -> Result<ExpertsConfig, ConfigError> {
    // The key is there, but both references have the one function whatever it says.
    if config.text_opt("hidden_act")?.is_some_and(|name| name != "silu" && name != "swish") {
        return Err(config.invalid("hidden_act", "silu or swish"));
    }
    let count = config.count_or("num_local_experts", 128)?;
    let per_token = config.size_or("num_experts_per_tok", 4)?;
    super::check_experts(config, count, per_token)?;
    // The released files say it twice.
    if config.size_or("experts_per_token", per_token)? != per_token {
        return Err(config.invalid("experts_per_token", &format!("num_experts_per_tok, {per_token}")));
    }
    let activation = Activation::ClampedSilu {
        alpha: config.positive_or("swiglu_alpha", 1.702)? as f32,
        limit: config.positive_or("swiglu_limit", 7.0)? as f32,
    };
    let expert = MlpConfig { intermediate: dims.intermediate, activation, bias: true, fused_gate_up: false };
    Ok(ExpertsConfig {
        count,
        per_token,
        expert,
        routing: Routing::SoftmaxOfChosen,
        router_bias: true,
        shared: false,
        rows_take_turns: true,
    })
}

fn rope(config: &Config, dims: &Dims) -> Result<Rope, ConfigError> {
    let rope = Rope::from_config(config, &rope_defaults(dims, 150_000.0))?;
    let described = ["rope_scaling", "rope_parameters"].iter().any(|key| config.get(key).is_some());
    let rope =
        if described { rope } else { Rope::new(rope.dims(), rope.base(), rope.traditional(), released()) };
    // The released files say this twice, too.
    if let &RopeScaling::Yarn { original_context, .. } = rope.scaling() {
        let key = "initial_context_length";
        if config.size_or(key, original_context)? != original_context {
            let allowed = format!("original_max_position_embeddings, {original_context}");
            return Err(config.invalid(key, &allowed));
        }
    }
    Ok(rope)
}

fn released() -> RopeScaling {
    RopeScaling::Yarn {
        factor: YARN_FACTOR,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        original_context: ORIGINAL_CONTEXT,
        attention_factor: 0.1 * YARN_FACTOR.ln() + 1.0,
    }
}
