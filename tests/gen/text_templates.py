"""Whole chat templates, in the manner of public model families, rendered by transformers.

Renders tests/golden/text/templates/*.jinja (written for this project) and SmolLM2's own template (Apache-2.0, Hugging Face
SmolLM2-135M-Instruct, from its tokenizer.chat_template) for several conversations; writes tests/golden/text/templates.json.

    python tests/gen/text_templates.py --models models
"""

import argparse
import datetime
import json
from pathlib import Path

import jinja2
import transformers.utils.chat_template_utils as utils
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parent.parent / "golden" / "text"
NOW = datetime.datetime(2031, 2, 3, 4, 5, 6)

CALL = {"id": "abcdef123", "type": "function", "function": {"name": "tide", "arguments": {"harbour": "Köln & <Bonn>", "days": 2, "units": ["m", None, True, 1.5]}}}
CONVERSATIONS = {
    "question": [{"role": "user", "content": "  What's \"2\" < 3?\n"}],
    "system": [
        {"role": "system", "content": "Be brief. /no_think "}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "  Hello!\n\n"}, {"role": "user", "content": "日本語で 👩‍🚀\r\n\r\nplease"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": " Look: "}, {"type": "image"}, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": "A boat."}, {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."}, {"role": "user", "content": "Tide?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "abcdef123", "name": "tide", "content": "{\"level\": 1.5}"},
        {"role": "assistant", "content": "1.5 m."}, {"role": "user", "content": "Thanks"},
    ],
    "two_calls": [
        {"role": "user", "content": "Both?"}, {"role": "assistant", "reasoning_content": "I need both.", "tool_calls": [CALL, {**CALL, "id": "zyxwvu987"}]},
        {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"},
    ],
    "thoughts": [
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause."}, {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "So.", "reasoning": "secret\nplan"},
    ],
    "wrong_turns": [{"role": "assistant", "content": "Me first."}, {"role": "user", "content": "No"}, {"role": "user", "content": "Me"}],
    "tokens": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n{{ bos_token }}{% raw %}</s>[/INST]<end_of_turn>"}, {"role": "assistant", "content": ""}],
}
TOOLS = [
    {"type": "function", "function": {"name": "tide", "description": "Tide table, é.", "parameters": {"type": "object", "properties": {
        "harbour": {"type": "string", "description": "Which <harbour>"}, "days": {"type": "integer", "default": 1, "minimum": 0.5},
        "units": {"type": "array", "items": {"type": "string"}}, "mode": {"type": ["string", "null"], "enum": ["a", "b"]}}, "required": ["harbour"]}}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}},
]
DOCUMENTS = [{"title": "Tides", "text": "High at noon."}, {"title": "Moon", "text": "Full.", "doc_id": 7}]
CASES = [(name, {"add_generation_prompt": prompt, "enable_thinking": False}) for name in CONVERSATIONS for prompt in (False, True)]
CASES += [(name, {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": True}) for name in ("question", "tools", "two_calls")]
CASES += [("system", {"add_generation_prompt": True, "documents": DOCUMENTS, "tools": TOOLS, "enable_thinking": True, "reasoning_effort": "high", "controls": {"length": "long"}, "citation_mode": "fast", "bos_token": "[B]"})]
CASES += [(name, {"continue_final_message": True, "enable_thinking": False}) for name in ("question", "system", "thoughts", "parts", "two_calls")]


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(tokenizer, template, name, options):
    try:
        return tokenizer.apply_chat_template(CONVERSATIONS[name], chat_template=template, tokenize=False, **options), None
    except jinja2.exceptions.TemplateError as e:
        return None, str(e) if type(e) is jinja2.exceptions.TemplateError else "error"
    except Exception:
        return None, "error"


def prompt_ids(models):
    """[tokenizer, template, case, ids]: whole prompts in ids, the tokens in messages being tokens."""
    kinds = {"byte_level": ["chatml", "thinking_split", "drops_system"], "llama": ["inst_system_folded", "strict_turns", "turns_parts"],
             "gemma": ["turns_parts", "headers_with_date"], "SmolLM2-135M-Instruct": ["smollm2", "thinking_split"]}
    for kind, names in kinds.items():
        folder = models / kind if (models / kind).exists() else OUT / kind
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        for name in names:
            template = (OUT / "templates" / f"{name}.jinja").read_text()
            for case, (conversation, options) in enumerate(CASES):
                try:
                    ids = tokenizer.apply_chat_template(CONVERSATIONS[conversation], chat_template=template, return_dict=False, **options)
                except Exception:
                    continue
                yield [kind, name, case, ids]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--models", type=Path, required=True)
    models = args.parse_args().models
    config = json.loads((models / "SmolLM2-135M-Instruct" / "tokenizer_config.json").read_text())
    (OUT / "templates" / "smollm2.jinja").write_text(config["chat_template"])
    utils.datetime = FixedClock
    tokenizer = PreTrainedTokenizerFast.from_pretrained(OUT / "llama")
    tokenizer.pad_token = "<unk>"
    rows = []
    for path in sorted((OUT / "templates").glob("*.jinja")):
        for case, (name, options) in enumerate(CASES):
            rows.append([path.stem, case, *render(tokenizer, path.read_text(), name, options)])
    failed = sum(row[2] is None for row in rows)
    print(f"{len(rows)} renderings, {failed} refused")
    head = {"conversations": CONVERSATIONS, "now": NOW.isoformat(), "special": tokenizer.special_tokens_map, "cases": CASES}
    lines = lambda rows: ",\n".join(json.dumps(row) for row in rows)
    (OUT / "templates.json").write_text(json.dumps(head)[:-1] + ',\n"rows": [\n' + lines(rows) + '\n],\n"ids": [\n' + lines(prompt_ids(models)) + "\n]}\n")


if __name__ == "__main__":
    main()
