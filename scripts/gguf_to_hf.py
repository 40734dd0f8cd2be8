#!/usr/bin/env python3
"""Turns a small GGUF model into the folder that a Hugging Face checkout of the same model would be.

    python3 scripts/gguf_to_hf.py MODEL.gguf FOLDER

The tests load one model from both kinds of file. No hub is reachable from where they run, but two
small real models are on the Python package index as GGUF (see fetch_models.py); this script makes
their Hugging Face twins: config.json, generation_config.json, tokenizer.json, tokenizer_config.json
and model.safetensors. The weights are the dequantized ones, rounded to bfloat16, so they are close
to the original checkpoint, not equal to it.

It handles what those two files hold and refuses anything else by name: architectures `llama` and
`gemma3`, byte-level BPE of the SmolLM kind and SentencePiece BPE, tensor types F32, Q4_1, Q5_0,
Q8_0, Q4_K and Q6_K. Needs numpy. The folder appears only when it is complete.
"""

import argparse
import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np


class Refused(Exception):
    """The input is not something this script can convert; the message says what is wrong."""


# ---- GGUF ----------------------------------------------------------------------------------------

# Metadata value types: number -> struct letter. 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

SLAB = 1 << 22  # values dequantized at once, which bounds the memory


class Reader:
    """Reads little-endian values one after another from a buffer."""

    def __init__(self, buffer):
        self.buffer, self.at = buffer, 0

    def numbers(self, letter, count):
        layout = struct.Struct(f"<{count}{letter}")
        values = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return values

    def number(self, letter):
        return self.numbers(letter, 1)[0]

    def text(self):
        length = self.number("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.buffer):
            raise ValueError("a string runs past the end of the file")
        return bytes(self.buffer[start : self.at]).decode("utf-8")

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return list(self.numbers(SCALARS[kind], count))
            return [self.value(kind) for _ in range(count)]
        return self.number(SCALARS[kind])


class Gguf:
    """A GGUF file: `metadata`, and `tensors` as name -> (shape outermost first, type, bytes)."""

    def __init__(self, path):
        self.path = path
        data = np.memmap(path, dtype=np.uint8, mode="r")
        reader = Reader(memoryview(data))
        try:
            if reader.numbers("B", 4) != tuple(b"GGUF"):
                raise ValueError("it does not begin with GGUF")
            version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
            if version not in (2, 3):
                raise ValueError(f"its version is {version}")
            self.metadata = {}
            for _ in range(pairs):
                key = reader.text()
                self.metadata[key] = reader.value(reader.number("I"))
            headers = []
            for _ in range(tensors):
                name, dims = reader.text(), reader.number("I")
                shape = reader.numbers("Q", dims)[::-1]
                headers.append((name, shape, reader.number("I"), reader.number("Q")))
        except (struct.error, ValueError, KeyError) as error:
            raise Refused(f"{path}: not a readable GGUF file: {error}") from error
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-reader.at // alignment) * alignment
        self.tensors = {}
        for name, shape, kind, offset in headers:
            if kind not in TYPES:
                raise Refused(f"{path}: tensor {name} has type {kind}; this script reads {sorted(TYPES)}")
            _, values, size, _ = TYPES[kind]
            end = start + offset + int(np.prod(shape)) // values * size
            if end > len(data):
                raise Refused(f"{path}: tensor {name} runs past the end of the file")
            self.tensors[name] = (shape, kind, data[start + offset : end])

    def __getitem__(self, key):
        """A metadata value that must be there; a leading dot stands for the architecture's prefix."""
        found = self.get(key)
        if found is None:
            raise Refused(f"{self.path}: the metadata lacks {key}")
        return found

    def get(self, key, default=None):
        if key.startswith("."):
            key = self.metadata.get("general.architecture", "") + key
        return self.metadata.get(key, default)

    def real(self, key):
        """A float as a person wrote it: the file holds f32(1e-5), this gives 1e-05."""
        return float(str(np.float32(self[key])))

    def slabs(self, name):
        """A tensor's values as float32, in order, a few million at a time."""
        _, kind, data = self.tensors[name]
        _, values, size, dequantize = TYPES[kind]
        blocks = data.reshape(-1, size)
        step = SLAB // values
        for first in range(0, len(blocks), step):
            yield dequantize(blocks[first : first + step]).ravel()

    def weights(self, name):
        """A whole tensor as float32, in its shape."""
        return np.concatenate(list(self.slabs(name))).reshape(self.tensors[name][0])


# ---- tensor types --------------------------------------------------------------------------------
# Each function takes the blocks of a tensor as bytes, [blocks, bytes of a block], and returns float32
# values in the order of the tensor. The layouts are those of the GGUF format.


def f16(blocks, at):
    """The half-precision number at byte `at` of every block, as a column of float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(packed):
    """Low halves, then high halves, of the bytes of every block."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def from_f32(blocks):
    return np.ascontiguousarray(blocks).view(np.float32)


def from_q4_1(blocks):
    return f16(blocks, 0) * nibbles(blocks[:, 4:]).astype(np.float32) + f16(blocks, 2)


def from_q5_0(blocks):
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes = (nibbles(blocks[:, 6:]) | fifth << 4).astype(np.float32)
    return f16(blocks, 0) * (codes - 16)


def from_q8_0(blocks):
    return f16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def from_q4_k(blocks):
    # Eight groups of 32 in a block of 256. Their 6-bit scales and minima share 12 bytes: the first four
    # of each lie in the low bits of bytes 0-3 and 4-7, the last four are put together from the halves
    # of bytes 8-11 and the two bits left over above the first ones.
    first_scales, first_minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first_scales & 63, rest & 15 | first_scales >> 6 << 4], axis=1)
    minima = np.concatenate([first_minima & 63, rest >> 4 | first_minima >> 6 << 4], axis=1)
    # 32 bytes hold one group in their low halves and the next one in their high halves.
    packed = blocks[:, 16:].reshape(len(blocks), 4, 1, 32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(len(blocks), 8, 32)
    scale = (f16(blocks, 0) * scales.astype(np.float32))[:, :, None]
    minimum = (f16(blocks, 2) * minima.astype(np.float32))[:, :, None]
    return scale * codes.astype(np.float32) - minimum


def from_q6_k(blocks):
    # Two halves of 128 values. In each, 64 bytes hold the low four bits (the low halves of all of them
    # first) and 32 bytes the high two bits, for the four runs of 32 values from the lowest bits up.
    low = blocks[:, :128].reshape(len(blocks), 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = (low | high << 4).reshape(len(blocks), 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (f16(blocks, 208) * scales)[:, :, None] * codes


# ggml's number of the type -> (name, values in a block, bytes of a block, function)
TYPES = {
    0: ("F32", 1, 4, from_f32),
    3: ("Q4_1", 32, 20, from_q4_1),
    6: ("Q5_0", 32, 22, from_q5_0),
    8: ("Q8_0", 32, 34, from_q8_0),
    12: ("Q4_K", 256, 144, from_q4_k),
    14: ("Q6_K", 256, 210, from_q6_k),
}


# ---- weights -------------------------------------------------------------------------------------

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama has two norms a layer and Gemma four; `ffn_norm` is a different one in each.
NORM_NAMES = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def checkpoint_name(gguf, name):
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        known = LAYER_NAMES | NORM_NAMES[gguf["general.architecture"]]
        if layer[2] in known:
            return f"model.layers.{layer[1]}.{known[layer[2]]}.weight"
    elif name.removesuffix(".weight") in OUTER_NAMES:
        return OUTER_NAMES[name.removesuffix(".weight")] + ".weight"
    raise Refused(f"{gguf.path}: tensor {name} belongs to no {gguf['general.architecture']} model known here")


def checkpoint_weights(gguf, name):
    """A tensor as Hugging Face stores it, in pieces: what the conversion to GGUF changed is undone."""
    llama = gguf["general.architecture"] == "llama"
    if llama and re.search(r"attn_[qk]\.weight", name):
        # GGUF keeps the two rows of a rotary pair side by side; Hugging Face keeps all first rows of a
        # head before all second ones.
        heads = gguf[".attention.head_count" if "attn_q" in name else ".attention.head_count_kv"]
        weights = gguf.weights(name)
        yield weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2)
    elif not llama and name.endswith("norm.weight"):
        yield gguf.weights(name) - np.float32(1)  # Gemma multiplies by 1 + weight; GGUF has added the 1
    else:
        yield from gguf.slabs(name)


def bfloat16(values):
    """The bits of float32 values rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def write_safetensors(gguf, path):
    """A length, a JSON header, then the tensors one after another."""
    names = sorted((checkpoint_name(gguf, name), name) for name in gguf.tensors)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for new, old in names:
        shape = [int(size) for size in gguf.tensors[old][0]]
        start, end = end, end + 2 * int(np.prod(shape))
        header[new] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, old in names:
            for weights in checkpoint_weights(gguf, old):
                if not np.isfinite(weights).all():
                    raise Refused(f"{gguf.path}: tensor {old} holds a value that is not finite")
                file.write(bfloat16(weights).data)


# ---- config.json, generation_config.json ----------------------------------------------------------


def token_ids(gguf):
    return {
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
    }


def model_config(gguf):
    if gguf.get(".rope.scaling.type") or "rope_freqs.weight" in gguf.tensors:
        raise Refused(f"{gguf.path}: the model scales its rotary embedding, which this script does not handle")
    layers, heads, hidden = gguf[".block_count"], gguf[".attention.head_count"], gguf[".embedding_length"]
    config = {
        "hidden_size": hidden,
        "intermediate_size": gguf[".feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": gguf[".attention.head_count_kv"],
        "head_dim": gguf.get(".attention.key_length", hidden // heads),
        "max_position_embeddings": gguf[".context_length"],
        "rms_norm_eps": gguf.real(".attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.real(".rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": int(gguf.tensors["token_embd.weight"][0][0]),
        "torch_dtype": "bfloat16",
        **token_ids(gguf),
    }
    if gguf["general.architecture"] == "llama":
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": False}
        return kind | config
    # GGUF leaves Gemma 3's layer pattern and the local rotary base to the program that reads it.
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": config["head_dim"],
        "rope_local_base_freq": 10000.0,
        "sliding_window": gguf[".attention.sliding_window"],
        "sliding_window_pattern": 6,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
    } | config


def generation_config(gguf):
    gemma = {"do_sample": True, "top_k": 64, "top_p": 0.95}
    return token_ids(gguf) | (gemma if gguf["general.architecture"] == "gemma3" else {})


# ---- tokenizer.json, tokenizer_config.json ---------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # GGUF's token types
VISIBLE_SPACE = "\u2581"


def rebuilt_merges(tokens, scores, types):
    """The merge rules of a SentencePiece BPE vocabulary, which has scores in their place.

    SentencePiece joins the two neighbours whose joined piece scores best, so each way to cut a piece
    into two pieces is a rule and the piece's score is its rank. Pieces that the user defined are taken
    whole before any rule applies; rules for them that come first, short pieces before long ones, do that.
    """
    pieces = {t for t, kind in zip(tokens, types) if kind in (NORMAL, USER_DEFINED)}
    rules = []
    for index, (piece, kind) in enumerate(zip(tokens, types)):
        if piece not in pieces or kind not in (NORMAL, USER_DEFINED):
            continue
        rank = (0, len(piece)) if kind == USER_DEFINED else (1, -scores[index])
        for cut in range(1, len(piece)):
            halves = [piece[:cut], piece[cut:]]
            if pieces.issuperset(halves):
                rules.append((rank, index, cut, halves))
    rules.sort(key=lambda rule: rule[:3])
    return [rule[3] for rule in rules]


def byte_level(add_prefix_space):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def byte_level_stages(gguf):
    """tokenizer.json's parts for a GPT-2 style vocabulary whose digits stand alone."""
    if gguf["tokenizer.ggml.pre"] != "smollm":
        raise Refused(f"{gguf.path}: pre-tokenizer {gguf['tokenizer.ggml.pre']} is not smollm, the one known here")
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level(False)]},
        "decoder": byte_level(True),
    }


