# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""OpenAI's package for Python."""

import asyncio
import json
from typing import Literal

import openai
import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, base_url, feature, main, model, raises

client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
chats = client.chat.completions
USER = [{"role": "user", "content": QUESTION}]
MESSAGES = [{"role": "developer", "content": SYSTEM}, *USER]
SHORT = {"model": model, "max_tokens": 12, "temperature": 0}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]
    years: list[int] = pydantic.Field(max_length=2)


class GetWeather(pydantic.BaseModel):
    """Weather of a town."""

    town: Literal["Oslo", "Rome"]


TOOLS = [openai.pydantic_function_tool(GetWeather)]
# Small models do not end a list of calls.
ONE_CALL = {"tools": TOOLS, "parallel_tool_calls": False}


@feature("models")
def models():
    assert [found.id for found in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


@feature("chat")
def chat():
    answer = chats.create(messages=MESSAGES, **SHORT)
    assert answer.choices[0].message.content and answer._request_id
    assert answer.usage.total_tokens > answer.usage.completion_tokens > 0
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    answer = chats.with_raw_response.create(messages=parts, **SHORT)
    assert answer.parse().choices[0].message.content


@feature("stream")
def stream():
    # The helper takes an answer that its limit ends for a fault.
    longer = {**SHORT, "max_tokens": 200, "messages": MESSAGES}
    whole = chats.create(**longer).choices[0]
    with chats.stream(stream_options={"include_usage": True}, **longer) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.message.content
    assert final.usage.completion_tokens and final.choices[0].finish_reason == "stop"
    chunks = chats.create(messages=MESSAGES, stream=True, **SHORT)
    next(chunks)
    chunks.close()


@feature("settings")
def settings():
    def say(**options):
        options = {**SHORT, "temperature": 1, "seed": 5, **options}
        return chats.create(messages=USER, **options).choices[0].message.content

    text = say()
    assert text == say() != say(seed=6)
    word = text.split()[2]
    assert say(stop=[word]) == text[: text.index(word)]
    say(top_p=0.5, presence_penalty=1, frequency_penalty=1, logit_bias={"5": -100}, user="me")
    say(max_tokens=None, max_completion_tokens=3, store=False, metadata={"a": "b"})


@feature("n")
def n():
    answer = chats.create(messages=USER, n=3, **{**SHORT, "temperature": 1})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@feature("logprobs")
def logprobs():
    choice = chats.create(messages=USER, logprobs=True, top_logprobs=3, **SHORT).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(len(token.top_logprobs) == 3 for token in tokens)


@feature("tools")
def tools():
    options = {**SHORT, **ONE_CALL, "max_tokens": 100}
    answer = chats.parse(messages=USER, tool_choice="required", **options)
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, GetWeather), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    turn = [*USER, message, result]
    end = chats.create(messages=turn, tools=TOOLS, tool_choice="none", **SHORT).choices[0]
    assert end.message.content and not end.message.tool_calls
    named = {"type": "function", "function": {"name": "GetWeather"}}
    one = chats.create(messages=USER, tool_choice=named, **options)
    assert json.loads(one.choices[0].message.tool_calls[0].function.arguments)["town"]


@feature("tool-stream")
def tool_stream():
    ask = {"messages": USER, "tool_choice": "required", "max_tokens": 100}
    with chats.stream(**{**SHORT, **ONE_CALL, **ask}) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion().choices[0]
    assert isinstance(done[0].parsed_arguments, GetWeather), done
    assert final.finish_reason == "tool_calls" and final.message.tool_calls[0].id


@feature("schema")
def schema():
    answer = chats.parse(
        messages=USER, response_format=Person, model=model, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@feature("schema-stream")
def schema_stream():
    ask = {"messages": USER, "response_format": Person, "model": model, "temperature": 0}
    with chats.stream(**ask) as events:
        parsed = [event.parsed for event in events if event.type == "content.delta"]
        final = events.get_final_completion().choices[0].message.parsed
    assert isinstance(final, Person) and parsed


@feature("completions")
def completions():
    complete = client.completions.create
    assert complete(prompt="Once upon", **SHORT).choices[0].text
    answer = complete(prompt=["One", "Two"], n=2, logprobs=1, echo=True, **SHORT)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = "".join(c.choices[0].text for c in complete(prompt="Once", stream=True, **SHORT))
    assert streamed == complete(prompt="Once", **SHORT).choices[0].text


@feature("responses")
def responses():
    ask = {"model": model, "temperature": 0}
    create = client.responses.create
    first = create(input=QUESTION, instructions=SYSTEM, max_output_tokens=12, **ask)
    assert first.output_text and first.usage.output_tokens
    second = create(
        input="Why?", previous_response_id=first.id, max_output_tokens=12, truncation="auto", **ask
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    person = client.responses.parse(input=QUESTION, text_format=Person, **ask)
    assert isinstance(person.output_parsed, Person)
    with client.responses.stream(input=QUESTION, text_format=Person, **ask) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert isinstance(final.output_parsed, Person) and "response.output_text.delta" in kinds
    tool = openai.pydantic_function_tool(GetWeather)["function"]
    tool = {"type": "function", **tool}
    called = client.responses.parse(
        input=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, **ask
    )
    call = called.output[-1]
    assert json.loads(call.arguments)["town"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    end = create(
        input=[*USER, *called.output, result], tools=[tool], tool_choice="none",
        max_output_tokens=12, include=["reasoning.encrypted_content"], store=False, **ask
    )
    assert end.output_text
    # A function in a namespace, beside a tool that a node does not have.
    town = {"type": "namespace", "name": "town", "description": "A town.", "tools": [tool]}
    called = create(
        input=USER, tools=[town, {"type": "web_search"}], tool_choice="required",
        parallel_tool_calls=False, **ask
    )
    call = called.output[-1]
    assert (call.namespace, call.name) == ("town", tool["name"]), call
    result["call_id"] = call.call_id
    end = create(
        input=[*USER, *called.output, result], tools=[town], tool_choice="none",
        max_output_tokens=12, **ask
    )
    assert end.output_text


@feature("embeddings", path="/v1/embeddings")
def embeddings():
    # The package asks for base64, and decodes it.
    several = client.embeddings.create(model=model, input=["a cat", "a dog"]).data
    assert [one.index for one in several] == [0, 1]
    one = client.embeddings.create(model=model, input="a cat", encoding_format="float").data[0]
    near = lambda a, b: abs(a - b) < 1e-6
    assert all(map(near, one.embedding, several[0].embedding)), "base64 and float differ"


@feature("batch")
async def batch():
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as many:
        ask = many.chat.completions.create
        answers = await asyncio.gather(*(ask(messages=USER, **SHORT) for _ in range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@feature("errors")
def errors():
    missing = raises(
        openai.NotFoundError, lambda: chats.create(messages=USER, **{**SHORT, "model": "none"})
    )
    assert missing.code == "model_not_found"
    long = [{"role": "user", "content": TOO_LONG}]
    error = raises(openai.BadRequestError, lambda: chats.create(messages=long, **SHORT))
    assert error.code == "context_length_exceeded"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    seen = [{"role": "user", "content": [picture]}]
    error = raises(openai.BadRequestError, lambda: chats.create(messages=seen, **SHORT))
    assert error.param == "messages[0].content[0].type"
    wrong = {**SHORT, "temperature": 9}
    error = raises(openai.BadRequestError, lambda: chats.create(messages=USER, **wrong))
    assert error.param == "temperature"


main()
