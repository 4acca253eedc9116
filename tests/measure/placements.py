#!/usr/bin/env python3
"""Predicted against measured tokens per second of one chat, over placements of a model's layers.

For each model and each kind of machines: four homes run, one of which chats. They measure themselves and
announce that. From these numbers alone, the formula of specs/placement.md 2 predicts each placement.
Then each placement is set up with `serve --layers`, and measured. The placement that `hearthnet plan`
chooses is one of them.
"""

import json
import tempfile
import time
from pathlib import Path

from homes import MIB, Failed, Network, arguments, finish, main, median, parsed, random_model, rate, say, until

CALLER, HOSTS = "attic", ["bakery", "cellar", "dairy"]
# Values of the planner for links without a measurement.
DELAY_US, KBIT_S = 1_000, 100_000
# Tokens for which the planner keeps memory.
KV_TOKENS = 4_096

# Per kind: of each home its threads, or its share of a core, the delay of its link in ms each way, and its
# rate. `room` is the share of the layers that fits into each home's memory.
KINDS = {
    "alike": {"room": 1.1, "homes": {}},
    "threads": {
        "room": 1.1,
        "homes": {"bakery": {"threads": 2}, "cellar": {"delay": 2}, "dairy": {"rate": "50mbit"}},
    },
    # The kernel enforces shares at its ticks, every 4 ms or so. Short steps are hardly slowed down.
    "shares": {
        "room": 1.1,
        "homes": {
            "attic": {"share": 0.6},
            "bakery": {"share": 0.5},
            "cellar": {"delay": 2},
            "dairy": {"share": 0.3, "rate": "50mbit"},
        },
    },
    # No home can hold the whole model.
    "small": {
        "room": 0.6,
        "homes": {"bakery": {"threads": 2, "delay": 1}, "dairy": {"delay": 4, "rate": "100mbit"}},
    },
}
# Kinds for each model: steps of the small one are short.
MODELS = {"real": ["alike", "threads", "small"], "random": ["alike", "shares", "small"]}


class Model:
    """What the formula needs to know of a file."""

    def __init__(self, file, home):
        shown = home.json("model", "inspect", file)
        spec = shown["spec"]
        self.file, self.weights = file, shown["weights"]
        self.layers = spec["layers"]
        self.layer_bytes = shown["layer_bytes"]
        self.kv_bytes = sum(shown["kv_bytes_per_position"]) * min(spec["context"], KV_TOKENS)
        self.row_bytes = spec["width"] * (4 if spec["boundary"] == "f32" else 2)


class Street:
    """The running homes of one kind, with one model."""

    def __init__(self, net, model, options):
        self.net, self.model, self.options = net, model, options
        self.serving = {}
        self.ids = {}
        attic = net[CALLER]
        attic.run("init", "--research", "--name", CALLER)
        attic.run("community", "create", "Elm Street", "--research", "on", "--as", CALLER)
        self.restart(CALLER, None)
        code = attic.json("community", "invite", "--level", "trusted", "--uses", "8")["code"]
        for name in HOSTS:
            net[name].enter(code)
        for home in net.homes.values():
            self.ids[home.name] = home.json("id")["node_id"]

    def restart(self, name, layers):
        home = self.net[name]
        if home.daemon:
            home.daemon.stop()
        home.serve("--model", self.model.file, *(["--layers", layers] if layers else []))
        self.serving[name] = layers

    def place(self, placement):
        """Starts the homes that serve other layers than before; homes without layers stop."""
        for name in self.net.names:
            layers = placement.get(name)
            text = f"{layers[0]}-{layers[1]}" if layers else None
            if name != CALLER and not text:
                if self.net[name].daemon:
                    self.net[name].daemon.stop()
                self.serving.pop(name, None)
            elif self.serving.get(name, "none") != text:
                self.restart(name, text)
        wanted = {(self.ids[name], *layers) for name, layers in placement.items()}
        until(f"{CALLER} sees {placement}", lambda: self.advertised() == wanted, pause=0.5)

    def advertised(self):
        found = set()
        for model in self.net[CALLER].json("status")["models"]:
            if model["weights_sha256"] == self.model.weights:
                shards = [it for it in model["shards"] if it["reachable"]]
                found |= {(it["node"], *it["descriptor"]["layer_range"]) for it in shards}
        return found

    def measured(self):
        """Newest measurements of each home, as the caller's log has them."""
        found = {}
        for line in self.net[CALLER].run("log", "show", "--json")[1].splitlines():
            event = json.loads(line)
            if event["kind"] == "node.measured":
                found[event["author"]] = event["body"]
        return {name: found.get(node) for name, node in self.ids.items()}

    def speeds(self):
        """Numbers of the formula, or `None` while some are missing."""
        found = {}
        measured = self.measured()
        for name, body in measured.items():
            models = [it for it in (body or {}).get("models", []) if it["weights"] == self.model.weights]
            if not models or not models[0]["layer_us"]:
                return None
            found[name] = models[0]
        links = {it["node"]: it for it in measured[CALLER]["links"]}
        if not found[CALLER]["head_us"] or any(self.ids[name] not in links for name in HOSTS):
            return None
        for name in HOSTS:
            found[name] = {**found[name], "link": links[self.ids[name]]}
        return found

    def calibrate(self, first, last):
        """Homes measure themselves while they answer a few chats, a third of the layers each."""
        cuts = [first + round((last + 1 - first) * third / 3) for third in range(4)]
        self.place({name: (lo, hi - 1) for name, lo, hi in zip(HOSTS, cuts, cuts[1:])})
        for _ in range(4):
            self.ask()

        def ready():
            # Links to hosts that did not answer lately are not announced.
            self.ask()
            time.sleep(5)
            return self.speeds()

        until("all homes announce measurements", ready, 400)
        # Announcements follow a change within 40 s: the last chats count as well.
        time.sleep(self.options.settle)
        return self.speeds() or until("measurements", ready, 400)

    def ask(self, alone=False):
        answer = self.net[CALLER].chat(self.model.file, self.options.tokens, alone)
        if answer["usage"]["completion_tokens"] < 8:
            raise Failed("the answer is too short to be measured")
        return answer

    def measure(self, placement):
        """Tokens per second, and whether the answers took another route."""
        alone = not placement
        if not alone:
            self.place(placement)
            # A node that just started measures itself.
            time.sleep(2)
        self.ask(alone)
        answers = [self.ask(alone) for _ in range(self.options.answers)]
        used = {(hop.get("host"), *hop["layers"]) for it in answers for hop in it["route"] if hop.get("host")}
        wanted = {(self.ids[name], *layers) for name, layers in placement.items()}
        # Own layers are in this process: their hop may name no host.
        other = not alone and not used <= wanted
        return median(list(map(rate, answers))), other


