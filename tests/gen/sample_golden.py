"""Golden data of the `sample` module, made by mlx and mlx-lm: python tests/gen/sample_golden.py

Writes tests/golden/sample/{random,draws,survivors,processors}.json. Logits are formulas of IEEE f32 operations
that crates/lm/tests/text/sample.rs repeats bit for bit, so that only parameters and results need be stored.
Needs mlx-lm 0.32.2 and mlx 0.32.4 (on the CPU). As in mlx-lm's generate, log-probs have the shape [1, vocab]: for these
this mlx draws by the inverse of the cumulative distribution; older ones, and this one for other shapes, by the
Gumbel-max trick (docs/decisions/categorical-draw.md).
"""

import json
import math
import pathlib

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors, make_sampler

OUT = pathlib.Path(__file__).resolve().parent.parent / "golden" / "sample"
EOS = 3


def logits(shape, vocab, salt):
    """`vocab` distinct f32 values in a scrambled order."""
    i = np.arange(vocab, dtype=np.uint64)
    hashed = ((i + np.uint64(salt)) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    unit = (hashed >> np.uint64(8)).astype(np.float32) / np.float32(2**24)
    if shape == "peaked":  # a few likely tokens and a long tail
        scaled = unit * np.float32(vocab / 8)
        return np.float32(12) / (scaled + np.float32(1))
    return unit * unit * unit * np.float32(30)  # "flat": much of the vocabulary counts, the rest is below 2^-25


def logprobs(values):
    values = mx.array(values)[None]
    return values - mx.logsumexp(values, keepdims=True)


def random_data():
    chains = []
    for seed in [0, 7, 42, 2**32 + 5, 2**64 - 1]:
        mx.random.seed(seed)
        states, uniforms = [np.array(mx.random.state[0]).tolist()], []
        for _ in range(6):
            uniforms.append(int(np.array(mx.random.uniform()).view(np.uint32)))
            states.append(np.array(mx.random.state[0]).tolist())
        chains.append({"seed": str(seed), "states": states, "uniform_bits": uniforms})
    return chains


PARAMS = [
    {"temp": 0.0},
    {"temp": 1.0},
    {"temp": 0.7},
    {"temp": 0.05},
    {"temp": 3.0},
    {"temp": 1.0, "top_p": 0.9},
    {"temp": 2.0, "top_p": 0.3},
    {"temp": 1.0, "top_p": 1.0, "top_k": 0},
    {"temp": 1.3, "min_p": 0.1},
    {"temp": 1.3, "min_p": 0.9, "min_tokens_to_keep": 4},
    {"temp": 0.9, "top_k": 1},
    {"temp": 1.5, "top_k": 7},
    {"temp": 0.6, "top_p": 0.95, "top_k": 20},
    {"temp": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temp": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.02, "xtc_special_tokens": [0, EOS]},
    {"temp": 2.0, "top_p": 0.9, "min_p": 0.1, "top_k": 9},
    {
        "temp": 1.1,
        "top_p": 0.8,
        "min_p": 0.02,
        "min_tokens_to_keep": 2,
        "xtc_probability": 0.6,
        "xtc_threshold": 0.1,
        "top_k": 5,
    },
]


def draws():
    cases = []
    for shape in ["peaked", "flat"]:
        for vocab in [10, 11, 257, 49152, 49153]:
            for number, params in enumerate(PARAMS):
                if params.get("top_k", 0) >= vocab:
                    continue  # mlx-lm fails there; lmx takes it as "off"
                seed = [1, 7, 2**40 + 3][number % 3]
                mx.random.seed(seed)
                sampler = make_sampler(**params)
                tokens = [int(sampler(logprobs(logits(shape, vocab, 100 + step)))[0]) for step in range(10)]
                cases.append({"shape": shape, "vocab": vocab, "seed": str(seed), "params": params, "tokens": tokens})
    return cases


def digest(indices):
    """FNV-1a over 32-bit words, for sets that are too long to store."""
    value = 0xCBF29CE484222325
    for index in indices:
        value = ((value ^ int(index)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def filtered(values, params):
    """The filters of make_sampler, by the same functions and rules, without the draw."""
    if 0 < params.get("top_p", 0) < 1:
        values = sample_utils.apply_top_p(values, params["top_p"])
    if params.get("min_p", 0) != 0:
        values = sample_utils.apply_min_p(values, params["min_p"], params.get("min_tokens_to_keep", 1))
    if params.get("xtc_probability", 0) > 0:
        values = sample_utils.apply_xtc(
            values, params["xtc_probability"], params.get("xtc_threshold", 0.1), params.get("xtc_special_tokens", [])
        )
    if params.get("top_k", 0) > 0:
        values = sample_utils.apply_top_k(values, params["top_k"])
    return np.flatnonzero(np.array(values[0]) > -math.inf).tolist()


def survivors():
    five = [0.4, 0.3, 0.15, 0.1, 0.05]
    four = [0.25] * 4
    given = [(five, {"top_p": p}) for p in [0.3, 0.4, 0.5, 0.7, 0.85, 0.99]]
    given += [(four, {"top_p": 0.3}), (four, {"min_p": 1.0})]
    # Two tokens share the log-prob at which the nucleus ends.
    given += [([0.5, 0.2, 0.2, 0.1], {"top_p": 0.6})]
    given += [(five, {"min_p": p}) for p in [0.1, 0.3, 0.5, 1.0]]
    given += [(five, {"min_p": p, "min_tokens_to_keep": 3}) for p in [0.1, 0.5, 1.0]]
    given += [(five, {"top_p": 0.5, "min_p": 1.0, "min_tokens_to_keep": 3})]
    given += [(five, {"top_k": k}) for k in [1, 2, 4]]
    given += [(five, {"xtc_probability": 1.0, "xtc_threshold": t}) for t in [0.08, 0.12, 0.2, 0.35, 0.5]]
    given += [(five, {"xtc_probability": 1.0, "xtc_threshold": 0.12, "xtc_special_tokens": [0]})]
    # The order shows: each of these differs when the filters are swapped or see tempered log-probs.
    given += [
        (five, {"temp": 2.0, "top_p": 0.87, "min_p": 0.2}),
        (five, {"temp": 2.0, "top_p": 0.85, "top_k": 2}),
        (five, {"top_p": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.35}),
        (five, {"top_k": 1, "top_p": 0.8, "temp": 0.01}),
        (five, {"top_k": 2, "xtc_probability": 1.0, "xtc_threshold": 0.2}),
    ]
    cases = []
    for probabilities, params in given:
        values = mx.log(mx.array(probabilities, mx.float32))[None]
        cases.append({"probabilities": probabilities, "params": params, "kept": filtered(values, params)})
    for shape in ["peaked", "flat"]:
        for vocab in [257, 49152]:
            for params in [p for p in PARAMS if p.get("xtc_probability", 1) == 1] + [
                {"top_p": p} for p in [0.01, 0.5, 0.99, 0.9999]
            ]:
                if not set(params) - {"temp"}:
                    continue
                kept = filtered(logprobs(logits(shape, vocab, 5)), params)
                cases.append(
                    {
                        "shape": shape,
                        "vocab": vocab,
                        "salt": 5,
                        "params": params,
                        "count": len(kept),
                        "digest": digest(kept),
                    }
                )
    return cases


def processors():
    small = ([2.0, -1.0, 0.5], [0, 0, 1])
    history = [5, 2, 2, 7, 5, 5, 0, 9, 1, 5, 3, 2, 8, 8, 8, 6, 5, 4, 1, 1, 0, 2, 9, 9, 5, 7]
    long = (logits("flat", 11, 1) - 15, history)
    given = [
        (small, {"repetition_penalty": 2.0}),
        (small, {"repetition_penalty": 2.0, "repetition_context_size": 1}),
        (small, {"repetition_penalty": 2.0, "repetition_context_size": 0}),
        (small, {"presence_penalty": 0.5}),
        (small, {"frequency_penalty": 0.5}),
        (small, {"frequency_penalty": 0.5, "frequency_context_size": 2}),
        (small, {"logit_bias": {2: 3.0}}),
        (([2.0, -2.0, 0.0], [0, 1, 2]), {"repetition_penalty": 1.5}),
    ]
    for size in [0, 1, 5, 20, 26, 100]:
        given.append((long, {"repetition_penalty": 1.3, "repetition_context_size": size}))
        given.append((long, {"presence_penalty": 0.7, "presence_context_size": size}))
        given.append((long, {"frequency_penalty": -0.25, "frequency_context_size": size}))
    given.append(
        (
            long,
            {
                "logit_bias": {0: -2.5, 7: 4.0},
                "repetition_penalty": 1.1,
                "repetition_context_size": 8,
                "presence_penalty": 0.5,
                "presence_context_size": 3,
                "frequency_penalty": 0.3,
                "frequency_context_size": 0,
            },
        )
    )
    cases = []
    for (values, tokens), params in given:
        out = mx.array(np.array(values, np.float32))[None]
        for processor in make_logits_processors(**params):
            out = processor(mx.array(tokens), out)
        cases.append(
            {
                "logits": [float(v) for v in values],
                "history": tokens,
                "params": params,
                "out": [float(v) for v in np.array(out[0])],
            }
        )
    return cases


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    data = {"random": random_data(), "draws": draws(), "survivors": survivors(), "processors": processors()}
    for name, content in data.items():
        lines = ",\n".join(json.dumps(case) for case in content)
        (OUT / f"{name}.json").write_text(f"[\n{lines}\n]\n")


main()
