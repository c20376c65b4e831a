"""Attention layers of vLLM over kvant's pages, against float64: every kind of step that a server takes."""

from __future__ import annotations

import pytest

from .engine import DEVICE, ON_CPU, Engine

SLOPES = [0.5, 0.25, 0.125, 0.0625]


def a_day(e, tolerance=2e-5):
    """Prompts whole and in chunks, decoding, a prefix hit, a preemption, drafts: what a layer may meet."""
    a, b, c = (e.request(seed) for seed in (1, 2, 3))
    e.step([(a, 200)], tolerance=tolerance)
    e.step([(a, 1), (b, 70)], tolerance=tolerance)  # decoding beside a prompt
    e.step([(a, 1), (b, 1), (c, 130)], tolerance=tolerance)  # a prompt in chunks, cut within a block
    e.step([(a, 1), (b, 1), (c, 99)], tolerance=tolerance)
    e.preempt(b)
    e.step([(a, 1), (c, 1)], tolerance=tolerance)
    e.step([(a, 1), (b, 72), (c, 1)], tolerance=tolerance)  # resumed: all of its tokens again, on other blocks
    for _ in range(2):
        e.step([(a, 1), (b, 1), (c, 1)], tolerance=tolerance)
    return a, b, c


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 100},
        {"window": 16},
        {"softcap": 2.0},
        {"alibi_slopes": SLOPES},
        {"scale": 0.3},
        {"sinks": [1.0, -2.0, 0.0, 6.0]},
        {"sinks": [3.0, 3.0, 3.0, 3.0], "window": 128, "softcap": 30.0},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_features(vllm, pages, torch, options):
    if "sinks" in options:
        options = options | {"sinks": torch.tensor(options["sinks"])}
    a_day(Engine(vllm, [options], cache_dtype=pages))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)])
def test_groups_of_heads(vllm, pages, heads):
    a_day(Engine(vllm, q_heads=heads[0], kv_heads=heads[1], cache_dtype=pages))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(vllm, pages, torch, dtype):
    a_day(Engine(vllm, dtype=getattr(torch, dtype), cache_dtype=pages), tolerance=5e-3)


@pytest.mark.parametrize("head_dim", [64, 72, 128, 512])
@pytest.mark.parametrize(
    "cache_dtype, error",
    [
        ("kvant_tq8", 0.013),
        ("kvant_tq6_tq4", 0.12),
        ("kvant_tq4", 0.2),
        ("kvant_fp8", 0.055),
        ("kvant_tq5_tq4", 0.13),
        ("kvant_tq3_tq4", 0.32),
    ],
)
def test_formats(vllm, cache_dtype, error, head_dim):
    """Kinds of steps make no difference to the error of a format, on keys and values that have no structure."""
    if not ON_CPU and (head_dim == 72 or cache_dtype == "kvant_tq3_tq4"):
        pytest.skip("devices have no kernels for it")
    e = Engine(vllm, [{}, {"window": 100}], cache_dtype=cache_dtype, head_dim=head_dim)
    a_day(e, tolerance=error)
    assert e.worst > error / 2  # else the bound says nothing


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "LHBNC"])
def test_layouts(vllm, pages, layout):
    if not ON_CPU and layout in ("BHLNC", "LHBNC"):
        pytest.skip("devices read blocks whose heads follow one another: test_pages.py has the backend's list")
    a_day(Engine(vllm, [{}, {"softcap": 5.0}, {}], layout=layout, cache_dtype=pages))


def test_layers_of_several_kinds(vllm, pages):
    """Sliding and full layers are groups with tables of their own; their blocks overlay each other in one pool."""
    e = Engine(vllm, [{"window": 80}, {"window": 80, "softcap": 3.0}, {}, {"scale": 0.2}], cache_dtype=pages)
    assert len(e.groups) == 2
    assert sorted(len(group.plans) for group in map(e.builder, (0, 1))) == [2, 2]
    a_day(e)


