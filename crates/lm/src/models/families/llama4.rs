//! Llama 4, text only: attention within chunks, global layers without position encoding whose queries grow with their
//! position, experts in some or all layers.
//!
//! References: `modeling_llama4.py` of transformers, `models/llama4.py` of mlx-lm.

use std::num::NonZeroUsize;

use super::activation;
use super::dims::{Defaults, Dims};
use super::llama::{plain_attention, plain_decoder, rope_defaults};
use crate::cache::Policy;
use crate::models::config::{Config, ConfigError};
use crate::models::description::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, LayerConfig, MlpConfig,
    Names, NormPlacement, QkNorm, Routing, Temperature,
};
use crate::models::rope::{Rope, RopeDefaults};

const DEFAULTS: Defaults = Defaults {
    heads: Some(40),
    kv_heads: Some(8),
    head_dim: Some(128),
    vocab: Some(202_048),
    positions: 131_072,
    eps: 1e-5,
};
const NAMES: Names = Names { feed_forward: "feed_forward", ..Names::LLAMA };

pub(super) fn describe(config: &Config) -> Result<DecoderConfig, ConfigError> {
    let dims = Dims::read(config, &DEFAULTS)?;
    let rope = RopeDefaults { traditional: true, ..rope_defaults(&dims, 500_000.0) };
    let rope = Rope::from_config(config, &rope)?;
    let roped = roped_layers(config, &dims)?;
    let policies = policies(config, &roped)?;
    let blocks = feed_forwards(config, &dims)?;
    let bias = config.flag_or("attention_bias", false)?;
    let qk_norm = if config.flag_or("use_qk_norm", true)? { QkNorm::Plain } else { QkNorm::None };
    let temperature = temperature(config)?;
    let attention = |roped: bool, policy: Policy| AttentionConfig {
        policy,
        qk_norm: if roped { qk_norm } else { QkNorm::None },
        qkv_bias: bias,
        output_bias: bias,
        rope: Some(0).filter(|_| roped),
        temperature: temperature.filter(|_| !roped),
        ..plain_attention(&dims)
    };
    let layers = roped.iter().zip(policies).zip(blocks).map(|((&roped, policy), feed_forward)| LayerConfig {
        mixer: attention(roped, policy).into(),
        feed_forward,
        norms: NormPlacement::Pre,
    });
    Ok(DecoderConfig {
        layers: layers.collect(),
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        names: NAMES,
        ..plain_decoder(&dims, rope)
    })
}

/// Whether each layer has a position encoding: all but every fourth unless `no_rope_layers`, if not empty, says which.
fn roped_layers(config: &Config, dims: &Dims) -> Result<Vec<bool>, ConfigError> {
    let interval = config.size_or("no_rope_layer_interval", 4)?;
    let by_interval = (1..=dims.layers).map(|layer| !layer.is_multiple_of(interval)).collect();
    if config.get("no_rope_layers").and_then(|value| value.as_array()).is_some_and(Vec::is_empty) {
        return Ok(by_interval);
    }
    let items = "numbers, 1 for a layer with position encoding and 0 for one without, or an empty list";
    let listed = config.list_opt("no_rope_layers", dims.layers, items, |value| {
        value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1)
    })?;
    Ok(listed.unwrap_or(by_interval))
}

/// Layers with position encoding see their chunk only, unless `layer_types` says which do.
fn policies(config: &Config, roped: &[bool]) -> Result<Vec<Policy>, ConfigError> {
    let key = "attention_chunk_size";
    let size = if config.is_null(key) { None } else { NonZeroUsize::new(config.size_or(key, 8192)?) };
    let items = "texts (full_attention or chunked_attention)";
    let chunked = config.list_opt("layer_types", roped.len(), items, |value| match value.as_str() {
        Some("full_attention") => Some(false),
        Some("chunked_attention") => Some(true),
        _ => None,
    })?;
    let chunked =
        chunked.unwrap_or_else(|| roped.iter().map(|roped| *roped && size.is_some()).collect::<Vec<_>>());
    let policy = |chunked: bool| match (chunked, size) {
        (true, Some(size)) => Ok(Policy::Chunk(size)),
        (true, None) => Err(config.missing(key, "a whole number of at least 1, since layers are chunked")),
        (false, _) => Ok(Policy::Full),
    };
    chunked.into_iter().map(policy).collect()
}

/// Experts in every `interleave_moe_layer_step`-th layer unless `moe_layers` says which.
fn feed_forwards(config: &Config, dims: &Dims) -> Result<Vec<FeedForwardConfig>, ConfigError> {
    let step = config.count_or("interleave_moe_layer_step", 1)?;
    let by_step = (1..=dims.layers).map(|layer| step > 0 && layer.is_multiple_of(step)).collect();
    let with_experts = super::listed_layers(config, "moe_layers", dims.layers)?.unwrap_or(by_step);
    let dense = MlpConfig {
        intermediate: config.size_or("intermediate_size_mlp", 16_384)?,
        activation: activation(config, "hidden_act", Activation::Silu)?,
        bias: false,
        fused_gate_up: false,
    };
    super::dims::check_width(config, "intermediate_size_mlp", dense.intermediate)?;
    let count = config.count_or("num_local_experts", 16)?;
    let per_token = config.size_or("num_experts_per_tok", 1)?;
    if with_experts.contains(&true) {
        super::check_experts(config, count, per_token)?;
    }
    let expert = MlpConfig { intermediate: dims.intermediate, ..dense };
    let experts = ExpertsConfig {
        count,
        per_token,
        expert,
        routing: Routing::SigmoidOnInput,
        router_bias: false,
        shared: true,
        rows_take_turns: false,
    };
    let block = |with_experts| match with_experts {
        true => FeedForwardConfig::Experts(experts),
        false => FeedForwardConfig::Dense(dense),
    };
    Ok(with_experts.into_iter().map(block).collect())
}

/// `attn_temperature_tuning` is a flag, or a number as the first files have it.
fn temperature(config: &Config) -> Result<Option<Temperature>, ConfigError> {
    let key = "attn_temperature_tuning";
    let on = match config.get(key) {
        Some(serde_json::Value::Number(_)) => config.count_or(key, 0)? > 0,
        _ => config.flag_or(key, true)?,
    };
    let (floor, scale) = (config.size_or("floor_scale", 8192)?, config.number_or("attn_scale", 0.1)?);
    Ok(on.then_some(Temperature { floor, scale }))
}
