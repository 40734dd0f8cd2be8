"""mlx-lm, in the Python that has it: MODEL THREADS PROMPT GENERATE; prints tokens per second of both as JSON."""

import json
import sys

from mlx_lm import load
from mlx_lm.generate import stream_generate

model, tokenizer = load(sys.argv[1])
_, prompt, generate = map(int, sys.argv[2:])
tokenizer._eos_token_ids = set()
vocabulary = len(tokenizer.get_vocab())


def run(tokens, more):
    for response in stream_generate(model, tokenizer, [i * 7919 % vocabulary for i in range(tokens)], max_tokens=more):
        pass
    return response


run(4, 2)
done = run(prompt, generate)
print(json.dumps({"prompt": done.prompt_tps, "generate": done.generation_tps}))
