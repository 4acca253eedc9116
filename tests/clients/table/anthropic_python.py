# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Anthropic's package for Python."""

import asyncio
from typing import Literal

import anthropic
import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, feature, main, model, raises, root

client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
messages = client.messages
USER = [{"role": "user", "content": QUESTION}]
# The package names no temperature any more; older clients send one.
SHORT = {"model": model, "max_tokens": 12, "extra_body": {"temperature": 0}}
CALL = {**SHORT, "max_tokens": 100}
TOOL = {
    "name": "get_weather",
    "description": "Weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Oslo", "Rome"]}},
        "required": ["town"],
    },
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


@feature("models")
def models():
    assert [found.id for found in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


@feature("chat")
def chat():
    message = messages.create(messages=USER, system=SYSTEM, **SHORT)
    assert text(message) and message.usage.output_tokens
    cached = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    again = messages.create(messages=USER, system=cached, **SHORT)
    assert text(again) == text(message) and again.usage.cache_read_input_tokens


@feature("stream")
def stream():
    whole = messages.create(messages=USER, system=SYSTEM, **SHORT)
    with messages.stream(messages=USER, system=SYSTEM, **SHORT) as events:
        streamed = "".join(events.text_stream)
        final = events.get_final_message()
    assert streamed == text(final) == text(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    with messages.create(messages=USER, stream=True, **SHORT) as events:
        assert next(iter(events)).type == "message_start"


@feature("settings")
def settings():
    body = {"temperature": 1, "top_p": 0.9, "top_k": 40, "seed": 5}
    ask = {"messages": USER, "model": model, "max_tokens": 12, "extra_body": body}
    said = text(messages.create(**ask))
    assert said == text(messages.create(**ask))
    word = said.split()[2]
    stopped = messages.create(**ask, stop_sequences=[word], metadata={"user_id": "me"})
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == word
    off = messages.create(messages=USER, thinking={"type": "disabled"}, **SHORT)
    assert text(off)


@feature("tools")
def tools():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = messages.create(messages=USER, tools=[TOOL], tool_choice=choice, **CALL)
    assert asked.stop_reason == "tool_use", asked
    call = asked.content[-1]
    assert call.input["town"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    turn = [
        *USER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    end = messages.create(messages=turn, tools=[TOOL], tool_choice={"type": "none"}, **SHORT)
    assert text(end)
    # The package's own loop.
    calls = []

    @anthropic.beta_tool
    def get_weather(town: str) -> str:
        """Weather of a town.

        Args:
            town: name of the town
        """
        calls.append(town)
        return "20 degrees"

    named = {"type": "tool", "name": "get_weather"}
    runner = client.beta.messages.tool_runner(
        messages=USER, tools=[get_weather], tool_choice=named, max_iterations=2, **CALL
    )
    turns = list(runner)
    assert len(turns) == 2 and calls, turns


@feature("tool-stream")
def tool_stream():
    choice = {"type": "tool", "name": "get_weather"}
    with messages.stream(messages=USER, tools=[TOOL], tool_choice=choice, **CALL) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert "input_json" in kinds and final.stop_reason == "tool_use"
    assert final.content[-1].input["town"] in ("Oslo", "Rome")


@feature("schema")
def schema():
    parsed = messages.parse(messages=USER, output_format=Person, **{**SHORT, "max_tokens": 200})
    assert isinstance(parsed.parsed_output, Person)


@feature("schema-stream")
def schema_stream():
    ask = {**SHORT, "max_tokens": 200, "messages": USER, "output_format": Person}
    with messages.stream(**ask) as events:
        final = events.get_final_message()
    assert isinstance(final.parsed_output, Person)


@feature("count-tokens")
def count_tokens():
    counted = messages.count_tokens(model=model, messages=USER, system=SYSTEM, tools=[TOOL])
    asked = messages.create(messages=USER, system=SYSTEM, tools=[TOOL], **SHORT).usage
    assert counted.input_tokens == asked.input_tokens + asked.cache_read_input_tokens


@feature("batch")
async def batch():
    async with anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as many:
        ask = many.messages.create
        answers = await asyncio.gather(*(ask(messages=USER, **SHORT) for _ in range(8)))
    assert len({text(answer) for answer in answers}) == 1


@feature("errors")
def errors():
    ask = messages.create
    none = {**SHORT, "model": "none"}
    raises(anthropic.NotFoundError, lambda: ask(messages=USER, **none))
    long = [{"role": "user", "content": TOO_LONG}]
    raises(anthropic.BadRequestError, lambda: ask(messages=long, **SHORT), "prompt is too long")
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    seen = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    raises(anthropic.BadRequestError, lambda: ask(messages=seen, **SHORT), "image")


main()
