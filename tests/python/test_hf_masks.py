"""Positions that a query may see: own masks, padding, images, windows whose pages were freed, prefixes and cropping.

Expected values come from eager attention over transformers' own cache, fed with the tokens that should be left.
"""

from __future__ import annotations

import copy

import models
import pytest
import torch
import zoo

import kvant.hf
from kvant.hf import versions

VOCABULARY = 128


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def forward(model, cache, ids, **arguments) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{versions.CACHE_NAME: cache}, **arguments).logits


def pair(model, **options):
    """(model over kvant, its f32 cache), (the same model with eager attention, transformers' cache)."""
    exact = copy.deepcopy(model)
    exact.set_attn_implementation("eager")
    kvant.hf.enable(model, k="f32", v="f32", short_windows=True, **options)
    return (model, kvant.hf.cache(model)), (exact, plain_cache(exact))


def plain_cache(model):
    return versions.DynamicCache(config=versions.decoder_config(model.config))


def tokens(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def check(actual: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None = None) -> None:
    if real is not None:
        actual, expected = actual[real.bool()], expected[real.bool()]
    error = float((actual - expected).abs().max() / expected.std())
    assert error <= 1e-4, f"{error:.1e} of the logits' standard deviation"


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max() / b.std()) > 1e-2


def full_model():
    return models.sharpen(models.tiny_llama(vocab_size=VOCABULARY), 6.0)


def window_model(window: int = 64):
    return models.sharpen(models.tiny_mistral(window, vocab_size=VOCABULARY), 6.0)


# --- masks of one's own ---


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("form", ["bool", "additive", "bias"])
@pytest.mark.parametrize("make", [full_model, window_model])
def test_an_own_mask_over_what_is_stored(form, make):
    """Tree attention, packed documents: a 4-D mask over past and new keys."""
    (model, cache), (exact, reference) = pair(make())
    past, new = tokens(2, 150), tokens(2, 12, 1)
    for m, c in ((model, cache), (exact, reference)):
        forward(m, c, past)
    keys = reference.get_mask_sizes(12, 0)[0]
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, 12, keys, generator=generator) < 0.5
    mask[..., -12:] &= torch.ones(12, 12, dtype=torch.bool).tril()
    mask[..., -12:] |= torch.eye(12, dtype=torch.bool)
    numbers = additive(mask)
    if form == "bias":
        numbers = numbers + torch.randn(numbers.shape, generator=generator)
    expected = forward(exact, reference, new, attention_mask=numbers)
    check(forward(model, cache, new, attention_mask=mask if form == "bool" else numbers), expected)
    # One that is blind to the mask would fail: the plain logits are others.
    plain = plain_cache(exact)
    forward(exact, plain, past)
    assert differs(forward(exact, plain, new), expected)
    # The cache goes on without a mask.
    check(forward(model, cache, tokens(2, 1, 3)), forward(exact, reference, tokens(2, 1, 3)))


def test_an_own_mask_of_another_shape_is_refused():
    (model, cache), _ = pair(full_model())
    forward(model, cache, tokens(1, 20))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 1, 3, 11\].*\[batch, heads, 3, 23\]"):
        forward(model, cache, tokens(1, 3), attention_mask=torch.ones(1, 1, 3, 11, dtype=torch.bool))


# --- padding ---


@pytest.mark.parametrize("make", [full_model, window_model])
def test_padding_on_the_right(make):
    (model, cache), (exact, reference) = pair(make())
    ids = tokens(2, 100)
    real = torch.ones_like(ids)
    real[1, 70:] = 0
    check(forward(model, cache, ids, attention_mask=real), forward(exact, reference, ids, attention_mask=real), real)


def test_padding_between_turns():
    """Turns of different lengths: row 0 ends its first turn with padding, row 1 has nothing at all in the second."""
    (model, cache), (exact, reference) = pair(full_model())
    ids = tokens(2, 160)
    real = torch.ones_like(ids)
    real[0, 60:80] = 0
    real[1, 80:120] = 0
    position_ids = real.cumsum(1) - 1
    at = 0
    for n in (80, 40, 30, 1, 9):
        arguments = {"attention_mask": real[:, : at + n], "position_ids": position_ids[:, at : at + n].clamp_min(0)}
        check(
            forward(model, cache, ids[:, at : at + n], **arguments),
            forward(exact, reference, ids[:, at : at + n], **arguments),
            real[:, at : at + n],
        )
        at += n


@pytest.mark.parametrize("make", [full_model, window_model])
@pytest.mark.parametrize("fresh_keys", [False, True])
def test_a_first_prompt_with_padding_between_turns(make, fresh_keys):
    """Padding is no token of a window, whoever computes attention of the prompt."""
    model = make()
    kvant.hf.enable(model, k="f32", v="f32", short_windows=True, fresh_keys=fresh_keys)
    ids = tokens(2, 160)
    real = torch.ones_like(ids)
    real[0, 60:100] = 0
    real[1, :30] = 0
    position_ids = (real.cumsum(1) - 1).clamp_min(0)
    together = forward(model, kvant.hf.cache(model), ids, attention_mask=real, position_ids=position_ids)
    for row in range(2):
        kept = real[row].bool()
        alone = forward(model, kvant.hf.cache(model), ids[row : row + 1, kept])
        check(together[row : row + 1, kept], alone)


