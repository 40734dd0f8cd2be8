"""Writes tests/golden/models: tiny models with the logits that mlx-lm or transformers computes for them in float32.

Run from the repository's root: python tests/gen/models_golden.py [CASE...]

Each case of models_cases.py becomes NAME.json: configuration,
where the weights come from, and for three prompts the logits at their first, middle and last position. Weights follow
the rule of `rule_values`, so that the reader can make them itself; those of cases that are not stored as float32 are in
NAME.safetensors as mlx-lm saves them. Every case is computed by both implementations, transformers on the dequantized
weights: where the case names mlx-lm as its reference, they must agree.
"""

import copy
import json
import logging
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, quantize_model
from models_cases import CASES, MLX, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM

logging.disable(logging.WARNING)

FOLDER = Path("tests/golden/models")
PROMPT_LENGTHS = (5, 11, 24)
# Cases with mlx-lm as reference in which transformers computes something else.
DISAGREE = {
    "gemma3-rounded-scale-f32",  # mlx-lm rounds the scale to bfloat16 always, transformers for bfloat16 weights
    "llama-layer-types-f32",  # transformers has no windows in llama
    "llama-traditional-f32",  # transformers has no such key
}


def norm_center(config):
    """What norm weights lie around: Gemma adds 1 to them."""
    return 0 if config["model_type"].startswith("gemma") else 1


# Weights that are around 1 in every model: those of convolutions over tokens.
CONVOLUTIONS = ("conv.conv.weight", "conv_k", "conv_v")


def rule_values(name, shape, center):
    """Values in (-0.15, 0.15), around `center` for norms, around 1 for convolutions over tokens, from a hash of the
    tensor's name and the element's position.

    Of a size that neither grows nor shrinks activations much, so that errors are seen as they are.
    """
    i = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    h = (i * 2654435761 + sum(name.encode()) * 97) & 0xFFFFFFFF
    h ^= h >> np.uint64(15)
    h = (h * 2246822519) & 0xFFFFFFFF
    h ^= h >> np.uint64(13)
    u = h.astype(np.float64) / 2**31 - 1
    if name.endswith("norm.weight"):
        values = center + 0.1 * u
    else:
        values = 1 + 0.1 * u if name.endswith(CONVOLUTIONS) else 0.15 * u
    return values.astype(np.float32).reshape(shape)


def prompts(lengths=PROMPT_LENGTHS):
    state = 12345
    result = []
    for length in lengths:
        tokens = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            tokens.append(state // 65536 % VOCAB)
        result.append(tokens)
    return result


def mlx_model(config):
    # mlx-lm reads none of the keys that transformers 5 nests here.
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    # Gemma's model has a head until it sees that the file has none; the others drop a tied one.
    if config["model_type"] == "gemma3_text":
        model.sanitize({})
    rule = lambda name, value: mx.array(rule_values(name, value.shape, norm_center(config)))
    weights = {name: rule(name, value) for name, value in tree_flatten(model.parameters())}
    model.update(tree_unflatten(list(weights.items())))
    return model, weights


def cast(model, dtype):
    change = lambda x: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x
    model.update(tree_map(change, model.parameters()))


def store(model, config, storage):
    """Casts and quantizes the model as `storage` says; returns the configuration that mlx-lm would write."""
    if not storage:
        return config
    cast(model, getattr(mx, storage["dtype"]))
    if "bits" not in storage and "mode" not in storage:
        return config
    modules = storage.get("modules", {})
    predicate = (lambda path, _: modules.get(path, True)) if modules else None
    mode = storage.get("mode", "affine")
    _, config = quantize_model(model, config, storage.get("group_size"), storage.get("bits"), mode, quant_predicate=predicate)
    # mlx-lm leaves modules out of the block that a predicate refuses; other writers name them.
    config["quantization"] |= {path: False for path, how in modules.items() if how is False}
    return config


def mlx_logits(model, tokens, stepwise):
    if not stepwise:
        return np.array(model(mx.array([tokens]))[0], dtype=np.float32)
    cache = make_prompt_cache(model)
    return np.stack([np.array(model(mx.array([[token]]), cache=cache)[0, 0]) for token in tokens])


def float_weights(model):
    """The weights in float32, those of quantized modules dequantized."""
    weights = {}
    modules = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    paths = {path for path, _ in modules}
    for name, value in tree_flatten(model.parameters()):
        # Those that lie beside the leaves, such as sinks.
        if name.rpartition(".")[0] not in paths:
            weights[name] = torch.from_numpy(np.array(value.astype(mx.float32)))
    for path, module in modules:
        parameters = dict(tree_flatten(module.parameters()))
        if "scales" in parameters:
            parameters["weight"] = mx.dequantize(
                parameters["weight"],
                parameters.pop("scales"),
                parameters.pop("biases", None),
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
            )
        for name, value in parameters.items():
            weights[f"{path}.{name}"] = torch.from_numpy(np.array(value.astype(mx.float32)))
    return weights


def transformers_model(config, weights):
    """The model in float32; freshly initialized if there are no weights."""
    config = copy.deepcopy(config)
    config.pop("quantization", None)
    config.pop("rope_traditional", None)
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is None:
        return model
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(name == "lm_head.weight" and hf_config.tie_word_embeddings for name in missing), missing
    return model


@torch.no_grad()
def transformers_logits(model, tokens, stepwise):
    if not stepwise:
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    rows, cache = [], None
    for token in tokens:
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0, 0].numpy())
    return np.stack(rows)


def expected(rows_of_prompts, lengths=PROMPT_LENGTHS):
    """What the logits of each prompt must be, at its first, middle and last position."""
    chosen = lambda tokens: (0, len(tokens) // 2, len(tokens) - 1)
    rounded = lambda row: [round(float(logit), 6) for logit in row]
    return [
        {"tokens": tokens, "logits": {str(position): rounded(rows[position]) for position in chosen(tokens)}}
        for tokens, rows in zip(prompts(lengths), rows_of_prompts)
    ]


def difference(a, b):
    return float(np.max(np.abs(a - b).max(-1) / np.abs(b).max(-1)))


def check_agreement(name, reference, ours, theirs):
    worst = max(difference(a, b) for a, b in zip(ours, theirs))
    print(f"{name:28} reference {reference:13} mlx-lm and transformers differ by {worst:.1e}")
    assert worst < 2e-5 or reference != MLX or name in DISAGREE, name


def make(name, config, storage, reference):
    model, rule_weights = mlx_model(config)
    written = store(model, config, storage)
    weights_file = None
    if storage:
        weights_file = f"{name}.safetensors"
        mx.save_safetensors(str(FOLDER / weights_file), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    cast(model, mx.float32)
    stepwise = "dynamic" in name
    ours = [mlx_logits(model, tokens, stepwise) for tokens in prompts()]
    other = transformers_model(written, float_weights(model))
    theirs = [transformers_logits(other, tokens, stepwise) for tokens in prompts()]
    check_agreement(name, reference, ours, theirs)
    case = {
        "reference": reference,
        "config": written,
        # Either the file, or the names and shapes of tensors that the rule gives.
        "weights": weights_file or {name: list(value.shape) for name, value in rule_weights.items()},
        "norm_center": norm_center(config),
        "prompts": expected(ours if reference == MLX else theirs),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(case) + "\n")


def main():
    wanted = sys.argv[1:]
    for name, config, storage, reference in CASES:
        if not wanted or name in wanted:
            make(name, config, storage, reference)


if __name__ == "__main__":
    main()
