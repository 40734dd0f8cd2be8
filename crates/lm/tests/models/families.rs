//! Families: every spelling of a configuration means the same, what lmx cannot do is refused by name, and rotary
//! encodings are those of transformers.

use lmx::cache::Policy;
use lmx::models::{Config, DecoderConfig, FeedForwardConfig, LayerConfig, families};
use serde_json::{Map, Value, json};

fn llama() -> Map<String, Value> {
    object(json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null,
        "hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "use_cache": true
    }))
}

fn gemma3() -> Map<String, Value> {
    object(json!({
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256, "sliding_window": 32, "sliding_window_pattern": 3, "rope_scaling": null,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true, "attention_bias": false
    }))
}

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// `base` with some keys changed; a change to the text `-` removes the key.
fn edited(base: &Map<String, Value>, changes: Value) -> Map<String, Value> {
    let mut edited = base.clone();
    for (key, value) in object(changes) {
        if value == "-" {
            edited.remove(&key);
        } else {
            edited.insert(key, value);
        }
    }
    edited
}

fn describe(values: Map<String, Value>) -> Result<(DecoderConfig, Vec<String>), String> {
    let config = Config::from_values(values, "config.json");
    match families::describe(&config) {
        Ok(decoder) => Ok((decoder, config.notices())),
        Err(error) => Err(error.to_string()),
    }
}

/// The window of a layer with attention.
fn window(layer: &LayerConfig) -> Option<usize> {
    match layer.attention().unwrap().policy {
        Policy::Full => None,
        Policy::Window(window) => Some(window.size()),
        Policy::Chunk(size) => unreachable!("chunks of {size}"),
    }
}

fn assert_same(base: &Map<String, Value>, changes: Value) {
    let wanted = format!("{:?}", describe(base.clone()).unwrap().0);
    let (decoder, notices) = describe(edited(base, changes.clone())).unwrap();
    assert_eq!(format!("{decoder:?}"), wanted, "{changes}");
    assert!(notices.is_empty(), "{changes}: {notices:?}");
}

/// The error names everything in `parts`.
fn assert_refused(base: &Map<String, Value>, changes: Value, parts: &[&str]) {
    let error = describe(edited(base, changes.clone())).map(|_| ()).unwrap_err();
    for part in parts {
        assert!(error.contains(part), "{changes}: {error}");
    }
    assert!(error.starts_with("config.json: ") && !error.contains('\n'), "{error}");
}

