"""Small tokenizers of every kind that lmx reads, and what HF `tokenizers` and `transformers` do with them.

Writes tests/golden/text/<kind>/{tokenizer.json,tokenizer_config.json,cases.json}, and, when --models names a folder with
SmolLM2-135M-Instruct and gemma-3-270m, tests/golden/text/{smollm2,gemma3}.json with the ids of the real ones.

    python tests/gen/text_tokenizers.py [--models models]
"""

import argparse
import json
import random
from pathlib import Path

from text_corpus import TEXTS, TRAINING
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent.parent / "golden" / "text"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text, **flags):
    return AddedToken(text, special=True, normalized=False, **flags)


def plain(text, **flags):
    return AddedToken(text, special=False, **flags)


def template(bos):
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)])


def byte_level():
    """GPT-2 style with single digits, no BOS; added tokens with every flag."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tok.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False))
    tok.add_tokens([
        plain("<think>", normalized=False), plain("</think>", normalized=False), plain("<tool_call>", normalized=False),
        plain("</tool_call>", normalized=False), plain("snip", single_word=True, normalized=False),
        plain("<mark>", lstrip=True, rstrip=True, normalized=False), plain("<glue>", lstrip=True, normalized=False),
    ])
    return tok, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}


def split_nfc():
    """Qwen style: NFC, one regex, ignore_merges, BOS."""
    tok = Tokenizer(models.BPE(ignore_merges=True))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(TRAINING, trainer)
    tok.add_tokens([plain("<NORM>")])
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s>")])
    return tok, {"bos_token": "<s>", "eos_token": "</s>"}


def sentence_piece(legacy):
    """Llama style: byte fallback; the space prefix by the normalizer (and stripped again), or none (Gemma)."""
    tok = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if legacy else spaces
    # Only for training: words, so that merges stay inside them.
    tok.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    specials = ["<s>", "</s>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
    tok.train_from_iterator(TRAINING[:8], trainers.BpeTrainer(vocab_size=460, special_tokens=specials, limit_alphabet=60, show_progress=False))
    conf = json.loads(tok.to_str())
    # The bytes are tokens of the model, not added ones.
    conf["added_tokens"] = [t for t in conf["added_tokens"] if not t["content"].startswith("<0x")]
    conf["pre_tokenizer"] = None
    tok = Tokenizer.from_str(json.dumps(conf))
    tail = [decoders.Strip(" ", 1, 0)] if legacy else []
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    tok.post_processor = template("<s>")
    tok.add_tokens([plain("NORM"), plain("\n\n", normalized=False)])
    return tok, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def metaspace():
    """Llama without legacy: the Metaspace pre-tokenizer, prefix on the first piece only; unknowns not fused."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    tok.train_from_iterator(TRAINING[:5], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False))
    tok.post_processor = template("<s>")
    return tok, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def unigram():
    tok = Tokenizer(models.Unigram())
    tok.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.train_from_iterator(TRAINING, trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False))
    return tok, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def word_level():
    tok = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.train_from_iterator(TRAINING, trainers.WordLevelTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False))
    tok.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tok, {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"}


def byte_runs_are_whole(tok, ids):
    """HF drops good characters of a byte run that is not UTF-8 as a whole; lmx keeps them, so leave these out."""
    run = b""
    for i in [*ids, None]:
        piece = tok.id_to_token(i) if i is not None else None
        if piece and len(piece) == 6 and piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        if run.decode(errors="replace").count("\ufffd") and run.decode(errors="ignore"):
            return False
        run = b""
    return True


def cases(folder, seed):
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    tok = hf.backend_tokenizer
    encode = [[text, hf.encode(text, add_special_tokens=False), hf.encode(text)] for text in TEXTS]
    rng = random.Random(seed)
    size = len(hf)
    sequences = [rng.choices(range(size), k=rng.randint(1, 24)) for _ in range(40)]
    if tok.token_to_id("<0xE2>") is not None:
        byte_ids = [tok.token_to_id(f"<0x{b:02X}>") for b in "é日👍".encode()]
        sequences += [byte_ids, byte_ids[:1], byte_ids[:1] + [size - 1], [size - 1] + byte_ids + byte_ids]
    sequences = [ids for ids in sequences if byte_runs_are_whole(tok, ids)]
    decode = [[ids, hf.decode(ids, clean_up_tokenization_spaces=False)] for ids in sequences]
    decode += [[ids, hf.decode(ids, clean_up_tokenization_spaces=False)] for _, ids, _ in encode if byte_runs_are_whole(tok, ids)]
    return {"encode": encode, "decode": decode}


def write(path, value):
    rows = ",\n".join(
        f'"{key}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows) + "\n]" for key, rows in value.items()
    )
    path.write_text("{" + rows + "}\n")


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--models", type=Path)
    models_dir = args.parse_args().models
    kinds = {
        "byte_level": byte_level(), "split_nfc": split_nfc(), "llama": sentence_piece(True), "gemma": sentence_piece(False),
        "metaspace": metaspace(), "unigram": unigram(), "word_level": word_level(),
    }
    for seed, (name, (tok, roles)) in enumerate(kinds.items()):
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        tok.save(str(folder / "tokenizer.json"), pretty=False)
        config = {**roles, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        write(folder / "cases.json", cases(folder, seed))
    if models_dir:
        for name, folder in {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "gemma-3-270m"}.items():
            write(OUT / f"{name}.json", cases(models_dir / folder, 100))


if __name__ == "__main__":
    main()
