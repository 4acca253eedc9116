#!/usr/bin/env python3
"""Runs the programs of this folder against a node over two hosts, and writes the table of clients and
features in specs/http-api.md.

    run.py                     every client: fails if a feature fails, or if the table says something else
    run.py --write             the same, and writes the table
    run.py --only NAME,...     some clients, compared with their rows
    run.py --packages --only NAME,...   prints their packages, for pip

Packages have the versions that the programs name, and are kept in the user's cache: 2.5 GB. Standard
library only.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from feature import FEATURES
from node import CUTS, Node

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SPEC = ROOT / "specs/http-api.md"
BEGIN = "<!-- clients: written by tests/clients/table/run.py -->\n"
END = "<!-- end of clients -->\n"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hearthnet"
# Packages that are the clients.
NODE = {
    "openai_node": "openai",
    "anthropic_node": "@anthropic-ai/sdk",
    "ollama_node": "ollama",
    "ai_node": "ai",
    "codex_node": "@openai/codex",
}
CLIENTS = [
    "openai_python", "openai_node", "anthropic_python", "anthropic_node", "claude_agent_python",
    "ollama_python", "ollama_node", "langchain_python", "litellm_python", "pydantic_ai_python",
    "instructor_python", "llm_python", "ai_node", "codex_node", "lm_eval_python",
]  # fmt: skip
# Seconds for one client.
PATIENCE = 900


def manifest(name):
    """File with the packages of a client in JavaScript: its own, if they are large, or that of all."""
    own = HERE / f"{name}.json"
    return own if own.exists() else HERE / "package.json"


def dependencies(name):
    """Packages of a client, as its program names them."""
    if name in NODE:
        return json.loads(manifest(name).read_text())["dependencies"]
    # In inline script metadata (PEP 723), as JSON so that older versions of Python read it.
    text = (HERE / f"{name}.py").read_text()
    return json.loads(re.search(r"(?m)^# dependencies = (.*)$", text)[1])


def title(name):
    """The client's package, its version and its language."""
    needed = dependencies(name)
    if name in NODE:
        return f"`{NODE[name]}` {needed[NODE[name]]}, Node.js"
    package, version = needed[0].split("==")
    return f"`{package.split('[')[0]}` {version}, Python"


def command(name, here):
    """Command of a client's program, whose packages it installs."""
    if here and name not in NODE:
        return [sys.executable, "-B", HERE / f"{name}.py"]
    needed = json.dumps(dependencies(name))
    kind = "node" if name in NODE and manifest(name).name == "package.json" else name
    folder = CACHE / f"clients/{kind}-{hashlib.sha256(needed.encode()).hexdigest()[:12]}"
    # Made last.
    done = folder / "complete"
    if not done.exists():
        print(f"packages of {name}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        if name in NODE:
            (folder / "package.json").write_bytes(manifest(name).read_bytes())
            words = "npm install --silent --no-audit --no-fund --ignore-scripts --prefix"
            subprocess.run([*words.split(), folder], check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "venv"], check=True)
            pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *dependencies(name)], check=True)
        done.touch()
    if name not in NODE:
        return [folder / "venv/bin/python", "-B", HERE / f"{name}.py"]
    # Node.js looks for packages beside the program.
    for file in (*HERE.glob("*.mjs"), HERE / "feature.py"):
        (folder / file.name).write_bytes(file.read_bytes())
    return ["node", folder / f"{name}.mjs"]


def ask(name, node, here):
    """Results of a client, by feature."""
    words = [*command(name, here), node.url, node.model]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(FEATURES, f"failed: no end within {PATIENCE} s")
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    if any(result.startswith("failed") for result in found.values()) or not found:
        print(done.stderr, file=sys.stderr)
    return {feature: found.get(feature, "failed: no result") for feature in FEATURES}


def row(name, results):
    """Row of the table."""
    marks = {"ok": "yes", "not in this client": "–"}
    cells = [marks.get(results[feature], "no") for feature in FEATURES]
    return f"| {title(name)} | {' | '.join(cells)} |\n"


def rows(table):
    """Rows of a table, by their first cell without its version."""
    found = {}
    for line in table.splitlines(keepends=True)[2:]:
        found[re.sub(r"` [^,]*", "`", line.split("|")[1])] = line
    return found


def same_scores(program, model):
    """Compares the scores of `lm_eval` over one, two and three hosts."""
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        for hosts in CUTS:
            file = Path(folder, str(hosts))
            with Node(program, model, hosts) as node:
                words = [*command("lm_eval_python", False), node.url, node.model, file]
                subprocess.run(words, check=True)
            scores[hosts] = file.read_bytes()
    if len(set(scores.values())) > 1:
        return "failed: the scores differ"
    return "the same to the bit"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--program", type=Path, default=ROOT / "target/release/hearthnet")
    options.add_argument("--model", type=Path, help="file [SmolLM2-135M, as `model pull` stores it]")
    options.add_argument("--only", help="names of programs, separated by commas")
    options.add_argument("--write", action="store_true", help="write the table")
    options.add_argument("--service", nargs=2, metavar=("URL", "MODEL"), help="a node that runs")
    options.add_argument("--here", action="store_true", help="this Python has the packages")
    options.add_argument("--packages", action="store_true", help="print the packages and end")
    options = options.parse_args()
    names = options.only.split(",") if options.only else CLIENTS
    if options.packages:
        print(*sorted({package for name in names for package in dependencies(name)}))
        return
    if options.write and options.only:
        sys.exit("--write needs all clients: leave out --only")
    model = options.model or next((CACHE / "models/smollm2-135m-instruct").glob("*.gguf"), None)
    failed, table = [], {}
    with ExitStack() as stack:
        if options.service:
            url, name = options.service
            node = SimpleNamespace(url=url, model=name)
        else:
            if not model or not options.program.exists():
                sys.exit("build the program and run `hearthnet model pull smollm2-135m-instruct`")
            node = stack.enter_context(Node(options.program, model))
        for name in names:
            results = ask(name, node, options.here)
            table[name] = row(name, results)
            for feature, result in results.items():
                print(f"{name} {feature}: {result}", flush=True)
                if result.startswith("failed"):
                    failed.append(f"{name} {feature}")
    if "lm_eval_python" in names and not options.service:
        result = same_scores(options.program, model)
        print(f"lm_eval_python scores over {', '.join(map(str, CUTS))} hosts: {result}")
        if result.startswith("failed"):
            failed.append("lm_eval_python scores")
    spec = SPEC.read_text()
    before, rest = spec.split(BEGIN)
    old, after = rest.split(END)
    head = f"| client | {' | '.join(FEATURES)} |\n|---|{'---|' * len(FEATURES)}\n"
    new = head + "".join(table.values())
    if options.write:
        SPEC.write_text(f"{before}{BEGIN}{new}{END}{after}")
        old = new
    written = rows(old)
    for client, line in rows(new).items():
        if written.get(client) != line:
            failed.append(f"the row of{client}in {SPEC.relative_to(ROOT)}: run with --write")
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
