"""Homes in network namespaces: links with limits, processes, and the program's commands.

Standard library only. Needs Linux, root, and the programs `ip` and `tc`. Everything that a `Network`
makes (namespaces, control groups, processes, folders) ends with its `with` block.
"""

import argparse
import fcntl
import heapq
import json
import os
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# Where `hearthnet model pull` stores the small real model.
PULLED = Path.home() / ".cache/hearthnet/models/smollm2-135m-instruct"
# Seconds for a node to start or to answer, with a model that it still has to read.
PATIENCE = 300


class Failed(Exception):
    """A step could not run; the message names it."""


def say(line=""):
    print(line, flush=True)


def arguments(what, shape=True):
    """Options that all scripts have."""
    options = argparse.ArgumentParser(description=what)
    program = ROOT / "target/release/hearthnet"
    options.add_argument("--program", type=Path, default=program, help="release build [%(default)s]")
    options.add_argument("--model", type=Path, help=f"small real model [the one in {PULLED}]")
    options.add_argument("--dir", type=Path, help="folder for the homes' files [a temporary one]")
    options.add_argument("--keep", action="store_true", help="keep these files")
    if shape:
        options.add_argument("--shape", default="qwen2.5-7b", help="shape of the random model [%(default)s]")
        options.add_argument("--file", type=Path, help="random model that exists already")
    return options


def parsed(options):
    """Checks the options, and finds the model."""
    found = options.parse_args()
    if os.geteuid() != 0:
        options.error("network namespaces need root")
    if not found.program.exists():
        options.error(f"{found.program} is missing: cargo build --release, or --program")
    found.program = found.program.resolve()
    if not found.model:
        files = sorted(PULLED.glob("*.gguf"))
        if not files:
            options.error("no model: hearthnet model pull smollm2-135m-instruct, or --model FILE")
        found.model = files[0]
    found.model = found.model.resolve()
    if found.dir:
        found.dir.mkdir(parents=True, exist_ok=True)
    return found


