#!/usr/bin/env python3
"""Writes more_ids.json: token ids by llama.cpp's own tokenizer, see README.md.

usage: make_more_ids.py MODEL.gguf VOCABULARIES path/to/tokenize > more_ids.json
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

PRES = ["tekken", "gpt-4o", "qwen35", "falcon", "deepseek-llm", "deepseek-coder", "deepseek-v3"]


def changed(source, path, key, value):
    """The metadata of a model with one value changed, without tensors."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", key):
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main():
    model, vocabularies, tool = sys.argv[1:]
    reference = json.loads((Path(__file__).parent / "ids.json").read_text())
    given = b"".join(b"%d\n" % len(text) + text for text in map(str.encode, reference["texts"]))

    def ids(path, how):
        done = subprocess.run([tool, path, how], input=given, capture_output=True, check=True)
        return [[int(id) for id in line.split()] for line in done.stdout.decode().split("\n")[:-1]]

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.gguf"
        for pre in PRES:
            changed(model, path, "tokenizer.ggml.pre", pre)
            plain = ids(path, "plain")
            same = reference["smollm_plain"]
            rows[pre] = [None if row == same[i] else row for i, row in enumerate(plain)]
        spm = Path(vocabularies) / "ggml-vocab-llama-spm.gguf"
        rows["llama-spm_plain"] = ids(spm, "plain")
        rows["llama-spm_parse"] = ids(spm, "parse")
        rows["phi-3_parse"] = ids(Path(vocabularies) / "ggml-vocab-phi-3.gguf", "parse")
        changed(spm, path, "tokenizer.ggml.add_space_prefix", False)
        rows["no-prefix_plain"] = ids(path, "plain")

    # A row equal to that of llama-spm_plain is null.
    for key in ["llama-spm_parse", "phi-3_parse", "no-prefix_plain"]:
        same = rows["llama-spm_plain"]
        rows[key] = [None if row == same[i] else row for i, row in enumerate(rows[key])]

    def lines(rows):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"

    print("{\n" + ",\n".join(f'"{key}": {lines(value)}' for key, value in rows.items()) + "\n}")


main()
