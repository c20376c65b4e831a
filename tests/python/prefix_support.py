"""Helpers of tests of kvant.PrefixIndex: sequences whose keys and values follow from their ids, and processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

import kvant

HEADS, DIM, LAYERS = 2, 64, 2
SOURCE = """
import sys
sys.path[:0] = {folders!r}
import prefix_support as t
"""


@functools.lru_cache(maxsize=None)
def row(token, layer, what):
    return np.random.default_rng((token, layer, what)).standard_normal((HEADS, DIM)).astype(np.float32)


def rows(ids, layer, what):
    """Keys or values of tokens: functions of the id, as a model's are of all ids so far."""
    return np.array([row(i, layer, what) for i in ids])


def new_cache(**options):
    return kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, **options)


def append(sequence, ids):
    for layer in range(sequence.cache.layers):
        sequence.append(layer, rows(ids, layer, 0), rows(ids, layer, 1))


def filled(ids, **options):
    sequence = new_cache(**options).sequence()
    append(sequence, ids)
    return sequence


def attend(sequence, seed=9):
    q = np.random.default_rng(seed).standard_normal((1, 2 * HEADS, DIM)).astype(np.float32)
    return np.array([sequence.cache.attend(sequence, layer, q) for layer in range(LAYERS)])


def same(a, b, more=(5, 6, 7)):
    """Two sequences give the same bits, now and after more tokens."""
    assert np.array_equal(attend(a), attend(b))
    for ids in (more, range(1000, 1100)):
        append(a, ids)
        append(b, ids)
        assert np.array_equal(attend(a), attend(b))


def run(folder, code, wait=True):
    folders = [str(Path(__file__).parent), *sys.path]
    text = SOURCE.format(folders=folders) + textwrap.dedent(code)
    process = subprocess.Popen([sys.executable, "-c", text, str(folder)], stderr=subprocess.PIPE, text=True)
    if not wait:
        return process
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return process