def call(*command, check=True, **options):
    """Runs a command of the system, and returns its output."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if check and done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def random_model(options, folder):
    """The random model: the one that was named, else a new one in `folder`."""
    if options.file:
        return options.file.resolve()
    path = folder / f"{options.shape}.gguf"
    built = ROOT / "target/release/examples/random_model"
    cargo = ["cargo", "run", "--release", "-p", "hearthnet-testkit", "--example", "random_model", "--"]
    say(f"writing a random model with the shape of {options.shape}")
    experts = [options.experts] if getattr(options, "experts", None) else []
    call(*([built] if built.exists() else cargo), options.shape, path, *experts, cwd=ROOT)
    return path


def budget(layers, count):
    """Setting that gives room for the first `count` layers, of which `layers` are the bytes."""
    room = -(-sum(layers[:count]) // MIB) + 1
    return f"research.distributed_inference.host.memory_budget_mb={room}"


def until(what, done, seconds=PATIENCE, pause=0.2):
    """Waits until `done()` is true, and returns it."""
    end = time.monotonic() + seconds
    while True:
        if found := done():
            return found
        if time.monotonic() > end:
            raise Failed(f"not within {seconds} s: {what}")
        time.sleep(pause)


def rate(answer):
    """Tokens per second of an answer, behind its first one."""
    return 1e3 * (answer["usage"]["completion_tokens"] - 1) / answer["timings"]["decode_ms"]


def median(values):
    return statistics.median(values) if values else None


def finish(figures):
    """Prints the figures as the last line."""
    say(json.dumps(figures))


def main(run):
    """Runs a script. An interrupt or a termination removes what it made, too."""

    def stop(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        run()
    except Failed as why:
        sys.exit(f"error: {why}")
    except KeyboardInterrupt:
        sys.exit(130)


class Relay(threading.Thread):
    """Two TAP devices whose frames it passes on after a delay. Only kernels with netem have better."""

    TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000

    def __init__(self, names, delay_ms):
        super().__init__(daemon=True)
        self.delay = delay_ms / 1e3
        self.ends = [self.tap(name) for name in names]
        self.quit, self.stopping = os.pipe()

    def tap(self, name):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        wanted = struct.pack("16sH22x", name.encode(), self.IFF_TAP | self.IFF_NO_PI)
        fcntl.ioctl(end, self.TUNSETIFF, wanted)
        return end

    def run(self):
        other = dict(zip(self.ends, reversed(self.ends)))
        waiting, number = [], 0
        while True:
            pause = max(0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self.ends, self.quit], [], [], pause)
            if self.quit in ready:
                return
            for end in ready:
                try:
                    frame = os.read(end, 65536)
                except OSError:
                    continue
                number += 1
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, other[end], frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(waiting)
                try:
                    os.write(end, frame)
                except OSError:
                    pass  # As a full queue of a real link: the frame is lost.

    def close(self):
        os.close(self.stopping)
        self.join()
        for end in [*self.ends, self.quit]:
            os.close(end)


class Network:
    """A bridge, and a namespace with a home for each name: 10.60.0.1, 10.60.0.2, ..."""

    def __init__(self, options, names, settings=(), delays=None):
        self.options = options
        self.prefix = f"hn-{os.getpid()}-"
        self.settings = list(settings)
        self.relays, self.processes, self.groups = [], [], []
        self.homes = {}
        self.delays = delays or {}
        self.names = names

    def __enter__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="hn-", dir=self.options.dir))
        self.hub = self.prefix + "hub"
        try:
            call("ip", "netns", "add", self.hub)
            self.ip(self.hub, "link", "set", "lo", "up")
            self.ip(self.hub, "link", "add", "br0", "type", "bridge")
            self.ip(self.hub, "link", "set", "br0", "up")
            for number, name in enumerate(self.names, 1):
                self.homes[name] = self.add(name, number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def __getitem__(self, name):
        return self.homes[name]

    @staticmethod
    def ip(space, *words):
        return call("ip", "-n", space, *words)

    def add(self, name, number):
        space, port = self.prefix + name, f"p{number}"
        call("ip", "netns", "add", space)
        self.ip(space, "link", "set", "lo", "up")
        delay = self.delays.get(name, 0)
        if delay:
            # In this process's namespace at first, so with names of this process.
            taps = [f"hn{os.getpid()}{end}{number}" for end in "hp"]
            relay = Relay(taps, delay)
            self.relays.append(relay)
            for tap, where, to in zip(taps, [space, self.hub], ["eth0", port]):
                call("ip", "link", "set", tap, "netns", where)
                self.ip(where, "link", "set", tap, "name", to)
            relay.start()
        else:
            self.ip(self.hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        self.ip(self.hub, "link", "set", port, "master", "br0", "up")
        address = f"10.60.0.{number}"
        self.ip(space, "addr", "add", f"{address}/24", "dev", "eth0")
        self.ip(space, "link", "set", "eth0", "up")
        self.ip(space, "route", "add", "224.0.0.0/4", "dev", "eth0")
        self.ip(space, "route", "add", "default", "dev", "eth0")
        return Home(self, name, space, port, address)

    def close(self):
        for process in self.processes:
            process.kill()
        spaces = call("ip", "netns", "list", check=False).split()
        own = [space for space in spaces if space.startswith(self.prefix)]
        for space in own:
            # Engines that outlived their daemon. Only this script starts processes in there.
            for pid in call("ip", "netns", "pids", space, check=False).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for space in own:
            call("ip", "netns", "del", space, check=False)
        for relay in self.relays:
            relay.close()
        for group in self.groups:
            # A group is busy until the kernel has reaped its processes.
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        if self.options.keep:
            say(f"files: {self.dir}")
        else:
            shutil.rmtree(self.dir, ignore_errors=True)


class Home:
    """One household: a namespace, an address and folders."""

    def __init__(self, network, name, space, port, address):
        self.network, self.name, self.space = network, name, space
        self.port, self.address = port, address
        self.dir = network.dir / name
        self.dir.mkdir()
        self.settings = []
        self.group = None
        self.daemon = None

    def limit(self, rate):
        """Limits the link in both directions, for example to `1gbit`."""
        for space, dev in [(self.space, "eth0"), (self.network.hub, self.port)]:
            call(
                "tc", "-n", space, "qdisc", "replace", "dev", dev, "root",
                "tbf", "rate", rate, "burst", "128k", "latency", "20ms",
            )  # fmt: skip

    def slow_down(self, share):
        """Gives the home's processes this share of one core, in the shortest slices that the kernel has."""
        period = max(1000, round(1000 / share))
        name = f"{self.network.prefix}{self.name}"
        old = Path("/sys/fs/cgroup/cpu")
        if (old / "cpu.cfs_quota_us").exists() or (old / "cgroup.procs").exists():
            self.group = old / name
            self.group.mkdir()
            (self.group / "cpu.cfs_quota_us").write_text("1000")
            (self.group / "cpu.cfs_period_us").write_text(str(period))
        else:
            self.group = Path("/sys/fs/cgroup") / name
            self.group.mkdir()
            (self.group / "cpu.max").write_text(f"1000 {period}")
        self.network.groups.append(self.group)

    def command(self, args, settings):
        env = {
            "PATH": os.environ["PATH"],
            "HOME": self.dir,
            "XDG_CACHE_HOME": self.dir / "cache",
            "XDG_CONFIG_HOME": self.dir / "config",
            "XDG_DATA_HOME": self.dir / "data",
            "TERM": "dumb",
        }
        sets = [word for it in settings for word in ("--set", it)]
        words = ["ip", "netns", "exec", self.space, "env", "-i"]
        words += [f"{key}={value}" for key, value in env.items()]
        words += [self.network.options.program, *sets, *args]
        if self.group:
            enter = f'echo $$ > "{self.group}/cgroup.procs"; exec "$@"'
            words = ["sh", "-c", enter, "sh", *words]
        return [str(word) for word in words]

    def all_settings(self):
        return [*self.network.settings, *self.settings]

    def run(self, *args, input=None, check=True, seconds=PATIENCE, settings=()):
        """Runs a command of the program to its end. Returns exit status, output and messages. A chat
        with settings of its own does not use the daemon."""
        command = self.command(args, settings)
        try:
            done = subprocess.run(command, input=input or "", capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{self.name}: {args[0]} did not end within {seconds} s") from error
        if check and done.returncode != 0:
            raise Failed(f"{self.name}: hearthnet {' '.join(map(str, args))}: {done.stderr}{done.stdout}")
        return done.returncode, done.stdout, done.stderr

    def json(self, *args, settings=()):
        return json.loads(self.run(*args, "--json", settings=settings)[1])

    def start(self, *args, input=None):
        """Starts a command in the background, with the home's settings. Its output goes to files."""
        process = Process(self, args, input)
        self.network.processes.append(process)
        return process

    def up(self, *args, input=None, wait=True):
        """`hearthnet up`. With `wait`, returns when the daemon is ready."""
        self.daemon = self.start("up", "--no-open", "--name", self.name, *args, input=input)
        if wait:
            self.daemon.until_ready()
        return self.daemon

    def serve(self, *args):
        """`hearthnet serve` of a member. Returns when it is ready."""
        self.daemon = self.start("serve", *args)
        self.daemon.until_ready()
        return self.daemon

    def join(self, code, **how):
        """Joins with `hearthnet up`."""
        return self.up("--join", "-", input=code + "\n", **how)

    def enter(self, code):
        """Joins, and runs nothing afterwards."""
        self.run("community", "join", "--research", "on", "--name", self.name, "-", input=code + "\n")

    def serving(self):
        """First and last layer that the running node serves, or `None`."""
        status, out, _ = self.run("status", "--json", check=False)
        running = json.loads(out)["node"]["running"] if status == 0 else None
        found = re.search(r"(\d+)-(\d+)$", (running or {}).get("serving") or "")
        return (int(found[1]), int(found[2])) if found else None

    def is_fetching(self):
        running = self.json("status")["node"]["running"] or {}
        return bool(running.get("downloads"))

    def needed(self):
        """Bytes of adopted models that this home holds: pieces, heads, manifests and piece lists."""
        total = 0
        for row in self.json("model", "list"):
            if not row.get("adopted") or not row["here"]:
                continue
            part = self.dir / "cache/hearthnet/models/parts" / row["weights"]
            total += row["here"]["bytes"] + json.loads((part / "identity").read_text())["head_bytes"]
            total += sum((part / name).stat().st_size for name in ("manifest", "pieces"))
        if not total:
            raise Failed(f"{self.name}: `hearthnet model list --json` names no part of an adopted model")
        return total

    def interface(self):
        """Bytes that the home's interface received and sent."""
        link = json.loads(call("ip", "-n", self.space, "-s", "-j", "link", "show", "dev", "eth0"))[0]
        stats = link.get("stats64") or link["stats"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]

    def link(self):
        """Bytes to the home and from it on its limited link, with the headers of every frame. (An
        interface counts the headers of a large segment once, before it is cut into frames.)"""
        ends = [(self.network.hub, self.port), (self.space, "eth0")]
        return tuple(self.queue_bytes(space, dev) for space, dev in ends)

    @staticmethod
    def queue_bytes(space, dev):
        queues = json.loads(call("tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", dev))
        return queues[0].get("bytes", 0) if queues else 0

    def chat(self, model, tokens, alone=False):
        """Answer of the running node, or of this machine alone, as `chat --json` reports it."""
        ask = ["chat", "Tell me a long story about a lighthouse.", "--model", model]
        ask += ["--temperature", "0", "--max-tokens", tokens]
        if alone:
            return self.json(*ask, "--local", settings=self.all_settings())
        return self.json(*ask)


class Process:
    """A command of a home in the background."""

    def __init__(self, home, args, input):
        self.home = home
        number = len(home.network.processes)
        self.out, self.log = (home.dir / f"{number}.{name}" for name in ("out", "log"))
        self.code = None
        with open(self.out, "w") as out, open(self.log, "w") as log:
            self.process = subprocess.Popen(
                home.command(args, home.all_settings()),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                text=True,
            )
        if input:
            self.process.stdin.write(input)
        self.process.stdin.close()

    @property
    def pid(self):
        return self.process.pid

    def said(self):
        return self.out.read_text() + self.log.read_text()

    def is_running(self):
        return self.process.poll() is None

    def is_ready(self):
        """Reads what a daemon has printed: its invite code, and last the address of its page."""
        if not self.is_running():
            raise Failed(f"{self.home.name} ended: {self.said()}")
        lines = self.out.read_text().splitlines()
        code = [line.strip() for line in lines if line.strip().startswith("hearth1")]
        self.code = code[0] if code else None
        return any(line.split()[:1] == ["page"] for line in lines)

    def until_ready(self):
        until(f"{self.home.name} is ready", self.is_ready)

    def end(self):
        """Waits for the end of a command that must succeed."""
        if self.process.wait() != 0:
            raise Failed(f"{self.home.name}: {self.said()}")

    def stop(self):
        """Asks a daemon to stop, as Ctrl-C does."""
        if self.is_running():
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self):
        """Ends it as a power failure would. Its engines notice that themselves."""
        if self.is_running():
            self.process.kill()
            self.process.wait()


