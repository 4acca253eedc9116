#!/usr/bin/env python3
"""Transfer of a large model to three homes with empty disks, from one home that has the file.

    rate      The homes join with `hearthnet up`, and fetch what they will hold. Bytes received against
              bytes held; rate of the links; memory and processor time.
    answers   The home with the file answers chats with a small model, together with another home.
              Meanwhile three homes fetch a third of the large model each. Time per token before and
              during the transfer.

Homes share this machine's cores. If its processor is busy, that limits the rate: compare `cpu_percent`.
"""

import tempfile
import time
from pathlib import Path

from homes import (
    MIB,
    Failed,
    Network,
    Sampler,
    arguments,
    budget,
    finish,
    main,
    median,
    parsed,
    random_model,
    say,
    until,
    usage,
)

EMPTY = ["bakery", "cellar", "dairy"]
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits(rate):
    """Bits per second of a rate as `tc` writes it."""
    for unit, factor in BITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise Failed(f"write the rate as 1gbit or 500mbit, not {rate}")


def report_link(figures, sampler, name, column, link_bits):
    """Rate of a home's link during its transfer, and its best rate of five seconds."""
    begin, end, size = sampler.window(name, column)

    def percent(rate):
        return round(100 * 8 * rate / link_bits, 1)

    figures["seconds"] = round(end - begin, 1)
    figures["percent_of_link"] = percent(size / max(end - begin, 0.1))
    figures["best_5s_percent_of_link"] = percent(sampler.best_rate(name, column))
    say(
        f"{name} {['received', 'sent'][column - 1]} {size / MIB:.0f} MiB in {end - begin:.1f} s: "
        f"{figures['percent_of_link']} % of the link, {figures['best_5s_percent_of_link']} % in its best 5 s"
    )


def measure_rate(options, file):
    say("\nrate: three empty homes join with `hearthnet up`")
    figures = {"homes": {}}
    # Layers of all models would not fit into memory several times.
    setting = f"research.distributed_inference.host.memory_budget_mb={options.budget}"
    with Network(options, ["attic", *EMPTY], [setting]) as net:
        attic, others = net["attic"], [net[name] for name in EMPTY]
        for home in net.homes.values():
            home.limit(options.rate)
        founder = attic.up("--found", "Elm Street", "--model", file)
        until("the founder serves layers", attic.serving, pause=1)
        before = {home.name: (home.interface(), home.link()) for home in net.homes.values()}
        daemons = [home.join(founder.code, wait=False) for home in others]
        with Sampler([founder, *daemons]) as sampler:
            for home in others:
                home.daemon.until_ready()
            for home in others:
                until(f"{home.name} serves layers", home.serving, options.patience, 2)
            settled = lambda: not any(home.is_fetching() for home in others)
            until("all is fetched", settled, options.patience, 2)
            time.sleep(1)
        link = bits(options.rate)
        needed_all = got_all = 0
        for home in others:
            needed = home.needed()
            got, frames = (
                now[0] - then[0]
                for now, then in zip((home.interface(), home.link()), before[home.name])
            )
            needed_all, got_all = needed_all + needed, got_all + got
            window = sampler.window(home.name, 1)
            of = figures["homes"][home.name] = {
                "layers": home.serving(),
                "needed_bytes": needed,
                "interface_bytes": got,
                "frame_bytes": frames,
                "ratio": round(got / needed, 4),
                "usage": sampler.usage_of(home.name, window[0], window[1]),
            }
            report_link(of, sampler, home.name, 1, link)
            say(
                f"  needed {needed / MIB:.1f} MiB, received {got / MIB:.1f} MiB: {got / needed:.4f} "
                f"({frames / needed:.4f} with the headers of all frames); {of['usage']}"
            )
        figures["ratio"] = round(got_all / needed_all, 4)
        begin, end, _ = sampler.window("attic", 2)
        of = figures["homes"]["attic"] = {"usage": sampler.usage_of("attic", begin, end)}
        report_link(of, sampler, "attic", 2, link)
        # Receivers load what they have fetched for their own chats before they choose layers to serve.
        of["idle_seconds"] = round(sampler.idle("attic", 2, begin, end, link / 8 / 10), 1)
        say(f"  below a tenth of the link for {of['idle_seconds']} s; {of['usage']}")
        windows = [sampler.window(home.name, 1) for home in others]
        whole = max(w[1] for w in windows) - min(w[0] for w in windows)
        figures["all_receive_percent_of_link"] = round(
            100 * 8 * sum(w[2] for w in windows) / whole / link, 1
        )
        figures["sender_percent_of_link"] = of["percent_of_link"]
        figures["cpu_percent"] = sampler.cpu_percent(begin, end)
        say(
            f"together: {figures['ratio']} of the bytes needed (goal: at most 1.02); the sender's link "
            f"{of['percent_of_link']} % (goal: at least 85); receivers together "
            f"{figures['all_receive_percent_of_link']} % of one link; processor {figures['cpu_percent']} %"
        )
    return figures


