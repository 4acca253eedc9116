#!/usr/bin/env python3
"""Runs HearthNet's engine and llama.cpp's side by side on the same files, and prints the ratios.

Standard library only. llama.cpp is built once, into the user's cache, from the sources inside the source
distribution of the PyPI package llama-cpp-python; `--llama-bench` takes a program that is there already. The two
engines take turns, so that whatever else the machine does hits both; medians are compared.

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
# Shapes of published models with random weights, made by the test kit: Q4_K_M.
SHAPES = {
    "llama-3.2-3b": {"prefill": 2.5, "decode": 1.6},
    "qwen2.5-7b": {"prefill": 2.5, "decode": 1.6},
    "qwen3-30b-a3b": {"prefill": 1.3, "decode": 1.3},
    "qwen3.6-35b-a3b": {"prefill": 1.3, "decode": 1.3},
}
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


def measure_llama_cpp(program, file, threads, args):
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


def measure_hearthnet(program, file, threads, args):
    numbers = lambda values: ",".join(map(str, values))
    command = [program, "bench", "engine", "--model", file, "--threads", threads, "--prefill", numbers(args.prefill)]
    command += ["--decode", args.decode, "--depth", numbers(args.depth), "--repetitions", 1, "--json"]
    if args.isa != "native":
        command += ["--isa", args.isa]
    report = json.loads(run(command))
    speeds = {}
    for row in report["results"]:
        at = f" at {row['depth']}" if row["test"] == "decode" else ""
        speeds[f"{row['test']} {row['tokens']}{at}"] = row["tokens_per_second"]
    (bandwidth,) = report["memory_bandwidth"]
    args.memory[str(file), threads] = report["token_bytes"], bandwidth
    return speeds


def compare(engines, files, args):
    """Yields rows of results; the engines run alternately."""
    for name, file in files.items():
        for threads in args.threads:
            samples = {engine: {} for engine in engines}
            for repetition in range(args.repetitions):
                say(f"{name}, threads {threads}: {repetition + 1} of {args.repetitions}")
                for engine, measure in engines.items():
                    for test, speed in measure(file, threads).items():
                        samples[engine].setdefault(test, []).append(speed)
            token_bytes, bandwidth = args.memory[str(file), threads]
            for test in samples["hearthnet"]:
                speeds = {engine: samples[engine][test] for engine in engines}
                medians = {engine: statistics.median(values) for engine, values in speeds.items()}
                phase, tokens = test.split()[:2]
                # With fewer rows than a prompt chunk, HearthNet must only not be slower.
                bar = (BARS | SHAPES).get(name, {}).get(phase) if phase == "decode" or int(tokens) >= 512 else 1.0
                yield {
                    "model": name,
                    "file": str(file),
                    "threads": threads,
                    "test": test,
                    "tokens_per_second": medians,
                    "samples": speeds,
                    "ratio": medians["hearthnet"] / medians["llama.cpp"],
                    "bar": bar,
                    "of_memory": medians["hearthnet"] * token_bytes / bandwidth if phase == "decode" else None,
                }


def cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def print_table(rows, args):
    print(f"{cpu()}, {os.cpu_count()} cores, {args.isa}; tokens per second, medians of {args.repetitions} runs in turns")
    header = f"{'model':<14} {'threads':>7}  {'test':<20} {'HearthNet':>10} {'llama.cpp':>10} {'ratio':>6}  bar"
    print(header + "           of memory's speed", flush=True)
    for row in rows:
        ours, theirs = (row["tokens_per_second"][engine] for engine in ("hearthnet", "llama.cpp"))
        verdict = ""
        if row["bar"]:
            verdict = f"{row['bar']:.1f}  {'reached' if row['ratio'] >= row['bar'] else 'MISSED'}"
        memory = f"{100 * row['of_memory']:.0f}%" if row["of_memory"] else ""
        print(
            f"{row['model']:<14} {row['threads']:>7}  {row['test']:<20} {ours:>10.1f} {theirs:>10.1f}"
            f" {row['ratio']:>5.2f}x  {verdict:<13} {memory:>5}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--llama-bench", type=Path, help="use this program instead of building llama.cpp")
    parser.add_argument("--hearthnet", type=Path, help="use this program instead of building it")
    parser.add_argument("--model", type=Path, default=cache() / "models" / MODEL, help="GGUF file to start from")
    names = lambda text: text.split(",") if text else []
    parser.add_argument("--types", type=names, default=["q4_1", "q4_0", "q8_0"], help=f"of {', '.join(BARS)}")
    parser.add_argument("--shapes", type=names, default=[], help=f"of {', '.join(SHAPES)}; made once, with random weights")
    parser.add_argument("--isa", choices=ISAS, default="native", help="instruction set of both engines")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--prefill", type=numbers, default=[512], help="tokens of prompt (default 512)")
    parser.add_argument("--depth", type=numbers, default=[0], help="tokens before the decoded ones (default 0)")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode (default 64)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each engine (default 5)")
    parser.add_argument("--build", nargs="+", metavar="PROGRAM", help="only build these programs of llama.cpp, and say where")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    args.memory = {}
    try:
        if args.build:
            print(build_llama_cpp(args.build, args.isa))
            return 0
        llama_bench = args.llama_bench or build_llama_cpp(["llama-bench"], args.isa) / "llama-bench"
        hearthnet = args.hearthnet or build_hearthnet()
        files = model_files(hearthnet, args.model, args.types) | shape_files(args.shapes)
        engines = {
            "llama.cpp": lambda file, threads: measure_llama_cpp(llama_bench, file, threads, args),
            "hearthnet": lambda file, threads: measure_hearthnet(hearthnet, file, threads, args),
        }
        rows = compare(engines, files, args)
        if args.json:
            about = {"cpu": cpu(), "cores": os.cpu_count(), "isa": args.isa, "llama.cpp": f"{PACKAGE} {VERSION}"}
            print(json.dumps(about | {"rows": list(rows)}))
        else:
            print_table(rows, args)
    except Failed as error:
        say(f"compare: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
