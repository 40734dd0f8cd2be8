//! Keys that no family has read: those that change what a model computes are refused, those that do not are passed
//! over, and the user is told of the rest.

use std::borrow::Cow;

use serde_json::Value;

use crate::models::config::{Config, ConfigError};

/// Keys that change the computation, each with the values at which it does not. A family that reads such a key does
/// what it says; in any other it is refused.
const COMPUTING: &[(&str, &[Neutral])] = &[
    ("attention_bias", &[Neutral::False]),
    ("attention_chunk_size", &[]),
    ("attention_multiplier", &[]),
    ("attn_logit_softcapping", &[]),
    ("attn_temperature_tuning", &[Neutral::False, Neutral::Zero]),
    ("clip_qkv", &[]),
    ("conv_L_cache", &[]),
    ("conv_window", &[]),
    ("embedding_multiplier", &[Neutral::One]),
    ("final_logit_softcapping", &[]),
    ("full_attn_idxs", &[]),
    ("logit_scale", &[Neutral::One]),
    ("logits_scaling", &[Neutral::One]),
    ("mlp_bias", &[Neutral::False]),
    ("moe_layers", &[]),
    ("n_routed_experts", &[Neutral::Zero]),
    ("no_rope_layers", &[]),
    ("num_experts", &[Neutral::Zero]),
    ("num_local_experts", &[Neutral::Zero]),
    ("partial_rotary_factor", &[Neutral::One]),
    ("qk_layernorm", &[Neutral::False]),
    ("qk_norm", &[Neutral::False]),
    ("query_pre_attn_scalar", &[]),
    ("residual_multiplier", &[Neutral::One]),
    ("rope_local_base_freq", &[]),
    ("rope.long_mscale", &[]),
    ("rope.partial_rotary_factor", &[Neutral::One]),
    ("rope.short_mscale", &[]),
    ("scale_depth", &[]),
    ("scale_emb", &[Neutral::One]),
    ("sliding_window_layers", &[]),
    ("swiglu_alpha", &[]),
    ("swiglu_limit", &[]),
    ("use_alibi", &[Neutral::False]),
    ("use_bidirectional_attention", &[Neutral::False]),
    ("use_parallel_residual", &[Neutral::False]),
    ("use_qk_norm", &[Neutral::False]),
    ("use_sliding_window", &[Neutral::False]),
];

/// A value at which a key changes nothing. Null never does.
#[derive(Clone, Copy, Debug)]
enum Neutral {
    False,
    Zero,
    One,
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::False => value.as_bool() == Some(false),
            Self::Zero => value.as_f64() == Some(0.0),
            Self::One => value.as_f64() == Some(1.0),
        }
    }
}

/// Keys that do not touch the text model's computation at inference, or that other parts of lmx read (token ids, the
/// quantization block): what transformers and mlx-lm write beside it.
const IDLE: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "boi_token_index",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "conv_use_xavier_init",
    "dtype",
    "embd_pdrop",
    "eoi_token_index",
    "eos_token_id",
    "for_llm_compression",
    "hidden_act",
    "hidden_dropout",
    "id2label",
    "image_token_index",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "mm_tokens_per_image",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "quantization",
    "quantization_config",
    "resid_pdrop",
    "return_dict",
    "rope.factor",
    "rope.original_max_position_embeddings",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "vision_config",
];

/// Refuses what is defined by code in the folder: `model_file` always; `auto_map` unless lmx knows the model type, as
/// many repositories ship an old copy of code that transformers has since taken in.
pub(super) fn refuse_code(config: &Config, known: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    let needs_code = |key: &str| ConfigError::NeedsCode {
        origin: config.origin().to_owned(),
        key: key.to_owned(),
        value: config.shown(key),
    };
    if config.get("model_file").is_some() {
        return Err(needs_code("model_file"));
    }
    if config.get("auto_map").is_some() {
        let model_type = config.model_type()?;
        if !known(model_type) {
            return Err(needs_code("auto_map"));
        }
        config.notice(format!(
            "the folder's own program code (auto_map) is not run; lmx has {model_type} built in"
        ));
    }
    Ok(())
}

/// Refuses unread keys that change the computation, and notices those of unknown meaning.
pub(super) fn check_unread(config: &Config, model_type: &str) -> Result<(), ConfigError> {
    let mut unknown = Vec::new();
    for key in config.unread() {
        let listed = listed_name(&key);
        match COMPUTING.iter().find(|(name, _)| *name == listed) {
            Some((_, neutral)) => {
                let harmless =
                    config.get(&key).is_none_or(|value| neutral.iter().any(|neutral| neutral.is(value)));
                if !harmless {
                    return Err(ConfigError::Unsupported {
                        origin: config.origin().to_owned(),
                        value: config.shown(&key),
                        key,
                        model_type: model_type.to_owned(),
                    });
                }
            }
            None if IDLE.contains(&listed.as_ref()) => {}
            None => unknown.push(key),
        }
    }
    if !unknown.is_empty() {
        config.notice(format!("{}: keys without effect: {}", config.origin(), unknown.join(", ")));
    }
    Ok(())
}

/// The name under which the tables list a key: those in the objects of a rotary encoding go by `rope`.
fn listed_name(key: &str) -> Cow<'_, str> {
    match key.rsplit_once('.') {
        Some((object, name)) if object.starts_with("rope_") => Cow::Owned(format!("rope.{name}")),
        _ => Cow::Borrowed(key),
    }
}
