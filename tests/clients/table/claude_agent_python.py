# /// script
# dependencies = ["claude-agent-sdk==0.2.189"]
# ///
"""Anthropic's Agent SDK: it runs Claude Code, which its package carries."""

import asyncio
import os
import tempfile

import claude_agent_sdk as sdk
from feature import QUESTION, SYSTEM, feature, main, model, root

folder = tempfile.TemporaryDirectory()


@sdk.tool("get_weather", "Weather of a town.", {"town": str})
async def get_weather(arguments):
    return {"content": [{"type": "text", "text": "20 degrees"}]}


def options(**more):
    env = {
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CONFIG_DIR": folder.name,
        "HOME": folder.name,
        # It asks no other server then.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
        # So that no answer of the small model is a long one.
        "CLAUDE_CODE_EXTRA_BODY": '{"temperature": 0, "stop_sequences": ["."]}',
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    return sdk.ClaudeAgentOptions(
        **{
            "model": model, "system_prompt": SYSTEM, "tools": [], "setting_sources": [],
            "max_turns": 1, "cwd": folder.name, "env": env, **more,
        }
    )


async def ask(**more):
    """Messages of a conversation, of which the last is its result."""
    messages = [m async for m in sdk.query(prompt=QUESTION, options=options(**more))]
    result = messages[-1]
    assert isinstance(result, sdk.ResultMessage), messages
    return messages, result


def texts(messages):
    blocks = [b for m in messages if isinstance(m, sdk.AssistantMessage) for b in m.content]
    return "".join(block.text for block in blocks if isinstance(block, sdk.TextBlock))


@feature("chat")
async def chat():
    messages, result = await ask()
    assert texts(messages) and result.usage["output_tokens"], result
    assert not result.is_error, result


@feature("stream")
async def stream():
    messages, result = await ask(include_partial_messages=True)
    events = [m.event for m in messages if isinstance(m, sdk.StreamEvent)]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == texts(messages) != ""


@feature("tools")
async def tools():
    # The package cannot force a call. The model is told of the tool, and may call it.
    server = sdk.create_sdk_mcp_server("town", tools=[get_weather])
    named = ["mcp__town__get_weather"]
    messages, result = await ask(mcp_servers={"town": server}, allowed_tools=named, max_turns=2)
    start = messages[0]
    assert named[0] in start.data["tools"], start
    assert not result.is_error or result.subtype == "error_max_turns", result


@feature("errors")
async def errors():
    try:
        messages, result = await ask(model="none")
    except Exception as error:
        assert "model" in str(error), error
    else:
        assert result.is_error and "model" in str(result), result


main()
