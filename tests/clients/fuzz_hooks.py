"""What scripts/fuzz_http has schemathesis change in the bodies that it makes.

The document cannot say all that a valid request is: names of models, which roles follow each other, which fields exclude each
other. Of four bodies three are therefore made valid, as far as a table of values goes, so that the code behind the checks of
fields is reached too. What is made of a body depends on the body alone, as schemathesis repeats them.
"""

import json
import zlib

# Not used here: CPython 3.11 sometimes fails to compile it in one of several threads, where it is imported otherwise.
import anyio.from_thread  # noqa: F401
import schemathesis

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": False}
FORMS = [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}]


def number(value):
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else len(json.dumps(value))


def within(least, most):
    """A number in that range, made of whatever is there."""
    return lambda value: least + abs(number(value)) % (most - least)


def whole(least, most):
    return lambda value: least + int(abs(number(value))) % (most - least + 1)


def text(value):
    """The beginning of what is there, as a text."""
    return (value if isinstance(value, str) else json.dumps(value))[:200] or "x"


def messages(value):
    parts = value if isinstance(value, list) and value else [value]
    said = [{"role": ["user", "assistant"][index % 2], "content": text(part)} for index, part in enumerate(parts[:5])]
    return said if len(said) % 2 else said[:-1] or [{"role": "user", "content": "x"}]


def one_of(*values):
    return lambda value: values[zlib.crc32(json.dumps(value).encode()) % len(values)]


def as_made(looks_valid, otherwise):
    """What was made by the document, where it looks valid; something else where not."""

    def choose(value):
        fine = isinstance(value, list) and value and all(isinstance(one, dict) and looks_valid(one) for one in value)
        return value[:5] if fine else otherwise(value)

    return choose


def said(otherwise):
    return as_made(lambda message: message.get("role") and message.get("content") is not None, otherwise)


def offered(tool):
    return as_made(lambda made: made.get("name") or made.get("function"), one_of([tool], []))


def flag(value):
    return bool(value)


SAMPLING = {
    "temperature": within(0, 2),
    "top_p": within(0.05, 1),
    "top_k": whole(0, 300),
    "min_p": within(0, 1),
    "xtc_probability": within(0, 1),
    "xtc_threshold": within(0, 0.5),
    "repetition_penalty": within(0.1, 3),
    "repetition_context_size": whole(0, 100),
    "presence_penalty": within(-2, 2),
    "presence_context_size": whole(0, 100),
    "frequency_penalty": within(-2, 2),
    "frequency_context_size": whole(0, 100),
    "logit_bias": one_of({"5": 3}, {"7": -100, "8": 100}, {}),
    "seed": whole(0, 2**40),
    "stop": one_of("a", ["b", "\n"], []),
    "ignore_eos": flag,
    "priority": whole(-5, 5),
    "queue_deadline": within(30, 60),
    "stall_deadline": within(30, 60),
    "user": text,
    "stream": flag,
    "max_tokens": whole(1, 40),
}
FIELDS = {
    "chat/completions": SAMPLING
    | {
        "messages": said(messages),
        "n": whole(1, 4),
        "logprobs": flag,
        "response_format": one_of(*FORMS),
        "tools": offered(TOOL),
        "parallel_tool_calls": flag,
        "chat_template_kwargs": one_of({}, {"enable_thinking": False}),
        "metadata": lambda value: value,
    },
    "completions": SAMPLING
    | {
        "prompt": one_of("abc", ["a", "b"], [5, 6, 7], [[5], [6, 7]], "x" * 100),
        "n": whole(1, 4),
        "best_of": one_of(4, 5),
        "logprobs": whole(0, 20),
        "echo": flag,
    },
    "responses": {key: SAMPLING[key] for key in SAMPLING if key not in ("max_tokens", "stop")}
    | {
        "input": as_made(lambda item: item.get("role") or item.get("type"), one_of("abc", messages(["a", "b", "c"]))),
        "instructions": text,
        "max_output_tokens": whole(1, 40),
        "store": flag,
        "tools": offered(FLAT_TOOL),
        "text": one_of({}, {"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
    },
    "responses/input_tokens": {"input": text, "instructions": text},
    "embeddings": {
        "input": one_of("abc", ["a", "b"], [5, 6], [[5], [6, 7]]),
        "pooling": one_of("mean", "last"),
        "normalize": flag,
        "encoding_format": one_of("float", "base64"),
    },
    "messages": {
        "messages": said(messages),
        "max_tokens": whole(1, 40),
        "system": text,
        "temperature": within(0, 1),
        "top_k": whole(1, 300),
        "stop_sequences": one_of(["a"], []),
        "stream": flag,
        "tools": offered(CLAUDE_TOOL),
    },
    "messages/count_tokens": {"messages": said(messages), "system": text, "tools": offered(CLAUDE_TOOL)},
    "apply-template": {"messages": said(messages), "tools": offered(TOOL)},
    "tokenize": {"content": text},
    "detokenize": {"tokens": one_of([5, 6], [])},
}
# Without these there is no valid request.
NEEDED = {"messages", "prompt", "input", "content", "tokens"}


def valid(fields, body):
    made = {key: fields[key](value) for key, value in body.items() if key in fields and value is not None}
    for key in NEEDED & fields.keys() - made.keys():
        made[key] = fields[key](body)
    if "max_tokens" in fields and "system" in fields:
        made.setdefault("max_tokens", 5)
    if made.get("stream"):
        made.pop("best_of", None)
    return made


@schemathesis.hook
def map_body(context, body):
    fields = FIELDS.get(context.operation.path.removeprefix("/v1").lstrip("/"))
    if fields is None or not isinstance(body, dict) or zlib.crc32(json.dumps(body, default=str).encode()) % 4 == 0:
        return body
    try:
        return valid(fields, body)
    except (TypeError, ValueError, OverflowError):
        # Values that are no JSON.
        return body
