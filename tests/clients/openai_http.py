"""Asks a HearthNet node through the official OpenAI package, as any program would.

    openai_http.py BASE_URL MODEL WHAT

WHAT is the name of one of the functions below that have no leading underscore. Prints one JSON
object with its results; a failed claim is an AssertionError.
"""

import json
import re
import sys
import threading
import time
import urllib.request
from typing import Literal

import openai
import pydantic
from prometheus_client.parser import text_string_to_metric_families

QUESTION = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is it good to share?"},
]


class Door:
    def __init__(self, base_url, model):
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self.model = model
        # Retries would hide the refusals that these tests look for.
        self.client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)

    def ask(self, messages=QUESTION, **options):
        options = {"max_tokens": 24, "temperature": 0, **options}
        return self.client.chat.completions.create(
            model=self.model, messages=messages, **options
        )

    def get(self, path):
        with urllib.request.urlopen(self.root + path, timeout=60) as reply:
            return reply.read().decode()

    def health(self):
        return json.loads(self.get("/healthz"))

    def until(self, what, is_so):
        deadline = time.monotonic() + 60
        while not is_so(self.health()):
            assert time.monotonic() < deadline, (what, self.health())

    def numbers(self):
        """Every sample of /metrics by name and labels, by Prometheus' own parser."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return samples


def _fails(kind, status, code, param, call):
    try:
        call()
    except kind as error:
        assert error.status_code == status, error
        assert (error.code, error.param) == (code, param), (error.code, error.param)
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def models(door):
    names = [model.id for model in door.client.models.list()]
    assert names == [door.model], names
    assert door.client.models.retrieve(door.model).id == door.model
    return {}


def plain(door):
    answer = door.ask()
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == door.model
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.system_fingerprint.startswith("fp_")
    return {"text": choice.message.content, "fingerprint": answer.system_fingerprint}


def stream(door):
    whole = door.ask(user="plain")
    chunks = list(door.ask(stream=True, stream_options={"include_usage": True}, user="stream"))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len(chunks) > 10, "it comes in pieces"
    return {}


def logprobs(door):
    choice = door.ask(logprobs=True, top_logprobs=4).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == choice.message.content
    for entry in content:
        top = entry.top_logprobs
        assert len(top) == 4 and top[0].token == entry.token
        assert [t.logprob for t in top] == sorted((t.logprob for t in top), reverse=True)
        assert entry.logprob <= 0
    pieces = door.ask(logprobs=True, top_logprobs=4, stream=True)
    streamed = [
        entry
        for chunk in pieces
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    older = door.client.completions.create(
        model=door.model, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=2
    ).choices[0]
    assert "".join(older.logprobs.tokens) == older.text
    assert len(older.logprobs.token_logprobs) == 8
    for token, offset in zip(older.logprobs.tokens, older.logprobs.text_offset):
        assert older.text[offset:].startswith(token)
    return {}


def stop(door):
    text = door.ask().choices[0].message.content
    word = text.split()[3]
    for stops in (word, ["never said", word]):
        choice = door.ask(stop=stops).choices[0]
        assert choice.message.content == text[: text.index(word)], choice
        assert choice.finish_reason == "stop"
    return {}


def seed(door):
    def say(number):
        answer = door.ask(temperature=1.2, top_p=0.95, seed=number, max_completion_tokens=24)
        return answer.choices[0].message.content

    assert say(7) == say(7)
    assert say(7) != say(8)
    return {}


def choices(door):
    """Several answers to one prompt, whole and streamed, and answers to a list of prompts."""
    options = {"temperature": 1.2, "n": 4}
    texts = [choice.message.content for choice in door.ask(seed=7, **options).choices]
    assert len(texts) == 4 and len(set(texts)) > 1, texts
    for index, text in enumerate(texts):
        seed = (7 + index * 0x9E3779B97F4A7C15) % 2**64
        assert door.ask(temperature=1.2, seed=seed).choices[0].message.content == text
    streamed = [""] * 4
    for chunk in door.ask(seed=7, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts

    def complete(prompt):
        answer = door.client.completions.create(
            model=door.model, prompt=prompt, max_tokens=8, temperature=0.8, seed=3, n=2
        )
        return [choice.text for choice in answer.choices]

    prompts = ["The capital of France is", "Once upon a time", "One, two, three,"]
    listed = complete(prompts)
    assert listed == [text for prompt in prompts for text in complete(prompt)]
    return {"texts": texts, "listed": listed}


def scores(door):
    """Log-probabilities of prompts, as lm_eval asks for them."""
    prompts = [[504, 3575, 282, 4649, 314, 7042], [1, 2, 3], list(range(100, 400))]

    def score(**options):
        answer = door.client.completions.create(
            model=door.model, prompt=prompts, temperature=0, logprobs=1, echo=True, seed=1234,
            **options,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.logprobs for choice in answer.choices]

    scored = score(max_tokens=1)
    for prompt, one in zip(prompts, scored):
        assert len(one.tokens) == len(one.token_logprobs) == len(prompt) + 1
        assert one.token_logprobs[0] is None
        for logprob, top in zip(one.token_logprobs[1:], one.top_logprobs[1:]):
            assert logprob <= max(top.values())
    for one, prompt in zip(scored, score(max_tokens=0)):
        assert prompt.token_logprobs == one.token_logprobs[:-1]
    return {"scores": [one.token_logprobs for one in scored]}


def errors(door):
    ask, bad = door.ask, openai.BadRequestError
    _fails(openai.NotFoundError, 404, "model_not_found", "model",
           lambda: door.client.chat.completions.create(model="none", messages=QUESTION))
    _fails(openai.NotFoundError, 404, "model_not_found", "model",
           lambda: door.client.models.retrieve("none"))
    _fails(bad, 400, "invalid_value", "temperature", lambda: ask(temperature=9))
    _fails(bad, 400, "invalid_value", "n", lambda: ask(n=9))
    _fails(bad, 400, "unsupported_parameter", "response_format.type",
           lambda: ask(response_format={"type": "structural_tag"}))
    unique = {"name": "n", "schema": {"type": "array", "uniqueItems": True}}
    error = _fails(bad, 400, "unsupported_parameter", "response_format",
                   lambda: ask(response_format={"type": "json_schema", "json_schema": unique}))
    assert "uniqueItems" in error.message
    _fails(bad, 400, "invalid_value", "structured_outputs",
           lambda: ask(extra_body={"structured_outputs": {"regex": "("}}))
    _fails(bad, 400, "unsupported_parameter", "tools[0].type",
           lambda: ask(tools=[{"type": "web_search"}]))
    _fails(bad, 400, "unsupported_parameter", "messages[0].content[0].type",
           lambda: ask([{"role": "user", "content": [
               {"type": "image_url", "image_url": {"url": "http://localhost/"}}]}]))
    error = _fails(bad, 400, "context_length_exceeded", None,
                   lambda: ask([{"role": "user", "content": "long " * 20_000}]))
    # LiteLLM and LangChain look for these words.
    assert "This model's maximum context length is" in error.message, error.message
    large = [{"role": "user", "content": "x" * (2 << 20)}]
    error = _fails(openai.APIStatusError, 413, "request_too_large", None, lambda: ask(large))
    assert "1048576" in error.message
    return {}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=30)
    year: int = pydantic.Field(ge=1000, le=2100)
    mood: Literal["good", "bad"]


def grammars(door):
    ask = [{"role": "user", "content": "Invent a person: name, year of birth, mood. Answer in JSON."}]
    parsed = door.client.chat.completions.parse(
        model=door.model, messages=ask, response_format=Person, max_tokens=200, temperature=0)
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person) and parsed.choices[0].finish_reason == "stop", parsed
    texts = [parsed.choices[0].message.content]
    for fields, fits in [
        ({"regex": "[a-z]{3,9}!"}, r"[a-z]{3,9}!"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "I like " FRUIT "."\nFRUIT: "figs" | "plums"'}, r"I like (figs|plums)\."),
    ]:
        answer = door.ask(ask, max_tokens=60, extra_body={"structured_outputs": fields}).choices[0]
        assert answer.finish_reason == "stop", answer
        assert re.fullmatch(fits, answer.message.content), answer
        texts.append(answer.message.content)
    # A stream is the same answer, and a limit cuts it.
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    chunks = door.ask(ask, max_tokens=200, stream=True, response_format=form)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert Person.model_validate_json(streamed), streamed
    cut = door.ask(ask, max_tokens=3, response_format=form).choices[0]
    assert cut.finish_reason == "length" and streamed.startswith(cut.message.content), cut
    return {"texts": texts + [streamed]}


def _tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties),
              "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


TOOLS = [
    _tool("get_weather", town={"type": "string", "maxLength": 20},
          days={"type": "integer", "minimum": 1, "maximum": 9}),
    _tool("get_time", zone={"enum": ["UTC", "CET"]}),
]


def _reassembled(chunks):
    """Calls, text and finish_reason of a stream."""
    calls, text, reason = [], "", None
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.index == len(calls):
                assert piece.id and piece.type == "function", piece
                calls.append([piece.id, piece.function.name, ""])
            calls[piece.index][2] += piece.function.arguments
        reason = choice.finish_reason or reason
    return calls, text, reason


def tools(door):
    ask = [{"role": "user", "content": "Is it warm in Oslo?"}]
    options = {"tools": TOOLS, "seed": 3, "max_tokens": 150}
    must = {**options, "tool_choice": "required", "parallel_tool_calls": False}
    choice = door.ask(ask, **must).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert len(arguments["town"]) <= 20 and 1 <= arguments["days"] <= 9, arguments
    else:
        assert call.function.name == "get_time" and arguments["zone"] in ("UTC", "CET"), call
    whole = [[call.id, call.function.name, call.function.arguments]]
    assert _reassembled(door.ask(ask, stream=True, **must)) == (whole, "", "tool_calls")
    named = {"type": "function", "function": {"name": "get_time"}}
    named = door.ask(ask, **{**must, "tool_choice": named}).choices[0].message.tool_calls
    assert [call.function.name for call in named] == ["get_time"], named
    # Text may come before calls, and has no mark of one.
    auto = door.ask(ask, **options).choices[0]
    again = _reassembled(door.ask(ask, stream=True, **options))
    assert again[1] == (auto.message.content or "") and again[2] == auto.finish_reason, again
    assert "tool_call" not in again[1], again
    # The result of a call goes back into the conversation.
    result = {"role": "tool", "tool_call_id": call.id, "content": "{\"celsius\": 21}"}
    turn = [*ask, choice.message.model_dump(exclude_none=True), result]
    end = door.ask(turn, **{**options, "tool_choice": "none", "max_tokens": 24}).choices[0]
    assert end.message.content and not end.message.tool_calls, end
    bad = openai.BadRequestError
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}
    _fails(bad, 400, "unsupported_parameter", "tools", lambda: door.ask(ask, tools=[strict]))
    _fails(bad, 400, "invalid_value", "tool_choice", lambda: door.ask(ask, tool_choice="required"))
    return {"call": whole, "auto": again, "named": named[0].function.arguments,
            "end": end.message.content}


def turns(door):
    """A conversation: every turn finds the earlier ones in the prefix cache."""
    messages, cached, texts = list(QUESTION), [], []
    for question in ("Tell me more.", "And then?", "Why?"):
        answer = door.ask(messages, user="turns")
        usage = answer.usage
        cached.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
        texts.append(answer.choices[0].message.content)
        messages.append({"role": "assistant", "content": texts[-1]})
        messages.append({"role": "user", "content": question})
    assert cached[0][0] == 0, cached
    for (_, before), (now, prompt) in zip(cached, cached[1:]):
        assert before <= now < prompt, cached
    # Computed without the cache, the last turn gives the same answer.
    again = door.ask(messages[:-2], user="a new user")
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert again.choices[0].message.content == texts[-1]
    return {"cached": cached}


def crowd(door):
    """Ten at once: each gets the same answer, or a refusal with Retry-After."""
    say, lock = [], threading.Lock()

    def ask(n):
        try:
            said = door.ask(user=f"caller {n}").choices[0].message.content
        except openai.RateLimitError as error:
            assert error.code == "busy" and int(error.response.headers["retry-after"]) >= 1
            said = None
        with lock:
            say.append(said)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [text for text in say if text is not None]
    assert len(say) == 10 and len(set(answers)) == 1, say
    door.until("all is free", lambda health: (health["running"], health["waiting"]) == (0, 0))
    return {"answered": len(answers), "refused": 10 - len(answers), "text": answers[0]}


def disconnect(door):
    """A client that disconnects in the middle frees its resources."""
    pieces = door.ask(stream=True, max_tokens=2000, messages=[
        {"role": "user", "content": "Write a very long story about the sea."}])
    for chunk in pieces:
        if chunk.choices[0].delta.content:
            break
    assert door.health()["running"] == 1
    pieces.close()
    door.until("it is free", lambda health: health["running"] == 0)
    numbers = door.numbers()
    assert numbers["hearthnet_pipelines_running", ()] == 0
    assert numbers["hearthnet_answers_total", (("code", "cancelled"),)] >= 1
    return {}


def metrics(door):
    door.ask()
    numbers = door.numbers()
    names = {name for name, _ in numbers}
    for histogram in ("pipeline_construct_seconds", "first_token_seconds", "tokens_per_second"):
        name = f"distributed_inference_{histogram}"
        count = numbers[f"{name}_count", ()]
        assert count >= 1 and numbers[f"{name}_bucket", (("le", "+Inf"),)] == count
    for counter in ("failovers", "fallback_to_local", "shard_corruption_detected"):
        assert numbers[f"distributed_inference_{counter}_total", ()] == 0
    for name in ("hearthnet_pipelines_waiting", "hearthnet_conversations_kept"):
        assert (name, ()) in numbers, names
    shards = {
        dict(labels)["shard_id"]
        for name, labels in numbers
        if name == "distributed_inference_shard_latency_seconds_count"
    }
    return {"shards": sorted(shards)}


def key(door):
    """Without the key: 401, which OpenAI's package reports as its own error."""
    refused = _fails(openai.AuthenticationError, 401, "invalid_api_key", None, door.ask)
    return {"message": refused.message}


def main():
    base_url, model, what = sys.argv[1:]
    print(json.dumps(globals()[what](Door(base_url, model))))


if __name__ == "__main__":
    main()