def test_layers_of_two_head_dims(vllm, pages):
    """As in Gemma 4: sliding layers of half the head_dim. Pages whose ratio is whole get twice the tokens, which are
    cut in two again for the kernels."""
    e = Engine(vllm, [{"window": 80, "head_dim": 64}, {"head_dim": 128}], cache_dtype=pages)
    assert sorted(e.block_size(g) for g in (0, 1)) == [64, 128]
    a_day(e)


def test_pages_of_two_sizes_in_one_block(vllm, pages):
    """The layout BLHNC packs pages of several sizes side by side, whatever their ratio is."""
    layers = [{"window": 80, "head_dim": 64}, {"head_dim": 96}, {"head_dim": 96}]
    e = Engine(vllm, layers, layout="BLHNC", cache_dtype=pages)
    assert [e.block_size(g) for g in range(len(e.groups))] == [64] * len(e.groups)
    a_day(e)


def test_padded_pages(vllm, pages):
    """The layout LBHNC pads the smaller page instead."""
    a_day(Engine(vllm, [{"window": 80, "head_dim": 64}, {"head_dim": 96}], cache_dtype=pages))


def test_larger_blocks_are_split(vllm, pages):
    e = Engine(vllm, block_size=128, blocks=24, cache_dtype=pages)
    assert e.layers[0].made.kv_cache.shape[2] == 64
    a_day(e)


def test_exact_layers_beside_compressed_ones(vllm, torch):
    e = Engine(vllm, [{}, {}, {}], skip_layers=["0"], cache_dtype="kvant_tq8")
    names = [layer.made.impl.layer.pair for layer in e.layers]
    exact = "f32/f32" if ON_CPU else "bf16/bf16"
    assert [str(pair) for pair in names] == [exact, "tq8/tq8", "tq8/tq8"]
    assert [layer.made.kv_cache.dtype for layer in e.layers] == [e.dtype, torch.uint8, torch.uint8]
    assert len(e.groups) == 1  # pages of two sizes, none of them padded
    a_day(e, tolerance=0.02)


def test_a_prefix_hit(vllm, pages):
    e = Engine(vllm, cache_dtype=pages)
    first = e.request(1)
    e.step([(first, 200)])
    second = e.request(2, prefix_of=first, prefix_blocks=3)
    assert second.length == 192
    e.step([(first, 1), (second, 10)])  # fewer new tokens than cached ones: the rest of its prompt
    e.step([(first, 1), (second, 1)])


@pytest.mark.parametrize("window", [0, 1024])
def test_exact_copies(vllm, window):
    """The newest tokens of each request are read as they came, in every layer and whoever has their blocks: up to 127
    tokens a request loses nothing, and up to 191 where the first block is exact, too. Without copies two bits lose a
    third."""
    layers = [{}, {"softcap": 5.0}, {"head_dim": 128}]
    if window:
        layers = [{"window": window} | layer for layer in layers]
    exact = 2e-5 if ON_CPU else 1e-2
    e = Engine(vllm, layers, cache_dtype="kvant_tq2", exact_memory=1000)
    tails = [pages for group in e.all_groups() for pages in group.get_metadata_builder(0).own_pages]
    assert sum(pages.layers for pages in tails) == 3  # each group has its own
    assert {pages.tail_sequences for pages in tails} == {8}
    assert {(pages.sink_pages, pages.tail_copies) for pages in tails} == {(0, 32) if window else (1, 40)}
    a, b = e.request(1), e.request(2)
    e.step([(a, 64)], tolerance=exact)
    for _ in range(3):
        e.step([(a, 20), (b, 1)], tolerance=exact)
    c = e.request(3, prefix_of=a, prefix_blocks=1)  # a prefix hit on a block that has copies
    e.step([(a, 1), (b, 1), (c, 30)], tolerance=exact)
    e.preempt(b)
    e.step([(a, 1), (c, 1)], tolerance=exact)
    e.step([(b, 6), (a, 1), (c, 1)], tolerance=exact)  # resumed: all of its tokens again, on other blocks
    assert e.worst < exact and a.length == 127
    if not window:
        for _ in range(2):
            e.step([(a, 32), (c, 1)], tolerance=exact)  # the first block has left the tail
    e.step([(a, 1)], tolerance=1.0)  # the first or the second block is read encoded
    assert e.worst > 0.05
    assert all(pages.take_misses() == 0 for pages in tails)

    without = Engine(vllm, layers, cache_dtype="kvant_tq2", tail_pages=0, fresh_keys=False)
    assert all(pages.tail_pages == 0 for pages in without.builder().own_pages)
    d = without.request(1)
    without.step([(d, 64)], tolerance=1.0)
    assert without.worst > 0.1


