# /// script
# dependencies = ["ollama==0.6.3"]
# ///
"""Ollama's package for Python."""

import asyncio
from typing import Literal

import ollama
import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, feature, main, model, raises, root

client = ollama.Client(host=root)
USER = [{"role": "user", "content": QUESTION}]
MESSAGES = [{"role": "system", "content": SYSTEM}, *USER]
OPTIONS = {"num_predict": 12, "temperature": 0}
SHORT = {"model": model, "options": OPTIONS}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


def get_weather(town: str) -> str:
    """Weather of a town.

    Args:
      town: name of the town
    """
    return "20 degrees in " + town


@feature("models")
def models():
    assert [found.model for found in client.list().models] == [model]
    assert [found.model for found in client.ps().models] == [model]
    shown = client.show(model)
    assert {"completion", "tools"} <= set(shown.capabilities), shown.capabilities
    assert shown.details.family and shown.modelinfo


@feature("chat")
def chat():
    answer = client.chat(messages=MESSAGES, **SHORT)
    assert answer.message.content and answer.eval_count
    # As `ollama run` names a model, and keeps it.
    latest = {**SHORT, "model": model + ":latest"}
    assert client.chat(messages=MESSAGES, keep_alive="5m", **latest).message.content


@feature("stream")
def stream():
    whole = client.chat(messages=MESSAGES, **SHORT).message.content
    parts = list(client.chat(messages=MESSAGES, stream=True, **SHORT))
    assert "".join(part.message.content for part in parts) == whole
    assert parts[-1].done and parts[-1].eval_count


@feature("settings")
def settings():
    def say(**options):
        options = {**OPTIONS, "temperature": 1, "seed": 5, **options}
        return client.chat(model=model, messages=USER, options=options).message.content

    text = say()
    assert text == say() != say(seed=6)
    word = text.split()[2]
    assert say(stop=[word]) == text[: text.index(word)]
    say(top_k=40, top_p=0.9, min_p=0.05, repeat_penalty=1.1, num_ctx=4096, num_keep=4)


@feature("tools")
def tools():
    # This API cannot force a call. With a schema of calls for an answer, the turns are the same.
    answer = client.chat(messages=USER, tools=[get_weather], **SHORT)
    assert answer.message.content or answer.message.tool_calls
    call = ollama.Message.ToolCall.Function(name="get_weather", arguments={"town": "Oslo"})
    said = ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=call)])
    result = {"role": "tool", "content": get_weather("Oslo"), "tool_name": "get_weather"}
    end = client.chat(messages=[*USER, said, result], tools=[get_weather], **SHORT)
    assert end.message.content or end.message.tool_calls


@feature("tool-stream")
def tool_stream():
    parts = list(client.chat(messages=USER, tools=[get_weather], stream=True, **SHORT))
    assert parts[-1].done and any(p.message.content or p.message.tool_calls for p in parts)


@feature("schema")
def schema():
    ask = {"model": model, "messages": USER, "options": {"temperature": 0, "num_predict": 200}}
    answer = client.chat(format=Person.model_json_schema(), **ask)
    Person.model_validate_json(answer.message.content)
    assert client.chat(format="json", **ask).message.content.startswith("{")


@feature("schema-stream")
def schema_stream():
    ask = {"model": model, "messages": USER, "options": {"temperature": 0}}
    parts = client.chat(format=Person.model_json_schema(), stream=True, **ask)
    Person.model_validate_json("".join(part.message.content for part in parts))


@feature("completions")
def completions():
    assert client.generate(prompt=QUESTION, system=SYSTEM, **SHORT).response
    raw = client.generate(prompt="Once upon", raw=True, **SHORT).response
    parts = client.generate(prompt="Once upon", raw=True, stream=True, **SHORT)
    assert raw and "".join(part.response for part in parts) == raw


@feature("embeddings", path="/api/embed")
def embeddings():
    several = client.embed(model=model, input=["a cat", "a dog"]).embeddings
    assert len(several) == 2
    one = client.embed(model=model, input="a cat").embeddings[0]
    assert all(abs(a - b) < 1e-6 for a, b in zip(one, several[0], strict=True))


@feature("batch")
async def batch():
    many = ollama.AsyncClient(host=root)
    answers = await asyncio.gather(*(many.chat(messages=USER, **SHORT) for _ in range(8)))
    assert len({answer.message.content for answer in answers}) == 1


@feature("errors")
def errors():
    none = {**SHORT, "model": "none"}
    error = raises(ollama.ResponseError, lambda: client.chat(messages=USER, **none))
    assert error.status_code == 404
    long = [{"role": "user", "content": TOO_LONG}]
    raises(ollama.ResponseError, lambda: client.chat(messages=long, **SHORT), "context")
    seen = [{**USER[0], "images": ["aGk="]}]
    raises(ollama.ResponseError, lambda: client.chat(messages=seen, **SHORT), "images")


main()
