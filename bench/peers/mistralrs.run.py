"""mistral.rs, in the Python that has it: MODEL.gguf THREADS PROMPT GENERATE; prints tokens per second of both as JSON.

It takes texts: a word is about a token. The rates are its own.
"""

import json
import os
import sys

os.environ["RAYON_NUM_THREADS"] = sys.argv[2]
from mistralrs import CompletionRequest, Runner, Which  # noqa: E402

folder, file = os.path.split(os.path.abspath(sys.argv[1]))
prompt, generate = map(int, sys.argv[3:])
runner = Runner(which=Which.GGUF(quantized_model_id=folder, quantized_filename=file), prefix_cache_n=0)


def run(words, more):
    request = CompletionRequest(
        model="default", prompt=" one" * words, max_tokens=more, temperature=0.0, top_k=1, ignore_eos=True
    )
    return runner.send_completion_request(request).usage


run(4, 2)
usage = run(prompt, generate)
print(json.dumps({"prompt": usage.avg_prompt_tok_per_sec, "generate": usage.avg_compl_tok_per_sec}))
