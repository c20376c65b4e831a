"""Formats of other key/value caches: the values that are left of a tensor once such a cache has stored it.

The block formats of llama.cpp follow their public definition. 32 neighbouring values of a head share a scale in fp16,
in q5_1 also a minimum in fp16, and each value has a code of 4, 5 or 8 bits. llama.cpp rotates the keys and values of a
quantized cache by a Hadamard matrix where head_dim is a multiple of 64, unless LLAMA_ATTN_ROT_DISABLE is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = 32
# The levels of iq4_nl, in units of the scale.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2
E4M3_MOST = 448.0


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def inverse(x: np.ndarray) -> np.ndarray:
    """1 / x, and 0 for 0: a block of zeros has scale 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)


def farthest(x: np.ndarray) -> np.ndarray:
    """The value of the largest magnitude in each row, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[:, None], -1)


def q8_0(x: np.ndarray) -> np.ndarray:
    """Codes -127 to 127, rounded to nearest, halves away from zero."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    steps = x * inverse(scale)
    return np.sign(steps) * np.floor(np.abs(steps) + np.float32(0.5)) * half(scale)


def q5_1(x: np.ndarray) -> np.ndarray:
    """Codes 0 to 31 from the least value of the block to the largest."""
    least = x.min(-1, keepdims=True)
    scale = (x.max(-1, keepdims=True) - least) / np.float32(31)
    codes = np.floor((x - least) * inverse(scale) + np.float32(0.5)).clip(0, 31)
    return codes * half(scale) + half(least)


def q4_0(x: np.ndarray) -> np.ndarray:
    """Codes -8 to 7; the value of the largest magnitude is -8, whatever its sign."""
    scale = farthest(x) / np.float32(-8)
    codes = np.floor(x * inverse(scale) + np.float32(8.5)).clip(0, 15) - 8
    return codes * half(scale)


def iq4_nl(x: np.ndarray) -> np.ndarray:
    """The nearest of 16 uneven levels, then the scale that fits the block best, weighted by the squares of its
    values."""
    levels = LEVELS[np.searchsorted(BETWEEN, x * inverse(farthest(x) / LEVELS[0]), side="right")]
    weights = x * x
    scale = (weights * levels * x).sum(-1, keepdims=True) * inverse((weights * levels * levels).sum(-1, keepdims=True))
    return levels * half(scale)


class Block(NamedTuple):
    stored: Callable[[np.ndarray], np.ndarray]  # of rows of 32 values in float32
    code_bits: int
    halves: int  # fp16 numbers beside the codes

    @property
    def bits(self) -> float:
        """A value's share of a block."""
        return self.code_bits + 16 * self.halves / BLOCK


BLOCKS = {
    "q8_0": Block(q8_0, 8, 1),
    "q5_1": Block(q5_1, 5, 2),
    "q4_0": Block(q4_0, 4, 1),
    "iq4_nl": Block(iq4_nl, 4, 1),
}


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix, scaled so that the matrix is its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def rotation_size(head_dim: int, keys: bool) -> int:
    """How many neighbouring values llama.cpp rotates together; 0: none. Keys: the largest power of two that divides
    head_dim; values: 64."""
    if head_dim % 64:
        return 0
    return head_dim & -head_dim if keys else 64


def blocks(name: str, x: np.ndarray, rotated: int = 0) -> np.ndarray:
    """Keys or values [..., head_dim] in float32 after a cache of llama.cpp stored them. rotated: how many neighbouring
    values are rotated together. llama.cpp compares rotated queries with rotated keys and rotates the output back;
    rotating back here is the same."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"head_dim = {x.shape[-1]}: must be a multiple of {BLOCK} for {name}")
    matrix = hadamard(rotated) if rotated else None
    turned = x.reshape(-1, rotated) @ matrix if rotated else x
    stored = BLOCKS[name].stored(np.ascontiguousarray(turned).reshape(-1, BLOCK)).astype(np.float32)
    return (stored.reshape(-1, rotated) @ matrix if rotated else stored).reshape(x.shape)
