#!/usr/bin/env python3
"""JSON by schema: prints the people that a text names, as JSON of a fixed form.

    pip install openai
    hearthnet serve                       # in another terminal
    python3 examples/json_by_schema.py "Ada Lovelace was born in London in 1815."

The answer is always JSON that the schema describes: only tokens that continue such JSON are sampled. It is
the same on one machine and over hosts, however they share the layers. specs/http-api.md 10 has the keywords
and limits. Whether the answer is also true depends on the model.
"""

import argparse
import json
import sys

import openai

# Lengths are limited, so that a small model cannot fill the answer with one text.
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
                },
                "required": ["name", "born"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}

# The model does not see the schema: the prompt says what is in the JSON.
TASK = "Answer in JSON: the list `people`, each with `name` and `born`, the year of birth."


def main(args):
    client = openai.OpenAI(base_url=args.url, api_key=args.key)
    model = args.model or next(iter(client.models.list())).id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": TASK}, {"role": "user", "content": args.text}],
        response_format={"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}},
        temperature=0,
    )
    choice = answer.choices[0]
    if choice.finish_reason != "stop":
        sys.exit("the model's context is full, and the JSON is not complete: shorten the text")
    print(json.dumps(json.loads(choice.message.content), ensure_ascii=False, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text")
    parser.add_argument("--url", default="http://127.0.0.1:7602/v1")
    parser.add_argument("--key", default="none", help="key of the service, if it has one")
    parser.add_argument("--model", help="id of the model [default: the first of the service]")
    try:
        main(parser.parse_args())
    except openai.APIConnectionError:
        sys.exit("no service answers there: start one with `hearthnet serve`, or give its address with --url")
    except openai.APIStatusError as error:
        sys.exit(error.message)
