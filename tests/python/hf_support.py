"""What the tests of kvant.hf share: options, forward passes, comparisons, on the CPU or on a device."""

from __future__ import annotations

import copy
import os

import torch

import kvant.hf
from kvant.hf import versions

ON_DEVICE = os.environ.get("KVANT_TEST_DEVICE") == "cuda"
# AMX multiplies weights and values as two bf16 each, which may turn a token where logits all but tie.
ISA = next(i["name"] for i in kvant.info()["isas"] if i["available"] and i["name"] != "amx")
ENDS = dict(sink_pages=0, tail_pages=0, short_windows=True, isa=ISA)
# A device has no f32 pages: there f16 ones serve f32 models, and tokens may differ where logits all but tie.
EXACT = dict(k="f16", v="f16", exact="f16", **ENDS) if ON_DEVICE else dict(k="f32", v="f32", **ENDS)
PACKED = dict(k="tq6", v="tq4", **ENDS)
TIE = 0.02  # of the logits' standard deviation
TOLERANCE = 1e-2 if ON_DEVICE else 2e-4


def new_cache(model, **options):
    """An empty kvant cache; on a device one with room for what the tests do."""
    return kvant.hf.cache(model, max_length=512, batch=12, **options)


def with_cache(cache):
    """The argument of a model or of generate() that takes a cache."""
    return {versions.CACHE_NAME: cache}


def ids_of(prompts, n, begin=0):
    """Ids [1, n] of a text (the fixture prompts)."""
    return prompts(n, begin=begin)["input_ids"]


def forward(model, cache, ids, **options):
    """Logits of new tokens over a cache."""
    with torch.no_grad():
        return model(input_ids=ids, **with_cache(cache), **options).logits


def reference(model):
    """A copy of a model with transformers' own attention."""
    other = copy.deepcopy(model)
    kvant.hf.disable(other)
    return other


def close(a, b, tolerance=TOLERANCE):
    """Logits that are equal but for rounding."""
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * float(b.std())


def assert_same(model, expected, got, mask=None, new=16, best=True):
    """Equal tokens. On a device: each as likely as the model's own choice, but for what f16 changes (best: greedy
    search)."""
    if not ON_DEVICE:
        assert torch.equal(expected, got)
        return
    assert expected.shape == got.shape
    plain, scores = reference(model), []
    for tokens in (got, expected):
        real = torch.ones_like(tokens)
        if mask is not None:
            mask = mask.repeat_interleave(len(tokens) // len(mask), 0)
            real[:, : mask.shape[1]] = mask
        with torch.no_grad():
            position = (real.cumsum(1) - 1).clamp(min=0)
            logits = plain(input_ids=tokens, attention_mask=real, position_ids=position, use_cache=False).logits[
                :, -new - 1 : -1
            ]
        chosen = logits.gather(2, tokens[:, -new:, None])[..., 0]
        scores.append((chosen - logits.logsumexp(-1)).sum(1))
        if best and tokens is got:
            assert float((logits.amax(-1) - chosen).max()) <= TIE * float(logits.std())
    assert bool((scores[0] >= scores[1] - TIE * new).all())
