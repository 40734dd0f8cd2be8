"""OpenVINO GenAI, in the Python that has it: MODEL.gguf THREADS PROMPT GENERATE; prints tokens per second of both as JSON."""

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

threads, prompt, generate = map(int, sys.argv[2:])
pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=threads)


def run(tokens, more):
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = more, True, False
    ids = np.array([[3 + i * 7919 % 10_000 for i in range(tokens)]], dtype=np.int64)
    return pipeline.generate(ov.Tensor(ids), config).perf_metrics


run(4, 2)
metrics = run(prompt, generate)
decode = 1e3 / metrics.get_tpot().mean if generate > 1 else None
print(json.dumps({"prompt": prompt / (metrics.get_ttft().mean / 1e3), "generate": decode}))
