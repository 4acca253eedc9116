#!/usr/bin/env python3
"""Runs HearthNet's engine and llama.cpp's side by side on the same files, and prints the ratios.

Standard library only. llama.cpp is built once, into the user's cache, from the sources inside the source
distribution of the PyPI package llama-cpp-python; `--llama-bench` takes a program that is there already. The two
engines take turns, so that whatever else the machine does hits both; medians are compared.

`--all` prints the whole table: AVX2 and the best instruction set of this machine, all weight types, and each shape
that fits into memory, at depths 0 and 4,096. It takes hours, and fetches or makes whatever is missing.

Timings are never asserted: a ratio below its bar is printed as such, and the exit status only says whether
everything could be run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
MODEL = "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"

# HearthNet's goals, as multiples of llama.cpp's tokens per second.
BARS = {
    "q4_0": {"prefill": 2.5, "decode": 1.6},
    "q4_1": {"prefill": 2.5, "decode": 1.6},
    "q4_k": {"prefill": 2.5, "decode": 1.6},
    "q6_k": {"prefill": 2.0, "decode": 1.6},
    "q8_0": {"prefill": 2.0, "decode": 1.6},
    "f16": {"prefill": 1.0, "decode": 1.0},
}
# The same with AVX2. Eight-bit weights are bounded by their number of instructions.
AVX2_BARS = {
    name: {"prefill": 1.7 if name == "q8_0" else 2.0, "decode": 1.8} for name in BARS if name != "f16"
} | {"f16": BARS["f16"]}
# Shapes of published models with random weights, made by the test kit: Q4_K_M. Decoding them waits for memory, so
# a share of the memory's bandwidth is a goal as well (at depth 0).
SHAPES = {
    "llama-3.2-3b": {"gigabytes": 2.0, "prefill": 1.0, "decode": 1.0, "memory": 0.85},
    "qwen2.5-7b": {"gigabytes": 4.7, "prefill": 1.0, "decode": 1.0, "memory": 0.85},
    "qwen3-30b-a3b": {"gigabytes": 18.6, "prefill": 1.3, "decode": 1.3, "memory": 0.75},
    "qwen3.6-35b-a3b": {"gigabytes": 21.2, "prefill": 1.3, "decode": 1.3, "memory": 0.75},
}
# Share of the speed at depth 0 that is the goal at other depths.
AT_DEPTH = 0.85
# Build flags with which llama.cpp uses the same instructions as HearthNet.
AVX2 = ["-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"]
ISAS = {
    "native": ["-DGGML_NATIVE=ON"],
    "avx2": AVX2,
    # For machines whose hypervisor hides instructions that a native build would use.
    "avx512": [*AVX2, "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_VBMI=ON"],
}


class Failed(Exception):
    """A step could not run; the message names it, and what to do."""


def say(line):
    print(line, file=sys.stderr, flush=True)


def run(command, log=None):
    """Runs a command and returns what it prints; on failure its last lines are the message."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log or subprocess.PIPE, text=True)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        tail = "" if log else "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise Failed(f"{' '.join(command)} ended with status {done.returncode}\n{tail}")
    return done.stdout


def cache():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hearthnet"


# ---------------------------------------------------------------------------------------------------------
# Subjects of the comparison


