# /// script
# dependencies = ["instructor==1.17.0", "openai==3.3.0"]
# ///
"""instructor, which asks for objects of a class."""

import asyncio
from typing import Literal

import instructor
import openai
import pydantic
from feature import QUESTION, base_url, feature, main, model, raises

USER = [{"role": "user", "content": QUESTION}]
ASK = {"messages": USER, "model": model, "temperature": 0, "max_tokens": 250, "max_retries": 0}
openais = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    mood: Literal["good", "bad"]


def client(mode):
    return instructor.from_openai(openais, mode=mode)


@feature("tools")
def tools():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        person = client(mode).chat.completions.create(response_model=Person, **ASK)
        assert isinstance(person, Person), mode
    person, raw = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(
        response_model=Person, **ASK
    )
    assert raw.usage.completion_tokens


@feature("tool-stream")
def tool_stream():
    ask = client(instructor.Mode.TOOLS).chat.completions
    parts = list(ask.create_partial(response_model=Person, **ASK))
    assert parts[-1].name is not None and parts[-1].mood in ("good", "bad")


@feature("schema")
def schema():
    ask = client(instructor.Mode.JSON_SCHEMA).chat.completions
    assert isinstance(ask.create(response_model=Person, **ASK), Person)


@feature("schema-stream")
def schema_stream():
    ask = client(instructor.Mode.JSON_SCHEMA).chat.completions
    parts = list(ask.create_partial(response_model=Person, **ASK))
    assert parts[-1].name is not None and parts[-1].mood in ("good", "bad")


@feature("responses")
def responses():
    ask = {key: value for key, value in ASK.items() if key not in ("messages", "max_tokens")}
    made = client(instructor.Mode.RESPONSES_TOOLS)
    person = made.responses.create(
        input=QUESTION, response_model=Person, max_output_tokens=250, **ask
    )
    assert isinstance(person, Person)


@feature("batch")
async def batch():
    many = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    ask = instructor.from_openai(many, mode=instructor.Mode.TOOLS).chat.completions
    people = await asyncio.gather(*(ask.create(response_model=Person, **ASK) for _ in range(4)))
    # Objects hold their responses, which differ.
    assert len({person.model_dump_json() for person in people}) == 1


@feature("errors")
def errors():
    # It retries an answer that its class refuses, and says why to the model.
    class Never(Person):
        @pydantic.field_validator("name")
        @classmethod
        def never(cls, name):
            raise ValueError("another name, please")

    ask = client(instructor.Mode.TOOLS).chat.completions
    options = {**ASK, "max_retries": 2}
    error = raises(Exception, lambda: ask.create(response_model=Never, **options))
    assert "another name" in str(error), error


main()