def sentencepiece_stages(gguf):
    """tokenizer.json's parts for a SentencePiece vocabulary without a leading space."""
    if gguf.get("tokenizer.ggml.add_space_prefix", True):
        raise Refused(f"{gguf.path}: the tokenizer adds a leading space, which this script does not handle")
    decoders = [
        {"type": "Replace", "pattern": {"String": VISIBLE_SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": VISIBLE_SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def bos_in_front(bos, bos_id):
    """A post-processor that puts the BOS token before each text."""
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + second,
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def tokenizer_files(gguf):
    """The contents of tokenizer.json and tokenizer_config.json."""
    model, tokens, types = (gguf["tokenizer.ggml." + key] for key in ("model", "tokens", "token_type"))
    special = {}
    for role in ("bos", "eos", "unknown", "padding"):
        key = {"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"
        special[key] = tokens[gguf[f"tokenizer.ggml.{role}_token_id"]]
    if model == "gpt2":
        stages, sentencepiece = byte_level_stages(gguf), False
        merges = [rule.split(" ") for rule in gguf["tokenizer.ggml.merges"]]
    elif model == "llama":
        stages, sentencepiece = sentencepiece_stages(gguf), True
        # User-defined tokens were stored with plain spaces.
        tokens = [
            t.replace(" ", VISIBLE_SPACE) if kind == USER_DEFINED else t for t, kind in zip(tokens, types)
        ]
        merges = rebuilt_merges(tokens, gguf["tokenizer.ggml.scores"], types)
    else:
        raise Refused(f"{gguf.path}: tokenizer model {model} is neither gpt2 nor llama")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise Refused(f"{gguf.path}: the vocabulary holds a token twice")

    adds_bos = gguf.get("tokenizer.ggml.add_bos_token", sentencepiece)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token, **plain, "special": kind != USER_DEFINED}
        for index, (token, kind) in enumerate(zip(tokens, types))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **stages,
        "post_processor": bos_in_front(special["bos_token"], vocabulary[special["bos_token"]]) if adds_bos else None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": special["unk_token"] if sentencepiece else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": sentencepiece,
            "byte_fallback": sentencepiece,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf[".context_length"],
        # The generic class takes tokenizer.json as it is; the named ones rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if gguf.get("tokenizer.chat_template"):
        config["chat_template"] = gguf["tokenizer.chat_template"]
    return tokenizer, config


# ---- all together --------------------------------------------------------------------------------


def convert(source, folder):
    gguf = Gguf(source)
    if gguf["general.architecture"] not in NORM_NAMES:
        raise Refused(
            f"{source}: architecture {gguf['general.architecture']} is none of {', '.join(NORM_NAMES)}"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer, tokenizer_config = tokenizer_files(gguf)
        for name, content in [
            ("config.json", model_config(gguf)),
            ("generation_config.json", generation_config(gguf)),
            ("tokenizer_config.json", tokenizer_config),
        ]:
            (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
        (partial / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
        write_safetensors(gguf, partial / "model.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description="Make the Hugging Face folder of a small GGUF model.")
    parser.add_argument("source", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="replaced when it exists")
    arguments = parser.parse_args()
    try:
        convert(arguments.source, arguments.folder)
    except (Refused, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
