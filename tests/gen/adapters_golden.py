"""Writes tests/golden/adapters: adapters that mlx-lm makes for tiny models, and the logits that it computes with them.

Run from the repository's root: python tests/gen/adapters_golden.py [CASE...]

Each case is a folder NAME, as mlx-lm's training writes it: adapter_config.json and adapters.safetensors, made by mlx-lm's
`linear_to_lora_layers`, with values that the rule of `rule_values` gives in place of trained ones (initial ones would
change nothing). expected.json beside them names the base, a case of tests/golden/models, and has the logits of the
model that mlx-lm's `load_adapters` makes of it.
"""

import json
import sys
from pathlib import Path

import hybrid_golden
import mlx.core as mx
import models_golden
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from models_golden import cast, expected, mlx_logits, prompts, rule_values, store

FOLDER = Path("tests/golden/adapters")
LENGTHS = (5, 24)

ATTENTION = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"]
# name: base, type, number of layers, rank, scale, keys
CASES = {
    "llama-f32-lora": ("llama-f32", "lora", 1, 4, 2.0, None),
    "llama-f32-dora": ("llama-f32", "dora", -1, 3, 1.5, [*ATTENTION, "mlp.down_proj"]),
    "llama-f32-outer": ("llama-f32", "lora", 1, 2, 3.0, ["mlp.up_proj", "model.embed_tokens", "lm_head"]),
    "llama-q4-lora": ("llama-q4", "lora", 2, 4, 2.0, None),
    "llama-q4-dora": ("llama-q4", "dora", 1, 4, 2.0, ATTENTION),
    "llama-q8-lora": ("llama-q8", "lora", 2, 4, 2.0, ATTENTION),
    "llama-q8-dora": ("llama-q8", "dora", 2, 4, 2.0, ["mlp.gate_proj", "mlp.down_proj", "lm_head"]),
    "qwen2-f32-dora": ("qwen2-no-window-f32", "dora", 2, 2, 2.0, None),
    "qwen3-f32-tied-dora": ("qwen3-no-window-f32", "dora", 1, 2, 2.0, ["model.embed_tokens"]),
    "gemma3-f32-tied": ("gemma3-f32", "lora", 1, 2, 0.5, ["self_attn.k_proj", "model.embed_tokens"]),
    "phi3-f32-dora": ("phi3-no-window-f32", "dora", 1, 2, 2.0, None),
    "lfm2-f32-lora": ("lfm2-f32", "lora", -1, 2, 2.0, ["conv.in_proj", "conv.out_proj", "feed_forward.w2"]),
    "gpt-oss-f32-experts": ("gpt-oss-f32", "lora", 1, 2, 2.0, None),
}


def base_model(name):
    for case in models_golden.CASES:
        if case[0] == name:
            model, _ = models_golden.mlx_model(case[1])
            store(model, case[1], case[2])
            cast(model, mx.float32)
            return model
    for case in hybrid_golden.CASES:
        if case[0] == name:
            model, _ = hybrid_golden.mlx_model(hybrid_golden.mlx_config(case[1]))
            return model
    raise KeyError(name)


def make(name):
    base, fine_tune_type, num_layers, rank, scale, keys = CASES[name]
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {"rank": rank, "dropout": 0.0, "scale": scale} | ({} if keys is None else {"keys": keys})
    config = {"fine_tune_type": fine_tune_type, "lora_parameters": parameters, "model": base, "num_layers": num_layers}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4, sort_keys=True) + "\n")
    model = base_model(base)
    model.freeze()
    linear_to_lora_layers(model, num_layers, parameters, use_dora=fine_tune_type == "dora")
    rule = lambda name, value: mx.array(rule_values(name, value.shape, 0) + (1 if name.endswith(".m") else 0))
    weights = {name: rule(name, value) for name, value in tree_flatten(model.trainable_parameters())}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    model = load_adapters(base_model(base), str(folder))
    model.eval()
    with_adapter = [mlx_logits(model, tokens, False) for tokens in prompts(LENGTHS)]
    without = [mlx_logits(base_model(base), tokens, False) for tokens in prompts(LENGTHS)]
    changed = min(models_golden.difference(a, b) for a, b in zip(with_adapter, without))
    print(f"{name:22} {len(weights):3} tensors, logits change by {changed:.2f} at least")
    assert changed > 0.05, name
    found = {"base": base, "prompts": expected(with_adapter, LENGTHS)}
    (folder / "expected.json").write_text(json.dumps(found) + "\n")


def main():
    for name in sys.argv[1:] or CASES:
        make(name)


if __name__ == "__main__":
    main()
