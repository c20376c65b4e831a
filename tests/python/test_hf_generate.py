"""generate() over kvant caches: with f32 pages the same tokens as transformers' own cache; packed, the same however batched."""

from __future__ import annotations

import copy
import threading

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvant.hf  # noqa: E402

EXACT = dict(k="f32", v="f32", sink_pages=0, tail_pages=0, short_windows=True)
PACKED = dict(k="tq6", v="tq4", sink_pages=0, tail_pages=0, short_windows=True)


@pytest.fixture(params=["llama", "sliding", pytest.param("nano", marks=pytest.mark.slow)])
def model(request):
    model = request.getfixturevalue(request.param)
    yield model
    kvant.hf.disable(model)


def generate(model, inputs, new=24, **options):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new, **options}
    return model.generate(**inputs, **options)


def both(model, inputs, **options):
    """The tokens of transformers' own cache, and of kvant with f32 pages."""
    expected = generate(model, inputs, **options)
    kvant.hf.enable(model, **EXACT)
    got = generate(model, inputs, **options)
    kvant.hf.disable(model)
    return expected, got


CASES = {
    "greedy": ((300,), {}),
    "padded batch": ((400, 90, 233), {}),
    "beam": ((150,), {"num_beams": 3}),
    "beam on a padded batch": ((300, 90), {"num_beams": 3, "num_return_sequences": 2}),
    "chunked prefill": ((300,), {"prefill_chunk_size": 128}),
    "prompt lookup": ((300,), {"prompt_lookup_num_tokens": 6}),
    "long prompt lookup": ((300,), {"prompt_lookup_num_tokens": 50}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(model, prompts, case):
    lengths, options = CASES[case]
    expected, got = both(model, prompts(*lengths), **options)
    assert torch.equal(expected, got)


def test_sampling(model, prompts):
    expected, got = [], []
    for tokens, enabled in ((expected, False), (got, True)):
        if enabled:
            kvant.hf.enable(model, **EXACT)
        torch.manual_seed(5)
        tokens.append(generate(model, prompts(120), do_sample=True, num_return_sequences=4, top_k=20))
    assert torch.equal(expected[0], got[0])
    assert len({tuple(row.tolist()) for row in got[0]}) > 1


@pytest.mark.parametrize("length", [100, 300])
def test_padded_batch_is_each_alone(model, prompts, length):
    """Padding is never stored, so packed caches give bit for bit what they give for each row alone."""
    kvant.hf.enable(model, **PACKED)
    inputs = prompts(length, 40, 77)
    batch = generate(model, inputs)
    for i, n in enumerate((length, 40, 77)):
        alone = generate(model, {"input_ids": inputs["input_ids"][i : i + 1, length - n :]})
        assert torch.equal(batch[i, length - n :], alone[0])
