"""Writes queries, keys and values as `kvant eval` and `kvant calibrate` read them, with numpy and json alone.

    python3 examples/python/write_capture.py capture.safetensors
"""

import json
import sys

import numpy as np


def write_capture(path, layers, metadata):
    """layers: {number: (q [q_heads, queries, head_dim], k, v [kv_heads, positions, head_dim])}; metadata: texts."""
    header, data, end = {"__metadata__": metadata}, [], 0
    for number, tensors in layers.items():
        for name, x in zip("qkv", tensors):
            x = np.ascontiguousarray(x, np.float32)  # float16 does as well: then the dtype below is "F16"
            begin, end = end, end + x.nbytes
            header[f"layer{number}.{name}"] = {"dtype": "F32", "shape": x.shape, "data_offsets": [begin, end]}
            data.append(x.tobytes())
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(data))


if __name__ == "__main__":  # random numbers in place of a model's: two layers, the second with a window of 256
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    rng = np.random.default_rng(0)
    shapes = (8, 128, 64), (2, 1000, 64), (2, 1000, 64)
    layers = {n: [rng.standard_normal(shape) for shape in shapes] for n in (0, 1)}
    write_capture(sys.argv[1], layers, {"layer0.sliding_window": "0", "layer1.sliding_window": "256"})
