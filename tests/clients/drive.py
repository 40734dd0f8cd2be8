"""Drives a running server with the real clients of both protocols; fails by an exception.

usage: drive.py URL_OF_A_REAL_MODEL URL_OF_A_MODEL_THAT_CALLS_A_TOOL
"""

import asyncio
import json
import sys

import anthropic
import openai
import pydantic

real, script = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0, timeout=120)
claude = anthropic.Anthropic(base_url=real, api_key="none", max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "user", "content": "Say hello to the sea."}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def chat(**options):
    return client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, seed=3, **options)


def test_chat_and_streams():
    whole = chat(temperature=0.8)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 24
    assert chat(temperature=0.8).choices[0].message.content == text, "the same seed"
    chunks = list(chat(temperature=0.8, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    three = chat(temperature=1.0, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in three.choices}) > 1
    likely = chat(logprobs=True, top_logprobs=2).choices[0]
    assert all(len(t.top_logprobs) == 2 and t.logprob <= t.top_logprobs[0].logprob + 1e-6 for t in likely.logprobs.content)
    assert bytes(b for t in likely.logprobs.content for b in t.bytes).decode(errors="ignore").startswith(likely.message.content[:10])


def test_completions():
    made = client.completions.create(model=MODEL, prompt=["The sea", "The sky"], max_tokens=5, echo=True)
    assert [c.text[:7] for c in made.choices] == ["The sea", "The sky"]
    best = client.completions.create(model=MODEL, prompt="The sea", max_tokens=5, n=1, best_of=3, temperature=1.0, seed=1)
    assert len(best.choices) == 1
    ids = client.completions.create(model=MODEL, prompt=[504, 4259], max_tokens=5, logprobs=1)
    assert len(ids.choices[0].logprobs.tokens) == 5


def test_embeddings():
    made = client.embeddings.create(model=MODEL, input=["The sea", "The sky"])
    assert len(made.data) == 2 and abs(sum(x * x for x in made.data[0].embedding) - 1) < 1e-4


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def test_structured_output():
    reply = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Who are you?"}], response_format=Person, max_tokens=200
    )
    assert isinstance(reply.choices[0].message.parsed, Person)
    anything = chat(response_format={"type": "json_object"}, temperature=1.0)
    assert anything.choices[0].finish_reason == "length" or json.loads(anything.choices[0].message.content)


def test_errors():
    assert raises(openai.BadRequestError, lambda: chat(top_p=3)).param == "top_p"
    raises(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-none", messages=HELLO))
    assert "top_p" in str(raises(anthropic.BadRequestError, lambda: message(extra_body={"top_p": 3})))
    raises(anthropic.NotFoundError, lambda: claude.messages.create(model="none", messages=HELLO, max_tokens=1))


def message(**options):
    return claude.messages.create(model=MODEL, messages=HELLO, max_tokens=24, **options)


def test_anthropic():
    whole = message(system="You are brief.")
    assert whole.content[0].text and whole.usage.output_tokens <= 24
    with claude.messages.stream(model=MODEL, messages=HELLO, max_tokens=24, system="You are brief.") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="You are brief.")
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_tools_in_two_turns():
    """The script model calls get_weather whatever it is asked."""
    caller = openai.OpenAI(base_url=f"{script}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "user", "content": "Weather in Rome?"}]
    ask = lambda **options: caller.chat.completions.create(model="default_model", messages=messages, tools=tools, **options)
    reply = ask().choices[0]
    assert reply.finish_reason == "tool_calls", reply
    call = reply.message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}
    streamed = [c.choices[0].delta.tool_calls[0] for c in ask(stream=True) if c.choices and c.choices[0].delta.tool_calls]
    assert streamed[0].id and streamed[0].function.name == "get_weather"
    assert json.loads("".join(part.function.arguments or "" for part in streamed)) == {"city": "Rome"}
    messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask().choices[0].message
    none = ask(tool_choice="none").choices[0]
    assert none.message.tool_calls is None and none.finish_reason == "stop"

    talker = anthropic.Anthropic(base_url=script, api_key="none", max_retries=0)
    own = [{"name": TOOL["name"], "description": "", "input_schema": TOOL["parameters"]}]
    said = [{"role": "user", "content": "Weather in Rome?"}]
    reply = talker.messages.create(model="default_model", messages=said, tools=own, max_tokens=90)
    assert reply.stop_reason == "tool_use", reply
    use = next(block for block in reply.content if block.type == "tool_use")
    assert use.name == "get_weather" and use.input == {"city": "Rome"}
    said += [
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ]
    with talker.messages.stream(model="default_model", messages=said, tools=own, max_tokens=90) as stream:
        assert stream.get_final_message().stop_reason == "tool_use"


