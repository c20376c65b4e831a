"""Threads of a server that go on from copies of one prefix cache, and Python's collector: each gets what it gets
alone."""

from __future__ import annotations

import copy
import gc
import threading

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from hf_support import EXACT, PACKED, forward, ids_of, new_cache  # noqa: E402


@pytest.fixture(params=[("llama", EXACT), ("sliding", EXACT), ("llama", PACKED)], ids=["llama", "sliding", "packed"])
def model(request):
    name, options = request.param
    model = request.getfixturevalue(name)
    kvant.hf.enable(model, **options)
    yield model
    kvant.hf.disable(model)


def prefix_cache(model, prompts):
    cache = new_cache(model)
    forward(model, cache, ids_of(prompts, 150))
    return cache


def answer(model, cache, prompts, number, steps=12):
    """Logits of a question and of the tokens after it."""
    logits = [forward(model, cache, ids_of(prompts, 9, begin=1000 * number))[:, -1]]
    for _ in range(steps):
        logits.append(forward(model, cache, logits[-1].argmax(-1, keepdim=True))[:, -1])
    return torch.stack(logits)


def in_threads(count, work):
    """work(0), work(1), ... at the same time; the first exception is raised here."""
    failures = []

    def run(i):
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_go_on_from_copies_of_one_prefix(model, prompts):
    expected = [answer(model, prefix_cache(model, prompts), prompts, i) for i in range(4)]
    prefix, got = prefix_cache(model, prompts), [None] * 4

    def work(i):
        got[i] = answer(model, copy.deepcopy(prefix), prompts, i)

    in_threads(4, work)
    assert [torch.equal(a, b) for a, b in zip(got, expected)] == [True] * 4
    assert torch.equal(answer(model, prefix, prompts, 0), expected[0])


class Ring:
    """Keeps a cache until Python's collector comes by: a cycle."""

    def __init__(self, cache):
        self.cache, self.me = cache, self


def test_other_copies_come_grow_and_go_between_the_layers_of_a_step(model, prompts):
    expected = answer(model, prefix_cache(model, prompts), prompts, 1)
    prefix, mine = prefix_cache(model, prompts), threading.get_ident()
    cache = copy.deepcopy(prefix)
    calls = [0]

    def grow(_):
        other = copy.deepcopy(prefix)
        answer(model, other, prompts, 2, steps=1)
        other.crop(-3)
        Ring(other)

    def between(module, arguments, output):
        if threading.get_ident() != mine:
            return
        calls[0] += 1
        if calls[0] % 3 == 0:
            in_threads(1, grow)
        gc.collect()

    hooks = [layer.register_forward_hook(between) for layer in model.model.layers]
    try:
        got = answer(model, cache, prompts, 1)
    finally:
        for hook in hooks:
            hook.remove()
    assert calls[0] > 20
    assert torch.equal(got, expected)
