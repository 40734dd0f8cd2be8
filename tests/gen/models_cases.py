"""The tiny models of models_golden.py: name, configuration, how they are stored, and which implementation is the reference.

Each is small enough for a repository, and each family's special features are on. Prompts are 5, 11 and 24 tokens long,
so that the last is beyond the window of 8 of the windowed models.
"""

VOCAB = 64
WINDOW = 8

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
LLAMA = BASE | {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
LLAMA3 = LLAMA | {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": WINDOW}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "tie_word_embeddings": True, "no_rope_layers": [1, 0], "rope_theta": 2e6}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
    "rope_theta": 1e6,
}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "attention_bias": False}
GEMMA2 = BASE | {
    "model_type": "gemma2",
    "head_dim": 32,
    "rope_theta": 10000.0,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3 = BASE | {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
PHI3 = BASE | {
    "model_type": "phi3",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "original_max_position_embeddings": 64,
}
# Six pairs are rotated: 12 of a head's 16 dimensions.
LONGROPE = PHI3 | {
    "sliding_window": None,
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

F32 = {}  # stored as float32, given by the rule
BF16 = {"dtype": "bfloat16"}
Q4 = {"dtype": "bfloat16", "bits": 4, "group_size": 64}
Q8 = {"dtype": "float16", "bits": 8, "group_size": 32}
MXFP4 = {"dtype": "bfloat16", "mode": "mxfp4"}

MLX, TRANSFORMERS = "mlx-lm", "transformers"


def variants(name, config, reference, stored=(("f32", F32), ("q4", Q4), ("q8", Q8), ("mxfp4", MXFP4))):
    return [(f"{name}-{suffix}", config, storage, reference) for suffix, storage in stored]


# (name, configuration, storage, reference)
CASES = [
    *variants("llama", LLAMA3, MLX),
    ("llama-bf16", LLAMA3, BF16, MLX),
    ("llama-nvfp4", LLAMA, {"dtype": "bfloat16", "mode": "nvfp4"}, MLX),
    ("llama-mxfp8", LLAMA, {"dtype": "bfloat16", "mode": "mxfp8"}, MLX),
    (
        "llama-mixed",
        LLAMA,
        Q4
        | {
            "modules": {
                "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6},
                "model.layers.1.self_attn.v_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
                "model.embed_tokens": {"group_size": 32, "bits": 8},
                "lm_head": False,
            }
        },
        MLX,
    ),
    ("llama-biases-f32", LLAMA | {"attention_bias": True, "mlp_bias": True}, F32, MLX),
    ("llama-traditional-f32", LLAMA | {"rope_traditional": True, "head_dim": 32}, F32, MLX),
    ("llama-linear-f32", LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, F32, MLX),
    # One token at a time: the reference's frequencies depend on how long the sequence has become.
    ("llama-dynamic-f32", LLAMA | {"max_position_embeddings": 12, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, F32, MLX),
    ("llama-yarn-f32", LLAMA | {"rope_scaling": YARN}, F32, MLX),
    (
        "llama-layer-types-f32",
        LLAMA | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
        F32,
        MLX,
    ),
    ("llama-gelu-f32", LLAMA | {"hidden_act": "gelu_pytorch_tanh"}, F32, TRANSFORMERS),
    (
        "llama-v5-f32",
        {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        F32,
        TRANSFORMERS,
    ),
    (
        "llama-yarn-attention-f32",
        LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.5, "truncate": False, "beta_fast": 20.0}},
        F32,
        TRANSFORMERS,
    ),
    ("llama-yarn-mscale-f32", LLAMA | {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}, F32, MLX),
    ("llama-yarn-mscale-alone-f32", LLAMA | {"rope_scaling": YARN | {"mscale": 2.0}}, F32, TRANSFORMERS),
    *variants("mistral", MISTRAL, TRANSFORMERS),
    ("mistral-no-window-f32", MISTRAL | {"sliding_window": None}, F32, MLX),
    *variants("smollm3", SMOLLM3, MLX),
    (
        "smollm3-windows-f32",
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": WINDOW},
        F32,
        TRANSFORMERS,
    ),
    *variants("qwen2", QWEN2, TRANSFORMERS),
    ("qwen2-no-window-f32", QWEN2 | {"use_sliding_window": False}, F32, MLX),
    *variants("qwen3", QWEN3, TRANSFORMERS),
    ("qwen3-no-window-f32", QWEN3 | {"use_sliding_window": False}, F32, MLX),
    *variants("gemma2", GEMMA2, TRANSFORMERS),
    *variants("gemma3", GEMMA3, MLX),
    # The square root of this width is not a bfloat16.
    ("gemma3-rounded-scale-f32", GEMMA3 | {"hidden_size": 96}, F32, MLX),
    ("gemma3-linear-f32", GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, F32, MLX),
    (
        "gemma3-v5-f32",
        {key: value for key, value in GEMMA3.items() if key not in ("rope_theta", "rope_local_base_freq")}
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        F32,
        TRANSFORMERS,
    ),
    *variants("phi3", PHI3, TRANSFORMERS),
    ("phi3-no-window-f32", PHI3 | {"sliding_window": None}, F32, MLX),
    *variants("phi3-longrope", LONGROPE, TRANSFORMERS, (("f32", F32), ("q4", Q4))),
]
