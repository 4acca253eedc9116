"""Asks a HearthNet node through the packages of three APIs: OpenAI's, Anthropic's and Ollama's.

    apis.py BASE_URL MODEL

Every API must give the same text for the same prompt. Prints one JSON object with the texts; a
failed claim is an AssertionError.
"""

import json
import sys

import anthropic
import ollama
import openai
import pydantic

SYSTEM = "You answer in one short sentence."
QUESTION = "Why is it good to share?"
TOKENS = 24


class Author(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)


base_url, model = sys.argv[1:]
root = base_url.removesuffix("/v1")
# Retries would hide refusals.
openais = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
anthropics = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
ollamas = ollama.Client(host=root)


def same(expected, got):
    """Compares the texts of every way to ask."""
    for way, text in got.items():
        assert text == expected, (way, text, expected)


def fails(kind, status, call):
    try:
        call()
    except kind as error:
        assert error.status_code == status, error
        return str(error)
    raise AssertionError(f"{kind.__name__} was expected")


def plain():
    """A system prompt and a question, in one piece and streamed."""
    user = [{"role": "user", "content": QUESTION}]
    messages = [{"role": "system", "content": SYSTEM}, *user]
    reference = openais.chat.completions.create(
        model=model, messages=messages, max_tokens=TOKENS, temperature=0
    )
    expected = reference.choices[0].message.content
    assert expected
    usage = reference.usage
    got = {}

    # The package names no temperature any more, and older clients send one.
    asked = {
        "model": model, "system": SYSTEM, "messages": user, "max_tokens": TOKENS,
        "extra_body": {"temperature": 0},
    }
    message = anthropics.messages.create(**asked)
    got["anthropic"] = "".join(block.text for block in message.content)
    assert message.role == "assistant" and message.model == model
    assert message.stop_reason in ("end_turn", "max_tokens"), message.stop_reason
    prompt_tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert prompt_tokens == usage.prompt_tokens, message.usage
    assert message.usage.output_tokens == usage.completion_tokens
    # The prompt of the call before is kept, so most of it is found.
    assert message.usage.cache_read_input_tokens > 0
    with anthropics.messages.stream(**asked) as stream:
        got["anthropic stream"] = "".join(stream.text_stream)
        final = stream.get_final_message()
    got["anthropic final"] = final.content[0].text
    assert final.usage.output_tokens == usage.completion_tokens
    assert final.stop_reason == message.stop_reason
    cached = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    message = anthropics.messages.create(**{**asked, "system": cached})
    got["anthropic blocks"] = message.content[0].text
    counted = anthropics.messages.count_tokens(model=model, system=SYSTEM, messages=user)
    assert counted.input_tokens == usage.prompt_tokens

    options = {"num_predict": TOKENS, "temperature": 0}
    answer = ollamas.chat(model=model, messages=messages, options=options)
    got["ollama"] = answer.message.content
    assert answer.done and answer.eval_count == usage.completion_tokens
    assert answer.prompt_eval_count == usage.prompt_tokens
    assert answer.total_duration >= answer.eval_duration > 0
    parts = list(ollamas.chat(model=model, messages=messages, options=options, stream=True))
    got["ollama stream"] = "".join(part.message.content for part in parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    generate = {"model": model, "system": SYSTEM, "prompt": QUESTION, "options": options}
    got["ollama generate"] = ollamas.generate(**generate).response
    parts = ollamas.generate(**generate, stream=True)
    got["ollama generate stream"] = "".join(part.response for part in parts)

    asked = {
        "model": model, "instructions": SYSTEM, "input": QUESTION, "max_output_tokens": TOKENS,
        "temperature": 0,
    }
    response = openais.responses.create(**asked)
    got["responses"] = response.output_text
    assert response.usage.input_tokens == usage.prompt_tokens
    assert response.usage.output_tokens == usage.completion_tokens
    with openais.responses.stream(**asked) as stream:
        events = list(stream)
    # An answer that its limit ended is `response.incomplete`, which the package's
    # `get_final_response` does not take.
    final = events[-1].response
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    got["responses stream"] = "".join(deltas)
    got["responses final"] = final.output_text
    same(expected, got)
    return expected


def raw():
    """A text that is continued without the chat template."""
    expected = openais.completions.create(
        model=model, prompt="Once upon a time", max_tokens=12, temperature=0
    ).choices[0].text
    options = {"num_predict": 12, "temperature": 0}
    answer = ollamas.generate(model=model, prompt="Once upon a time", raw=True, options=options)
    same(expected, {"ollama raw": answer.response})
    return expected


def structured():
    """An answer by a schema."""
    user = [{"role": "user", "content": "Who wrote Emma? Answer in JSON."}]
    schema = {**Author.model_json_schema()}
    named = {"name": "author", "strict": True, "schema": schema}
    expected = openais.chat.completions.create(
        model=model, messages=user, temperature=0,
        response_format={"type": "json_schema", "json_schema": named},
    ).choices[0].message.content
    Author.model_validate_json(expected)
    got = {}
    got["ollama"] = ollamas.chat(
        model=model, messages=user, format=schema, options={"temperature": 0}
    ).message.content
    got["responses"] = openais.responses.create(
        model=model, input=user, temperature=0,
        text={"format": {"type": "json_schema", **named}},
    ).output_text
    got["anthropic"] = anthropics.messages.create(
        model=model, messages=user, max_tokens=200, extra_body={"temperature": 0},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    ).content[0].text
    same(expected, got)
    free = ollamas.chat(
        model=model, messages=user, format="json", options={"temperature": 0, "num_predict": 40}
    )
    assert free.message.content.startswith("{")
    return expected


def turns():
    """Two turns, of which the second refers to the first."""
    settings = {"model": model, "temperature": 0, "max_output_tokens": 12}
    first = openais.responses.create(input="Name a colour.", **settings)
    second = openais.responses.create(
        input="And another?", previous_response_id=first.id, **settings
    )
    messages = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And another?"},
    ]
    expected = openais.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=12
    ).choices[0].message.content
    same(expected, {"responses": second.output_text})
    # The first turn did not have to be computed again.
    assert second.usage.input_tokens_details.cached_tokens > 0
    call = lambda: openais.responses.create(
        input="x", previous_response_id="resp_none", **settings
    )
    assert "resp_none" in fails(openai.BadRequestError, 400, call)
    return expected