def tree(pid):
    """A process and all its children."""
    found, left = [], [pid]
    while left:
        pid = left.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                left += [int(child) for child in task.read_text().split()]
            except OSError:
                pass
    return found


def usage(pid):
    """Resident memory of a process tree in bytes, the same without mapped files, and its processor time
    in seconds."""
    total = anon = ticks = 0
    for one in tree(pid):
        try:
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            times = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(times[11]) + int(times[12])
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "RssAnon")))
        total += int(sizes.get("VmRSS", "0").split()[0]) * 1024
        anon += int(sizes.get("RssAnon", "0").split()[0]) * 1024
    return total, anon, ticks / os.sysconf("SC_CLK_TCK")


def processor():
    """Busy and all processor time of the machine so far, in ticks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def traffic(pid):
    """Bytes that the interface of a process's namespace received and sent."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            words = numbers.split()
            return int(words[0]), int(words[8])
    return 0, 0


class Sampler(threading.Thread):
    """Reads traffic and memory of running daemons, and the machine's processor time, twice a second."""

    def __init__(self, processes):
        super().__init__(daemon=True)
        self.processes = processes
        self.samples = {process.home.name: [] for process in processes}
        self.busy = []
        self.ends = threading.Event()

    def run(self):
        while not self.ends.wait(0.5):
            now = time.monotonic()
            self.busy.append((now, *processor()))
            for process in self.processes:
                if not process.is_running():
                    continue
                try:
                    sample = (now, *traffic(process.pid), *usage(process.pid))
                except OSError:
                    continue
                self.samples[process.home.name].append(sample)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.join()

    def cpu_percent(self, begin, end):
        """Share of all cores that was busy between two times."""
        inside = [it for it in self.busy if begin <= it[0] <= end]
        if len(inside) < 2:
            return None
        (_, busy, every), (_, busy_then, every_then) = inside[0], inside[-1]
        return round(100 * (busy_then - busy) / max(1, every_then - every), 1)

    def window(self, name, column):
        """Begin and end of a home's transfer (1: received, 2: sent), and its bytes: from the first
        MiB to all but the last 1%."""
        samples = self.samples[name]
        if not samples:
            return None
        first, last = samples[0][column], samples[-1][column]
        total = last - first
        begin = next((i for i, s in enumerate(samples) if s[column] - first > MIB), None)
        if begin is None:
            return None
        end = next(i for i, s in enumerate(samples) if s[column] - first >= total * 0.99)
        begin = max(0, begin - 1)
        return samples[begin][0], samples[end][0], samples[end][column] - samples[begin][column]

    def best_rate(self, name, column, seconds=5):
        """Most bytes per second over some seconds, within which a home need not wait for anything."""
        samples, best, at = self.samples[name], 0, 0
        for sample in samples:
            while at + 1 < len(samples) and sample[0] - samples[at + 1][0] >= seconds:
                at += 1
            took = sample[0] - samples[at][0]
            if took >= seconds:
                best = max(best, (sample[column] - samples[at][column]) / took)
        return best

    def idle(self, name, column, begin, end, rate):
        """Seconds between two times in which a home's link carried less than `rate` bytes per second."""
        inside = [s for s in self.samples[name] if begin <= s[0] <= end]
        steps = [(b[0] - a[0], b[column] - a[column]) for a, b in zip(inside, inside[1:])]
        return sum(took for took, size in steps if size < rate * took)

    def usage_of(self, name, begin, end):
        """Processor time in seconds, and resident memory in MiB during a time. How memory grew: medians
        of ten equal parts."""
        inside = [s for s in self.samples[name] if begin <= s[0] <= end]
        if not inside:
            return None
        step = max(1, len(inside) // 10)
        parts = [inside[at : at + step] for at in range(0, len(inside), step)]
        return {
            "cpu_seconds": round(inside[-1][5] - inside[0][5], 1),
            "max_mib": round(max(s[3] for s in inside) / MIB),
            "max_without_files_mib": round(max(s[4] for s in inside) / MIB),
            "without_files_mib": [round(median([s[4] for s in part]) / MIB) for part in parts],
        }
