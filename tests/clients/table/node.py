"""A node that answers over hosts of some layers, all on this machine. Standard library only."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

ENABLE = ["--set", "policy.research.enable=true"]
# Cuts of the 30 layers of SmolLM2-135M by number of hosts.
CUTS = {1: ["0-29"], 2: ["0-14", "15-29"], 3: ["0-9", "10-19", "20-29"]}


class Node:
    """`hearthnet serve` with hosts in processes of their own. All end with the `with` block."""

    def __init__(self, program, model, hosts=2):
        self.program, self.model_file, self.layers = program, model, CUTS[hosts]
        self.processes = []

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hn-")
        try:
            key = json.loads(self.command("caller", "id", "--json").stdout.readline())["node_id"]
            serve = [*ENABLE, "serve", "--json", "--lifeline", "--http", "127.0.0.1:0"]
            serve += ["--model", self.model_file]
            for layers in self.layers:
                host = self.start(
                    f"host {layers}", *ENABLE, "shard", "serve", "--json", "--lifeline",
                    "--model", self.model_file, "--layers", layers, "--threads", "1",
                    "--peer-key", key,
                )
                serve += ["--shard", host["address"]]
            ready = self.start("caller", *serve)
        except BaseException:
            self.close()
            raise
        self.url, self.model = ready["url"], ready["models"][0]
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        self.folder.cleanup()

    def command(self, home, *words):
        """Starts a command of the program, as a user of its own."""
        folder = Path(self.folder.name, home)
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [str(word) for word in (self.program, *words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / "log", "a"),
            text=True,
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ["HOME"],
                "HEARTHNET_DATA_DIR": folder / "data",
                "XDG_CONFIG_HOME": folder / "config",
                "TMPDIR": folder,
            },
        )
        self.processes.append(process)
        return process

    def start(self, home, *words):
        """Starts a command that serves, and returns what it says when it is ready."""
        line = self.command(home, *words).stdout.readline()
        if not line:
            raise SystemExit(Path(self.folder.name, home, "log").read_text())
        return json.loads(line)
