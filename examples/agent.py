#!/usr/bin/env python3
"""An agent with tools: answers a question from the text files of a folder.

    pip install openai
    hearthnet serve                       # in another terminal
    python3 examples/agent.py --folder notes "Where is the key?"

The model may list the files and read them; each call is printed. A call always fits its tool's schema, also
when the layers of the model run on several hosts. specs/http-api.md 11 has the fields. Whether the model
calls the right tool depends on the model: with fewer than some billion parameters it often does not.
"""

import argparse
import json
import pathlib
import sys

import openai

TASK = "Answer from the files. List them, then read what you need, then answer in one sentence."

# Rounds of calls before the agent has to answer.
ROUNDS = 4


def tool(name, description, /, **properties):
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


def main(args):
    client = openai.OpenAI(base_url=args.url, api_key=args.key)
    model = args.model or next(iter(client.models.list())).id
    files = {path.name: path for path in sorted(pathlib.Path(args.folder).glob("*.txt"))}
    if not files:
        sys.exit(f"there are no .txt files in {args.folder}: give another folder with --folder")
    # The schema names the files, so the model cannot ask for another one.
    tools = [
        tool("list_files", "Lists the files."),
        tool("read_file", "Reads a file.", name={"type": "string", "enum": list(files)}),
    ]
    run = {
        "list_files": lambda: json.dumps(list(files)),
        "read_file": lambda name: files[name].read_text(encoding="utf-8")[:4000],
    }
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": args.question}]
    for left in reversed(range(ROUNDS + 1)):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=0, max_tokens=args.max_tokens,
            parallel_tool_calls=False,
            tool_choice=("required" if left == ROUNDS else "auto") if left else "none",
        )
        message = answer.choices[0].message
        # A call that a limit has cut is incomplete.
        if answer.choices[0].finish_reason != "tool_calls":
            print(message.content or "the model said nothing: ask again, or take a larger model")
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            print(call.function.name, call.function.arguments, file=sys.stderr)
            result = run[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("--folder", default=".", help="folder with the .txt files")
    parser.add_argument("--url", default="http://127.0.0.1:7602/v1")
    parser.add_argument("--key", default="none", help="key of the service, if it has one")
    parser.add_argument("--model", help="id of the model [default: the first of the service]")
    parser.add_argument("--max-tokens", type=int, default=500, help="longest turn")
    try:
        main(parser.parse_args())
    except openai.APIConnectionError:
        sys.exit("no service answers there: start one with `hearthnet serve`, or give its address with --url")
    except openai.APIStatusError as error:
        sys.exit(error.message)