#[test]
fn spellings_of_one_llama() {
    let base = llama();
    for changes in [
        json!({"rope_scaling": "-"}),
        json!({"rope_scaling": {}}),
        json!({"rope_scaling": {"type": "default"}}),
        json!({"rope_scaling": {"rope_type": "default", "factor": 8.0}}),
        json!({"rope_scaling": {"type": null, "rope_type": null}}),
        json!({"rope_scaling": "-", "rope_theta": "-", "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}),
        json!({"rope_theta": 5, "rope_parameters": {"rope_theta": 10000.0}}),
        json!({"rope_theta": 10000}),
        json!({"rope_theta": null}),
        json!({"head_dim": "-"}),
        json!({"head_dim": null}),
        json!({"num_key_value_heads": "-"}),
        json!({"num_key_value_heads": null}),
        json!({"hidden_size": 64.0, "num_hidden_layers": 3.0, "max_position_embeddings": 512.0}),
        json!({"eos_token_id": [2, 3]}),
        json!({"eos_token_id": null, "bos_token_id": null, "pad_token_id": null}),
        json!({"torch_dtype": "-", "dtype": "bfloat16"}),
        json!({"hidden_act": "-"}),
        json!({"hidden_act": "swish"}),
        json!({"attention_bias": null, "mlp_bias": "-"}),
        json!({"partial_rotary_factor": 1.0, "pretraining_tp": 2, "transformers_version": "5.0"}),
        json!({"layer_types": ["full_attention", "full_attention", "full_attention"]}),
        json!({"sliding_window": null}),
        json!({"model_type": "xverse"}),
    ] {
        assert_same(&base, changes);
    }
    // Nested, as in a wrapper.
    assert_same(&object(json!({"model_type": "llama", "text_config": base.clone()})), json!({}));
    let nested =
        describe(object(json!({"model_type": "some_wrapper", "text_config": base.clone()}))).unwrap().0;
    assert_eq!(format!("{nested:?}"), format!("{:?}", describe(base).unwrap().0));
}

#[test]
fn spellings_of_one_gemma() {
    let base = gemma3();
    let types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"];
    for changes in [
        json!({"layer_types": types}),
        json!({"layer_types": types, "sliding_window_pattern": "-"}),
        json!({"layer_types": types, "sliding_window_pattern": 6}),
        json!({"sliding_window_pattern": "-", "_sliding_window_pattern": 3}),
        json!({"rope_scaling": "-", "rope_theta": "-", "rope_local_base_freq": "-"}),
        json!({"rope_theta": "-", "rope_local_base_freq": "-", "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        json!({"hidden_act": "gelu_pytorch_tanh"}),
        json!({"tie_word_embeddings": "-", "final_logit_softcapping": null, "attn_logit_softcapping": null}),
    ] {
        assert_same(&base, changes);
    }
    let windows: Vec<_> = describe(base).unwrap().0.layers.iter().map(window).collect();
    assert_eq!(windows, [Some(32), Some(32), None, Some(32)]);
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let base = llama();
    for (changes, parts) in [
        (
            json!({"model_type": "lama"}),
            ["`model_type`", "\"lama\"", "gemma2, gemma3_text", "lfm2, llama, llama4_text"].as_slice(),
        ),
        (json!({"model_type": "-"}), &["`model_type` is missing"]),
        (json!({"hidden_size": "-"}), &["`hidden_size` is missing"]),
        (json!({"hidden_size": "64"}), &["`hidden_size` is \"64\""]),
        (json!({"hidden_size": 0}), &["`hidden_size` is 0"]),
        (json!({"hidden_size": 1u64 << 40}), &["`hidden_size`", "1099511627776"]),
        (json!({"num_hidden_layers": 1_000_000}), &["`num_hidden_layers`", "at most 4096"]),
        (json!({"num_key_value_heads": 3}), &["`num_key_value_heads` is 3", "divisor", "4"]),
        (json!({"head_dim": 1 << 23}), &["`head_dim`", "at most"]),
        (json!({"head_dim": 15}), &["`head_dim` is 15", "even"]),
        (json!({"head_dim": "-", "hidden_size": 65}), &["`hidden_size` is 65", "multiple"]),
        (json!({"rms_norm_eps": -1e-5}), &["`rms_norm_eps`"]),
        (json!({"hidden_act": "gelu"}), &["`hidden_act` is \"gelu\"", "silu", "gelu_pytorch_tanh"]),
        (json!({"rope_theta": 0}), &["`rope_theta` is 0"]),
        (json!({"rope_scaling": []}), &["`rope_scaling`", "an object"]),
        (json!({"rope_scaling": {"type": "ntk"}}), &["`rope_scaling.type` is \"ntk\"", "yarn", "longrope"]),
        (json!({"rope_scaling": {"rope_type": "su2"}}), &["`rope_scaling.rope_type` is \"su2\""]),
        (json!({"rope_scaling": {"type": "linear"}}), &["`rope_scaling.factor` is missing"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 0}}), &["`rope_scaling.factor` is 0"]),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5}}),
            &["`rope_scaling`", "rope_parameters"],
        ),
        (json!({"layer_types": ["full_attention"]}), &["`layer_types`", "3"]),
        (
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
            &["`layer_types`", "sliding_attention"],
        ),
        (
            json!({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
            &["`sliding_window` is missing"],
        ),
        // Keys that other families have and that would change the result.
        (json!({"partial_rotary_factor": 0.5}), &["`partial_rotary_factor` is 0.5", "llama"]),
        (json!({"num_local_experts": 8}), &["`num_local_experts` is 8"]),
        (json!({"attn_logit_softcapping": 50}), &["`attn_logit_softcapping`"]),
        (json!({"embedding_multiplier": 12.0}), &["`embedding_multiplier`"]),
        (json!({"rope_scaling": {"type": "default", "long_mscale": 1.5}}), &["`rope_scaling.long_mscale`"]),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}),
            &["partial_rotary_factor"],
        ),
        // Code.
        (json!({"model_file": "m.py"}), &["`model_file`", "m.py", "never runs code"]),
        (
            json!({"model_type": "new", "auto_map": {"AutoModel": "m.New"}}),
            &["`auto_map`", "m.New", "never runs code"],
        ),
    ] {
        assert_refused(&base, changes, parts);
    }
    assert_refused(
        &gemma3(),
        json!({"use_bidirectional_attention": true}),
        &["`use_bidirectional_attention`", "gemma3_text"],
    );
    assert_refused(&gemma3(), json!({"attn_logit_softcapping": 50.0}), &["`attn_logit_softcapping`"]);
}

