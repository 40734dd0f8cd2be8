"""Writes the cases of tests/golden/models that have chunks, experts, recurrent state or several kinds of it in a layer.

Run from the repository's root, with tests/gen on the path: python tests/gen/hybrid_golden.py [CASE...]

As models_golden.py, but prompts are 5, 24 and 90 tokens long, and not every model is in both implementations: mlx-lm has
no Llama 4 of several experts per token and no gpt-oss of another limit, transformers has no Baichuan M1. Where a model is
in both, they must agree.
"""

import copy
import json
import sys

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from models_cases import BASE, F32, MLX, Q4, Q8, TRANSFORMERS
from models_golden import (
    FOLDER,
    cast,
    difference,
    expected,
    float_weights,
    mlx_logits,
    prompts,
    rule_values,
    store,
    transformers_logits,
)
from transformers import AutoConfig, AutoModelForCausalLM

LENGTHS = (5, 24, 90)

# As the original files of gpt-oss are stored: experts in mxfp4, as blocks of bytes, and all else in bfloat16.
BLOCKS = {
    "dtype": "bfloat16",
    "mode": "mxfp4",
    "modules": {
        name: False
        for layer in range(3)
        for name in [f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkvo"]
        + [f"model.layers.{layer}.mlp.router"]
    }
    | {"model.embed_tokens": False, "lm_head": False},
}

LLAMA4 = BASE | {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "attention_bias": False,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.3,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # mlx-lm has this for the norms of q and k whatever the configuration says.
    "rms_norm_eps": 1e-6,
}
TOP2 = LLAMA4 | {
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "moe_layers": [1, 2, 4],
    "no_rope_layers": [1, 0, 1, 1, 1],
    "attention_chunk_size": 24,
    "attention_bias": True,
}
LFM2 = {key: value for key, value in BASE.items() if key != "rms_norm_eps"} | {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    # Long enough for snapshots of the state.
    "max_position_embeddings": 1024,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 120,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [2],
    "rope_theta": 10000.0,
}
BAICHUAN = {key: value for key, value in BASE.items() if key != "pad_token_id"} | {
    "model_type": "baichuan_m1",
    "num_hidden_layers": 3,
    "conv_window": 2,
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "sliding_window_layers": [1],
    "num_swa_attention_heads": 8,
    "num_swa_key_value_heads": 4,
    "tie_word_embeddings": False,
}
GPT_OSS = BASE | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    },
    # mlx-lm has these two always.
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "tie_word_embeddings": False,
}
# mlx-lm rounds the ends of yarn's ramp whatever the configuration says. The limit is one that activations reach.
CLAMPED = GPT_OSS | {
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "layer_types": None,
    "swiglu_limit": 0.3,
    "swiglu_alpha": 1.3,
    "rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": False},
}

# (name, configuration, storage, implementations; the first is the reference)
CASES = [
    ("llama4-f32", LLAMA4, F32, (MLX, TRANSFORMERS)),
    ("llama4-q4", LLAMA4, Q4, (MLX, TRANSFORMERS)),
    ("llama4-top2-f32", TOP2, F32, (TRANSFORMERS,)),
    ("lfm2-f32", LFM2, F32, (MLX, TRANSFORMERS)),
    ("lfm2-bias-f32", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [0, 3]}, F32, (MLX, TRANSFORMERS)),
    ("lfm2-q4", LFM2, Q4, (MLX, TRANSFORMERS)),
    ("baichuan-m1-f32", BAICHUAN, F32, (MLX,)),
    ("baichuan-m1-q8", BAICHUAN, Q8, (MLX,)),
    ("gpt-oss-f32", GPT_OSS, F32, (MLX, TRANSFORMERS)),
    ("gpt-oss-q4", GPT_OSS, Q4, (MLX, TRANSFORMERS)),
    ("gpt-oss-clamped-f32", CLAMPED, F32, (TRANSFORMERS,)),
    ("gpt-oss-blocks-mxfp4", GPT_OSS, BLOCKS, (MLX, TRANSFORMERS)),
]


def mlx_config(config):
    """mlx-lm has the experts of Llama 4 in the multimodal model only."""
    if config["model_type"] == "llama4_text":
        return {"model_type": "llama4", "text_config": config}
    return config


