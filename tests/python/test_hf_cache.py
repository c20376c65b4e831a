"""KvantCache: what transformers' cache has and does, masks, refusals, and the report."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvant.hf  # noqa: E402
from hf_support import EXACT, ON_DEVICE, close, forward, ids_of, new_cache, reference, with_cache  # noqa: E402
from kvant.hf import versions  # noqa: E402



@pytest.fixture(params=["llama", "sliding"])
def model(request):
    model = request.getfixturevalue(request.param)
    kvant.hf.enable(model, **EXACT)
    yield model
    kvant.hf.disable(model)


@pytest.fixture
def enabled_llama(llama):
    kvant.hf.enable(llama, **EXACT)
    yield llama
    kvant.hf.disable(llama)


# --- sizes ---


def test_lengths_and_kinds(model, prompts):
    cache, own = new_cache(model), DynamicCache(config=model.config)
    plain = reference(model)
    for n in (100, 1, 60, 1):
        for i in range(4):
            assert cache.get_mask_sizes(n, i) == own.get_mask_sizes(n, i)
        forward(model, cache, ids_of(prompts, n))
        forward(plain, own, ids_of(prompts, n))
        assert cache.get_seq_length() == own.get_seq_length()
    assert cache.is_sliding == own.is_sliding
    assert [cache.get_max_length(i) for i in range(4)] == [own.get_max_length(i) for i in range(4)]
    assert not cache.is_compileable and cache.batch_size == 1 and len(cache) == 4
    assert all(layer.is_croppable for layer in cache.layers)


def test_layers_of_one_geometry_share_a_cache(sliding, prompts):
    kvant.hf.enable(sliding, **EXACT)
    cache = new_cache(sliding)
    forward(sliding, cache, ids_of(prompts, 10))
    kvant.hf.disable(sliding)
    assert sorted(group.members for group in cache.groups) == [[0, 1, 3], [2]]
    assert sorted(group.window for group in cache.groups) == [0, 128]


# --- crop, rows ---


def test_crop(model, prompts):
    """As if the tokens had never been; by a tensor, by 0, by a positive length to keep."""
    cache, ids = new_cache(model), ids_of(prompts, 200)
    forward(model, cache, ids[:, :170])
    expected = forward(model, copy.deepcopy(cache), ids[:, 170:])
    forward(model, cache, ids_of(prompts, 40, begin=2000))
    cache.crop(0)
    cache.crop(torch.tensor(-30))
    assert cache.get_seq_length() == 180
    cache.crop(170)
    assert cache.get_seq_length() == 170
    close(forward(model, cache, ids[:, 170:]), expected)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1000)


def test_crop_of_padded_rows(model, prompts):
    """Each row gives back those of the newest positions that were its own."""
    cache, inputs = new_cache(model), prompts(70, 40)
    more, ids = prompts(30, 11, begin=1000, left=False), ids_of(prompts, 10, begin=2000).expand(2, -1)
    forward(model, cache, **dict(ids=inputs["input_ids"]), attention_mask=inputs["attention_mask"])
    twin = copy.deepcopy(cache)
    mask = torch.cat([inputs["attention_mask"], more["attention_mask"]], 1)
    forward(model, cache, more["input_ids"], attention_mask=mask)
    cache.crop(-25)
    forward(model, twin, more["input_ids"][:, :5], attention_mask=mask[:, :75])
    mask = torch.cat([mask[:, :75], mask.new_ones(2, 10)], 1)
    close(forward(model, cache, ids, attention_mask=mask), forward(model, twin, ids, attention_mask=mask))


def test_rows_repeated_and_selected(model, prompts):
    plain, own, cache = reference(model), DynamicCache(config=model.config), new_cache(model)
    inputs = prompts(150, 60)
    for m, c in ((plain, own), (model, cache)):
        forward(m, c, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    mask = inputs["attention_mask"]
    for change in (
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.reorder_cache(torch.tensor([5, 0, 0, 2, 3, 3])),
        lambda c: c.batch_select_indices(torch.tensor([4, 0, 1])),
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
    ):
        change(own), change(cache)
        rows = torch.arange(mask.shape[0])
        mask = torch.cat([_changed(change, mask), mask.new_ones(len(_changed(change, mask)), 7)], 1)
        ids = ids_of(prompts, 7, begin=len(rows) * 100).expand(mask.shape[0], -1)
        a, b = forward(model, cache, ids, attention_mask=mask), forward(plain, own, ids, attention_mask=mask)
        close(a, b)
    assert cache.batch_size == 2


def _changed(change, mask):
    """A tensor after a change of rows, as transformers' own cache makes it."""
    cache = DynamicCache()
    cache.update(mask[:, None, :, None].float(), mask[:, None, :, None].float(), 0)
    change(cache)
    return cache.layers[0].keys[:, 0, :, 0].long()


