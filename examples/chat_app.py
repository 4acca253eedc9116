#!/usr/bin/env python3
"""A community app: asks the node on this machine, and prints the answer as it comes.

    pip install websockets
    hearthnet serve                       # in another terminal
    python3 examples/chat_app.py "Why is the sky blue?"

The protocol is specs/capability-bus.md. Nothing else of HearthNet is needed.
"""

import argparse
import asyncio
import json
import os
import pathlib
import sys

import websockets

CHAT = "experimental.distributed_llm.chat@1.0"


def data_dir():
    if "HEARTHNET_DATA_DIR" in os.environ:
        return pathlib.Path(os.environ["HEARTHNET_DATA_DIR"])
    share = os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local" / "share"
    return pathlib.Path(share) / "hearthnet"


async def call(folder, capability, params):
    """Calls the node, and yields what it says, event by event, until the call ends."""
    endpoint = (folder / "bus.endpoint").read_text().strip()
    token = (folder / "bus.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with websockets.connect(endpoint, additional_headers=headers, proxy=None) as bus:
        sent = 0

        async def send(event, data):
            nonlocal sent
            sent += 1
            await bus.send(json.dumps({"call": 1, "seq": sent, "event": event, "data": data}))

        await send("call", {"capability": capability, "params": params})
        async for message in bus:
            frame = json.loads(message)
            event, data = frame["event"], frame["data"]
            if event == "end":
                return
            if event == "error":
                raise RuntimeError(f"{data['message']} ({data['code']})\n{data.get('hint', '')}")
            yield event, data
            # The node waits when 64 events were not acknowledged.
            if frame["seq"] % 16 == 0:
                await send("ack", {"seq": frame["seq"]})
        # Leaving the block closes the connection, which cancels a call that has not ended.


def shown(text):
    """The text as it is; on a terminal without what would steer it: a host can make any token appear."""
    if not sys.stdout.isatty():
        return text
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


async def main(args):
    params = {
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    params |= {key: value for key in ("model", "seed") if (value := getattr(args, key)) is not None}
    async for event, data in call(args.data_dir, CHAT, params):
        if event == "token_delta":
            print(shown(data["text"]), end="", flush=True)
        elif event == "done":
            print(f"\n[{data['usage']['completion_tokens']} tokens, seed {data['seed']}]", file=sys.stderr)
        elif args.verbose:
            print(f"[{event}: {json.dumps(data)}]", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--data-dir", type=pathlib.Path, default=data_dir())
    parser.add_argument("--model")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--verbose", action="store_true", help="tell what becomes of the hosts")
    try:
        asyncio.run(main(parser.parse_args()))
    except FileNotFoundError:
        sys.exit("no node runs on this machine: start one with `hearthnet serve`")
    except (RuntimeError, OSError, websockets.WebSocketException) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