#[test]
fn what_has_no_effect_is_noticed() {
    let notices = |changes: Value| describe(edited(&llama(), changes)).unwrap().1;
    assert_eq!(
        notices(json!({"novel_trick": 3, "rope_scaling": {"type": "default", "novel_factor": 2}})),
        ["config.json: keys without effect: rope_scaling.novel_factor, novel_trick"]
    );
    assert!(notices(json!({"sliding_window": 16}))[0].contains("sliding_window is not in effect"));
    assert!(notices(json!({"auto_map": {"AutoModel": "m.Llama"}}))[0].contains("is not run"));
    assert!(
        notices(json!({"partial_rotary_factor": 1, "num_experts": 0, "use_sliding_window": false}))
            .is_empty()
    );
}

#[test]
fn windows_of_each_family() {
    let windows = |changes: Value| -> Result<Vec<Option<usize>>, String> {
        let (decoder, _) = describe(edited(&llama(), changes))?;
        Ok(decoder.layers.iter().map(window).collect())
    };
    let w = Some(32);
    // transformers: a Mistral without the key has a window of 4096, with null it has none.
    assert_eq!(windows(json!({"model_type": "mistral"})).unwrap(), [Some(4096); 3]);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": null})).unwrap(), [None; 3]);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": 32})).unwrap(), [w; 3]);
    let mixed = json!(["full_attention", "sliding_attention", "full_attention"]);
    assert_eq!(
        windows(json!({"model_type": "mistral", "sliding_window": 32, "layer_types": mixed})).unwrap(),
        [None, w, None]
    );
    for family in ["qwen2", "qwen3"] {
        let with = |more: Value| {
            windows(Value::Object(edited(&object(json!({"model_type": family, "sliding_window": 32})), more)))
        };
        assert_eq!(with(json!({})).unwrap(), [None; 3]);
        assert_eq!(with(json!({"use_sliding_window": true})).unwrap(), [None; 3], "max_window_layers is 28");
        assert_eq!(with(json!({"use_sliding_window": true, "max_window_layers": 0})).unwrap(), [w; 3]);
        assert_eq!(
            with(json!({"use_sliding_window": true, "max_window_layers": 2})).unwrap(),
            [None, None, w]
        );
        assert_eq!(with(json!({"use_sliding_window": true, "layer_types": mixed})).unwrap(), [None, w, None]);
        assert!(with(json!({"layer_types": mixed})).unwrap_err().contains("use_sliding_window"));
    }
    assert_eq!(windows(json!({"model_type": "gemma2"})).unwrap(), [Some(4096), None, Some(4096)]);
    assert_eq!(windows(json!({"model_type": "gemma2", "sliding_window": null})).unwrap(), [None; 3]);
    assert_eq!(windows(json!({"model_type": "phi3", "sliding_window": 32})).unwrap(), [w; 3]);
}

#[test]
fn smollm3_layers_without_position_encoding() {
    let ropes = |changes: Value| -> Result<Vec<bool>, String> {
        let base = edited(&llama(), json!({"model_type": "smollm3", "num_hidden_layers": 5}));
        let (decoder, _) = describe(edited(&base, changes))?;
        Ok(decoder.layers.iter().map(|layer| layer.attention().unwrap().rope.is_some()).collect())
    };
    assert_eq!(ropes(json!({})).unwrap(), [true, true, true, false, true]);
    assert_eq!(ropes(json!({"no_rope_layer_interval": 2})).unwrap(), [true, false, true, false, true]);
    assert_eq!(ropes(json!({"no_rope_layers": [0, 1, 1, 1, 0]})).unwrap(), [false, true, true, true, false]);
    assert!(ropes(json!({"no_rope_layers": [0, 1]})).unwrap_err().contains("`no_rope_layers`"));
}