def test_pages_are_freed_with_the_cache(model, prompts):
    cache = new_cache(model)
    forward(model, cache, ids_of(prompts, 50))
    twin = copy.deepcopy(cache)
    groups = [weakref.ref(group) for group in cache.groups]
    kept = [group.cache for group in cache.groups]
    gc.disable()
    try:
        del cache
        assert all(group() is None for group in groups)
        assert all(c.memory().tokens == 50 for c in kept)
        twin.reset()
        assert all(c.memory().tokens == 0 for c in kept)
    finally:
        gc.enable()


# --- masks ---


def test_padding_on_the_right(model, prompts):
    plain, inputs = reference(model), prompts(150, 60, left=False)
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 5)], 1)
    ids = ids_of(prompts, 5, begin=900).expand(2, -1)
    own, cache = DynamicCache(config=model.config), new_cache(model)
    position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for m, c in ((plain, own), (model, cache)):
        forward(m, c, inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=position)
    after = inputs["attention_mask"].sum(1, keepdim=True) + torch.arange(5, device=ids.device)
    a = forward(model, cache, ids, attention_mask=mask, position_ids=after)
    if any(own.is_sliding):  # there transformers counts padding as tokens of the window, where kvant's rows have none
        full = reference(model)
        own = DynamicCache()
        inputs = {k: v[1:, :60] for k, v in inputs.items()}
        forward(full, own, inputs["input_ids"])
        close(a[1:], forward(full, own, ids[1:]))
        return
    close(a, forward(plain, own, ids, attention_mask=mask, position_ids=after))


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_mask_of_ones_own(model, prompts, additive):
    """[batch, 1, queries, keys], here with a block of tokens that see each other in both directions."""
    plain, own, cache = reference(model), DynamicCache(config=model.config), new_cache(model)
    ids, past = ids_of(prompts, 110), 70
    mask = torch.ones(110, 110, dtype=torch.bool, device=ids.device).tril()
    mask[80:90, 80:90] = True
    mask[:, 20:30] = False
    mask = mask[None, None]
    if additive:
        mask = torch.zeros(mask.shape, device=ids.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    for m, c in ((plain, own), (model, cache)):
        forward(m, c, ids[:, :past], attention_mask=mask[:, :, :past, :past])
    a = forward(model, cache, ids[:, past:], attention_mask=mask[:, :, past:])
    close(a, forward(plain, own, ids[:, past:], attention_mask=mask[:, :, past:]))


def test_a_past_that_is_hidden_later(model, prompts):
    """Tokens that were stored can be hidden by a later mask, in some rows."""
    plain, own, cache = reference(model), DynamicCache(config=model.config), new_cache(model)
    inputs = prompts(80, 60)
    for m, c in ((plain, own), (model, cache)):
        forward(m, c, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 6)], 1)
    shown, hidden = mask.clone(), mask
    hidden[1, 30:40] = 0
    ids, position = ids_of(prompts, 6, begin=700).expand(2, -1), torch.arange(80, 86, device=mask.device)[None].expand(
        2, -1
    )
    with_all = forward(model, copy.deepcopy(cache), ids, attention_mask=shown, position_ids=position)
    a = forward(model, cache, ids, attention_mask=hidden, position_ids=position)
    close(a, forward(plain, own, ids, attention_mask=hidden, position_ids=position))
    assert not torch.allclose(a[1], with_all[1], atol=1e-3)


