#!/usr/bin/env python3
"""A large model over three homes that begin with `hearthnet up`: one has the file, two have empty disks.

Prints what each home serves and how much memory it takes, the time until all layers are served, the speed
of one chat of the home that has the file, and the speed of the same chat by one process with all layers.
Both answers must have the same tokens.

Each home has one thread and one private layer, and all share the cores and the memory of this machine. `--experts` makes a
mixture smaller where that memory does not suffice: the work for a token stays the same.
"""

import tempfile
import time
from pathlib import Path

from homes import (
    MIB,
    Failed,
    Network,
    arguments,
    finish,
    main,
    median,
    parsed,
    random_model,
    rate,
    say,
    until,
    usage,
)

OTHERS = ["bakery", "cellar"]


def covered(homes, layers):
    """Ranges that the homes serve, by name, once they cover all layers."""
    found = {home.name: home.serving() for home in homes}
    held = {n for served in found.values() if served for n in range(served[0], served[1] + 1)}
    return found if held >= set(range(layers)) else None


def measure(options, file, folder):
    settings = [
        f"research.distributed_inference.host.memory_budget_mb={options.budget}",
        "engine.threads=1",
        "research.distributed_inference.private_first_layers=1",
    ]
    options.dir = folder
    with Network(options, ["attic", *OTHERS], settings) as net:
        attic, homes = net["attic"], list(net.homes.values())
        layers = attic.json("model", "inspect", file)["spec"]["layers"]
        begin = time.monotonic()
        founder = attic.up("--found", "Elm Street", "--model", file)
        until("the founder serves layers", attic.serving, pause=1)
        say(f"attic is ready after {time.monotonic() - begin:.1f} s, layers {attic.serving()} of {layers}")
        begin = time.monotonic()
        for name in OTHERS:
            net[name].join(founder.code, wait=False)
        serving = until("all layers are served", lambda: covered(homes, layers), options.patience, 0.5)
        figures = {"served_seconds": round(time.monotonic() - begin, 1), "homes": {}}
        say(f"all layers are served {figures['served_seconds']} s after the others began: {serving}")
        attic.chat(file, 8)
        answers = [attic.chat(file, options.tokens) for _ in range(options.answers)]
        for home in homes:
            resident, anonymous, _ = usage(home.daemon.pid)
            figures["homes"][home.name] = {
                "layers": home.serving(),
                "without_files_mib": round(anonymous / MIB),
                "resident_mib": round(resident / MIB),
            }
            say(f"{home.name}: {figures['homes'][home.name]}")
        for home in homes:
            home.daemon.stop()
        alone = [attic.chat(file, options.tokens, alone=True) for _ in range(2)]
    if len({answer["text"] for answer in [*answers, *alone]}) != 1:
        raise Failed("the answers differ")
    for what, found in (("over three homes", answers), ("one process alone", alone)):
        figures[what] = {
            "first_token_ms": round(median([it["timings"]["first_token_ms"] for it in found])),
            "tokens_per_second": round(median(list(map(rate, found))), 2),
        }
        say(f"{what}: {figures[what]}")
    figures["prompt_tokens"] = answers[0]["usage"]["prompt_tokens"]
    finish(figures)


def run():
    options = arguments(__doc__)
    options.set_defaults(shape="qwen3.6-35b-a3b")
    options.add_argument("--experts", help="experts per layer of the random model [as the shape has]")
    options.add_argument("--budget", type=int, default=8000, help="MiB for weights in each home [%(default)s]")
    options.add_argument("--tokens", type=int, default=48, help="tokens of an answer [%(default)s]")
    options.add_argument("--answers", type=int, default=5, help="answers over the homes [%(default)s]")
    options.add_argument("--patience", type=int, default=1800, help="seconds to fetch and load [%(default)s]")
    options = parsed(options)
    with tempfile.TemporaryDirectory(prefix="hn-", dir=options.dir) as folder:
        measure(options, random_model(options, Path(folder)), Path(folder))


if __name__ == "__main__":
    main(run)
