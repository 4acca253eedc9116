"""Frame of the programs in this folder: each asks a node through one client, feature by feature.

    CLIENT.py BASE_URL MODEL

Prints a line for each feature: `ok`, `failed: WHY`, `not in this client`, or `not served` if the node
has no such path.
"""

import inspect
import json
import sys
import traceback
import urllib.request

# Order of the table's columns. tests/clients/table/feature.mjs reads it from here.
FEATURES = """
models chat stream settings n logprobs tools tool-stream schema schema-stream completions responses
embeddings count-tokens batch errors
""".split()

base_url, model = sys.argv[1:3] if len(sys.argv) > 2 else ("http://127.0.0.1:7602/v1", "none")
root = base_url.removesuffix("/v1")

SYSTEM = "You answer in one short sentence."
QUESTION = "Why is it good to share?"
# Longer than the context of every small model, and shorter than the largest body.
TOO_LONG = "word " * 40000

checks = {}


def feature(name, path=None):
    """Registers the check of a feature, which the node has if it serves `path`."""
    assert name in FEATURES, name

    def register(check):
        checks[name] = check, path
        return check

    return register


def raises(kind, call, *words):
    """Error of a call that must fail, with these words in its message."""
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def served():
    with urllib.request.urlopen(root + "/openapi.json", timeout=60) as reply:
        return json.load(reply)["paths"]


def main():
    paths = served()
    for name in FEATURES:
        check, path = checks.get(name, (None, None))
        if check is None:
            result = "not in this client"
        elif path and path not in paths:
            result = "not served"
        else:
            try:
                done = check()
                if inspect.iscoroutine(done):
                    import asyncio

                    asyncio.run(done)
                result = "ok"
            except Exception as error:
                traceback.print_exc()
                why = " ".join(str(error).split()) or type(error).__name__
                result = f"failed: {why[:300]}"
        print(f"{name}: {result}", flush=True)
