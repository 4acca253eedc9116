"""Writes blocks.json: blocks of every quantised type of the engine, and their values
according to the `gguf` package of the llama.cpp project.

    python3 -m pip install gguf==0.19.0 numpy
    python3 blocks.py > blocks.json
"""

import json

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import GGML_QUANT_SIZES, dequantize

# Offsets of the 16-bit floats in a block: random bits could be infinities or NaN.
FIELDS = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [], T.BF16: [],
}

random = np.random.default_rng(20261122)
out = {}
for dtype, fields in FIELDS.items():
    values, size = GGML_QUANT_SIZES[dtype]
    count = 512 // values
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in fields:
        field = random.normal(0, 0.05, count).astype(np.float16)
        blocks[:, at : at + 2] = field.view(np.uint8).reshape(count, 2)
    if dtype == T.MXFP4:
        # Includes the extremes of the exponent; 255 is NaN in this format.
        blocks[:, 0] = random.integers(100, 150, count)
        blocks[:3, 0] = [0, 1, 2]
    if dtype == T.BF16:
        blocks = random.normal(0, 1, 512).astype(np.float32).view(np.uint16)[1::2]
        blocks = np.ascontiguousarray(blocks).view(np.uint8).reshape(1, -1)
    decoded = dequantize(blocks.reshape(1, -1), dtype).astype("<f4")
    out[dtype.name] = {"blocks": blocks.tobytes().hex(), "values": decoded.tobytes().hex()}
print(json.dumps(out, indent=0))