fn llama4() -> Map<String, Value> {
    object(json!({
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "attention_chunk_size": 24,
        "interleave_moe_layer_step": 2, "num_local_experts": 4, "num_experts_per_tok": 1, "use_qk_norm": true,
        "attn_temperature_tuning": true, "floor_scale": 8192, "attn_scale": 0.1, "rope_scaling": null
    }))
}

fn lfm2() -> Map<String, Value> {
    object(json!({
        "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 120, "num_hidden_layers": 3, "norm_eps": 1e-5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
        "conv_L_cache": 3, "conv_bias": false, "block_multiple_of": 64, "full_attn_idxs": [1], "rope_theta": 1e6
    }))
}

fn baichuan_m1() -> Map<String, Value> {
    object(json!({
        "model_type": "baichuan_m1", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1e5, "conv_window": 2, "sliding_window": 32,
        "sliding_window_layers": [1], "num_swa_attention_heads": 8, "num_swa_key_value_heads": 4
    }))
}

/// As the released files spell it.
fn gpt_oss() -> Map<String, Value> {
    object(json!({
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "sliding_window": 16, "num_local_experts": 8, "num_experts_per_tok": 4,
        "experts_per_token": 4, "attention_bias": true, "hidden_act": "silu", "swiglu_limit": 7.0,
        "initial_context_length": 4096, "rope_theta": 150_000, "tie_word_embeddings": false,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096}
    }))
}

#[test]
fn spellings_of_one_gpt_oss() {
    let base = gpt_oss();
    for changes in [
        json!({"layer_types": "-", "attention_bias": "-", "experts_per_token": "-", "num_experts_per_tok": "-"}),
        json!({"rope_scaling": "-", "rope_theta": "-", "swiglu_limit": "-", "initial_context_length": "-"}),
        json!({"rope_scaling": null, "swiglu_alpha": 1.702, "hidden_act": "-", "tie_word_embeddings": "-"}),
        json!({"max_position_embeddings": "-", "router_aux_loss_coef": 0.9, "output_router_logits": false}),
    ] {
        assert_same(&base, changes);
    }
    let (decoder, _) = describe(base).unwrap();
    let windows: Vec<_> = decoder.layers.iter().map(window).collect();
    assert_eq!(windows, [Some(16), None, Some(16)]);
    for layer in &decoder.layers {
        let attention = layer.attention().unwrap();
        assert!(attention.sinks && attention.qkv_bias && attention.output_bias);
        let FeedForwardConfig::Experts(experts) = layer.feed_forward else { unreachable!("{layer:?}") };
        assert_eq!((experts.count, experts.per_token, experts.expert.intermediate), (8, 4, 96));
        assert!(experts.router_bias && experts.expert.bias && !experts.shared);
    }
}

#[test]
fn what_gpt_oss_cannot_mean_is_refused_by_name() {
    for (changes, parts) in [
        (json!({"experts_per_token": 2}), ["`experts_per_token` is 2", "num_experts_per_tok, 4"].as_slice()),
        (json!({"initial_context_length": 64}), &["`initial_context_length` is 64", "4096"]),
        (json!({"hidden_act": "gelu_pytorch_tanh"}), &["`hidden_act`", "silu"]),
        (json!({"swiglu_limit": 0}), &["`swiglu_limit` is 0", "above 0"]),
        (json!({"swiglu_alpha": -1}), &["`swiglu_alpha` is -1", "above 0"]),
        (json!({"num_local_experts": 0}), &["`num_local_experts` is 0", "from 1"]),
        (json!({"num_local_experts": 3}), &["`num_experts_per_tok` is 4", "num_local_experts, 3"]),
        (json!({"sliding_window": null}), &["`sliding_window` is missing"]),
        (json!({"layer_types": vec!["chunked_attention"; 3]}), &["`layer_types`", "sliding_attention"]),
        (json!({"num_experts": 8}), &["`num_experts` is 8", "gpt_oss"]),
    ] {
        assert_refused(&gpt_oss(), changes, parts);
    }
    assert_refused(&llama(), json!({"swiglu_limit": 7.0}), &["`swiglu_limit` is 7", "llama"]);
}