def errors_of_prompts(vllm, fresh, **options):
    """Relative errors of a prompt's first chunk, of its second, and of the step after it."""
    e = Engine(vllm, tail_pages=0, fresh_keys=fresh, **options)
    a, b = e.request(1), e.request(2)
    errors = []
    for batch in ([(a, 150), (b, 70)], [(a, 50), (b, 90)], [(a, 1), (b, 1)]):
        e.worst = 0.0
        e.step(batch, tolerance=1.0)
        errors.append(e.worst)
    return e, errors


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0, "window": 64}])
@pytest.mark.parametrize("cache_dtype", ["kvant_tq2", "kvant_tq4", "kvant_tq6_tq4", "kvant_tq8"])
def test_fresh_keys(vllm, cache_dtype, options):
    """A chunk of a prompt attends to its own tokens as the model gives them: nothing of the first one is lost. Older
    tokens are read encoded, and so are all in decoding."""
    _, stored = errors_of_prompts(vllm, False, layers=[options], cache_dtype=cache_dtype)
    e, fresh = errors_of_prompts(vllm, None, layers=[options], cache_dtype=cache_dtype)
    print(f"{cache_dtype} {options}: stored {stored}, fresh {fresh}")
    exact = 2e-5 if ON_CPU else 5e-3  # the result is bf16 there
    assert fresh[0] < exact < stored[0]
    assert fresh[1] < 0.97 * stored[1]
    assert fresh[2] == pytest.approx(stored[2], rel=1e-3)  # decoding makes no difference between the two
    first = e.request(3)
    e.step([(first, 200)], tolerance=max(exact, 1e-2))
    second = e.request(4, prefix_of=first, prefix_blocks=3)
    e.step([(second, 5)], tolerance=1.0)  # a prefix hit: fewer new tokens than cached ones


