# /// script
# dependencies = ["langchain-openai==1.7.4", "langchain-core==1.8.3", "openai==3.57.0"]
# ///
"""LangChain's models for OpenAI's API."""

import asyncio
import math
from typing import Literal

import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, base_url, feature, main, model, raises
from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

MESSAGES = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
PLACE = {"model": model, "base_url": base_url, "api_key": "none", "max_retries": 0}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


@tool
def get_weather(town: Literal["Oslo", "Rome"]) -> str:
    """Weather of a town."""
    return "20 degrees in " + town


def chats(**options):
    return ChatOpenAI(**PLACE, **{"temperature": 0, "max_tokens": 12, **options})


@feature("chat")
def chat():
    said = chats().invoke(MESSAGES)
    assert said.text and said.usage_metadata["output_tokens"]
    assert said.response_metadata["model_name"] == model


@feature("stream")
def stream():
    whole = chats().invoke(MESSAGES)
    chunks = list(chats(stream_usage=True).stream(MESSAGES))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    last = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
    assert last == whole.usage_metadata["output_tokens"]


@feature("settings")
def settings():
    ask = chats(temperature=1, seed=5, top_p=0.9, presence_penalty=0.5)
    text = ask.invoke(QUESTION).text
    assert text == ask.invoke(QUESTION).text
    word = text.split()[2]
    assert ask.invoke(QUESTION, stop=[word]).text == text[: text.index(word)]


@feature("n")
def n():
    answers = chats(n=3, temperature=1).generate([MESSAGES]).generations[0]
    assert len(answers) == 3


@feature("logprobs")
def logprobs():
    said = chats(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    entries = said.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == said.text


@feature("tools")
def tools():
    ask = chats(max_tokens=100).bind_tools([get_weather], tool_choice="any", strict=True)
    said = ask.invoke(MESSAGES)
    call = said.tool_calls[0]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    end = chats().bind_tools([get_weather], tool_choice="none")
    results = [get_weather.invoke(call) for call in said.tool_calls]
    assert end.invoke([*MESSAGES, said, *results]).text
    named = chats(max_tokens=100).bind_tools([get_weather], tool_choice="get_weather")
    assert named.invoke(MESSAGES).tool_calls[0]["args"]["town"] in ("Oslo", "Rome")


@feature("tool-stream")
def tool_stream():
    options = {"tool_choice": "any", "parallel_tool_calls": False}
    ask = chats(max_tokens=100).bind_tools([get_weather], **options)
    whole = None
    for chunk in ask.stream(MESSAGES):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["town"] in ("Oslo", "Rome"), whole


@feature("schema")
def schema():
    for method in ("json_schema", "function_calling"):
        ask = chats(max_tokens=200).with_structured_output(Person, method=method)
        assert isinstance(ask.invoke(MESSAGES), Person), method
    ask = chats(max_tokens=200).with_structured_output(Person, include_raw=True)
    assert isinstance(ask.invoke(MESSAGES)["parsed"], Person)


@feature("schema-stream")
def schema_stream():
    ask = chats(max_tokens=200).with_structured_output(Person)
    assert isinstance(list(ask.stream(MESSAGES))[-1], Person)


@feature("completions")
def completions():
    ask = OpenAI(**PLACE, temperature=0, max_tokens=12)
    assert ask.invoke("Once upon") == "".join(ask.stream("Once upon"))
    several = OpenAI(**PLACE, temperature=1, max_tokens=12, n=2, best_of=2, batch_size=2)
    answers = several.generate(["One", "Two", "Three"]).generations
    assert [len(answer) for answer in answers] == [2, 2, 2]


@feature("responses")
def responses():
    ask = chats(use_responses_api=True, max_tokens=100)
    assert ask.invoke(MESSAGES).text
    assert "".join(chunk.text for chunk in ask.stream(MESSAGES))
    said = ask.bind_tools([get_weather], tool_choice="any").invoke(MESSAGES)
    results = [get_weather.invoke(call) for call in said.tool_calls]
    end = ask.bind_tools([get_weather], tool_choice="none").invoke([*MESSAGES, said, *results])
    assert results and end.text
    assert isinstance(ask.with_structured_output(Person).invoke(MESSAGES), Person)


@feature("embeddings", path="/v1/embeddings")
def embeddings():
    texts = ["a cat", "a dog"]
    # By default the package sends tokens of OpenAI's own vocabulary, which no other model has.
    ask = OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False)
    several, one = ask.embed_documents(texts), ask.embed_query(texts[0])
    assert len(several) == 2 and math.dist(several[0], one) < 1e-4 < math.dist(*several)


@feature("batch")
def batch():
    ask = chats()
    answers = ask.batch([MESSAGES] * 8)
    assert len({answer.text for answer in answers}) == 1
    again = asyncio.run(ask.abatch([MESSAGES] * 2))
    assert again[0].text == answers[0].text


@feature("errors")
def errors():
    raises(ContextOverflowError, lambda: chats().invoke(TOO_LONG))
    raises(ModelNotFoundError, lambda: ChatOpenAI(**{**PLACE, "model": "none"}).invoke("x"))


main()
