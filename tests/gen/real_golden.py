#!/usr/bin/env python3
"""Greedy continuations of the two real models by mlx-lm in f32, and llama.cpp's perplexity of their GGUF files.

    python tests/gen/real_golden.py --models models --out tests/golden/real [--llama-perplexity BIN]

Needs mlx-lm (CPU) and the folders that scripts/fetch_models.py --folders makes. Takes about ten minutes, most of
it Gemma's prompt of 1,500 tokens. For each prompt the file holds its token ids, mlx-lm's next 64 tokens, and for
each of those the gap between the best and the second-best logit (a gap near zero is a tie that rounding decides).
"""

import argparse
import json
import re
import subprocess
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": ("gemma-3-270m", "gemma-3-270m-q4_k_m.gguf"),
}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three states of matter are",
    "Q: What is 12 times 11?\nA:",
    "Water boils at 100 degrees Celsius because",
    "Dear Sir or Madam,\n\nI am writing to",
    '{"name": "Ada", "born": 1815, "known for": "',
    "Le chat est assis sur",
]
NEW_TOKENS = 64
LONG_TOKENS = 1500


def continue_greedily(model, ids):
    cache = make_prompt_cache(model)
    inputs, tokens, gaps = mx.array([ids]), [], []
    for _ in range(NEW_TOKENS):
        logits = model(inputs, cache=cache)[0, -1]
        top = mx.sort(logits)[-2:]
        gaps.append(round((top[1] - top[0]).item(), 5))
        tokens.append(mx.argmax(logits).item())
        inputs = mx.array([[tokens[-1]]])
    return {"prompt": ids, "tokens": tokens, "gaps": gaps}


def perplexity(binary, gguf, text):
    run = subprocess.run(
        [binary, "-m", gguf, "-f", text, "-c", "512", "-t", "2", "--no-warmup"], capture_output=True, text=True
    )
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", run.stdout + run.stderr)
    if not found:
        raise SystemExit(f"no perplexity in the output of {binary}:\n{run.stderr[-2000:]}")
    return float(found[1])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--llama-perplexity", type=Path, help="measures the GGUF files with it")
    a = p.parse_args()
    mx.set_default_device(mx.cpu)
    text = a.out / "text.txt"
    for name, (folder, gguf) in MODELS.items():
        model, tokenizer = load(str(a.models / folder))
        model.update(tree_map(lambda w: w.astype(mx.float32), model.parameters()))
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        prompts.append(tokenizer.encode(text.read_text())[: LONG_TOKENS if name == "gemma3" else 200])
        result = {"greedy": [continue_greedily(model, ids) for ids in prompts]}
        if a.llama_perplexity:
            result["llama_cpp_perplexity_512"] = perplexity(a.llama_perplexity, a.models / gguf, text)
        (a.out / f"{name}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