def mlx_model(config):
    """The model, and the weights of a checkpoint of it, which the rule gives."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    weights = {name: mx.array(rule_values(name, value.shape, 1)) for name, value in tree_flatten(model.parameters())}
    model.update(tree_unflatten(list(model.sanitize(dict(weights)).items())))
    return model, weights


def transformers_model(config):
    config = copy.deepcopy({key: value for key, value in config.items() if not key.startswith("quantization")})
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()


def to_transformers(weights):
    """mlx-lm's names and layouts as those of transformers."""
    weights = {name.removeprefix("language_model."): value for name, value in weights.items()}
    for name in [name for name in weights if name.endswith("experts.gate_proj.weight")]:
        module = name.removesuffix(".gate_proj.weight")
        parts = ("gate", "up", "down")
        gate, up, down = [weights.pop(f"{module}.{part}_proj.weight").transpose(1, 2) for part in parts]
        biased = f"{module}.gate_proj.bias" in weights
        # gpt-oss, which has biases, has the two in turn.
        joined = torch.stack([gate, up], -1).flatten(-2) if biased else torch.cat([gate, up], -1)
        weights |= {f"{module}.gate_up_proj": joined, f"{module}.down_proj": down}
        if biased:
            gate, up, down = [weights.pop(f"{module}.{part}_proj.bias") for part in parts]
            weights |= {f"{module}.gate_up_proj_bias": torch.stack([gate, up], -1).flatten(-2)}
            weights |= {f"{module}.down_proj_bias": down}
    return {
        name: value.transpose(1, 2) if name.endswith("conv.conv.weight") else value for name, value in weights.items()
    }


def as_blocks(weights):
    """What `sanitize` of mlx-lm's gpt_oss makes these weights from: gate and up in turn, codes as blocks of 16 bytes."""
    for name in [name for name in weights if name.endswith("experts.gate_proj.weight")]:
        module = name.removesuffix(".gate_proj.weight")
        turns = lambda gate, up: mx.stack([gate, up], 2 if gate.ndim > 2 else -1).flatten(1, 2)
        for kind in ("weight", "scales", "bias"):
            gate, up, down = [weights.pop(f"{module}.{part}_proj.{kind}") for part in ("gate", "up", "down")]
            end = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[kind]
            for part, value in (("gate_up", turns(gate, up)), ("down", down)):
                if kind == "weight":
                    value = value.view(mx.uint8).reshape(*value.shape[:2], -1, 16)
                weights[f"{module}.{part}_proj{end}"] = value
    return weights


def by_transformers(config, weights):
    """The logits of all prompts, and the weights, which the rule gives unless there are some."""
    model = transformers_model(config)
    if weights is None:
        rule = lambda name, value: torch.from_numpy(rule_values(name, value.shape, 1))
        weights = {name: rule(name, value) for name, value in model.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    return [transformers_logits(model, tokens, False) for tokens in prompts(LENGTHS)], weights


def make(name, config, storage, implementations):
    written, norm_center, file = config, 1, None
    if MLX in implementations:
        model, weights = mlx_model(mlx_config(config))
        written = store(model, mlx_config(config), storage)
        if storage:
            file = f"{name}.safetensors"
            stored = dict(tree_flatten(model.parameters()))
            if storage is BLOCKS:
                stored = as_blocks(stored)
                written = config | {"quantization_config": {"quant_method": "mxfp4"}}
            mx.save_safetensors(str(FOLDER / file), stored, {"format": "mlx"})
        cast(model, mx.float32)
        logits = [mlx_logits(model, tokens, False) for tokens in prompts(LENGTHS)]
        for tokens, rows in zip(prompts(LENGTHS), logits):
            cached = difference(mlx_logits(model, tokens, True), rows)
            print(f"{name:20} mlx-lm token by token differs by {cached:.1e}")
        if TRANSFORMERS in implementations:
            theirs, _ = by_transformers(config, to_transformers(float_weights(model)))
            worst = max(difference(a, b) for a, b in zip(logits, theirs))
            print(f"{name:20} mlx-lm and transformers differ by {worst:.1e}")
            assert worst < 2e-5, name
    else:
        logits, weights = by_transformers(config, None)
    case = {
        "reference": implementations[0],
        "config": written,
        "weights": file or {name: list(value.shape) for name, value in weights.items()},
        "norm_center": norm_center,
        "prompts": expected(logits, LENGTHS),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(case) + "\n")


def main():
    wanted = sys.argv[1:]
    for name, config, storage, implementations in CASES:
        if not wanted or name in wanted:
            make(name, config, storage, implementations)


if __name__ == "__main__":
    main()