@pytest.mark.parametrize("row", [0, 1])
def test_padding_of_each_row_stays_hidden(enabled_llama, row):
    cache = new_cache(enabled_llama)
    cache.length, cache.stored = 3, torch.ones((2, 3), dtype=torch.bool)
    cache.stored[row, 1] = False
    mask = torch.ones((2, 4), dtype=torch.long)
    with pytest.raises(ValueError, match="visible that were padding when they were given"):
        cache.note_padding(mask, 3, 1)
    mask[row, 1] = 0
    assert cache.note_padding(mask, 3, 1)
    mask[1 - row, 0] = 0
    assert not cache.note_padding(mask, 3, 1)  # hides a token that is stored


def test_a_crop_of_more_than_there_is(enabled_llama, prompts):
    cache = new_cache(enabled_llama)
    forward(enabled_llama, cache, ids_of(prompts, 70))
    for n in (-71, -72, -200):
        with pytest.raises(ValueError, match="more than the 70 tokens that the cache holds"):
            cache.crop(n)
    assert cache.get_seq_length() == cache.length == 70
    cache.crop(-70)
    assert cache.get_seq_length() == cache.length == 0


def test_masks_that_cannot_be(enabled_llama, prompts):
    model, inputs = enabled_llama, prompts(50, 30)
    cache = new_cache(model)
    forward(model, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    ids = ids_of(prompts, 2).expand(2, -1)
    with pytest.raises(ValueError, match="were padding"):
        forward(model, cache, ids, attention_mask=torch.ones(2, 52, dtype=torch.long, device=ids.device))
    with pytest.raises(ValueError, match="pass all 52 columns"):
        forward(model, cache, ids, attention_mask=inputs["attention_mask"])
    assert cache.get_seq_length() == 50


def test_image_blocks_beyond_the_window(sliding, prompts):
    """A later turn whose tokens see each other in both directions, when pages have left the window."""
    kvant.hf.enable(sliding, **EXACT)
    plain, cache = reference(sliding), new_cache(sliding)
    own, ids = DynamicCache(config=sliding.config), ids_of(prompts, 330)
    blocks = torch.full((1, 330), -1, device=ids.device)
    blocks[:, 302:322] = 0
    masks = {}
    for m, c in ((plain, own), (sliding, cache)):
        forward(m, c, ids[:, :300])
        embeds = m.get_input_embeddings()(ids[:, 300:])
        arguments = dict(config=m.config, inputs_embeds=embeds, attention_mask=None, block_sequence_ids=blocks)
        arguments[versions.CACHE_NAME] = c
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        masks = {
            "full_attention": create_causal_mask(**arguments),
            "sliding_attention": create_sliding_window_causal_mask(**arguments),
        }
        if m is plain:
            expected = forward(m, c, ids[:, 300:], attention_mask=masks)
        else:
            assert masks["sliding_attention"].kind == "overlay"
            close(forward(m, c, ids[:, 300:], attention_mask=masks), expected)
    kvant.hf.disable(sliding)


# --- what goes to transformers ---


def test_skipped_layers_stay_with_transformers(llama, prompts):
    with pytest.raises(kvant.InvalidArgument, match="skip_layers has 4"):
        kvant.hf.enable(llama, skip_layers=[4])
    kvant.hf.enable(llama, skip_layers=[0, -1], **EXACT)
    cache, ids = new_cache(llama), ids_of(prompts, 90)
    a = forward(llama, cache, ids)
    plain = reference(llama)
    close(a, forward(plain, DynamicCache(config=llama.config), ids))
    report = kvant.hf.report(cache)
    rows = report.rows
    kvant.hf.disable(llama)
    assert [row.stored for row in rows] == [False, True, True, False]
    assert re.search(r"^ *0 +transformers .* -  +-  +0\.", str(report), re.MULTILINE)  # kvant counts nothing there
    assert (
        rows[0].reason == "in skip_layers"
        and rows[0].bytes == 2 * 90 * 2 * 64 * 4
        and rows[0].bf16_bytes == rows[0].bytes // 2
    )


def test_short_windows_stay_with_transformers(sliding, prompts):
    kvant.hf.enable(sliding, **{**EXACT, "short_windows": False})
    cache, ids = new_cache(sliding), ids_of(prompts, 200)
    close(forward(sliding, cache, ids), forward(reference(sliding), DynamicCache(config=sliding.config), ids))
    report = kvant.hf.report(cache)
    kvant.hf.disable(sliding)
    assert [row.stored for row in report.rows] == [False, False, True, False]
    assert "window of 128" in report.rows[0].reason and "short_windows=True" in str(report)


def of_head_dim(transformers, head_dim, device):
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=256,
        head_dim=head_dim,
    )
    return transformers.LlamaForCausalLM(config).eval().to(device), config


