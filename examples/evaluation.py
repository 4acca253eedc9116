#!/usr/bin/env python3
"""An evaluation: how often a model finds the right answer likelier than the wrong ones.

    pip install openai
    hearthnet serve                       # in another terminal
    python3 examples/evaluation.py examples/evaluation.jsonl

Each line of the file is {"question": TEXT, "choices": [TEXT, ...], "answer": INDEX}. The model generates
nothing: `echo` with `logprobs` and `max_tokens` 0 returns the log-probabilities of the prompt's own tokens
(specs/http-api.md 3). They do not depend on the hosts that share the layers, so the score is the same to
the bit on one machine and over several. `lm_eval --model local-completions` asks in the same way.
"""

import argparse
import json
import sys

import openai


def scores(client, model, question, choices):
    """Log-probability of each choice behind the question."""
    answer = client.completions.create(
        model=model,
        prompt=[f"{question} {choice}" for choice in choices],
        max_tokens=0,
        echo=True,
        logprobs=0,
        temperature=0,
    )
    found = []
    for choice in answer.choices:
        tokens = zip(choice.logprobs.text_offset, choice.logprobs.token_logprobs, strict=True)
        # A token that begins with the space before the choice belongs to it.
        found.append(sum(logprob for offset, logprob in tokens if offset >= len(question)))
    return found


def main(args):
    client = openai.OpenAI(base_url=args.url, api_key=args.key)
    model = args.model or next(iter(client.models.list())).id
    with open(args.file, encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file if line.strip()]
    if not tasks:
        sys.exit(f"{args.file} has no line with a question")
    right = 0
    for task in tasks:
        question, choices = task["question"], task["choices"]
        found = scores(client, model, question, choices)
        best = found.index(max(found))
        right += best == task["answer"]
        print(f"{question} {choices[best]}: {'right' if best == task['answer'] else 'wrong'}, {found[best]}")
    print(f"{right} of {len(tasks)} right: {right / len(tasks):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="JSON lines with questions")
    parser.add_argument("--url", default="http://127.0.0.1:7602/v1")
    parser.add_argument("--key", default="none", help="key of the service, if it has one")
    parser.add_argument("--model", help="id of the model [default: the first of the service]")
    try:
        main(parser.parse_args())
    except openai.APIConnectionError:
        sys.exit("no service answers there: start one with `hearthnet serve`, or give its address with --url")
    except openai.APIStatusError as error:
        sys.exit(error.message)
