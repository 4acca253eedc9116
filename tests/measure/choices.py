#!/usr/bin/env python3
"""Eight answers to one prompt of 1,500 tokens over two hosts: `n` 8 against eight separate calls.

The caller's home and two hosts, with half of the layers each, have a namespace each. The time is that from
the request to the last token of the last answer. Separate calls are measured in three ways:

    one by one, other users    each call runs the prompt again
    one by one, one user       later calls find the prompt in the conversation that the service keeps
    at once                    eight calls of one user at the same time, four of which run together

Each way asks as another user, so none finds the prompt of another one. All ways must give the same texts.
"""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

from homes import Failed, Network, arguments, finish, main, median, parsed, say, until

CALLER, HOSTS = "attic", ["bakery", "cellar"]
# Seed of answer i beside that of answer 0 (specs/http-api.md 3).
STEP = 0x9E3779B97F4A7C15
WAYS = ["n", "one by one, other users", "one by one, one user", "at once"]


class Client:
    """Asks the caller's service. Runs in its namespace."""

    def __init__(self, url, model, options):
        self.at, self.model, self.options = urlsplit(url), model, options

    def ask(self, prompt, seed, user, n=1):
        connection = http.client.HTTPConnection(self.at.hostname, self.at.port, timeout=1200)
        body = {
            "model": self.model, "prompt": prompt, "seed": seed % 2**64, "n": n, "user": user,
            "max_tokens": self.options["tokens"], "temperature": 1,
            # So that all answers have the same length.
            "logit_bias": {str(end): -100 for end in self.options["ends"]},
        }
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        connection.close()
        if reply.status != 200:
            raise Failed(f"status {reply.status}: {answer}")
        return [choice["text"] for choice in answer["choices"]]

    def run(self, way, prompt, count):
        """Seconds, and the texts. A user finds only its own prompts in kept conversations."""
        seeds = [number * STEP for number in range(count)]
        texts = [None] * count
        begin = time.monotonic()
        if way == "n":
            texts = self.ask(prompt, 0, n=count, user=way)
        elif way == "at once":

            def one(number):
                [texts[number]] = self.ask(prompt, seeds[number], user=way)

            threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for number, seed in enumerate(seeds):
                user = way if way.endswith("one user") else f"{way} {number}"
                [texts[number]] = self.ask(prompt, seed, user=user)
        return time.monotonic() - begin, texts

    def measure(self):
        source = random.Random(self.options["round"])
        prompt = [source.randrange(1000, 40000) for _ in range(self.options["prompt"])]
        found = {}
        for way in WAYS:
            seconds, texts = self.run(way, prompt, self.options["answers"])
            found[way] = {"seconds": seconds, "texts": texts}
        return found


def ready(process):
    """Object that a serving command prints when it is ready."""

    def line():
        if not process.is_running():
            raise Failed(f"{process.home.name} ended: {process.said()}")
        lines = process.out.read_text().splitlines()
        return json.loads(lines[0]) if lines else None

    return until(f"{process.home.name} is ready", line)


def run():
    if sys.argv[1:2] == ["--ask"]:
        url, model, options = sys.argv[2:]
        print(json.dumps(Client(url, model, json.loads(options)).measure()))
        return
    options = arguments(__doc__.splitlines()[0], shape=False)
    options.add_argument("--rate", default="1gbit", help="of each link [%(default)s]")
    options.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt [%(default)s]")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each answer [%(default)s]")
    options.add_argument("--answers", type=int, default=8, help="answers, at most 8 [%(default)s]")
    options.add_argument("--rounds", type=int, default=3, help="medians of so many [%(default)s]")
    options.add_argument(
        "--ends", default="0,2", help="tokens that end an answer of the model, never sampled [%(default)s]"
    )
    options = parsed(options)
    settings = ["policy.research.enable=true", "engine.threads=1", "discovery.mdns=false"]
    with Network(options, [CALLER, *HOSTS], settings) as net:
        caller = net[CALLER]
        for home in net.homes.values():
            home.limit(options.rate)
        layers = caller.json("model", "inspect", options.model)["spec"]["layers"]
        cuts = [f"0-{layers // 2 - 1}", f"{layers // 2}-{layers - 1}"]
        key = caller.json("id")["node_id"]
        shards = []
        for name, part in zip(HOSTS, cuts):
            home = net[name]
            host = home.start(
                "shard", "serve", "--json", "--model", options.model, "--layers", part,
                "--listen", f"{home.address}:0", "--peer-key", key,
            )
            shards += ["--shard", ready(host)["address"]]
        serve = ["serve", "--json", "--http", "127.0.0.1:0", "--model", options.model, *shards]
        service = ready(caller.start(*serve))
        rounds = []
        for number in range(options.rounds):
            asked = {
                "prompt": options.prompt, "tokens": options.tokens, "answers": options.answers,
                "ends": [int(end) for end in options.ends.split(",")], "round": number,
            }
            command = ["ip", "netns", "exec", caller.space, sys.executable, __file__, "--ask"]
            command += [service["url"], service["models"][0], json.dumps(asked)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise Failed(done.stderr.strip())
            rounds.append(json.loads(done.stdout))
        seconds = {way: median([one[way]["seconds"] for one in rounds]) for way in WAYS}
        same = all(one[way]["texts"] == one["n"]["texts"] for one in rounds for way in WAYS)
        figures = {
            "prompt_tokens": options.prompt, "answer_tokens": options.tokens,
            "answers": options.answers, "same_texts": same,
            "seconds": {way: round(value, 2) for way, value in seconds.items()},
            "times_faster": {way: round(seconds[way] / seconds["n"], 2) for way in WAYS[1:]},
        }
        say(f"n {options.answers}: {seconds['n']:.2f} s to the last token; texts the same: {same}")
        for way in WAYS[1:]:
            say(f"{way}: {seconds[way]:.2f} s, {seconds[way] / seconds['n']:.2f} times as long (goal: 3)")
        finish(figures)


if __name__ == "__main__":
    main(run)