@pytest.mark.parametrize("fresh", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_short_chunks_behind_long_prefixes(vllm, fresh):
    """The rest of a prompt whose prefix is stored. On a device decode kernels serve it, where prefill kernels serve the
    server's largest step of such chunks."""
    layers = [{}, {"window": 700}]
    limits = dict(q_heads=32, kv_heads=8, head_dim=128, max_requests=32, max_tokens=2048, max_model_len=8192, blocks=80)
    e = Engine(vllm, layers, cache_dtype="kvant_tq8", fresh_keys=fresh, tail_pages=0, **limits)
    a, b = e.request(1), e.request(2)
    e.step([(a, 850), (b, 600)], tolerance=0.02)
    for batch, few in (([(a, 40)], True), ([(b, 1), (a, 20)], True), ([(a, 60), (b, 60)], True), ([(b, 200)], False)):
        made, _, _ = e.metadata(batch)
        plans = [plan for m in made.values() for plans in m.plans.values() for plan in [m.parts[-1].plan(plans)]]
        if not ON_CPU:  # few queries over a window may take either kind
            decodes = [plan.facts.kernel.startswith("decode") for plan in plans]
            assert any(decodes) == few, [plan.explain() for plan in plans]
            assert [plan.fresh_keys for plan in plans] == [fresh and not decode for decode in decodes]
        e.step(batch, tolerance=0.02)


def test_which_chunks_are_fresh(vllm, dense_pages, torch):
    """All, but for few queries of long requests on a device."""
    from kvant.vllm.layer import Extend, Few

    assert Extend(None, "fresh").choose(1, 1 << 20) == "fresh"
    assert Extend("stored", None).choose(1, 1) == "stored"
    few = Few("few", 2, 1000)
    for extend, other in ((Extend(None, "fresh", few), "fresh"), (Extend("stored", None, few), "stored")):
        chosen = [extend.choose(*batch) for batch in ((1, 999), (1, 1000), (2, 5000), (3, 5000))]
        assert chosen == [other, "few", "few", other]
    e = Engine(vllm, cache_dtype=dense_pages)
    (plans,) = e.builder().plans.values()
    assert all(extend.fresh.fresh_keys and extend.stored is None for (extend,) in plans.extend.values())
    assert not any(plan.fresh_keys for plan in plans.decode.values())
    e = Engine(vllm, cache_dtype=dense_pages, fresh_keys=False)
    (plans,) = e.builder().plans.values()
    assert all(extend.fresh is None and not extend.stored.fresh_keys for (extend,) in plans.extend.values())
    for wrong in ({"fresh_keys": 1}, {"fresh": True}):
        e.config.additional_config = {"kvant": wrong}
        with pytest.raises(ValueError, match="fresh"):
            e.layers[0].made.impl._config = e.config
            e.layers[0].made.impl._has_fresh_keys()


def test_no_kernels_for_fresh_keys(vllm, dense_pages, monkeypatch, caplog):
    """A device without kernels for them: prompts read pages alone, and the log says why, once."""
    import kvant

    from . import dense

    def plan(pages, q_heads, **options):
        if options.pop("fresh_keys", False):
            raise kvant.Unsupported("fresh_keys needs kernels of another device")
        return dense.Plan(pages, q_heads, **options)

    monkeypatch.setattr(dense.Pages, "plan", plan)
    caplog.set_level("INFO", logger="vllm.kvant")
    a_day(Engine(vllm, cache_dtype=dense_pages))
    assert caplog.text.count("needs kernels of another device") == 1


def test_keys_that_are_not_given(vllm, pages, torch):
    """An operator of a model that stores keys itself gives none to forward: nothing would be stored."""
    e = Engine(vllm, cache_dtype=pages)
    made, _, _ = e.metadata([(e.request(1), 9)])
    (metadata,) = made.values()
    impl, cache = e.layers[0].made.impl, e.layers[0].made.kv_cache
    q = torch.zeros(9, 4, 64, dtype=e.dtype, device=cache.device)
    with pytest.raises(NotImplementedError, match="choose another backend"):
        impl.forward(e.layers[0].made, q, None, None, cache, metadata, torch.zeros_like(q))


def test_which_layers_have_a_tail(vllm):
    from kvant.vllm import versions

    e = Engine(vllm, [{"window": 100}, {}, {"window": 1023}], cache_dtype="kvant_tq4", skip_layers=["1"])
    assert e.layers[1].made.impl.pages is None  # an exact layer
    assert [e.layers[i].made.impl.pages.tail_pages for i in (0, 2)] == [0, 0]  # short windows
    for wrong in ({"kvant": {"tail_pages": -1}}, {"kvant": {"tail_pages": "1"}}, {"kvant": {"tails_pages": 1}}):
        e.config.additional_config = wrong
        with pytest.raises(ValueError, match="tail"):
            versions.option(e.config, "tail_pages")
    for wrong in (0, -1, "5 %", True, 1001, None):
        e.config.additional_config = {"kvant": {"exact_memory": wrong}}
        with pytest.raises(ValueError, match="exact_memory"):
            versions.option(e.config, "exact_memory")
    e.config.additional_config = {}
    e.config.kv_transfer_config = object()
    assert e.layers[0].made.impl.layer._replace(window=0).tail(e.config) == 0  # a connector writes to blocks


def test_memory_of_exact_copies(vllm, caplog):
    """Copies take a share of the cache's memory, by default a twentieth; the log says what was given. Blocks that get
    no copy are read encoded."""
    import kvant
    from kvant.vllm import tail

    caplog.set_level("INFO", logger="vllm.kvant")
    layers, error = [{}, {"window": 100}, {"head_dim": 128}], 0.2
    e = Engine(vllm, layers, cache_dtype="kvant_tq4", blocks=600, layout="BLHNC")
    impls = [layer.made.impl for layer in e.layers]
    cache = 600 * sum(impl.layer.block_bytes() for impl in impls)
    size = [tail.copy_bytes(impl.layer, e.dtype) for impl in impls]
    taken = sum(impl.copies * n for impl, n in zip(impls, size))
    assert impls[1].copies == 0 and impls[0].copies == impls[2].copies > 0
    assert 0.05 * cache - size[0] - size[2] < taken <= 0.05 * cache
    pages = [impl.pages for impl in impls]
    assert sum(p.tail_bytes for p in set(pages)) == taken and pages[1].tail_pages == 0
    text, count = caplog.text, impls[0].copies
    assert text.count("exact copies") == 1 and f"{count} to {count} blocks in each of 2 layers" in text
    assert f"{taken / 2**20:.1f} MiB" in text and f"enough for {impls[0].copies // 3} of 8 requests" in text
    a_day(e, tolerance=error)
    assert sum(p.take_misses() for p in set(pages)) > 0

    all_of_them = Engine(vllm, layers, cache_dtype="kvant_tq4", blocks=600, layout="BLHNC", exact_memory=1000)
    a_day(all_of_them, tolerance=error)
    for layer in all_of_them.layers:
        impl = layer.made.impl
        wanted = kvant.Pages(
            kv_heads=2, head_dim=impl.head_size, k="tq4", v="tq4", tail_pages=1, sink_pages=1, tail_sequences=8
        )
        assert impl.copies == (0 if impl.layer.window else wanted.tail_copies)
    assert "enough for 8 of 8" in caplog.text

    caplog.clear()
    none = Engine(vllm, layers, cache_dtype="kvant_tq4", tail_pages=0)
    assert [layer.made.impl.copies for layer in none.layers] == [0, 0, 0] and "exact copies" not in caplog.text
    a_day(none, tolerance=error)


def drafts_and_others(e):
    """Drafts are verified; other tokens overwrite those that are rejected. Yields before and after a prompt joins."""
    a, b = e.request(1), e.request(2)
    e.step([(a, 60), (b, 90)])
    for round in range(5):
        e.step([(a, 4), (b, 4)])
        e.rewind(a, 3)
        e.rewind(b, round % 4)
        a.seed, b.seed = 100 + round, 200 + round  # the next tokens are others
    e.step([(a, 4), (b, 1)])  # lengths may differ
    yield
    e.step([(a, 4), (b, 1), (e.request(3), 64)])
    yield


def test_drafts(vllm, pages):
    for _ in drafts_and_others(Engine(vllm, [{}, {"window": 80}], drafts=3, cache_dtype=pages)):
        pass


def test_drafts_take_the_decode_plan(vllm, dense_pages):
    e = Engine(vllm, drafts=3)
    builder = e.builder()
    assert builder.reorder_batch_threshold == 4
    (plans,) = builder.plans.values()
    runs = [
        (plans.decode[2].runs, sum(plan.fresh.runs for (plan,) in plans.extend.values())) for _ in drafts_and_others(e)
    ]
    assert runs == [(6, 1), (7, 2)]


def test_padding_of_graphs(vllm, pages, torch):
    """A graph for eight requests replays three: the others have no queries and no keys, and their slots are -1."""
    e = Engine(vllm, cache_dtype=pages)
    requests = [e.request(seed) for seed in (1, 2, 3)]
    e.step([(r, 40) for r in requests])
    before = e.layers[0].made.kv_cache.view(torch.uint8).clone()
    made, slots, _ = e.metadata([(r, 1) for r in requests], pad_to=(8, 8))
    (metadata,) = made.values()
    assert [part[:6] for part in metadata.parts] == [(True, 8, 0, 0, 8, 8)] and metadata.num_actual_tokens == 8
    assert torch.equal(e.layers[0].made.kv_cache.view(torch.uint8), before)
    e.step([(r, 1) for r in requests], pad_to=(8, 8))


def test_shared_caches(vllm, pages, torch):
    """A layer that shares another's cache attends over it. It writes nothing, and ignores keys that it is given."""
    from vllm.model_executor.layers.attention import Attention

    e = Engine(vllm, cache_dtype=pages)
    names = ["model.layers.0.attn", "model.layers.7.attn"]
    with vllm.set_current_vllm_config(e.config), vllm.default_dtype(e.dtype):
        shared = Attention(
            4,
            64,
            0.125,
            2,
            cache_config=e.config.cache_config,
            prefix=names[1],
            kv_sharing_target_layer_name=names[0],
        )
    owner = e.layers[0].made
    shared.kv_cache = owner.kv_cache
    shared.use_direct_call = True
    group = e.attn_groups[0][0]
    group.metadata_builders = [type(e.builder())(e.specs[names[0]], names, e.config, owner.kv_cache.device)]
    a = e.request(1)
    e.step([(a, 100)])
    for new in (1, 30):  # decoding, and a chunk of a prompt
        batch = [(a, new)]
        made, slots, rows = e.metadata(batch)
        made[names[1]] = made[names[0]]
        ((q, k, v),) = e.inputs(batch, rows)
        with vllm.set_forward_context(made, e.config, slot_mapping=slots):
            wanted = owner(q, k, v)
            before = owner.kv_cache.view(torch.uint8).clone()
            got = shared(q, torch.full_like(k, 9.0), torch.full_like(k, 9.0))
        assert torch.equal(owner.kv_cache.view(torch.uint8), before)
        if new == 1:
            assert torch.equal(got, wanted)
        else:  # the owner attends to its own keys as they are given; these pages are exact, too
            torch.testing.assert_close(got, wanted, rtol=2e-2 if e.dtype == torch.bfloat16 else 1e-4, atol=1e-2)
        e.finish(batch, [got], 2e-5)


def test_while_memory_is_measured(vllm, dense_pages, torch):
    """Without metadata outputs are zeros, and nothing is written."""
    e = Engine(vllm)
    layer = e.layers[0].made
    layer.kv_cache = torch.tensor([])
    with vllm.set_forward_context(None, e.config, slot_mapping={}):
        out = layer(torch.randn(1, 256), torch.randn(1, 128), torch.randn(1, 128))
    assert torch.equal(out, torch.zeros_like(out))


def stored(e, torch):
    return [layer.made.kv_cache.view(torch.uint8).clone() for layer in e.layers]


def warm_up(e, torch, tokens):
    """A run of vLLM that only warms up: no metadata, and slots of no request. V1 makes such runs before the first step,
    for each size that it compiles or records pieces for, and for ranks without requests."""
    vllm, slots = e.vllm, torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
    by_layer = {name: slots for group in e.groups for name in group.layer_names}
    with vllm.set_current_vllm_config(e.config), vllm.set_forward_context(None, e.config, slot_mapping=by_layer):
        for layer in e.layers:
            sizes = (heads * layer.head_dim for heads in (*layer.heads, layer.heads[1]))
            out = layer.made(*(torch.randn(tokens, n, dtype=e.dtype, device=DEVICE) for n in sizes))
            assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("cache_dtype", ["kvant_tq4", "kvant_tq6_tq4", "kvant_fp8", "auto"])
def test_warm_up(vllm, torch, cache_dtype):
    """vLLM's own runs before and between steps: without metadata, and with that of a step whose slots are -1 and whose
    tables have block 0 or blocks of others. None fails or stores anything, and what follows is right."""
    e = Engine(vllm, [{}, {"window": 100}, {}], cache_dtype=cache_dtype, skip_layers=["2"])
    error = 2e-5 if cache_dtype == "auto" else 0.2
    before = stored(e, torch)
    warm_up(e, torch, 7)
    for capture in (True, False):
        for counts, length in (([1] * 8, 1024), ([1] * 4, 1), ([64, 60], 64), ([1, 1, 100], 101)):
            e.dummy_step(counts, length, capture)
    warm_up(e, torch, 64)
    assert all(torch.equal(a, b) for a, b in zip(before, stored(e, torch)))
    a = e.request(1)
    e.step([(a, 100)], tolerance=error)
    warm_up(e, torch, 3)  # a rank without requests, beside others
    e.dummy_step([1, 1], 1, True)
    before = stored(e, torch)
    e.step([(a, 1)], tolerance=error)
    assert not all(torch.equal(a, b) for a, b in zip(before, stored(e, torch)))
    a_day(e, tolerance=error)


@pytest.mark.parametrize("cache_dtype, error", [("kvant_tq4", 0.2), ("auto", 2e-5)])
def test_options_of_centres(vllm, torch, cache_dtype, error):
    """Pages without centres are smaller; exact pages have none. Other words are refused."""
    from kvant.vllm import versions

    e = Engine(vllm, cache_dtype=cache_dtype, k_centre="none")
    sizes = [made.layers[0].made.kv_cache.shape[3] for made in (e, Engine(vllm, cache_dtype=cache_dtype))]
    assert sizes == ([68, 69] if cache_dtype == "kvant_tq4" else [sizes[0]] * 2)
    a_day(e, tolerance=error)
    for wrong in ("Page", True, None):
        e.config.additional_config = {"kvant": {"k_centre": wrong}}
        with pytest.raises(ValueError, match="must be one of automatic, none, page"):
            versions.option(e.config, "k_centre")


@pytest.mark.parametrize("bits", [16, 8])
def test_products(vllm, torch, caplog, bits):
    """Plans get the option, but for exact layers, and the log says so. Other numbers are refused."""
    from kvant.vllm import layer, versions

    layer.say_once.cache_clear()
    with caplog.at_level("INFO", "vllm.kvant"):
        e = Engine(vllm, [{}, {}], cache_dtype="kvant_tq8", products=bits, fresh_keys=False, skip_layers=["1"])
    a_day(e, tolerance=2.5e-2)
    stored, exact = (made.made.impl.layer for made in e.layers)
    assert (stored.options, exact.options) == ((("products", bits),), ())
    (plans,) = (plans[stored] for plans in (e.builder(i).plans for i in range(len(e.groups))) if stored in plans)
    assert f"products   {bits} bits: forced" in plans.extend[128][0].stored.explain()
    assert f"products of {bits} bits for many queries over tq8/tq8 pages" in caplog.text
    for wrong in (7, "8", True):
        e.config.additional_config = {"kvant": {"products": wrong}}
        with pytest.raises(ValueError, match="products = "):
            versions.option(e.config, "products")


def test_sinks_are_loaded_after_the_layer_is_made(vllm, pages, torch):
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    e = Engine(vllm, [{"sinks": sinks}], cache_dtype=pages)
    impl = e.layers[0].made.impl
    address = impl._sink_logits.data_ptr()
    impl.sinks.fill_(4.0)  # a reload
    e.layers[0].made.process_weights_after_loading(torch.float32)
    assert impl._sink_logits.data_ptr() == address and impl._sink_logits.tolist() == [4.0] * 4
    a_day(e)


@pytest.mark.parametrize("drafts", [0, 3])
def test_replays(vllm, torch, drafts):
    """A step of eight requests, recorded once. Replays follow tables, lengths and slots that change between them. The
    CPU makes the recorded calls again."""
    e = Engine(vllm, [{}, {"window": 100}], cache_dtype="kvant_tq8", drafts=drafts)
    width = 1 + drafts
    requests = [e.request(seed) for seed in range(1, 6)]
    for n, r in zip((3, 64, 65, 150, 200), requests):
        e.step([(r, n)], tolerance=0.02)
    graph = outputs = None
    for active in (5, 4, 5, 2):
        batch = [(r, width) for r in requests[:active]]
        made, slots, rows = e.metadata(batch, pad_to=(8, 8 * width))
        inputs = e.inputs(batch, rows)
        if outputs is None:
            fixed = slots, inputs
            fixed_made = made
            outputs = e.forward(fixed_made, *fixed)  # a first run, as vLLM warms up before it records
            if not ON_CPU:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outputs = e.forward(fixed_made, *fixed)
        else:
            for mine, new in zip(fixed[1], inputs):
                for x, y in zip(mine, new):
                    x.copy_(y)
        if graph is None:
            outputs = e.forward(fixed_made, *fixed)
        else:
            graph.replay()
        e.finish(batch, outputs, 0.02)