def vectors():
    """Vectors of texts: the same in both APIs that have them, and in every encoding."""
    texts = ["Why is it good to share?", "A whale swims in the sea. " * 60, "share"]
    # The package asks for base64, and decodes it.
    answer = openais.embeddings.create(model=model, input=texts)
    expected = [entry.embedding for entry in answer.data]
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.hearthnet_pooling == "mean-hidden-1", answer.hearthnet_pooling
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 300, answer.usage
    for vector in expected:
        assert abs(sum(value * value for value in vector) - 1) < 1e-5

    def got(inputs, **options):
        data = openais.embeddings.create(model=model, input=inputs, **options).data
        return [entry.embedding for entry in data]

    assert got(texts, encoding_format="float") == expected
    assert got(texts[0]) == expected[:1]
    assert got(texts[2], dimensions=len(expected[0]), extra_body={"exact": "require"}) == expected[2:]
    ids = [504, 3575, 282]
    assert got(ids) == got([ids])
    embedded = ollamas.embed(model=model, input=texts)
    assert [list(vector) for vector in embedded.embeddings] == expected
    assert embedded.prompt_eval_count == answer.usage.prompt_tokens
    assert list(ollamas.embeddings(model=model, prompt=texts[0]).embedding) == expected[0]

    long = "word " * 20000
    for inputs, param in [
        ([], "input"), ("", "input"), (["a", ""], "input[1]"), (["a"] * 2049, "input"),
        ([1, 10**9], "input"), ([[1], [10**9]], "input[1]"), (["a", long], "input[1]"),
    ]:
        try:
            got(inputs)
        except openai.BadRequestError as error:
            assert error.param == param, (error, param)
        else:
            raise AssertionError(f"a refusal of {param} was expected")
    said = fails(openai.BadRequestError, 400, lambda: got(long))
    assert "This model's maximum context length is" in said, said
    fails(openai.BadRequestError, 400, lambda: got("a", dimensions=8))
    fails(
        ollama.ResponseError, 400,
        lambda: ollamas.embed(model=model, input=long, truncate=False),
    )
    return expected


def stop():
    """A stop text of Anthropic's is named."""
    user = [{"role": "user", "content": "Count from 1 to 9."}]
    asked = {
        "model": model, "messages": user, "max_tokens": 40, "extra_body": {"temperature": 0},
    }
    text = anthropics.messages.create(**asked).content[0].text
    word = text.split()[-1]
    message = anthropics.messages.create(**asked, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word), message
    before = "".join(block.text for block in message.content)
    assert before == text[: text.index(word)]
    return before


def models():
    """Lists and errors."""
    assert [entry.model for entry in ollamas.list().models] == [model]
    assert [entry.model for entry in ollamas.ps().models] == [model]
    shown = ollamas.show(model)
    assert "completion" in shown.capabilities
    user = [{"role": "user", "content": "x"}]
    fails(ollama.ResponseError, 404, lambda: ollamas.chat(model="none", messages=user))
    fails(
        anthropic.NotFoundError, 404,
        lambda: anthropics.messages.create(model="none", messages=user, max_tokens=1),
    )
    said = fails(
        anthropic.BadRequestError, 400,
        lambda: anthropics.messages.create(
            model=model, messages=user, max_tokens=1, stop_sequences=[""]
        ),
    )
    assert "stop_sequences" in said, said
    long = [{"role": "user", "content": "word " * 20000}]
    said = fails(
        anthropic.BadRequestError, 400,
        lambda: anthropics.messages.create(model=model, messages=long, max_tokens=1),
    )
    assert "prompt is too long" in said, said
    return shown.modelinfo["general.architecture"]


asks = (plain, raw, structured, turns, vectors, stop, models)
print(json.dumps({ask.__name__: ask() for ask in asks}))