def test_a_head_size_that_is_stored_padded(transformers, prompts, device):
    model, config = of_head_dim(transformers, 18, device)
    kvant.hf.enable(model, **EXACT)
    cache, ids = new_cache(model, **EXACT), ids_of(prompts, 90)
    own = DynamicCache(config=config)
    for part in (ids[:, :70], ids[:, 70:]):
        close(forward(model, cache, part), forward(reference(model), own, part))
    rows = kvant.hf.report(cache).rows
    assert [row.stored for row in rows] == [True] * 2


def test_a_head_size_that_kvant_has_not(transformers, prompts, device):
    model, config = of_head_dim(transformers, 600, device)
    kvant.hf.enable(model)
    cache, ids = new_cache(model), ids_of(prompts, 30)
    close(forward(model, cache, ids), forward(reference(model), DynamicCache(config=config), ids))
    assert [row.stored for row in kvant.hf.report(cache).rows] == [False, False]
    assert kvant.hf.report(cache).rows[1].reason == "head_dim 600 is above 576"
    assert not any(row.stored for row in kvant.hf.report(new_cache(model)).rows)  # before the first token, too
    with pytest.raises(kvant.Unsupported, match="layer 0: head_dim 600.*strict=True"):
        kvant.hf.enable(model, strict=True)


