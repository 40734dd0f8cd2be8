"""Writes tests/golden/kv/bounded.json: logits of tiny models of tests/golden/models with mlx-lm's bounded cache.

Run from the repository's root, after models_golden.py: python tests/gen/kv_golden.py

Each token is run by itself: with several at a time mlx-lm's rotating cache lets a query see up to a window of old
positions beside the new ones, so that its result depends on how a prompt is cut.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache
from models_golden import FOLDER, mlx_model

LENGTH = 90
# Positions seen, and those of them that are the first ones; both within a block of 32, and beyond one.
BOUNDS = ((1, 0), (16, 4), (64, 40))
POSITIONS = (0, 15, 16, 31, 32, 63, 64, 65, 89)


def bounded_logits(model, tokens, size, keep):
    cache = [RotatingKVCache(max_size=size, keep=keep) for _ in model.layers]
    return [np.array(model(mx.array([[token]]), cache=cache)[0, 0]) for token in tokens]


def main():
    cases = []
    for name in ("llama-f32", "qwen3-no-window-f32"):
        config = json.loads((FOLDER / f"{name}.json").read_text())["config"]
        model, _ = mlx_model(config)
        tokens = [position * 37 % 61 for position in range(LENGTH)]
        for size, keep in BOUNDS:
            rows = bounded_logits(model, tokens, size, keep)
            logits = {position: [float(f"{value:.8g}") for value in rows[position]] for position in POSITIONS}
            cases.append({"model": name, "size": size, "keep": keep, "tokens": tokens, "logits": logits})
    Path("tests/golden/kv/bounded.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