def build_llama_cpp(targets, isa):
    """Builds llama.cpp in the user's cache if it is missing; returns the directory of its programs."""
    home = cache() / "compare" / f"{PACKAGE}-{VERSION}"
    build = home / f"build-{isa}"
    programs = build / "bin"
    if all((programs / target).exists() for target in targets):
        return programs
    home.mkdir(parents=True, exist_ok=True)
    python = home / "venv" / "bin" / "python"
    if not python.exists():
        say("llama.cpp: making a virtual environment with cmake and ninja")
        venv.create(home / "venv", with_pip=True, clear=True)
        run([python, "-m", "pip", "install", "--quiet", "cmake", "ninja"])
    source = home / "source"
    if not source.exists():
        say(f"llama.cpp: fetching the source distribution of {PACKAGE} {VERSION}")
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE]
            run([*pip, "--dest", scratch, f"{PACKAGE}=={VERSION}"])
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            (unpacked,) = (path for path in Path(scratch).iterdir() if path.is_dir())
            # Renamed last, so that a directory with this name is complete.
            (unpacked / "vendor" / "llama.cpp").rename(source)
    say(f"llama.cpp: building {', '.join(targets)} for {isa} (some minutes; log in {home})")
    tools = python.parent
    with open(home / f"build-{isa}.log", "w") as log:
        configure = [tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *ISAS[isa]]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        configure += ["-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        configure += ["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_TOOLS=ON"]
        print(run(configure, log), file=log, flush=True)
        print(run([tools / "cmake", "--build", build, "--target", *targets], log), file=log)
    return programs


def build_hearthnet():
    """Builds the release program with cargo, and returns its path as cargo reports it."""
    say("hearthnet: building the release program")
    command = ["cargo", "build", "--release", "--package", "hearthnet", "--message-format", "json-render-diagnostics"]
    command += ["--manifest-path", ROOT / "Cargo.toml"]
    for line in run(command, sys.stderr).splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "hearthnet":
            return Path(message["executable"])
    raise Failed("cargo built no program named hearthnet")


def model_files(hearthnet, model, types):
    """The file for each weight type: the model itself, and conversions of it, kept in the cache."""
    if not model.exists() and model == cache() / "models" / MODEL:
        say("hearthnet: fetching the model")
        run([hearthnet, "model", "pull", model.parent.name])
    if not model.exists():
        raise Failed(f"{model} is missing: run `hearthnet model pull smollm2-135m-instruct`, or name a file with --model")
    files = {}
    for name in types:
        if name in model.name.lower():
            files[name] = model
            continue
        files[name] = cache() / "compare" / f"{model.stem}.to-{name}.gguf"
        if not files[name].exists():
            say(f"hearthnet: converting {model.name} to {name}")
            files[name].parent.mkdir(parents=True, exist_ok=True)
            run([hearthnet, "model", "convert", model, "--to", name, "--output", files[name]])
    return files


def fits(shape):
    """Whether an engine's copy of the weights, and its other memory, fit into what is available now."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return 1.2e9 * SHAPES[shape]["gigabytes"] < available


def shape_files(shapes):
    """A file with random weights for each shape, kept in the cache; the largest takes 21 GB."""
    files = {}
    for name in shapes:
        files[name] = cache() / "compare" / f"{name}.random.gguf"
        if not files[name].exists():
            say(f"hearthnet: writing random weights in the shape of {name}")
            files[name].parent.mkdir(parents=True, exist_ok=True)
            # Their tokens come from llama.cpp's vocabularies, which this script fetches if they are missing.
            run([sys.executable, ROOT / "tests" / "vocabularies.py"])
            part = files[name].with_suffix(".part")
            command = ["cargo", "run", "--release", "--quiet", "--package", "hearthnet-testkit"]
            command += ["--manifest-path", ROOT / "Cargo.toml", "--example", "random_model", "--", name, part]
            run(command)
            part.rename(files[name])
    return files


# ---------------------------------------------------------------------------------------------------------
# Measuring


def measure_llama_cpp(program, file, threads, isa, args):
    """Tokens per second by test, after llama-bench's own warm-up, at its defaults."""
    numbers = lambda values: ",".join(map(str, values))
    command = [program, "-m", file, "-t", threads, "-r", 1, "-o", "json"]
    prefill = [*command, "-p", numbers(args.prefill), "-n", 0]
    decode = [*command, "-p", 0, "-n", args.decode, "-d", numbers(args.depth)]
    speeds = {}
    for row in json.loads(run(prefill)) + json.loads(run(decode)):
        test = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_gen']} at {row['n_depth']}"
        speeds[test] = row["avg_ts"]
    return speeds


def measure_hearthnet(program, file, threads, isa, args):
    numbers = lambda values: ",".join(map(str, values))
    command = [program, "bench", "engine", "--model", file, "--threads", threads, "--prefill", numbers(args.prefill)]
    command += ["--decode", args.decode, "--depth", numbers(args.depth), "--repetitions", 1, "--json"]
    if isa != "native":
        command += ["--isa", isa]
    report = json.loads(run(command))
    speeds = {}
    for row in report["results"]:
        at = f" at {row['depth']}" if row["test"] == "decode" else ""
        test = f"{row['test']} {row['tokens']}{at}"
        speeds[test] = row["tokens_per_second"]
        args.bandwidth.setdefault((str(file), threads, isa, test), []).append(row["memory_bandwidth"])
    args.reports[str(file), isa] = report
    return speeds


def compare(engines, files, isa, args):
    """Yields rows of results; the engines run alternately."""
    bars = SHAPES | (AVX2_BARS if isa == "avx2" else BARS)
    for name, file in files.items():
        for threads in args.threads:
            samples = {engine: {} for engine in engines}
            for repetition in range(args.repetitions):
                say(f"{name}, {isa}, threads {threads}: {repetition + 1} of {args.repetitions}")
                for engine, measure in engines.items():
                    for test, speed in measure(file, threads).items():
                        samples[engine].setdefault(test, []).append(speed)
            report = args.reports[str(file), isa]
            at_zero = None
            for test in samples["hearthnet"]:
                speeds = {engine: samples[engine][test] for engine in engines}
                medians = {engine: statistics.median(values) for engine, values in speeds.items()}
                bandwidth = statistics.median(args.bandwidth[str(file), threads, isa, test])
                of_memory = medians["hearthnet"] * report["token_bytes"] / bandwidth
                phase, tokens, *depth = test.split()
                deep = phase == "decode" and depth[-1] != "0"
                if phase == "decode" and not deep:
                    at_zero = medians["hearthnet"]
                # With fewer rows than a prompt chunk, HearthNet must only not be slower.
                bar = bars.get(name, {}).get(phase) if phase == "decode" or int(tokens) >= 512 else 1.0
                yield {
                    "model": name,
                    "file": str(file),
                    "isa": report["isa"],
                    "threads": threads,
                    "test": test,
                    "tokens_per_second": medians,
                    "samples": speeds,
                    "ratio": medians["hearthnet"] / medians["llama.cpp"],
                    "bar": bar,
                    "bandwidth": bandwidth,
                    "of_memory": of_memory if phase == "decode" else None,
                    "memory_bar": bars.get(name, {}).get("memory") if phase == "decode" and not deep else None,
                    "of_depth_0": medians["hearthnet"] / at_zero if deep and at_zero else None,
                }


def cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def verdict(value, bar):
    return f"{'reached' if value >= bar else 'MISSED'} {bar:.2f}" if bar else ""


def print_table(rows, args):
    print(f"{cpu()}, {os.cpu_count()} cores; tokens per second, medians of {args.repetitions} runs in turns")
    header = f"{'model':<16} {'isa':<8} {'threads':>7}  {'test':<20} {'HearthNet':>10} {'llama.cpp':>10} {'ratio':>6}"
    print(f"{header}  {'goal':<13} {'GB/s':>5} {'used':>5}  {'goal':<13} {'of depth 0':>10}  goal", flush=True)
    for row in rows:
        ours, theirs = (row["tokens_per_second"][engine] for engine in ("hearthnet", "llama.cpp"))
        line = f"{row['model']:<16} {row['isa']:<8} {row['threads']:>7}  {row['test']:<20} {ours:>10.1f} {theirs:>10.1f}"
        line += f" {row['ratio']:>5.2f}x  {verdict(row['ratio'], row['bar']):<13}"
        if row["of_memory"]:
            # "used": weights read per second, as a share of a streaming read. Small models stay in caches.
            line += f" {row['bandwidth'] / 1e9:>5.1f} {row['of_memory']:>5.0%}"
            line += f"  {verdict(row['of_memory'], row['memory_bar']):<13}"
        if row["of_depth_0"]:
            line += f" {row['of_depth_0']:>10.0%}  {verdict(row['of_depth_0'], AT_DEPTH)}"
        print(line.rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--llama-bench", type=Path, help="use this program instead of building llama.cpp")
    parser.add_argument("--hearthnet", type=Path, help="use this program instead of building it")
    parser.add_argument("--model", type=Path, default=cache() / "models" / MODEL, help="GGUF file to start from")
    names = lambda text: text.split(",") if text else []
    parser.add_argument("--types", type=names, default=["q4_1", "q4_0", "q8_0"], help=f"of {', '.join(BARS)}")
    parser.add_argument("--shapes", type=names, default=[], help=f"of {', '.join(SHAPES)}; made once, with random weights")
    parser.add_argument("--isa", type=names, default=["native"], help=f"instruction sets of both engines, of {', '.join(ISAS)}")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--prefill", type=numbers, default=[512], help="tokens of prompt (default 512)")
    parser.add_argument("--depth", type=numbers, default=[0], help="tokens before the decoded ones (default 0)")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode (default 64)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each engine (default 5)")
    parser.add_argument("--build", nargs="+", metavar="PROGRAM", help="only build these programs of llama.cpp, and say where")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--all", action="store_true", help="print the whole table; overrides types, shapes, isa and depth")
    args = parser.parse_args()
    if args.all:
        args.types, args.isa, args.depth = list(BARS), ["avx2", "native"], [0, 4096]
        args.shapes = [shape for shape in SHAPES if fits(shape)]
        if left_out := set(SHAPES) - set(args.shapes):
            say(f"left out, because too little memory is available: {', '.join(sorted(left_out))}")
    for given, known in ((args.types, BARS), (args.shapes, SHAPES), (args.isa, ISAS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    args.bandwidth, args.reports = {}, {}

    def rows(hearthnet, files):
        for isa in args.isa:
            llama_bench = args.llama_bench or build_llama_cpp(["llama-bench"], isa) / "llama-bench"
            engines = {
                "llama.cpp": lambda file, threads: measure_llama_cpp(llama_bench, file, threads, isa, args),
                "hearthnet": lambda file, threads: measure_hearthnet(hearthnet, file, threads, isa, args),
            }
            yield from compare(engines, files, isa, args)

    try:
        if args.build:
            for isa in args.isa:
                print(build_llama_cpp(args.build, isa))
            return 0
        hearthnet = args.hearthnet or build_hearthnet()
        files = model_files(hearthnet, args.model, args.types) | shape_files(args.shapes)
        rows = rows(hearthnet, files)
        if args.json:
            about = {"cpu": cpu(), "cores": os.cpu_count(), "llama.cpp": f"{PACKAGE} {VERSION}"}
            print(json.dumps(about | {"rows": list(rows)}))
        else:
            print_table(rows, args)
    except Failed as error:
        say(f"compare: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
