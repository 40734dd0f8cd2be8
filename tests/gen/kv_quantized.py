"""Writes tests/golden/kv/quantized.json: what mlx makes of numbers that it quantizes, and logits of tiny models of
tests/golden/models with mlx-lm's quantized cache.

Run from the repository's root, after models_golden.py: python tests/gen/kv_quantized.py

Each token is run by itself, so that the cache is quantized exactly where it is told to be.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from models_golden import FOLDER, mlx_model

WIDTH = 128
DTYPES = {"F32": mx.float32, "F16": mx.float16, "Bf16": mx.bfloat16}
# Ranges around zero, on either side of it, and very small.
CENTERS = ((0.0, 1.0), (2.0, 0.5), (-3.0, 1.0), (0.0, 2.0**-20))
LENGTH = 70
POSITIONS = (0, 31, 39, 40, 69)
STARTS = (0, 40)


def numbers(row):
    """In 2^-12 of the size, so that they are the same in every language."""
    center, size = CENTERS[row]
    codes = [(i * 2654435761 + row * 40503) % 2**32 // 2**19 - 4096 for i in range(1, WIDTH + 1)]
    return [center + size * code / 4096 for code in codes]


def as_hex(array):
    """Bytes as they lie in memory; mlx gives numpy no bfloat16."""
    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.view(mx.uint16)
    return np.array(array).tobytes().hex()


def quantized():
    cases = []
    for name, dtype in DTYPES.items():
        rows = mx.array([numbers(row) for row in range(len(CENTERS))], dtype=mx.float32).astype(dtype)
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                parts = mx.quantize(rows, group_size=group, bits=bits)
                codes, scales, biases = (as_hex(part) for part in parts)
                case = {"type": name, "bits": bits, "group": group}
                cases.append(case | {"codes": codes, "scales": scales, "biases": biases})
    return cases


def quantized_logits(model, tokens, bits, group, start):
    cache = [KVCache() for _ in model.layers]
    rows = []
    for position, token in enumerate(tokens):
        # As mlx-lm does before a step.
        if position >= start and isinstance(cache[0], KVCache):
            cache = [layer.to_quantized(group_size=group, bits=bits) for layer in cache]
        rows.append(np.array(model(mx.array([[token]]), cache=cache)[0, 0]))
    return rows


def logits():
    cases = []
    for name in ("llama-traditional-f32", "qwen3-no-window-f32"):
        config = json.loads((FOLDER / f"{name}.json").read_text())["config"]
        model, _ = mlx_model(config)
        tokens = [position * 37 % 61 for position in range(LENGTH)]
        for bits in (2, 3, 4, 5, 6, 8):
            start = STARTS[bits % 3 == 2]
            rows = quantized_logits(model, tokens, bits, 32, start)
            kept = {position: [float(f"{value:.8g}") for value in rows[position]] for position in POSITIONS}
            cases.append({"model": name, "bits": bits, "group": 32, "start": start, "tokens": tokens, "logits": kept})
    return cases


def main():
    golden = {"quantized": quantized(), "logits": logits()}
    Path("tests/golden/kv/quantized.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