def test_code_that_computes_attention_itself(llama, prompts):
    """Under another attention the cache decodes what it stores: once warned, and right."""
    ids, cache = ids_of(prompts, 90), new_cache(llama, **EXACT)
    own = DynamicCache(config=llama.config)
    expected = [forward(llama, own, ids[:, :70]), forward(llama, own, ids[:, 70:])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [forward(llama, cache, ids[:, :70]), forward(llama, cache, ids[:, 70:])]
    assert sum("decodes the whole cache" in str(w.message) for w in caught) == 1
    for a, b in zip(got, expected):
        close(a, b)
    cache = new_cache(llama, strict=True)
    with pytest.raises(RuntimeError, match="strict=True"):  # on a device the prompt itself is not decoded
        forward(llama, cache, ids[:, :70])
        forward(llama, cache, ids[:, 70:])


def test_decoded_padding_is_zero(enabled_llama, prompts):
    cache, inputs = new_cache(enabled_llama), prompts(40, 25)
    with torch.no_grad():
        keys = torch.randn(2, 2, 40, 64, device=inputs["input_ids"].device).half().float()
        cache.note_padding(inputs["attention_mask"].bool(), 0, 40)
        packed, _ = cache.update(keys, keys, 0)
    packed.fresh = None  # on a device it still has the keys themselves
    decoded = packed + 0
    real = inputs["attention_mask"].bool()[:, None, :, None]
    assert torch.equal(decoded, keys * real)


def test_fresh_keys(llama, prompts):
    """The first prompt attends to its own keys and values, later tokens to what is stored."""
    ids = ids_of(prompts, 150)
    plain = DynamicCache(config=llama.config)
    expected = [forward(llama, plain, ids[:, :140]), forward(llama, plain, ids[:, 140:])]
    errors = {}
    for exact in (True, False):
        kvant.hf.enable(llama, k="tq3", v="tq3", sink_pages=0, tail_pages=0, fresh_keys=exact)
        cache = new_cache(llama)
        got = [forward(llama, cache, ids[:, :140]), forward(llama, cache, ids[:, 140:])]
        errors[exact] = [float((a - b).abs().max() / b.std()) for a, b in zip(got, expected)]
        kvant.hf.disable(llama)
    assert errors[True][0] < 1e-5 < 1e-3 < errors[False][0] and errors[True][1] > 1e-3


def test_chunks_of_a_prompt_attend_to_their_own_keys_as_they_are(llama, prompts):
    if ON_DEVICE:  # kernels on a device take fresh keys in bf16 and f16
        llama = copy.deepcopy(llama).to(torch.bfloat16)
    ids = ids_of(prompts, 240)
    chunks = (ids[:, :100], ids[:, 100:])
    plain = DynamicCache(config=llama.config)
    expected = [forward(llama, plain, x) for x in chunks][1]
    errors = {}
    for exact in (True, False):
        kvant.hf.enable(llama, k="tq3", v="tq3", sink_pages=0, tail_pages=0, fresh_keys=exact)
        cache = new_cache(llama)
        got = [forward(llama, cache, x) for x in chunks][1]
        errors[exact] = float((got - expected).norm() / expected.norm())
        assert ("over their own keys as they are" in str(kvant.hf.report(cache))) == exact
        kvant.hf.disable(llama)
    assert errors[True] < 0.8 * errors[False]


def test_products_of_8_bits(llama, prompts):
    """The report has them, and a prompt's logits are near those of 16 bits, but not the same. (Coarse formats would
    round the keys of the second layer on otherwise, which moves logits more.)"""
    ids, found = ids_of(prompts, 320), {}
    for bits in (16, 8):
        kvant.hf.enable(llama, k="tq8", v="tq8", products=bits, fresh_keys=False)
        cache = new_cache(llama)
        found[bits] = forward(llama, cache, ids)
        report = kvant.hf.report(cache)
        kvant.hf.disable(llama)
        assert {row.products for row in report.rows} == {bits}
        assert f"products of {bits} bits for many queries" in str(report).splitlines()[0]
    apart = float((found[8] - found[16]).norm() / found[16].norm())
    assert 1e-6 < apart < 2e-2
    assert "products" not in str(kvant.hf.report(new_cache(llama)))


def test_products_that_plans_choose(llama, prompts):
    kvant.hf.enable(llama, k="tq4", v="tq4", fresh_keys=False)
    cache = new_cache(llama)
    assert {row.products for row in kvant.hf.report(cache).rows} == {0}
    forward(llama, cache, ids_of(prompts, 320))
    forward(llama, cache, ids_of(prompts, 2))  # few rows say nothing
    report = kvant.hf.report(cache)
    kvant.hf.disable(llama)
    best = next(isa["name"] for isa in kvant.info()["isas"] if isa["available"])
    faster = not ON_DEVICE and best in ("avx2", "avx512", "amx")
    assert {row.products for row in report.rows} == {8 if faster else 16}
    assert "products" not in str(report)


# --- refusals ---


def test_refusals(enabled_llama, prompts):
    model, ids = enabled_llama, ids_of(prompts, 8)
    cache = new_cache(model)
    with pytest.raises(RuntimeError, match="no backward pass"):
        model(input_ids=ids, **with_cache(cache))
    assert cache.get_seq_length() == 0
    forward(model, cache, ids)
    with pytest.raises(RuntimeError, match="1 rows and gets one of 2"):
        forward(model, cache, ids.expand(2, -1))
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(cache)
    with pytest.raises(RuntimeError, match="of the cache, not of a layer"):
        cache.layers[0].crop(-1)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        packed = cache.update(*torch.randn(2, 1, 2, 1, 64, device=ids.device), 0)
        query = torch.randn(1, 4, 1, 64, device=ids.device)
        for options, message in (
            ({"dropout": 0.5}, "no dropout"),
            ({"output_attentions": True}, "eager"),
            ({"position_bias": torch.zeros(1, 4, 1, 9)}, "position_bias is set"),
        ):
            with pytest.raises(RuntimeError, match=message):
                kvant.hf.attention.attend(attention, query, *packed, None, **options)
        kvant.hf.attention.attend(attention, query, *packed, None, position_ids=torch.zeros(1, 1), use_cache=True)
        cache.reset()
        with pytest.raises(RuntimeError, match="after the step"):
            kvant.hf.attention.attend(attention, query, *packed, None)


def test_options_reach_the_caches_and_what_stored_bytes_depend_on(sliding, prompts):
    settings = kvant.hf.Settings.make(short_windows=1, strict=True, products=16, threads=1, fresh_keys=False)
    assert settings.short_windows is True and settings.of_plans() == {"products": 16}
    stored = kvant.hf.saving.stored_options(settings)
    assert stored["short_windows"] is True and stored["fresh_keys"] is False
    assert not {"threads", "isa", "strict", "bases", "products"} & set(stored)
    assert "rollback_tokens" not in settings.of_cache(False, 0)
    cache = new_cache(sliding, short_windows=True, rollback_tokens=200, sink_pages=2, tail_pages=1, exact="f32")
    forward(sliding, cache, ids_of(prompts, 300))
    window, full = sorted(cache.groups, key=lambda group: group.window == 0)
    assert (window.cache.rollback_tokens, full.cache.rollback_tokens) == (200, 0)
    assert (full.ends.sink_pages, full.ends.tail_pages, full.ends.dtype) == (2, 1, "f32")
    assert full.tokens_read() == (300 - 64, 64)  # pages 0, 1 and 3 on are exact, and page 2 is encoded
    assert window.tokens_read()[1] == 192 - (300 - 128)  # of the window those before the tail
    assert kvant.hf.report(cache).rows[2].ends == "2 sink and 1 tail pages, f32"


def test_options_that_cannot_be(llama):
    for options, error, message in (
        ({"k": "tq9"}, kvant.InvalidArgument, "must be one of"),
        ({"exact": "f64"}, kvant.InvalidArgument, "exact"),
        ({"k_centre": "pages"}, kvant.InvalidArgument, "k_centre"),
        ({"tail": 1}, TypeError, "tail: no such option of kvant.hf: it is called tail_pages"),
        ({"exact_prefill": True}, TypeError, "it is called fresh_keys"),
        ({"fresh_keys": "no"}, kvant.InvalidArgument, 'fresh_keys = "no": must be True or False'),
        ({"rollback_tokens": -1}, kvant.InvalidArgument, "rollback_tokens = -1: must be 0 or more"),
        ({"threads": 0}, kvant.InvalidArgument, "threads = 0: must be 1 or more"),
        ({"isa": "mmx"}, kvant.InvalidArgument, "this machine has"),
        ({"k": "lut4"}, kvant.InvalidArgument, "imported caches"),
        ({"products": 7}, kvant.InvalidArgument, "products = 7: must be 8 or 16 bits"),
        ({"products": 8, "k": "bf16", "v": "bf16"}, kvant.InvalidArgument, "only tq formats"),
        ({"skip_layers": 3}, kvant.InvalidArgument, "list"),
    ):
        with pytest.raises(error, match=message):
            kvant.hf.enable(llama, **options)
    with pytest.raises(TypeError, match="transformers model"):
        kvant.hf.enable(torch.nn.Linear(2, 2))
    assert "_kvant" not in llama.__dict__


def test_old_versions_are_refused():
    with pytest.raises(ImportError, match="5.16 or newer, and this is 5.15.2"):
        versions.require("5.15.2")
    versions.require("5.16.0.dev0"), versions.require("6.0")


# --- report ---


def test_report(sliding, prompts):
    kvant.hf.enable(sliding, short_windows=True, tail_pages=2)
    empty = kvant.hf.report(sliding)
    assert empty.tokens == 0 and empty.bytes == 0 and all(row.stored for row in empty.rows)
    sliding.generate(**prompts(300, 200), max_new_tokens=5, do_sample=False, pad_token_id=0)
    report = kvant.hf.report(sliding)
    kvant.hf.disable(sliding)
    assert (report.batch, report.tokens) == (2, 304)
    full, window = report.rows[2], report.rows[0]
    assert (full.k, full.v, full.kv_heads, full.head_dim, full.window) == ("tq6", "tq4", 2, 64, 0)
    assert window.window == 128 and "2 tail pages" in full.ends
    assert full.bf16_bytes == 2 * 304 * 2 * 64 * 4 and window.bf16_bytes == 2 * 127 * 2 * 64 * 4
    assert 0 < window.bytes < full.bytes and report.bytes == sum(row.bytes for row in report.rows)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 1 + 3 + 1 + 1 and "tq6/tq4" in lines[3] and "MB in bf16" in lines[1]
    assert report.bytes > report.bf16_bytes and "more than bf16 so far" in lines[-1]  # short, and two tail pages
    assert lines[2].split()[0] == "0-1" and f"{(window.bytes + report.rows[1].bytes) / 1e6:.2f}" in lines[2]  # alike
    with pytest.raises(ValueError, match="not enabled"):
        kvant.hf.report(sliding)


def test_a_full_cache_says_what_to_do(sliding, prompts, monkeypatch):
    """Nothing changes when one group of layers has no room: the cache goes on after a crop."""
    kvant.hf.enable(sliding, **EXACT)
    original = kvant.Cache

    def small(**options):
        return original(**{**options, **({} if options.get("window") else {"capacity_tokens": 256})})

    monkeypatch.setattr(kvant, "Cache", small)
    cache = new_cache(sliding)
    forward(sliding, cache, ids_of(prompts, 200))
    with pytest.raises(kvant.OutOfCapacity, match="holds what it held before.*max_length= and batch="):
        forward(sliding, cache, ids_of(prompts, 100))
    assert cache.get_seq_length() == 200
    assert [(g.length, g.rows, len(g.sequences[0])) for g in cache.groups] == [(200, [200], 200)] * 2
    cache.crop(-50)
    monkeypatch.undo()
    other = new_cache(sliding)
    forward(sliding, other, ids_of(prompts, 150))
    close(forward(sliding, cache, ids_of(prompts, 100)), forward(sliding, other, ids_of(prompts, 100)))
    kvant.hf.disable(sliding)


def test_capacity_of_a_device(llama):
    """Room for every row's tokens, a page that is partly filled, and beams that part; without sizes a clear refusal."""
    settings = kvant.hf.Settings.make()
    made = kvant.hf.KvantCache(llama.config, settings, max_length=1000, batch=6)
    assert made._capacity() == {
        "capacity_tokens": 6 * (1024 + 192),
        "max_sequences": 7,
        "max_sequence_tokens": 1024 + 192,
    }
    with pytest.raises(kvant.InvalidArgument, match="max_length= .* and batch="):
        kvant.hf.KvantCache(llama.config, settings)._capacity()
    assert made._why_not_this_window(0, 1216) is None and made._why_not_this_window(1024, 1216) is None
    assert made._why_not_this_window(512, 320) is None and made._why_not_this_window(512, 448)  # 7 pages of exact ends
    assert "less in bf16 than 4096 tokens" in made._why_not_this_window(512, 4096)
