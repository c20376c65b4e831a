"""Whatever kvant does not serve is said."""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
import zoo  # noqa: E402
from conversation_support import EXACT, answer, filled, ids_of, longrope, model, plain  # noqa: E402, F401
from hf_support import ISA, forward, with_cache  # noqa: E402
from kvant.hf import conversation, versions  # noqa: E402


@pytest.mark.parametrize("case", ["guidance", "longrope"])
def test_a_cache_that_the_model_makes_is_kvants(plain, case):
    ids = ids_of(120)
    alone = copy.deepcopy(plain) if case == "guidance" else longrope()
    options = {"guidance_scale": 1.5} if case == "guidance" else {"max_new_tokens": 30}
    expected = answer(alone, ids, **options)
    model = kvant.hf.enable(copy.deepcopy(alone), strict=True, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(answer(model, ids, **options), expected)
    assert all(row.stored for row in kvant.hf.report(model).rows)
    if case == "guidance":  # the answer's cache, and not the second run's
        assert "1 rows of 127 tokens" in str(kvant.hf.report(model))


def test_only_a_call_that_asks_gets_a_cache(plain):
    model, ids = kvant.hf.enable(copy.deepcopy(plain), **EXACT), ids_of(30)
    with torch.no_grad():
        asked = model(ids, use_cache=True)
        assert isinstance(versions.given_cache(dict(asked)), kvant.hf.KvantCache)
        more = model(ids[:, :1], use_cache=True, **with_cache(versions.given_cache(dict(asked)))).logits
        expected = plain(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(more, expected, rtol=0, atol=2e-4 * float(expected.std()))
        for options in ({}, {"use_cache": False}, {"use_cache": None}):
            assert not isinstance(versions.given_cache(dict(model(ids, **options))), kvant.hf.KvantCache)
    model(ids, use_cache=True).logits.sum().backward()  # to be trained
    with torch.no_grad():
        given = kvant.hf.cache(model)
        model(ids, None, None, given, use_cache=True)  # by its place
    assert given.get_seq_length() == 30 and torch.equal(given.conversation.ids(30), ids)


def test_no_cache_is_said(plain):
    model, ids = kvant.hf.enable(copy.deepcopy(plain), **EXACT), ids_of(30)
    with pytest.warns(UserWarning, match="no cache holds the keys and values .use_cache=False.*stores nothing"):
        answer(model, ids, use_cache=False)
    assert "went to no cache" in str(kvant.hf.report(model))
    kvant.hf.enable(model, strict=True, **EXACT)
    with pytest.raises(kvant.Unsupported, match="use_cache=False"):
        answer(model, ids, use_cache=False)


def too_wide():
    """A model whose latents are larger than any head_dim of kvant."""
    entry = next(entry for entry in zoo.ZOO if entry.prefix == "DeepseekV3")
    return zoo.build(dataclasses.replace(entry, changes=entry.changes | {"kv_lora_rank": 600})).eval()


def test_layers_left_are_said_before_and_after():
    with pytest.warns(UserWarning, match="kvant stores no layer of DeepseekV3ForCausalLM: head_dim 600 is above 576"):
        model = kvant.hf.enable(too_wide())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (0, 42):
            if tokens:
                answer(model, ids_of(40) % 100 + 5, max_new_tokens=3)
            report = kvant.hf.report(model)
            assert report.tokens == tokens and {row.stored for row in report.rows} == {False}
            assert all("head_dim 600 is above" in row.reason for row in report.rows)
        cache = filled(model, ids_of(30) % 100 + 5)
        assert kvant.hf.report(cache).tokens == 30 and kvant.hf.report(cache).batch == 1
    with pytest.raises(kvant.Unsupported, match="head_dim 600 is above"):
        kvant.hf.enable(model, strict=True)
    with pytest.raises(ValueError, match="head_dim 600 is above.*prefix_cache"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.hf.enable(model, prefix_cache=100)
    fresh = too_wide()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.hf.enable(fresh, skip_layers=range(2))  # as it was asked for


def test_layers_that_only_tokens_tell_are_said_once(plain, monkeypatch):
    monkeypatch.setattr(versions, "predicted_geometry", lambda config, layer: None)
    model = kvant.hf.enable(too_wide())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in (1, 2):
            answer(model, ids_of(40, seed) % 100 + 5, max_new_tokens=3)
    assert ["left to transformers" in str(w.message) for w in said] == [True]
    assert kvant.hf.report(model).tokens == 42 and not any(row.stored for row in kvant.hf.report(model).rows)


@pytest.mark.parametrize("entry", zoo.ZOO, ids=lambda entry: entry.name)
def test_reports_before_tokens_are_those_after(entry):
    model = zoo.build(entry)
    if model is None:
        pytest.skip("this version of transformers does not have it")
    cache = kvant.hf.cache(model.eval(), isa=ISA)
    cache.try_out()


    def facts():
        rows = kvant.hf.report(cache).rows
        return [(r.stored, r.k, r.v, *((r.kv_heads, r.head_dim, r.v_head_dim) if r.stored else ())) for r in rows]

    before = facts()
    forward(model, cache, ids_of(20) % 100 + 5)
    assert facts() == before


def test_a_prompt_whose_tokens_see_later_ones_goes_back_no_further(model, monkeypatch):
    ids, cache = ids_of(100), kvant.hf.cache(model)
    cache.conversation.saw_ahead(50)
    forward(model, cache, ids)
    assert cache.conversation.ahead == [(0, 50)]
    with pytest.raises(ValueError, match="tokens 0 to 49 see each other in both directions"):
        answer(model, torch.cat([ids[:, :30], ids_of(30, 8)], 1), **with_cache(cache))
    answer(model, torch.cat([ids[:, :50], ids_of(30, 8)], 1), **with_cache(cache))
    answer(model, ids[:, :50], **with_cache(cache))  # its last token is computed anew, and is the one that was seen


def test_a_prompt_whose_tokens_see_later_ones_is_no_prefix(plain, monkeypatch):
    index, expect = kvant.PrefixIndex(), conversation.Conversation.expect

    def seeing_ahead(self, model, arguments, length, seen):
        expect(self, model, arguments, length, seen)
        if not length:
            self.saw_ahead(50)

    monkeypatch.setattr(conversation.Conversation, "expect", seeing_ahead)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    with pytest.warns(RuntimeWarning, match="tokens of a prompt see later ones"):
        answer(model, ids_of(100))
    assert index.stats.entries == 0


def test_masks_tell_which_tokens_see_later_ones(sliding):
    both = types.SimpleNamespace(q_offset=2)
    from kvant.hf.masks import LazyMask

    for blocks, end in (([0, 1, 1, 1, 2, 3], 6), ([0, 1, 2, 3, 4, 5], 0), ([0, 0, 1, 2, 3, 4], 4)):
        ids = torch.tensor(blocks)

        def seen(batch, head, q, k, ids=ids):
            at, of = ((x - both.q_offset).clamp(min=0) for x in (q, k))
            return (k <= q) | (ids[at] == ids[of]) & (k >= 2)

        mask = LazyMask(dict(batch_size=1, q_length=6, kv_length=8, q_offset=2, kv_offset=0, mask_function=seen,
                             device="cpu", allow_is_causal_skip=False, use_vmap=True), "overlay", 0)  # fmt: skip
        assert mask.sees_ahead() == end, blocks
