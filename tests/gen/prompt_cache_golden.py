"""Writes tests/golden/prompt_cache: prompt-cache files by mlx-lm, and how mlx-lm continues them and those by lmx.

Run from the repository's root, after models_golden.py: python tests/gen/prompt_cache_golden.py

The files lmx-*.safetensors are lmx's: the test prompt_cache writes those that are missing, then fails. mlx-lm must be
able to read them; what it generates from them is what lmx must generate too.
"""

import json
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from models_golden import FOLDER, mlx_model

INTO = Path("tests/golden/prompt_cache")
PROMPT = [position * 37 % 61 for position in range(70)]
TAIL = [5, 17, 3]
GENERATED = 20
# Positions seen and kept, or None for the model's own caches; and the bits of a quantized one.
CASES = {
    "plain": ("llama-f32", None, None),
    "rotating": ("llama-f32", (40, 4), None),
    "mixed": ("gemma3-f32", None, None),
    "bits8": ("llama-traditional-f32", None, 8),
    "bits4": ("llama-traditional-f32", None, 4),
    # Codes that cross bytes and words.
    "bits5": ("llama-traditional-f32", None, 5),
}
GROUP = 32


def load(name):
    config = json.loads((FOLDER / f"{name}.json").read_text())["config"]
    return mlx_model(config)[0]


def advance(model, cache, token):
    return int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, 0]).item())


def greedy(model, cache):
    """Token by token: with several at a time mlx-lm's rotating cache shows a query more than its window."""
    for token in TAIL:
        following = advance(model, cache, token)
    tokens = []
    for _ in range(GENERATED):
        tokens.append(following)
        following = advance(model, cache, following)
    return tokens


def new_cache(model, bound, bits):
    if bits is not None:
        return [layer.to_quantized(group_size=GROUP, bits=bits) for layer in make_prompt_cache(model)]
    if bound is None:
        return make_prompt_cache(model)
    return [RotatingKVCache(max_size=bound[0], keep=bound[1]) for _ in model.layers]


def main():
    INTO.mkdir(parents=True, exist_ok=True)
    expected = {"prompt": PROMPT, "tail": TAIL, "cases": {}}
    for case, (name, bound, bits) in CASES.items():
        model = load(name)
        cache = new_cache(model, bound, bits)
        for token in PROMPT:
            advance(model, cache, token)
        metadata = {"model": name, "tokenizer_config": "{}"}
        save_prompt_cache(str(INTO / f"mlx-{case}.safetensors"), cache, metadata)
        expected["cases"][case] = {
            "model": name,
            "bound": bound,
            "bits": bits,
            "mlx": greedy(model, load_prompt_cache(str(INTO / f"mlx-{case}.safetensors"))),
        }
        by_lmx = INTO / f"lmx-{case}.safetensors"
        if by_lmx.exists():
            cache, metadata = load_prompt_cache(str(by_lmx), return_metadata=True)
            assert metadata["model"] == name, metadata
            assert [type(c).__name__ for c in cache] == [type(c).__name__ for c in new_cache(model, bound, bits)]
            assert bits is None or {(c.bits, c.group_size) for c in cache} == {(bits, GROUP)}
            expected["cases"][case]["lmx"] = greedy(model, cache)
    (INTO / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