def respond(**options):
    return client.responses.create(model=MODEL, input="Say hello to the sea.", max_output_tokens=24, **options)


def test_responses():
    whole = respond(instructions="You are brief.", metadata={"a": "b"}, temperature=0)
    assert whole.status in ("completed", "incomplete") and whole.output_text and whole.metadata == {"a": "b"}
    assert whole.usage.output_tokens <= 24 and whole.usage.output_tokens_details.reasoning_tokens == 0
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    events = list(respond(instructions="You are brief.", temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    likely = respond(include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0]
    assert "".join(entry.token for entry in likely.logprobs).startswith(likely.text[:5])
    assert all(len(entry.top_logprobs) == 2 for entry in likely.logprobs)

    again = client.responses.create(model=MODEL, input="And again.", previous_response_id=whole.id, max_output_tokens=8)
    said = client.responses.input_items.list(again.id, order="asc").data
    assert [item.type for item in said] == ["message"] * 3 and said[2].content[0].text == "And again."
    counted = client.responses.input_tokens.count(model=MODEL, input="And again.", previous_response_id=whole.id)
    assert counted.input_tokens == again.usage.input_tokens > whole.usage.input_tokens - 10
    assert again.usage.input_tokens_details.cached_tokens > 0
    client.responses.delete(whole.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(whole.id))
    gone = raises(openai.BadRequestError, lambda: respond(previous_response_id=whole.id))
    assert gone.code == "previous_response_not_found" and gone.param == "previous_response_id"
    assert raises(openai.BadRequestError, lambda: respond(tools=[{"type": "web_search"}])).param == "tools[0].type"


def test_responses_structured():
    reply = client.responses.parse(model=MODEL, input="Who are you?", text_format=Person, max_output_tokens=200)
    assert isinstance(reply.output_parsed, Person)
    with client.responses.stream(model=MODEL, input="Who are you?", text_format=Person, max_output_tokens=200) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed


def test_responses_tools_in_two_turns():
    caller = openai.OpenAI(base_url=f"{script}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "strict": False, **TOOL}]
    said = [{"role": "user", "content": "Weather in Rome?"}]
    ask = lambda items, **options: caller.responses.create(model="default_model", input=items, tools=tools, **options)
    reply = ask(said)
    call = next(item for item in reply.output if item.type == "function_call")
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Rome"}
    with caller.responses.stream(model="default_model", input=said, tools=tools) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in reply.output]
    assert next(item for item in final.output if item.type == "function_call").arguments == call.arguments
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = ask([answer], previous_response_id=reply.id)
    by_items = ask(said + reply.output + [answer], store=False)
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_id.output_text == by_items.output_text
    assert all(item.type != "function_call" for item in ask(said, tool_choice="none").output)


async def many():
    client = openai.AsyncOpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0, timeout=300)

    async def one(seed):
        made = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, temperature=1.0, seed=seed
        )
        return made.choices[0].message.content

    together = await asyncio.gather(*(one(seed) for seed in range(32)))
    for seed in (0, 13, 31):
        assert await one(seed) == together[seed], "alone as among others"


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(name, "ok", flush=True)
asyncio.run(many())
print("all ok")