#[test]
fn spellings_of_one_llama4() {
    let base = llama4();
    for changes in [
        json!({"attn_temperature_tuning": 4, "no_rope_layers": [], "interleave_moe_layer_step": "-", "moe_layers": [1, 3]}),
        json!({"attn_temperature_tuning": "-", "floor_scale": "-", "attn_scale": "-", "use_qk_norm": "-"}),
        json!({"no_rope_layers": [1, 1, 1, 0], "rope_theta": "-", "hidden_act": "silu", "for_llm_compression": false}),
        json!({"layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"]}),
        json!({"router_aux_loss_coef": 0.001, "output_router_logits": false, "router_jitter_noise": 0.0}),
    ] {
        assert_same(&base, changes);
    }
    let mut text = base.clone();
    text.remove("model_type");
    assert_same(&base, json!({}));
    let wrapped =
        describe(object(json!({"model_type": "llama4", "text_config": text, "vision_config": {}}))).unwrap();
    assert_eq!(format!("{:?}", wrapped.0), format!("{:?}", describe(base).unwrap().0));
    assert!(wrapped.1.is_empty(), "{:?}", wrapped.1);
}

#[test]
fn layers_of_llama4_are_chunked_or_without_positions_and_have_experts() {
    let layers = |changes: Value| -> Vec<_> {
        let (decoder, _) = describe(edited(&llama4(), changes)).unwrap();
        let layer = |layer: &LayerConfig| {
            let attention = layer.attention().unwrap();
            assert_eq!(attention.rope.is_none(), attention.temperature.is_some());
            let experts = matches!(layer.feed_forward, FeedForwardConfig::Experts(_));
            (attention.policy, attention.rope.is_some(), experts)
        };
        decoder.layers.iter().map(layer).collect()
    };
    let (chunk, full) = (Policy::Chunk(24.try_into().unwrap()), Policy::Full);
    let usual = [(chunk, true, false), (chunk, true, true), (chunk, true, false), (full, false, true)];
    assert_eq!(layers(json!({})), usual);
    let unchunked = [(full, true, false), (full, true, true), (full, true, false), (full, false, true)];
    assert_eq!(layers(json!({"attention_chunk_size": null})), unchunked);
    let dense = [(full, true, false), (chunk, true, false), (chunk, true, false), (full, true, false)];
    let types = ["full_attention", "chunked_attention", "chunked_attention", "full_attention"];
    let changes = json!({"layer_types": types, "no_rope_layers": [1, 1, 1, 1], "moe_layers": [], "num_local_experts": 0});
    assert_eq!(layers(changes), dense);
}