def predict(placement, speeds, model, first):
    """Tokens per second by the formula. An empty placement is the caller alone."""
    caller = speeds[CALLER]
    if not placement:
        us = caller["head_us"] + model.layers * caller["layer_us"]
    else:
        us = caller["head_us"] + first * caller["layer_us"]
        for name, (lo, hi) in placement.items():
            us += speeds[name]["step_us"] + (hi - lo + 1) * speeds[name]["layer_us"]
            if name != CALLER:
                link = speeds[name]["link"]
                wire = model.row_bytes * 8000 / (link["kbit_s"] or KBIT_S)
                us += 2 * ((link["delay_us"] or DELAY_US) + wire)
    return 1e6 / us


def spread(first, last, shares):
    """Cuts the layers by shares: `{home: share}`."""
    whole, at, found = sum(shares.values()), first, {}
    for number, (name, share) in enumerate(shares.items(), 1):
        count = round((last + 1 - first) * share / whole)
        end = last if number == len(shares) else at + count - 1
        found[name] = (at, end)
        at = end + 1
    return found


def placements(first, last, room):
    """Placements to measure: one home, two in unlike shares, all."""
    b, c, d = HOSTS
    shares = [
        {},
        {b: 1},
        {c: 1},
        {d: 1},
        {b: 1, c: 1},
        {c: 1, d: 1},
        {b: 1, c: 1, d: 1},
        {b: 1, c: 3},
        {CALLER: 1, c: 1},
        {d: 1, b: 1, c: 2},
        {CALLER: 1, b: 1, d: 1},
    ]
    for each in shares:
        placement = spread(first, last, each)
        if all(hi - lo + 1 <= room for lo, hi in placement.values()) and (each or room > last):
            yield placement


def text(placement):
    return ", ".join(f"{name} {lo}-{hi}" for name, (lo, hi) in placement.items()) or f"{CALLER} alone"


def chosen(plan, ids):
    """Placement that `hearthnet plan` recommends."""
    if plan["advice"] == "alone":
        return {}
    computes = {row["node"]: row["computes"] for row in plan["nodes"]}
    return {name: tuple(computes[node][0]) for name, node in ids.items() if computes.get(node)}


