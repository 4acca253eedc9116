"""Runs loops of tools through Anthropic's package: by hand and by its tool runner, whole and streamed.

    anthropic_tools.py BASE_URL MODEL

Prints one JSON object with the calls and texts; a failed claim is an AssertionError.
"""

import json
import sys
from typing import Literal

import anthropic

QUESTION = {"role": "user", "content": "Is it warm in Oslo this week?"}
CALL = {"type": "any", "disable_parallel_tool_use": True}
NO_CALL = {"type": "none"}

base_url, model = sys.argv[1:]
# Retries would hide refusals.
client = anthropic.Anthropic(
    base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0
)
# Ids of calls depend on the seed.
extra = {"temperature": 0, "seed": 7}
settings = {"model": model, "max_tokens": 120, "extra_body": extra}
ran = []


@anthropic.beta_tool
def get_weather(town: Literal["Oslo", "Rome", "Lima"], days: Literal[1, 2, 3]) -> str:
    """Forecasts the weather of a town.

    Args:
        town: Name of the town.
        days: Number of days.
    """
    ran.append([town, days])
    return f"{town}: 21 degrees for {days} days."


def whole(**request):
    return client.messages.create(**settings, **request)


def streamed(**request):
    """The message that the package makes of a stream, whose events must add up to it."""
    with client.messages.stream(**settings, **request) as stream:
        events = list(stream)
        message = stream.get_final_message()
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    calls = [block.input for block in message.content if block.type == "tool_use"]
    assert [json.loads("".join(pieces))] == calls if calls else not pieces, pieces
    texts = [event.text for event in events if event.type == "text"]
    assert "".join(texts) == text_of(message), texts
    return message


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def by_hand(ask):
    """A call, its result, and an answer; `ask` sends each request."""
    tools = [get_weather.to_dict()]
    first = ask(messages=[QUESTION], tools=tools, tool_choice=CALL)
    assert first.stop_reason == "tool_use", first
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather", call
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather.call(call.input)}
    messages = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = ask(messages=messages, tools=tools, tool_choice=NO_CALL)
    assert last.stop_reason in ("end_turn", "max_tokens"), last
    assert text_of(last), last
    return [call.id, call.input, text_of(last)]


def by_runner(stream):
    """The same with the runner of the package, which calls the function itself."""
    runner = client.beta.messages.tool_runner(
        messages=[QUESTION], tools=[get_weather], tool_choice=CALL, stream=stream,
        max_iterations=3, **settings,
    )
    messages = []
    for turn in runner:
        messages.append(turn.get_final_message() if stream else turn)
        # Else every turn would have to be a call.
        runner.set_messages_params(lambda params: {**params, "tool_choice": NO_CALL})
    assert [message.stop_reason == "tool_use" for message in messages] == [True, False], messages
    (call,) = [block for block in messages[0].content if block.type == "tool_use"]
    return [call.id, call.input, text_of(messages[1])]


loops = [by_hand(whole), by_hand(streamed), by_runner(False), by_runner(True)]
for loop in loops[1:]:
    assert loop == loops[0], loops
expected = [loops[0][1]["town"], loops[0][1]["days"]]
assert ran == [expected] * 4, ran
print(json.dumps(loops[0]))