#[test]
fn what_llama4_lfm2_and_baichuan_m1_cannot_mean_is_refused_by_name() {
    for (changes, parts) in [
        (json!({"attention_chunk_size": 0}), ["`attention_chunk_size` is 0", "from 1"].as_slice()),
        (
            json!({"attention_chunk_size": null, "layer_types": vec!["chunked_attention"; 4]}),
            &["`attention_chunk_size` is missing", "chunked"],
        ),
        (json!({"layer_types": vec!["sliding_attention"; 4]}), &["`layer_types`", "chunked_attention"]),
        (json!({"no_rope_layers": [1, 0]}), &["`no_rope_layers`", "4"]),
        (json!({"moe_layers": [4]}), &["`moe_layers`", "0 to 3"]),
        (json!({"moe_layers": "all"}), &["`moe_layers`", "0 to 3"]),
        (json!({"num_local_experts": 0}), &["`num_local_experts` is 0", "layers have experts"]),
        (json!({"num_local_experts": 1 << 20}), &["`num_local_experts`", "4096"]),
        (json!({"num_experts_per_tok": 5}), &["`num_experts_per_tok` is 5", "at most", "4"]),
        (json!({"attn_temperature_tuning": "yes"}), &["`attn_temperature_tuning`"]),
        (json!({"intermediate_size_mlp": 1 << 30}), &["`intermediate_size_mlp`", "at most"]),
        (json!({"sliding_window_layers": [1]}), &["`sliding_window_layers`", "llama4_text"]),
    ] {
        assert_refused(&llama4(), changes, parts);
    }
    for (changes, parts) in [
        (json!({"conv_L_cache": 1}), ["`conv_L_cache` is 1", "from 2"].as_slice()),
        (json!({"block_dim": 32}), &["`block_dim` is 32", "hidden_size, 64"]),
        (json!({"num_heads": 8}), &["`num_heads` is 8", "num_attention_heads, 4"]),
        (json!({"block_norm_eps": 1e-6}), &["`block_norm_eps` is", "norm_eps"]),
        (json!({"use_pos_enc": false}), &["`use_pos_enc` is false", "true"]),
        (json!({"full_attn_idxs": [3]}), &["`full_attn_idxs`", "0 to 2"]),
        (json!({"layer_types": ["conv", "conv", "full_attention"]}), &["`full_attn_idxs`", "layer_types"]),
        (json!({"layer_types": ["conv", "ssm", "conv"]}), &["`layer_types`", "conv"]),
        (json!({"intermediate_size": "-"}), &["`intermediate_size` is missing"]),
        (json!({"block_ffn_dim_multiplier": 1e12}), &["`block_ffn_dim_multiplier`", "at most"]),
        (json!({"block_ffn_dim_multiplier": 1e-6}), &["`block_ffn_dim_multiplier`", "width"]),
        (json!({"num_experts": 32}), &["`num_experts` is 32", "lfm2"]),
    ] {
        assert_refused(&lfm2(), changes, parts);
    }
    for (changes, parts) in [
        (json!({"conv_window": 3}), ["`conv_window` is 3", "2"].as_slice()),
        (json!({"conv_window": "-"}), &["`conv_window` is missing"]),
        (json!({"tie_word_embeddings": true}), &["`tie_word_embeddings` is true", "false"]),
        (json!({"sliding_window": "-"}), &["`sliding_window` is missing"]),
        (json!({"sliding_window_layers": [7]}), &["`sliding_window_layers`", "0 to 2"]),
        (json!({"num_swa_attention_heads": 7}), &["`num_swa_attention_heads` is 7", "64"]),
        (json!({"num_swa_key_value_heads": 3}), &["`num_swa_key_value_heads` is 3", "8"]),
    ] {
        assert_refused(&baichuan_m1(), changes, parts);
    }
    // Their keys in other families.
    for key in
        ["conv_L_cache", "conv_window", "sliding_window_layers", "moe_layers", "attn_temperature_tuning"]
    {
        assert_refused(&llama(), json!({key: 2}), &[key, "llama"]);
    }
}