def measure_kind(kind, label, file, options):
    about = KINDS[kind]
    delays = {name: it["delay"] for name, it in about["homes"].items() if "delay" in it}
    settings = [
        "research.distributed_inference.host.drain_seconds=0",
        # Times of a stage, not of a queue.
        "manners.niceness=0",
    ]
    say(f"\n{label}, machines {kind}: {about['homes'] or 'one core each, 1 Gbit/s'}")
    with Network(options, [CALLER, *HOSTS], settings, delays) as net:
        for home in net.homes.values():
            own = about["homes"].get(home.name, {})
            home.limit(own.get("rate", "1gbit"))
            home.settings.append(f"engine.threads={own.get('threads', 1)}")
            if "share" in own:
                home.slow_down(own["share"])
        model = Model(file, net[CALLER])
        # Homes add the head to what they announce, because the planner keeps memory for it.
        budget = {
            "memory_budget_mb": about["room"] * sum(model.layer_bytes),
            "kv_budget_mb": about["room"] * model.kv_bytes,
        }
        for home in net.homes.values():
            for key, size in budget.items():
                home.settings.append(f"research.distributed_inference.host.{key}={-(-int(size) // MIB)}")
        room = int(about["room"] * model.layers)
        street = Street(net, model, options)
        first, last = options.private, model.layers - 1
        speeds = street.calibrate(first, last)
        for name, speed in speeds.items():
            say(f"  {name}: {speed['layer_us']} us per layer, step {speed['step_us']}, head {speed['head_us']} us, link {speed.get('link')}")
        plan = net[CALLER].json("plan", file)
        best = chosen(plan, street.ids)
        says = (plan if best else plan["alone"])["tokens_per_second"]
        say(f"  the plan: {text(best)}, {says:.2f} tokens/s, advice {plan['advice']}")
        wanted = [best] + [it for it in placements(first, last, room) if it != best]
        rows = []
        for placement in wanted[: options.placements]:
            predicted = predict(placement, speeds, model, first)
            measured, other = street.measure(placement)
            error = (predicted - measured) / measured
            rows.append(
                {
                    "model": label,
                    "machines": kind,
                    "placement": {name: list(layers) for name, layers in placement.items()},
                    "predicted": round(predicted, 3),
                    "measured": round(measured, 3),
                    "error": round(error, 4),
                    "other_route": other,
                }
            )
            note = "  (ANOTHER ROUTE)" if other else ""
            say(f"  {predicted:8.2f} predicted {measured:8.2f} measured {100 * error:+6.1f} %  {text(placement)}{note}")
        most = max(row["measured"] for row in rows)
        single = [row["measured"] for row in rows if len(row["placement"]) <= 1]
        summary = {
            "model": label,
            "machines": kind,
            "plan_says": says,
            "formula_says": rows[0]["predicted"],
            "chosen_of_best": round(rows[0]["measured"] / most, 4),
            "chosen_of_one_machine": round(rows[0]["measured"] / max(single), 4) if single else None,
            "speeds": speeds,
        }
        say(f"  chosen / best measured: {summary['chosen_of_best']}; / best single: {summary['chosen_of_one_machine']}")
        return rows, summary


def run():
    options = arguments(__doc__.splitlines()[0])
    options.set_defaults(shape="llama-3.2-3b")
    options.add_argument("--machines", help=f"kinds of machines, of {','.join(KINDS)} [three, by model]")
    options.add_argument("--models", default="real,random", help="[%(default)s]")
    options.add_argument("--placements", type=int, default=12, help="at most, per model and kind [%(default)s]")
    options.add_argument("--tokens", type=int, default=48, help="per answer [%(default)s]")
    options.add_argument("--answers", type=int, default=3, help="per placement [%(default)s]")
    options.add_argument("--settle", type=float, default=100, help="seconds for announcements [%(default)s]")
    options.add_argument("--private", type=int, default=2, help="first layers that the caller runs [%(default)s]")
    options = parsed(options)
    rows, summaries = [], []
    with tempfile.TemporaryDirectory(prefix="hn-", dir=options.dir) as files:
        for label in options.models.split(","):
            file = options.model if label == "real" else random_model(options, Path(files))
            kinds = options.machines.split(",") if options.machines else MODELS[label]
            for kind in kinds:
                found, summary = measure_kind(kind, label, file, options)
                rows += found
                summaries.append(summary)
    errors = [abs(row["error"]) for row in rows]
    alone = [it["chosen_of_one_machine"] for it in summaries if it["chosen_of_one_machine"]]
    figures = {
        "placements": len(rows),
        "median_error": round(median(errors), 4),
        "worst_error": round(max(errors), 4),
        "worst_chosen_of_best": min(it["chosen_of_best"] for it in summaries),
        "worst_chosen_of_one_machine": min(alone) if alone else None,
        "other_routes": sum(row["other_route"] for row in rows),
        "kinds": summaries,
        "rows": rows,
    }
    say(
        f"\n{len(rows)} placements: error {100 * figures['median_error']:.1f} % at the median (goal 10), "
        f"{100 * figures['worst_error']:.1f} % at worst (goal 20); the chosen placement at "
        f"{100 * figures['worst_chosen_of_best']:.1f} % of the best measured at worst (goal 95)"
    )
    finish(figures)


if __name__ == "__main__":
    main(run)
