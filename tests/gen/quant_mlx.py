"""Writes tests/golden/formats/mlx.safetensors: matrices quantized by mlx, and what mlx decodes them to.

For each case CASE the file has CASE.weight, CASE.scales, CASE.biases (affine), CASE.global_scale (nvfp4 with one)
and CASE.expected in float32. Run from the repository's root: python tests/gen/quant_mlx.py
"""

import mlx.core as mx

ROWS, COLS = 3, 128
mx.random.seed(7)
tensors = {}


def matrix():
    """Random weights with an outlier, a group of zeros and a constant group."""
    w = mx.random.normal((ROWS, COLS))
    w[0, 5] = 9.5
    w[1, :32] = 0
    w[2, 32:64] = 3
    return w


def add(case, **parts):
    for name, part in parts.items():
        tensors[f"{case}.{name}"] = part


for dtype in (mx.float32, mx.float16, mx.bfloat16):
    name = str(dtype).removeprefix("mlx.core.")
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            weight, scales, biases = mx.quantize(matrix().astype(dtype), group, bits)
            # With the scales in float32, so that nothing but the last addition rounds.
            expected = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
            add(f"affine.{bits}.{group}.{name}", weight=weight, scales=scales, biases=biases, expected=expected)

for mode in ("mxfp4", "nvfp4", "mxfp8"):
    weight, scales = mx.quantize(matrix(), mode=mode)
    expected = mx.dequantize(weight, scales, mode=mode, dtype=mx.float32)
    add(mode, weight=weight, scales=scales, expected=expected)

w = matrix() / 50
global_scale = mx.abs(w).max()
try:
    weight, scales = mx.quantize(w, mode="nvfp4", global_scale=global_scale)
    expected = mx.dequantize(weight, scales, mode="nvfp4", global_scale=global_scale, dtype=mx.float32)
    add("nvfp4_global", weight=weight, scales=scales, global_scale=global_scale, expected=expected)
except Exception as e:
    print(e)

mx.eval(tensors)
mx.save_safetensors("tests/golden/formats/mlx.safetensors", tensors, metadata={"format": "mlx"})
