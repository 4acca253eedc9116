"""Divergences of llama.cpp's quantised forms of the models of this directory. See README.md.

Usage: quantise.py PROGRAM [NAME...]   (quantise.cpp, compiled; NAME: only these models)
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent
# Numbers of llama_ftype.
TYPES = {"Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "MXFP4": 38}
F16 = 1
# Features that llama.cpp ignores in these models, and that this script emulates: the window, and
# the attention factor beside the one that llama.cpp derives itself.
WINDOWS = {"mistral": 7, "phi3long": 9}
ATTENTION_FACTORS = {"mistralyarn": 1.25 / (1 + 0.1 * math.log(4))}
# Compared with llama.cpp's own F16 form, which differs from `transformers`: llama.cpp rounds gpt-oss's
# frequency limits to integers; in the others, it routes a row to another expert or sums a scan in
# another order.
OF_ITS_OWN = {"gptoss", "glm4moe", "granitehybridmoe", "nemotronhmoe", "qwen3next"}
# llama.cpp requires as many key heads as query heads: each key head is written once per use.
REPEATED = {"olmoe"}


def log_softmax(rows):
    rows = rows.astype(np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def divergences(expected, found):
    """Kullback-Leibler, in nats, of each row."""
    expected, found = log_softmax(expected), log_softmax(found)
    return (np.exp(expected) * (expected - found)).sum(-1)


def repeat_heads(model, architecture, out):
    """The same function: a norm over the row is that over the row twice."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(out, architecture)
    heads, kv_heads = (
        reader.fields[f"{architecture}.attention.head_count{kv}"].contents() for kv in ("", "_kv")
    )
    for field in reader.fields.values():
        if field.name.endswith("head_count_kv"):
            writer.add_head_count_kv(heads)
        elif not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        data = tensor.data
        if any(part in tensor.name for part in ("attn_k.", "attn_k_norm.", "attn_v.")):
            each = data.reshape(kv_heads, -1, *data.shape[1:])
            data = each.repeat(heads // kv_heads, 0).reshape(-1, *data.shape[1:])
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised_hash(file, dtype):
    """Hash of the tensors stored as that type, in the order of their names."""
    tensors = sorted(gguf.GGUFReader(file).tensors, key=lambda t: t.name)
    content = b"".join(t.data.tobytes() for t in tensors if t.tensor_type.name == dtype)
    return hashlib.sha256(content).hexdigest()


def main():
    program = sys.argv[1]
    reference = json.loads((HERE / "reference.json").read_text())
    names = sys.argv[2:] or sorted(reference)
    stored_hashes = json.loads((HERE / "quantised.json").read_text())
    hashes = {name: old for name, old in stored_hashes.items() if name not in names}
    for name in names:
        stored = HERE / f"{name}.gguf"
        ids = reference[name]["prompt"] + reference[name]["more"]
        expected = np.fromfile(HERE / f"{name}.logprobs", "<f2").reshape(len(ids), -1)
        architecture = gguf.GGUFReader(stored).fields["general.architecture"].contents()

        def run(model, ftype, out):
            told = (WINDOWS.get(name, 0), ATTENTION_FACTORS.get(name, 0))
            done = subprocess.run(
                [program, model, architecture, str(expected.shape[1]), str(ftype), out, *map(str, told)],
                input=" ".join(map(str, ids)).encode(),
                capture_output=True,
            )
            if name in REPEATED and model == stored:
                assert done.stderr == b"not loaded\n", done.stderr
                return None
            assert done.returncode == 0, done.stderr
            return np.frombuffer(done.stdout, np.float32).reshape(expected.shape)

        rows, hashes[name] = [], {}
        with tempfile.TemporaryDirectory() as directory:
            model, out = Path(directory) / "model.gguf", Path(directory) / "quantised.gguf"
            if name in REPEATED:
                repeat_heads(stored, architecture, model)
            else:
                model = stored
            own = run(model, F16, out)
            apart = divergences(expected, own).mean()
            assert (apart > 2e-5) == (name in OF_ITS_OWN), (name, apart)
            print(f"{name:12} F16 {apart:.1e}", end="")
            for dtype, ftype in TYPES.items():
                found = run(model, ftype, out)
                rows.append(divergences(own if name in OF_ITS_OWN else expected, found))
                print(f" {dtype} {rows[-1].mean():.2e}", end="")
                if model != stored:
                    run(stored, ftype, out)
                hashes[name][dtype] = quantised_hash(out, dtype)
            print()
        (HERE / f"{name}.divergences").write_bytes(np.array(rows, "<f4").tobytes())
    text = json.dumps(dict(sorted(hashes.items()))).replace('}, "', '},\n"')
    (HERE / "quantised.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
