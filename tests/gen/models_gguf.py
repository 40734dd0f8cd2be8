"""Writes the GGUF cases of tests/golden/models: tiny models with the logits that transformers computes for them.

Run from the repository's root: python tests/gen/models_gguf.py

The files are as llama.cpp's converters make them: rows of Llama's q and k permuted within heads, 1 added to Gemma's
norms, Llama 3's frequencies as divisors in a tensor. The reference computes in float32 on weights that gguf dequantized
and this script brought back to Hugging Face's order.
"""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter, quants
from models_cases import GEMMA2, GEMMA3, LLAMA3, LONGROPE, QWEN2, QWEN3, SMOLLM3, WINDOW
from models_golden import FOLDER, expected, norm_center, prompts, rule_values, transformers_logits, transformers_model

F32, F16, BF16 = Q.F32, Q.F16, Q.BF16
ARCHITECTURES = {"gemma3_text": "gemma3"}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_MODULES = MODULES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# The converters' rule where the file has no key for the scale of the scores.
SCALED_BY_WIDTH = {"query_pre_attn_scalar": 32}

# Name, configuration, type of each module's matrix.
CASES = [
    (
        "gguf-llama",
        LLAMA3,
        {"embed_tokens": Q.Q5_1, "lm_head": Q.Q4_1, "q_proj": Q.Q8_0, "k_proj": Q.Q4_0, "gate_proj": Q.Q5_0, "v_proj": F16},
    ),
    (
        "gguf-llama-k-quants",
        LLAMA3
        | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1, "rope_scaling": None},
        {
            "embed_tokens": Q.Q6_K,
            "lm_head": Q.Q4_K,
            "q_proj": Q.Q4_K,
            "k_proj": Q.Q5_K,
            "v_proj": Q.Q6_K,
            "gate_proj": Q.Q2_K,
            "up_proj": Q.Q3_K,
            "down_proj": Q.Q5_K,
        },
    ),
    ("gguf-smollm3", SMOLLM3 | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, {}),
    ("gguf-qwen2", QWEN2 | {"use_sliding_window": False}, {"v_proj": BF16, "down_proj": Q.Q4_1}),
    ("gguf-qwen3", QWEN3 | {"use_sliding_window": False}, {"q_proj": Q.Q5_0}),
    ("gguf-gemma2", GEMMA2 | SCALED_BY_WIDTH, {"up_proj": F16}),
    ("gguf-gemma3", GEMMA3 | SCALED_BY_WIDTH, {"gate_proj": BF16, "o_proj": F32}),
    ("gguf-phi3", LONGROPE | {"sliding_window": WINDOW}, {"gate_up_proj": Q.Q4_0}),
]

# Where the half-precision scales lie in a block of 256, and values that make weights of about 0.05.
K_QUANTS = {
    Q.Q2_K: {80: 0.007, 82: 0.01},
    Q.Q3_K: {108: 0.001},
    Q.Q4_K: {0: 0.0004, 2: 0.003},
    Q.Q5_K: {0: 0.0002, 2: 0.003},
    Q.Q6_K: {208: 0.00004},
}


def random_blocks(name, shape, kind):
    """gguf cannot quantize to these types: random codes and sub-scales under fixed scales."""
    rng = np.random.default_rng(sum(name.encode()))
    scales = K_QUANTS[kind]
    size = quants.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for offset, scale in scales.items():
        blocks[..., offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def permute(weight, heads):
    """Rows j and j + width/2 of each head become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight, heads):
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def permuted_heads(config, module):
    if config["model_type"] in ("llama", "smollm3"):
        return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(module)
    return None


def gguf_name(name, gemma):
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{(GEMMA_MODULES if gemma else MODULES)[module]}.{kind}"
    module, kind = name.rsplit(".", 1)
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[module] + "." + kind


def write_metadata(writer, config, architecture):
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture in ("llama", "smollm3"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_sliding_window_pattern([True, False])
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_dimension_count(int(head_dim * config["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_string("phi3.rope.scaling.type", "longrope")
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))


def rope_tensors(config):
    scaling = config.get("rope_scaling") or {}
    if "long_factor" in scaling:
        yield "rope_factors_long.weight", np.array(scaling["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(scaling["short_factor"], np.float32)
    if scaling.get("rope_type") == "llama3":
        width = config["hidden_size"] // config["num_attention_heads"]
        turns = scaling["original_max_position_embeddings"] / (2 * np.pi * config["rope_theta"] ** (np.arange(0, width, 2) / width))
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        yield "rope_freqs.weight", (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32)


def make(name, config, kinds):
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    gemma = architecture.startswith("gemma")
    writer = GGUFWriter(FOLDER / f"{name}.gguf", architecture)
    write_metadata(writer, config, architecture)
    for tensor, values in rope_tensors(config):
        writer.add_tensor(tensor, values)
    shapes = {key: value.shape for key, value in transformers_model(config, None).state_dict().items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight")
    weights = {}
    for tensor, shape in shapes.items():
        values = rule_values(tensor, shape, norm_center(config))
        module = tensor.split(".")[-2]
        heads = permuted_heads(config, module)
        kind = F32 if len(shape) == 1 else kinds.get(module, Q.Q8_0)
        stored = values if heads is None else permute(values, heads)
        stored = stored + 1 if gemma and tensor.endswith("norm.weight") else stored
        raw = random_blocks(tensor, shape, kind) if kind in K_QUANTS else quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(tensor, gemma), raw, raw_dtype=kind)
        read = quants.dequantize(raw, kind).reshape(shape)
        read = read if heads is None else unpermute(read, heads)
        weights[tensor] = torch.from_numpy(read - 1 if gemma and tensor.endswith("norm.weight") else read.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = transformers_model(config, weights)
    rows = [transformers_logits(model, tokens, stepwise=False) for tokens in prompts()]
    case = {
        "reference": "transformers",
        "gguf": f"{name}.gguf",
        "prompts": expected(rows),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(case) + "\n")
    print(name)


def main():
    for name, config, kinds in CASES:
        make(name, config, kinds)


if __name__ == "__main__":
    main()
