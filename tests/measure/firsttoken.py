#!/usr/bin/env python3
"""Time from the first command to the first token, in three homes with empty disks.

The first home has the model's file. Each home runs `hearthnet up`, and the last one asks the others.
Also prints the bytes that the other two homes received, against the bytes that they hold.
"""

import json
import time

from homes import MIB, Failed, Network, arguments, finish, main, parsed, say, until


def ask(home):
    """Seconds until the first token of an answer of the community, or `None` if it has none yet."""
    question = ["chat", "Why is it good to share?", "--no-fallback", "--frames", "--max-tokens", "16"]
    chat = home.start(*question)
    first = None
    while chat.is_running():
        lines = chat.out.read_text().splitlines()
        if first is None and any(is_token(line) for line in lines):
            first = time.monotonic()
        time.sleep(0.02)
    return first or (time.monotonic() if any(map(is_token, chat.out.read_text().splitlines())) else None)


def is_token(line):
    try:
        return json.loads(line).get("event") == "token_delta"
    except ValueError:
        return False


def run():
    options = arguments(__doc__.splitlines()[0], shape=False)
    options.add_argument("--rate", default="1gbit", help="of each link [%(default)s]")
    options = parsed(options)
    with Network(options, ["attic", "bakery", "cellar"]) as net:
        homes = [net[name] for name in net.names]
        for home in homes:
            home.limit(options.rate)
        begin = time.monotonic()

        def passed():
            return round(time.monotonic() - begin, 2)

        founder = net["attic"].up("--found", "Elm Street", "--model", options.model)
        if not founder.code:
            raise Failed(f"no invite code: {founder.said()}")
        figures = {"founder_ready_s": passed()}
        say(f"founder ready after {passed()} s")
        for home in homes[1:]:
            home.join(founder.code)
            say(f"{home.name} ready after {passed()} s")
        first = until("an answer", lambda: ask(net["cellar"]), pause=0.1)
        figures["first_token_s"] = round(first - begin, 2)
        say(f"first token after {figures['first_token_s']} s")
        for home in homes:
            until(f"{home.name} serves layers", home.serving, pause=0.5)
        until("all is fetched", lambda: not any(home.is_fetching() for home in homes), pause=0.5)
        figures["all_serve_s"] = passed()
        say(f"all homes serve after {passed()} s: {[home.serving() for home in homes]}")
        figures["homes"] = {}
        for home in homes[1:]:
            needed, (got, _), (frames, _) = home.needed(), home.interface(), home.link()
            figures["homes"][home.name] = {
                "needed_bytes": needed,
                "interface_bytes": got,
                "frame_bytes": frames,
                "ratio": round(got / needed, 4),
            }
            say(
                f"{home.name}: {got / MIB:.1f} MiB received for {needed / MIB:.1f} MiB needed: "
                f"{got / needed:.4f} ({frames / needed:.4f} with the headers of all frames)"
            )
        all_needed = sum(it["needed_bytes"] for it in figures["homes"].values())
        all_got = sum(it["interface_bytes"] for it in figures["homes"].values())
        figures["ratio"] = round(all_got / all_needed, 4)
        say(f"together: {figures['ratio']} (goal: at most 1.02); goal for the first token: 300 s")
        finish(figures)


if __name__ == "__main__":
    main(run)
