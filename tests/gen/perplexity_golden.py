#!/usr/bin/env python3
"""Perplexities of SmolLM2 in f32: mlx-lm's own windows, and documents and a sliding window by transformers.

    python tests/gen/perplexity_golden.py --models models --out tests/golden/eval

Needs mlx-lm (CPU), transformers and torch (requirements.txt) and the folder that scripts/fetch_models.py --folders makes.
Takes about a minute. Writes paragraphs.jsonl, the paragraphs of tests/golden/real/text.txt as records, and
perplexity.json, which holds for each protocol its parameters, the perplexities and how many tokens were scored; for
documents also the loss of each. mlx computes in f32 with errors of some 1e-4 on CPUs, which is why windows have both. Made with mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.24.0, torch 2.15.0, numpy 2.4.6.
"""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.perplexity import eval_ppl
from mlx_lm.tuner.datasets import create_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "SmolLM2-135M-Instruct"
SEED, LENGTH, SAMPLES = 123, 96, 6
DOCUMENTS, MAX_LENGTH = 8, 64
STRIDED = {"length": 96, "stride": 40, "tokens": 500}


def windows(folder, records, reference):
    """mlx-lm's rows, as its load_data makes them of a data set, and its own evaluation; the same rows by transformers."""
    model, tokenizer = load(folder)
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    data = create_dataset(records, tokenizer, SimpleNamespace())
    np.random.seed(SEED)
    tokens = []
    for i in np.random.permutation(len(records)).tolist():
        if len(tokens) >= LENGTH * SAMPLES:
            break
        tokens.extend(data.process(records[i])[0])
    rows = mx.array(tokens[: LENGTH * SAMPLES]).reshape(SAMPLES, LENGTH)
    perplexity, error = eval_ppl(model, rows, batch_size=4)
    losses = [loss for row in rows.tolist() for loss in token_losses(reference, row)]
    return {"seed": SEED, "length": LENGTH, "samples": SAMPLES, "mlx_lm": perplexity, "mlx_lm_error": error,
            "transformers": math.exp(sum(losses) / len(losses)), "scored": len(losses)}


def token_losses(model, ids):
    """The loss of every token but the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()


def documents(model, tokenizer, records):
    """Each text behind the BOS token; one that is longer than MAX_LENGTH is read piece by piece, each behind one token."""
    each, scored = [], 0
    for record in records[:DOCUMENTS]:
        ids = [tokenizer.bos_token_id] + tokenizer(record["text"])["input_ids"]
        loss, start = 0.0, 1
        while start < len(ids):
            end = min(len(ids), start + MAX_LENGTH)
            first = max(0, end - MAX_LENGTH - 1)
            loss += sum(token_losses(model, ids[first:end])[start - first - 1 :])
            scored, start = scored + end - start, end
        each.append(loss)
    return {"max_length": MAX_LENGTH, "documents": each, "scored": scored, "transformers": math.exp(sum(each) / scored)}


def strided(model, tokenizer, records):
    """The sliding window of transformers' guide: the model averages over the labels that are not masked."""
    ids = tokenizer("\n\n".join(r["text"] for r in records), return_tensors="pt").input_ids[:, : STRIDED["tokens"]]
    total, scored, previous = 0.0, 0, 0
    for begin in range(0, ids.size(1), STRIDED["stride"]):
        end = min(begin + STRIDED["length"], ids.size(1))
        labels = ids[:, begin:end].clone()
        labels[:, : previous - begin] = -100
        valid = (labels[:, 1:] != -100).sum().item()
        with torch.no_grad():
            total += model(ids[:, begin:end], labels=labels).loss.item() * valid
        scored, previous = scored + valid, end
        if end == ids.size(1):
            break
    return {**STRIDED, "scored": scored, "transformers": math.exp(total / scored)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    text = (args.out.parent / "real" / "text.txt").read_text()
    records = [{"text": part} for part in text.split("\n\n") if len(part) > 200]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (args.out / "paragraphs.jsonl").write_text("\n".join(lines) + "\n")
    folder = str(args.models / MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    golden = {
        "windows": windows(folder, records, model),
        "documents": documents(model, tokenizer, records),
        "strided": strided(model, tokenizer, records),
    }
    (args.out / "perplexity.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
