"""Writes tests/golden/models/ropes/ropes.json: rotary encodings of real configurations as transformers computes them.

Run from the repository's root: python tests/gen/models_ropes.py
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The sizes and scalings of Llama 3.1 8B, Qwen 2.5 7B with YaRN, Phi 3.5 mini, and made-up ones.
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 8}
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072}
CASES = {
    "llama-3.1": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "qwen-yarn": SIZES
    | {
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn-without-original": LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "truncate": False}},
    "phi-3.5": SIZES
    | {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_key_value_heads": 32,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.03 * i for i in range(48)],
            "long_factor": [1.0 + 0.04 * i * i for i in range(48)],
        },
    },
}


def main():
    result = {}
    for name, config in CASES.items():
        arguments = json.loads(json.dumps(config))
        hf_config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
        compute = ROPE_INIT_FUNCTIONS[hf_config.rope_parameters["rope_type"]]
        short, attention_factor = compute(hf_config, torch.device("cpu"), seq_len=1)
        long, _ = compute(hf_config, torch.device("cpu"), seq_len=100_000)
        result[name] = {
            "config": config,
            "short": short.tolist(),
            "long": long.tolist(),
            "attention_factor": attention_factor,
        }
    path = Path("tests/golden/models/ropes/ropes.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
