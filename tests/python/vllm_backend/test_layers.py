"""Attention layers of vLLM over kvant's pages, against float64: every kind of step that a server takes."""

from __future__ import annotations

import pytest

from .engine import Engine

ALIBI = [0.5, 0.25, 0.125, 0.0625]
KINDS = {
    "plain": {},
    "window": {"window": 100},
    "short window": {"window": 16},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": ALIBI},
    "scale": {"scale": 0.3},
}


def test_every_kind_of_step(vllm, dense_pages):
    e = Engine(vllm)
    a, b, c = (e.request(seed) for seed in (1, 2, 3))
    e.step([(a, 200)])  # a prompt at once
    e.step([(a, 1), (b, 70)])  # decoding beside a prompt
    e.step([(b, 1), (a, 1)])
    e.step([(a, 1), (b, 1), (c, 130)])  # a prompt in chunks, the second one not at a block's begin
    e.step([(a, 1), (b, 1), (c, 99)])
    for _ in range(3):
        e.step([(a, 1), (b, 1), (c, 1)])