def per_token_ms(answer):
    """Times of a token in ms: all of it, computing on hosts, and the rest of the round trips."""
    tokens = answer["usage"]["completion_tokens"]
    if tokens < 8:
        raise Failed(f"the answer has only {tokens} tokens")
    hops = answer["timings"]["hops"]
    compute = sum(hop["compute_us_p50"] for hop in hops) / 1e3
    wire = sum(hop["overhead_us_p50"] for hop in hops) / 1e3
    return answer["timings"]["decode_ms"] / (tokens - 1), compute, wire


def measure_answers(options, file):
    say("\nanswers: chats of a small model during a transfer from the home that asks")
    settings = ["engine.threads=1"]
    with Network(options, ["attic", "mill", *EMPTY], settings) as net:
        attic, mill, others = net["attic"], net["mill"], [net[name] for name in EMPTY]
        for home in net.homes.values():
            home.limit(options.rate)
        # Room for half of the small model's layers, and for none of the large one's.
        layers = attic.json("model", "inspect", options.model)["layer_bytes"]
        attic.settings.append(budget(layers, len(layers) // 2))
        founder = attic.up("--found", "Elm Street", "--model", options.model)
        until("attic serves layers", attic.serving, pause=0.5)
        last = attic.serving()[1]
        mill.enter(founder.code)
        mill.serve("--model", options.model, "--layers", f"{last + 1}-{len(layers) - 1}")
        until("mill serves layers", mill.serving, pause=0.5)
        say("the community adopts the large model: its file is read once")
        attic.run("model", "adopt", file, seconds=options.patience)
        for home in others:
            home.enter(founder.code)

        def ask():
            answer = attic.chat(options.model, options.tokens)
            return per_token_ms(answer), {hop.get("host") for hop in answer["route"]}

        until("chats use both homes", lambda: len(ask()[1] - {None}) >= 2, 60)
        before, _ = [], time.sleep(options.settle)
        begin = time.monotonic()
        for _ in range(options.answers):
            before.append(ask()[0])
        name = file.stem
        total = attic.json("model", "inspect", file)["spec"]["layers"]
        cuts = [round(total * third / 3) for third in range(4)]
        pulls = []
        with Sampler([founder, mill.daemon]) as sampler:
            idle = (begin, time.monotonic())
            begin = time.monotonic()
            for home, lo, hi in zip(others, cuts, cuts[1:]):
                pulls.append(home.start("model", "pull", name, "--layers", f"{lo}-{hi - 1}"))
            peak, during = [0] * len(pulls), []
            while any(pull.is_running() for pull in pulls):
                during.append(ask()[0])
                for at, pull in enumerate(pulls):
                    if pull.is_running():
                        peak[at] = max(peak[at], usage(pull.pid)[1])
            end = time.monotonic()
            for pull in pulls:
                pull.end()
            time.sleep(1)
        sent = sampler.window("attic", 2)
        # The last answer outlasted the transfer.
        during = during[:-1] or during
        parts = ["token", "compute", "wire"]
        times = {
            when: {part: round(median([it[at] for it in all]), 3) for at, part in enumerate(parts)}
            for when, all in (("before", before), ("during", during))
        }
        ratio = times["during"]["token"] / times["before"]["token"]
        rate = 8 * sent[2] / (sent[1] - sent[0])
        figures = {
            "ratio": round(ratio, 3),
            "ms_per_token": times,
            "answers": [len(before), len(during)],
            "transfer_seconds": round(end - begin, 1),
            "sender_percent_of_link": round(100 * rate / bits(options.rate), 1),
            "receivers_max_without_files_mib": [round(it / MIB) for it in peak],
            "sender_usage": sampler.usage_of("attic", sent[0], sent[1]),
            "cpu_percent": sampler.cpu_percent(begin, end),
        }
        figures["seconds_before"] = round(idle[1] - idle[0], 1)
        say(f"a token takes {times['before']['token']} ms before, {times['during']['token']} ms during: ")
        say(f"  ratio {ratio:.3f} (goal: at most 1.2); hosts and wire: {times}")
        say(f"  the sender's link at {figures['sender_percent_of_link']} %, processor {figures['cpu_percent']} %")
    return figures


def run():
    options = arguments(__doc__.splitlines()[0])
    options.add_argument("--rate", default="1gbit", help="of each link [%(default)s]")
    options.add_argument("--only", choices=["rate", "answers"], help="one of the two measurements")
    options.add_argument("--budget", type=int, default=2048, metavar="MIB", help="for layers, per home [%(default)s]")
    options.add_argument("--answers", type=int, default=15, help="before the transfer [%(default)s]")
    options.add_argument("--tokens", type=int, default=48, help="per answer [%(default)s]")
    options.add_argument("--settle", type=float, default=20, help="seconds before the first answer [%(default)s]")
    options.add_argument("--patience", type=int, default=900, help="seconds for the transfer [%(default)s]")
    options = parsed(options)
    with tempfile.TemporaryDirectory(prefix="hn-", dir=options.dir) as files:
        file = random_model(options, Path(files))
        figures = {"file_bytes": file.stat().st_size}
        if options.only != "answers":
            figures["rate"] = measure_rate(options, file)
        if options.only != "rate":
            figures["answers"] = measure_answers(options, file)
        finish(figures)


if __name__ == "__main__":
    main(run)
