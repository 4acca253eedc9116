# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0", "openai==3.57.0"]
# ///
"""Pydantic AI's agents."""

import asyncio
from typing import Literal

import pydantic
from feature import QUESTION, SYSTEM, TOO_LONG, base_url, feature, main, model, raises
from pydantic_ai import Agent, Embedder, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=base_url, api_key="none")
chats = OpenAIChatModel(model, provider=provider)
SHORT = {"temperature": 0, "max_tokens": 12}
LONGER = {"temperature": 0, "max_tokens": 200}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


def agent(**options):
    return Agent(options.pop("model", chats), **{"model_settings": SHORT, **options})


@feature("chat")
def chat():
    first = agent(instructions=SYSTEM).run_sync(QUESTION)
    assert first.output and first.usage.output_tokens
    second = agent(system_prompt=SYSTEM).run_sync("Why?", message_history=first.all_messages())
    assert second.output


@feature("stream")
async def stream():
    whole = await agent(instructions=SYSTEM).run(QUESTION)
    async with agent(instructions=SYSTEM).run_stream(QUESTION) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert "".join(pieces) == whole.output and len(pieces) > 2


@feature("settings")
def settings():
    def say(**options):
        options = {"temperature": 1, "seed": 5, "max_tokens": 12, **options}
        return agent(model_settings=options).run_sync(QUESTION).output

    text = say()
    assert text == say() != say(seed=6)
    word = text.split()[2]
    assert say(stop_sequences=[word]).strip() == text[: text.index(word)].strip()
    say(top_p=0.9, presence_penalty=0.5, logit_bias={"5": -10}, extra_body={"top_k": 40})


@feature("logprobs")
def logprobs():
    options = {**SHORT, "openai_logprobs": True, "openai_top_logprobs": 2}
    said = agent(model_settings=options).run_sync(QUESTION).response
    assert said.provider_details["logprobs"]


def with_tool(towns, **options):
    made = agent(**{"model_settings": LONGER, **options})

    @made.tool_plain
    def get_weather(town: Literal["Oslo", "Rome"]) -> str:
        """Weather of a town."""
        towns.append(town)
        return "20 degrees"

    return made


def step_by_step(context):
    """Settings that force a call in the first turn, and an answer in the second."""
    choice = ["get_weather"] if context.run_step == 1 else "none"
    # Small models do not end a list of calls.
    return {**LONGER, "tool_choice": choice, "parallel_tool_calls": False}


@feature("tools")
def tools():
    towns = []
    run = with_tool(towns, model_settings=step_by_step).run_sync(QUESTION)
    assert run.output and len(towns) == 1, towns
    # Without text as an output, the package requires a call in each turn: of the function, or of
    # the tool of the output.
    run = with_tool([], output_type=ToolOutput(Person)).run_sync(QUESTION)
    assert isinstance(run.output, Person)


@feature("tool-stream")
async def tool_stream():
    made = with_tool([], output_type=ToolOutput(Person))
    async with made.run_stream(QUESTION) as streamed:
        assert isinstance(await streamed.get_output(), Person)


@feature("schema")
def schema():
    for form in (NativeOutput(Person), NativeOutput(Person, strict=True), ToolOutput(Person)):
        run = agent(output_type=form, model_settings=LONGER).run_sync(QUESTION)
        assert isinstance(run.output, Person), form


@feature("schema-stream")
async def schema_stream():
    made = agent(output_type=NativeOutput(Person), model_settings=LONGER)
    async with made.run_stream(QUESTION) as streamed:
        parts = [part async for part in streamed.stream_output(debounce_by=None)]
    assert isinstance(parts[-1], Person)


@feature("responses")
def responses():
    other = OpenAIResponsesModel(model, provider=provider)
    first = agent(model=other, instructions=SYSTEM).run_sync(QUESTION)
    assert first.output
    assert agent(model=other).run_sync("Why?", message_history=first.all_messages()).output
    run = with_tool([], model=other, output_type=ToolOutput(Person)).run_sync(QUESTION)
    assert isinstance(run.output, Person)
    run = agent(model=other, output_type=NativeOutput(Person), model_settings=LONGER)
    assert isinstance(run.run_sync(QUESTION).output, Person)


@feature("embeddings", path="/v1/embeddings")
def embeddings():
    made = Embedder(OpenAIEmbeddingModel(model, provider=provider))
    assert len(made.embed_documents_sync(["a cat", "a dog"]).embeddings) == 2


@feature("batch")
async def batch():
    answers = await asyncio.gather(*(agent().run(QUESTION) for _ in range(8)))
    assert len({answer.output for answer in answers}) == 1


@feature("errors")
def errors():
    error = raises(ModelHTTPError, lambda: agent().run_sync(TOO_LONG))
    assert error.status_code == 400 and "context_length_exceeded" in str(error)
    none = OpenAIChatModel("none", provider=provider)
    assert raises(ModelHTTPError, lambda: agent(model=none).run_sync("x")).status_code == 404


main()
