# /// script
# dependencies = ["litellm==1.110.2", "openai==3.57.0"]
# ///
"""litellm, by its providers for OpenAI's, Anthropic's and Ollama's APIs."""

import asyncio
import json
import os
from typing import Literal

# Otherwise it fetches a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, base_url, feature, main, model, raises, root

USER = [{"role": "user", "content": QUESTION}]
MESSAGES = [{"role": "system", "content": SYSTEM}, *USER]
PLACE = {"model": "openai/" + model, "api_base": base_url, "api_key": "none"}
SHORT = {**PLACE, "temperature": 0, "max_tokens": 12}
OTHERS = [
    {**SHORT, "model": "anthropic/" + model, "api_base": root},
    {**SHORT, "model": "ollama_chat/" + model, "api_base": root},
    {**SHORT, "model": "hosted_vllm/" + model},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
        },
    },
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


def text(answer):
    return answer.choices[0].message.content


@feature("models")
def models():
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_key="none",
        api_base=base_url,
    )
    assert found and all(model in name for name in found), found


@feature("chat")
def chat():
    answer = litellm.completion(messages=MESSAGES, **SHORT)
    assert text(answer) and answer.usage.completion_tokens
    for other in OTHERS:
        assert text(litellm.completion(messages=MESSAGES, **other)) == text(answer), other


@feature("stream")
def stream():
    for place in (SHORT, *OTHERS):
        whole = text(litellm.completion(messages=MESSAGES, **place))
        chunks = litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **place
        )
        built = litellm.stream_chunk_builder(list(chunks))
        assert text(built) == whole and built.usage.completion_tokens, place


@feature("settings")
def settings():
    ask = {**SHORT, "messages": USER, "temperature": 1, "seed": 5, "top_p": 0.9}
    said = text(litellm.completion(**ask))
    assert said == text(litellm.completion(**ask, user="me", frequency_penalty=0))
    word = said.split()[2]
    stopped = litellm.completion(**ask, stop=[word])
    assert text(stopped) == said[: said.index(word)]


@feature("n")
def n():
    answer = litellm.completion(messages=USER, n=3, **{**SHORT, "temperature": 1})
    assert len(answer.choices) == 3


@feature("logprobs")
def logprobs():
    answer = litellm.completion(messages=USER, logprobs=True, top_logprobs=2, **SHORT)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == text(answer)


@feature("tools")
def tools():
    for place in (SHORT, OTHERS[0]):
        options = {**place, "max_tokens": 100, "tools": [TOOL]}
        said = litellm.completion(messages=USER, tool_choice="required", **options)
        message = said.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
            for call in message.tool_calls
        ]
        assert json.loads(message.tool_calls[0].function.arguments)["town"]
        end = litellm.completion(
            messages=[*USER, message, *results], tool_choice="none", **{**options, "max_tokens": 12}
        )
        assert text(end), place


@feature("tool-stream")
def tool_stream():
    for place in (SHORT, OTHERS[0]):
        options = {**place, "max_tokens": 100, "tools": [TOOL], "tool_choice": "required"}
        built = litellm.stream_chunk_builder(
            list(litellm.completion(messages=USER, stream=True, **options))
        )
        assert json.loads(built.choices[0].message.tool_calls[0].function.arguments)["town"]


@feature("schema")
def schema():
    options = {**PLACE, "temperature": 0, "max_tokens": 200}
    answer = litellm.completion(messages=USER, response_format=Person, **options)
    Person.model_validate_json(text(answer))
    free = litellm.completion(messages=USER, response_format={"type": "json_object"}, **options)
    assert text(free).startswith("{")


@feature("schema-stream")
def schema_stream():
    options = {**PLACE, "temperature": 0, "max_tokens": 200, "stream": True}
    chunks = litellm.completion(messages=USER, response_format=Person, **options)
    Person.model_validate_json(text(litellm.stream_chunk_builder(list(chunks))))


@feature("completions")
def completions():
    ask = {**SHORT, "model": "text-completion-openai/" + model}
    assert litellm.text_completion(prompt="Once upon", **ask).choices[0].text
    several = litellm.text_completion(prompt=["One", "Two"], **ask)
    assert len(several.choices) == 2


@feature("responses")
def responses():
    ask = {**PLACE, "temperature": 0, "max_output_tokens": 12}
    answer = litellm.responses(input=QUESTION, **ask)
    assert answer.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(input=QUESTION, stream=True, **ask)]
    assert kinds[0] == "response.created", kinds


@feature("embeddings", path="/v1/embeddings")
def embeddings():
    data = litellm.embedding(input=["a cat", "a dog"], **PLACE).data
    assert len(data) == 2


@feature("batch")
def batch():
    answers = litellm.batch_completion(messages=[USER] * 8, **SHORT)
    assert len({text(answer) for answer in answers}) == 1
    assert text(asyncio.run(litellm.acompletion(messages=USER, **SHORT))) == text(answers[0])


@feature("errors")
def errors():
    long = [{"role": "user", "content": TOO_LONG}]
    # It does not classify errors of Ollama's, which shortens a prompt itself.
    for place in (SHORT, OTHERS[0], OTHERS[2]):
        raises(
            litellm.ContextWindowExceededError,
            lambda: litellm.completion(messages=long, **place),
        )
    none = {**SHORT, "model": "openai/none"}
    raises(litellm.NotFoundError, lambda: litellm.completion(messages=USER, **none))


main()
