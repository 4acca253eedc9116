#!/usr/bin/env python3
"""Moves of layers when homes go.

    killed    A home that alone serves some layers is killed. Seconds until others serve these layers,
              and until an answer without fallback succeeds.
    churn     A home joins and leaves every ten seconds, for a minute. Bytes that the homes receive, and
              moves of layers.
"""

import time

from homes import MIB, Network, arguments, budget, finish, main, parsed, say, until

# Options of a chat that only hosts may answer.
TOGETHER = ["--no-fallback", "--max-tokens", "4", "--temperature", "0"]

# First layers, which chats run at home.
PRIVATE = 2


def covered(ranges, first, last):
    """Whether ranges, `None` among them, cover all layers from `first` to `last`."""
    held = {layer for found in ranges if found for layer in range(found[0], found[1] + 1)}
    return held.issuperset(range(first, last + 1))


def needed_home(homes, last):
    """A home that alone serves some layers, beside the founder, and what it serves; or `None`."""
    serving = {home: home.serving() for home in homes}
    say(f"serving: {({home.name: held for home, held in serving.items()})}")
    for home in homes[1:]:
        others = [held for other, held in serving.items() if other is not home]
        if not covered(others, PRIVATE, last):
            return home, serving[home]
    say("no home but the founder is needed, so nothing has to move when one goes")
    return None


def received(homes):
    return sum(home.interface()[0] for home in homes)


def start(net, options):
    """The homes run, and serve all layers. Returns the bytes of each layer."""
    names = list(net.names)
    for home in net.homes.values():
        home.limit(options.rate)
    first = net[names[0]]
    layers = first.json("model", "inspect", options.model)["layer_bytes"]
    for home in net.homes.values():
        home.settings.append(budget(layers, len(layers) // 2))
    founder = first.up("--found", "Elm Street", "--model", options.model)
    until("the founder serves layers", first.serving, pause=0.5)
    for name in names[1:]:
        net[name].join(founder.code)
        until(f"{name} serves layers", net[name].serving, pause=0.5)
    return layers


def measure_killed(options):
    say("\nkilled: the only host of some layers")
    with Network(options, ["attic", "bakery", "cellar"], ["engine.threads=1"]) as net:
        layers = start(net, options)
        homes, last = list(net.homes.values()), len(layers) - 1
        found = needed_home(homes, last)
        if not found:
            return None
        gone, lost = found
        left = [home for home in homes if home is not gone]
        ask = lambda: left[0].run("chat", "Hello", *TOGETHER, check=False)[0] == 0
        until("an answer", ask)
        time.sleep(options.settle)
        before = received(left)
        begin = time.monotonic()
        gone.daemon.kill()
        say(f"killed {gone.name}, which served {lost}")
        until(
            "the layers are served again",
            lambda: covered([home.serving() for home in left], PRIVATE, last),
            options.patience,
        )
        served = time.monotonic() - begin
        until("an answer", ask, options.patience)
        answered = time.monotonic() - begin
        moved = received(left) - before
        held = {home.name: home.serving() for home in left}
        say(f"served again after {served:.1f} s by {held}; an answer after {answered:.1f} s")
        say(f"received meanwhile: {moved / MIB:.1f} MiB")
        return {
            "served_again_s": round(served, 1),
            "answered_s": round(answered, 1),
            "received_bytes": moved,
            "lost_layers": lost,
        }


def moves(homes):
    """Times that homes said that they move."""
    return sum(home.daemon.log.read_text().count("moving to layers") for home in homes)


def measure_churn(options):
    say("\nchurn: a home joins and leaves every ten seconds")
    with Network(options, ["attic", "bakery", "cellar"], ["engine.threads=1"]) as net:
        layers = start(net, options)
        homes = list(net.homes.values())
        # The worst case: a home whose layers others would have to take.
        found = needed_home(homes, len(layers) - 1)
        guest = found[0] if found else homes[-1]
        stay = [home for home in homes if home is not guest]
        time.sleep(options.settle)
        moved, guest_moves = moves(stay), 0
        begin = time.monotonic()
        before = {home: home.interface()[0] for home in homes}
        half = None
        rounds = 0
        while time.monotonic() - begin < options.seconds:
            if half is None and time.monotonic() - begin >= options.seconds / 2:
                half = time.monotonic(), received(homes)
            turn = time.monotonic()
            # Every other time without a goodbye.
            guest.daemon.stop() if rounds % 2 else guest.daemon.kill()
            time.sleep(max(0, turn + options.every - time.monotonic()))
            turn = time.monotonic()
            guest.up(wait=False)
            time.sleep(max(0, turn + options.every - time.monotonic()))
            guest_moves += moves([guest])
            rounds += 1
        took = time.monotonic() - begin
        got = {home.name: home.interface()[0] - before[home] for home in homes}
        total, file = sum(got.values()), options.model.stat().st_size
        say(f"{rounds} joins and leaves in {took:.0f} s; received: {got}, {total / file:.2f} times the model's file")
        say(f"{moves(stay) - moved} moves of the other homes, {guest_moves} of the guest")
        figures = {
            "rounds": rounds,
            "seconds": round(took, 1),
            "received_bytes": got,
            "files": round(total / file, 3),
            "moves": moves(stay) - moved,
            "moves_of_guest": guest_moves,
        }
        if half:
            # At first another home may take over the guest's layers, once.
            later = (received(homes) - half[1]) * 3600 / (time.monotonic() - half[0])
            say(f"in the second half at a rate of {later / MIB:.1f} MiB in an hour, {later / file:.2f} files")
            figures["later_bytes_per_hour"] = round(later)
        return figures


def run():
    options = arguments(__doc__.splitlines()[0], shape=False)
    options.add_argument("--rate", default="1gbit", help="of each link [%(default)s]")
    options.add_argument("--only", choices=["killed", "churn"], help="one of the two measurements")
    options.add_argument("--settle", type=float, default=10, help="quiet seconds before [%(default)s]")
    options.add_argument("--seconds", type=float, default=60, help="of churn [%(default)s]")
    options.add_argument("--every", type=float, default=5, help="seconds that the guest stays, and is away [%(default)s]")
    options.add_argument("--patience", type=int, default=300, help="seconds to wait for a move [%(default)s]")
    options = parsed(options)
    figures = {}
    if options.only != "churn":
        figures["killed"] = measure_killed(options)
    if options.only != "killed":
        figures["churn"] = measure_churn(options)
    finish(figures)


if __name__ == "__main__":
    main(run)
