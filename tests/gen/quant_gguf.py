"""Writes tests/golden/formats/blocks.gguf, a file of gguf-py's with a tensor of every type that lmx reads and a
metadata value of every kind, and blocks.safetensors, what gguf-py decodes the tensors to, in float32.

Run from the repository's root: python tests/gen/quant_gguf.py
"""

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V

OUT = "tests/golden/formats/blocks"
ROWS = 3
rng = np.random.default_rng(11)
expected = {}

writer = gguf.GGUFWriter(f"{OUT}.gguf", "test")
writer.add_custom_alignment(64)
for key, value, kind in (
    ("u8", 200, V.UINT8), ("i8", -100, V.INT8), ("u16", 60000, V.UINT16), ("i16", -30000, V.INT16),
    ("u32", 4000000000, V.UINT32), ("i32", -2000000000, V.INT32), ("u64", 2**63 + 1, V.UINT64),
    ("i64", -(2**62), V.INT64), ("f32", 0.1, V.FLOAT32), ("f64", 0.1, V.FLOAT64), ("bool", True, V.BOOL),
    ("text", "Grüße, 世界", V.STRING),
):
    writer.add_key_value(f"test.{key}", value, kind)
writer.add_array("test.texts", ["a", "", "ĠĊ"])
writer.add_array("test.ints", [3, -1, 2])
writer.add_array("test.floats", [0.5, -1.5])
writer.add_array("test.bools", [True, False])
writer.add_array("test.bytes", b"\x01\xff")


def add(tensor_type, raw, shape):
    """A tensor from its bytes; `shape` is in elements."""
    name = f"{tensor_type.name.lower()}.weight"
    expected[name] = mx.array(gguf.quants.dequantize(raw, tensor_type).reshape(shape).astype(np.float32))
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=tensor_type)


w = rng.normal(size=(ROWS, 64)).astype(np.float32)
w[0, 5], w[1, :32] = 7.25, 0
for tensor_type in (T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0):
    raw = gguf.quants.quantize(w, tensor_type)
    if tensor_type == T.F32:
        writer.add_tensor("f32.weight", raw)
        expected["f32.weight"] = mx.array(w)
    elif tensor_type == T.F16:
        writer.add_tensor("f16.weight", raw)
        expected["f16.weight"] = mx.array(raw.astype(np.float32))
    else:
        add(tensor_type, raw, w.shape)

# gguf-py cannot quantize the K types: every bit of their blocks is random but for the half-precision scales, whose
# byte offsets are listed.
for tensor_type, halves in (
    (T.Q2_K, (80, 82)), (T.Q3_K, (108,)), (T.Q4_K, (0, 2)), (T.Q5_K, (0, 2)), (T.Q6_K, (208,)),
):
    block, size = gguf.GGML_QUANT_SIZES[tensor_type]
    raw = rng.integers(0, 256, size=(ROWS, 2 * size), dtype=np.uint8)
    for start in range(0, 2 * size, size):
        for at in halves:
            d = rng.normal(size=(ROWS, 1)).astype(np.float16)
            raw[:, start + at : start + at + 2] = d.view(np.uint8)
    add(tensor_type, raw, (ROWS, 2 * block))

writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
mx.save_safetensors(f"{OUT}.safetensors", expected)
