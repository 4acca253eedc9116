# /// script
# dependencies = ["llm==0.36", "openai==3.57.0"]
# ///
"""The command and library `llm`, with a node as one of its models."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from feature import QUESTION, SYSTEM, TOO_LONG, base_url, feature, main, model, raises

folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name
entry = {"model_name": model, "api_base": base_url, "supports_tools": True, "supports_schema": True}
entries = [
    {**entry, "model_id": "hearth"},
    {**entry, "model_id": "hearth-text", "completion": True},
    {**entry, "model_id": "hearth-responses", "responses": True},
    {**entry, "model_id": "none", "model_name": "none"},
]
# JSON is YAML.
pathlib.Path(folder.name, "extra-openai-models.yaml").write_text(json.dumps(entries))

import llm

SHORT = {"temperature": 0, "max_tokens": 12}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "mood": {"enum": ["good", "bad"]}},
    "required": ["name", "mood"],
}


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def hearth(name="hearth"):
    return llm.get_model(name)


@feature("models")
def models():
    assert "hearth-responses" in command("models")


@feature("chat")
def chat():
    said = hearth().prompt(QUESTION, system=SYSTEM, stream=False, **SHORT)
    assert said.text() and said.usage().output
    options = ["-o", "temperature", "0", "-o", "max_tokens", "12", "--no-stream"]
    assert command("-m", "hearth", "-s", SYSTEM, QUESTION, *options) == said.text().strip()
    # As `llm chat` does it.
    talk = hearth().conversation()
    talk.prompt(QUESTION, **SHORT).text()
    assert talk.prompt("Why?", **SHORT).text()


@feature("stream")
def stream():
    whole = hearth().prompt(QUESTION, stream=False, **SHORT).text()
    pieces = list(hearth().prompt(QUESTION, stream=True, **SHORT))
    assert "".join(pieces) == whole and len(pieces) > 2


@feature("settings")
def settings():
    options = {"temperature": 1, "seed": 5, "max_tokens": 12, "top_p": 0.9}
    said = hearth().prompt(QUESTION, **options).text()
    assert said == hearth().prompt(QUESTION, **options, logit_bias={"5": -10}).text()
    word = said.split()[2]
    assert hearth().prompt(QUESTION, **options, stop=word).text() == said[: said.index(word)]


@feature("tools")
def tools():
    # The package cannot force a call. The model sees the tool, and a call with its result.
    def get_weather(town: str) -> str:
        "Weather of a town."
        return "20 degrees in " + town

    talk = hearth().conversation().chain(QUESTION, tools=[get_weather], options=SHORT, chain_limit=3)
    assert isinstance(talk.text(), str)
    result = llm.ToolResult(name="get_weather", output="20 degrees", tool_call_id="abcdefghi")
    said = hearth().prompt(QUESTION, tools=[get_weather], tool_results=[result], **SHORT)
    assert isinstance(said.text(), str)


@feature("schema")
def schema():
    said = hearth().prompt(QUESTION, schema=PERSON, stream=False, temperature=0, max_tokens=200)
    assert json.loads(said.text())["mood"] in ("good", "bad")


@feature("schema-stream")
def schema_stream():
    pieces = hearth().prompt(QUESTION, schema=PERSON, temperature=0, max_tokens=200)
    assert json.loads("".join(pieces))["mood"] in ("good", "bad")


@feature("completions")
def completions():
    assert hearth("hearth-text").prompt("Once upon", **SHORT).text()


@feature("responses")
def responses():
    made = hearth("hearth-responses")
    options = {"max_output_tokens" if "max_output_tokens" in made.Options.model_fields else "max_tokens": 20}
    assert made.prompt(QUESTION, system=SYSTEM, **options).text()
    assert made.prompt(QUESTION, stream=False, **options).text()


@feature("errors")
def errors():
    raises(Exception, lambda: hearth().prompt(TOO_LONG, **SHORT).text(), "maximum context length")
    raises(Exception, lambda: hearth("none").prompt("x", **SHORT).text(), "none")


main()