def test_a_padded_row_is_what_it_is_alone():
    """With formats that round: padding is not stored, so that a row's pages hold the same tokens."""
    model = full_model()
    kvant.hf.enable(model, k="tq4", v="tq4", sink_pages=0, tail_pages=0)
    ids = tokens(2, 260)
    real = torch.ones_like(ids)
    real[1, :101] = 0
    position_ids = (real.cumsum(1) - 1).clamp_min(0)
    together, alone = kvant.hf.cache(model), kvant.hf.cache(model)
    a = forward(model, together, ids, attention_mask=real, position_ids=position_ids)
    b = forward(model, alone, ids[1:, 101:])
    assert float((a[1:, 101:] - b).abs().max()) <= 1e-5 * float(b.std())


def test_tokens_hidden_later():
    """A 2-D mask that hides tokens which were visible when they were given."""
    (model, cache), (exact, reference) = pair(full_model())
    for m, c in ((model, cache), (exact, reference)):
        forward(m, c, tokens(2, 90))
    mask = torch.ones(2, 95, dtype=torch.long)
    mask[0, 10:50] = 0
    expected = forward(exact, reference, tokens(2, 5, 1), attention_mask=mask)
    check(forward(model, cache, tokens(2, 5, 1), attention_mask=mask), expected)


# --- images ---


@pytest.mark.parametrize("padding", [0, 17])
def test_an_image_in_the_second_turn_past_the_window(padding):
    """Pages that left the window are gone when the image's mask is read; its tokens see each other in both
    directions."""
    past = 200
    model, ids, real, first = zoo.gemma3_with_images(past + 60, 60, padding)
    ids, real = torch.roll(ids, past, 1), torch.ones_like(ids)  # the turn with the images comes last
    ids[:, :past] = tokens(2, past)
    ids[ids == 0] = 3
    if padding:
        real[1, :padding] = 0
    (model, cache), (exact, reference) = pair(model)
    for m, c in ((model, cache), (exact, reference)):
        forward(m, c, ids[:, :past], attention_mask=real[:, :past])
    try:
        expected = forward(exact, reference, ids[:, past:], attention_mask=real, **first)
    except RuntimeError as error:  # 5.16 makes the image's mask without the window's offset
        pytest.skip(f"this version of transformers fails by itself: {error}")
    check(forward(model, cache, ids[:, past:], attention_mask=real, **first), expected)
    longer = torch.cat([real, real[:, -1:]], 1)
    check(
        forward(model, cache, tokens(2, 1), attention_mask=longer),
        forward(exact, reference, tokens(2, 1), attention_mask=longer),
    )


def test_attention_in_chunks_past_a_chunk():
    """Llama 4: a query sees only keys of its own chunk, which is a mask tensor over a cache with a window."""
    entry = next(e for e in zoo.ZOO if e.prefix == "Llama4")
    (model, cache), (exact, reference) = pair(zoo.build(entry))
    for seed, n in enumerate((200, 1, 30, 1, 1)):
        check(forward(model, cache, tokens(2, n, seed)), forward(exact, reference, tokens(2, n, seed)))


# --- prefixes and cropping ---


@pytest.mark.parametrize("make", [full_model, window_model])
def test_copies_of_a_prefix_go_on_alone(make):
    """copy.deepcopy of a cache whose window has passed: each copy and the original have their own future."""
    (model, cache), (exact, _) = pair(make())
    prefix = tokens(2, 210)
    forward(model, cache, prefix)
    twin = copy.deepcopy(cache)
    for c, seed in ((cache, 1), (twin, 2)):
        reference = plain_cache(exact)
        forward(exact, reference, prefix)
        check(forward(model, c, tokens(2, 70, seed)), forward(exact, reference, tokens(2, 70, seed)))
    third = copy.deepcopy(twin)
    del twin, c
    check(forward(model, third, tokens(2, 5, 3)), forward(exact, reference, tokens(2, 5, 3)))


@pytest.mark.parametrize("make", [full_model, window_model])
def test_drafts_of_120_tokens_are_taken_back(make):
    """Assisted generation crops what it rejects. With a window, the pages before it must have been kept until then."""
    (model, cache), (exact, _) = pair(make(), rollback_tokens=120)
    kept, drafts = tokens(1, 300), tokens(1, 120, 1)
    for at in range(0, 300, 50):
        forward(model, cache, kept[:, at : at + 50])
    for i in range(120):
        forward(model, cache, drafts[:, i : i + 1])
    cache.crop(-120)
    reference = plain_cache(exact)
    forward(exact, reference, kept)
    for seed in (2, 3):
        check(forward(model, cache, tokens(1, 7, seed)), forward(exact, reference, tokens(1, 7, seed)))


def test_cropping_a_padded_batch():
    (model, cache), (exact, reference) = pair(full_model())
    ids = tokens(2, 120)
    real = torch.ones_like(ids)
    real[1, :30] = 0
    real[1, 90:100] = 0
    position_ids = (real.cumsum(1) - 1).clamp_min(0)
    forward(model, cache, ids, attention_mask=real, position_ids=position_ids)
    cache.crop(-25)  # of which row 1 holds 20
    assert cache.get_seq_length() == 95
    forward(exact, reference, ids[:, :95], attention_mask=real[:, :95], position_ids=position_ids[:, :95])
    new, longer = tokens(2, 6, 1), torch.cat([real[:, :95], torch.ones(2, 6, dtype=torch.long)], 1)
    positions = (longer.cumsum(1) - 1)[:, 95:]
    arguments = {"attention_mask": longer, "position_ids": positions}
    check(forward(model, cache, new, **arguments), forward(exact, reference, new, **arguments))