#[test]
fn widths_and_heads_of_lfm2_and_baichuan_m1() {
    let width = |changes: Value| match describe(edited(&lfm2(), changes)).unwrap().0.layers[0].feed_forward {
        FeedForwardConfig::Dense(mlp) => mlp.intermediate,
        FeedForwardConfig::Experts(experts) => unreachable!("{experts:?}"),
    };
    // Two thirds of 120, rounded up to a multiple of 64.
    assert_eq!(width(json!({})), 128);
    assert_eq!(width(json!({"block_auto_adjust_ff_dim": false})), 120);
    assert_eq!(width(json!({"block_ff_dim": 300})), 256);
    assert_eq!(width(json!({"block_ffn_dim_multiplier": 2.5, "block_multiple_of": 1})), 200);
    for changes in [
        json!({"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": "-"}),
        json!({"rope_theta": "-", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        json!({"block_ff_dim": 120, "intermediate_size": 7, "tie_embedding": true, "block_dim": 64}),
        json!({"block_ff_dim": 120, "conv_dim": 64, "num_heads": 4, "use_pos_enc": true, "block_norm_eps": 1e-5}),
        json!({"block_use_swiglu": true, "conv_use_xavier_init": true, "block_out_init_scale": 1.0}),
    ] {
        assert_same(&lfm2(), changes);
    }
    let heads = |changes: Value| -> Vec<_> {
        let (decoder, _) = describe(edited(&baichuan_m1(), changes)).unwrap();
        let layer = |layer: &LayerConfig| {
            let attention = layer.attention().unwrap();
            let dims = decoder.ropes[attention.rope.unwrap()].dims();
            assert_eq!(dims, attention.head_dim, "the whole head is rotated");
            (attention.heads, attention.kv_heads, window(layer))
        };
        decoder.layers.iter().map(layer).collect()
    };
    assert_eq!(heads(json!({})), [(4, 2, None), (8, 4, Some(32)), (4, 2, None)]);
    let same = json!({"num_swa_attention_heads": null, "num_swa_key_value_heads": 0, "sliding_window_layers": [0, 2]});
    assert_eq!(heads(same), [(4, 2, Some(32)), (4, 2, None), (4, 2, Some(32))]);
}

#[test]
fn ties_and_biases_follow_transformers() {
    let with = |changes: Value| describe(edited(&llama(), changes)).unwrap().0;
    for (family, tied) in [
        ("llama", false),
        ("mistral", false),
        ("qwen2", false),
        ("qwen3", false),
        ("phi3", false),
        ("smollm3", true),
        ("gemma2", true),
        ("gemma3_text", true),
    ] {
        assert_eq!(
            with(json!({"model_type": family, "tie_word_embeddings": "-"})).tied_head,
            tied,
            "{family}"
        );
    }
    let biases = |decoder: DecoderConfig| {
        let layer = &decoder.layers[0];
        let attention = layer.attention().unwrap();
        let FeedForwardConfig::Dense(mlp) = layer.feed_forward else { unreachable!("{layer:?}") };
        (attention.qkv_bias, attention.output_bias, mlp.bias)
    };
    assert_eq!(biases(with(json!({}))), (false, false, false));
    assert_eq!(biases(with(json!({"attention_bias": true}))), (true, true, false));
    assert_eq!(biases(with(json!({"mlp_bias": true}))), (false, false, true));
    assert_eq!(biases(with(json!({"model_type": "qwen2"}))), (true, false, false));
    assert_eq!(biases(with(json!({"model_type": "qwen3", "attention_bias": true}))), (true, true, false));
}

#[test]
fn context_grows_with_yarn_and_dynamic_scaling_only() {
    let context = |scaling: Value| {
        describe(edited(&llama(), json!({"rope_scaling": scaling}))).unwrap().0.context_length
    };
    assert_eq!(context(json!(null)), 512);
    assert_eq!(context(json!({"type": "linear", "factor": 4.0})), 512);
    assert_eq!(context(json!({"type": "dynamic", "factor": 4.0})), 2048);
    assert_eq!(
        context(json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})),
        2048
    );
    assert_eq!(context(json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})), 512);
}

#[test]
fn rotary_encodings_are_those_of_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/models/ropes/ropes.json");
    let cases: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(cases.len(), 5);
    for (name, case) in cases {
        let (decoder, _) = describe(object(case["config"].clone())).unwrap();
        let rope = &decoder.ropes[0];
        let factor = case["attention_factor"].as_f64().unwrap();
        let (mut cos, mut sin) = (vec![0.0; rope.dims() / 2], vec![0.0; rope.dims() / 2]);
        for (long_context, set) in [(false, "short"), (true, "long")] {
            // At position 1 the angle is the inverse frequency.
            rope.fill(1, long_context, &mut cos, &mut sin);
            let wanted = case[set].as_array().unwrap();
            assert_eq!(wanted.len(), cos.len(), "{name}");
            for ((cos, sin), wanted) in cos.iter().zip(&sin).zip(wanted) {
                let (cos, sin, wanted) = (f64::from(*cos), f64::from(*sin), wanted.as_f64().unwrap());
                assert!(
                    (sin.atan2(cos) / wanted - 1.0).abs() < 1e-6,
                    "{name} {set}: {} {wanted}",
                    sin.atan2(cos)
                );
                assert!(
                    (sin.hypot(cos) / factor - 1.0).abs() < 1e-6,
                    "{name} {set}: {} {factor}",
                    sin.hypot(cos)
                );
            }
        }
    }
}
