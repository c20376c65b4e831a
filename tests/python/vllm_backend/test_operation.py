"""A server in operation: weights that are written in place, a GPU that others use, blocks that outlive the server, and
draft models."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from .engine import DEVICE, Engine
from .test_connectors import transfer

GIB = 1 << 30


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", ["auto", "kvant_tq8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_follow_the_parameter(vllm, torch, cache_dtype, dtype):
    """A write in place, one through .data, other memory under the same parameter, and a loaded checkpoint: each step
    attends with the sinks of its moment. The reference reads the same parameter."""
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=getattr(torch, dtype), device=DEVICE), requires_grad=False)
    e = Engine(vllm, [{"sinks": sinks}], cache_dtype=cache_dtype)
    error = 2e-5 if cache_dtype == "auto" else 1.3e-2
    impl = e.layers[0].made.impl
    assert impl.sinks is sinks
    a = e.request(1)

    def step(value):
        assert sinks.tolist() == [value] * 4
        e.step([(a, 70)], tolerance=error)
        e.step([(a, 1)], tolerance=error)

    step(0.0)
    sinks.copy_(torch.full((4,), 6.0))
    step(6.0)
    sinks.data.fill_(-1.5)
    step(-1.5)
    sinks.data = torch.full_like(sinks, 4.0)
    step(4.0)
    sinks.data.fill_(2.0)
    e.layers[0].made.process_weights_after_loading(e.dtype)
    step(2.0)


def test_converted_sinks_stay_where_graphs_read_them(vllm, torch):
    """In another dtype the numbers are converted anew into the same memory; in float32 there is no copy at all."""
    e = Engine(vllm, [{"sinks": torch.zeros(4, dtype=torch.bfloat16)}, {"sinks": torch.zeros(4)}, {}])
    converted, plain, none = (layer.made.impl for layer in e.layers)
    address = converted._sink_logits.data_ptr()
    converted.sinks.data.fill_(3.0)
    assert converted._sink_logits.tolist() == [3.0] * 4 and converted._sink_logits.data_ptr() == address
    converted._converted_sinks = None
    with torch.inference_mode():  # as vLLM's steps
        assert converted._sink_logits.tolist() == [3.0] * 4
    converted.sinks.data.fill_(4.0)
    assert converted._sink_logits.tolist() == [4.0] * 4
    address, real = converted._sink_logits.data_ptr(), converted.sinks
    converted.sinks = real.to("meta")  # while vLLM loads a checkpoint anew
    e.layers[0].made.process_weights_after_loading(e.dtype)
    converted.sinks = real
    assert converted._sink_logits.data_ptr() == address
    assert plain._sink_logits.data_ptr() == plain.sinks.data_ptr() and none._sink_logits is None
    plain.sinks = torch.arange(8.0, device=DEVICE)[::2]  # float32 with gaps, which kernels do not take
    assert plain._sink_logits.is_contiguous() and plain._sink_logits.tolist() == [0.0, 2.0, 4.0, 6.0]


# --- memory of exact copies -------------------------------------------------------------------------------------------


def server(torch, utilization=0.9, layers=32, **others):
    """A configuration of 32 layers of Llama's shape, before vLLM has measured memory."""
    from kvant.vllm.dtypes import Pair
    from kvant.vllm.layer import Layer, LayerOfKvant

    class Impl(LayerOfKvant):
        layer, dtype = Layer(Pair("tq6", "tq4"), 32, 8, 128, 0.1), torch.bfloat16
        kv_sharing_target_layer_name = copies = None

    cache = {"kv_cache_memory_bytes": None, "num_gpu_blocks": None, "num_gpu_blocks_override": None}
    context = {f"l.{i}": SimpleNamespace(impl=Impl()) for i in range(layers)}
    return SimpleNamespace(
        cache_config=SimpleNamespace(**cache | {"gpu_memory_utilization": utilization} | others),
        additional_config={},
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )


@pytest.fixture
def gpu(registered, torch, monkeypatch):
    """gpu(...): 80 GiB, of which this process has 16 in torch, and others so many."""
    from kvant.vllm import versions

    monkeypatch.setattr(versions, "is_cuda", lambda: True)

    def of(others=0, own=16 * GIB):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * GIB - others - own, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: own)

    return of


def copies(config, requests=64):
    """(copies of a layer, bytes of all)."""
    from kvant.vllm import tail
    from kvant.vllm.layer import Capacity

    tail.divide_memory(config, Capacity(requests, 512, 1, 8192))
    impls = [layer.impl for layer in config.compilation_config.static_forward_context.values()]
    assert len({impl.copies for impl in impls}) == 1
    return impls[0].copies, sum(impl.copies * tail.copy_bytes(impl.layer, impl.dtype) for impl in impls)


@pytest.mark.parametrize(
    "utilization, others", [(0.9, 0), (0.5, 0), (0.45, 36 * GIB), (0.45, 40 * GIB), (0.6, 8 * GIB)]
)
def test_others_on_the_gpu_do_not_count(gpu, torch, utilization, others):
    """The cache's memory is vLLM's: what this process may take, less what it holds."""
    from kvant.vllm import versions

    gpu(others)
    config = server(torch, utilization)
    available = math.ceil(80 * GIB * utilization) - 16 * GIB  # vLLM's number before activations
    assert versions.kv_memory(config) == available
    count, taken = copies(config, requests=1000)
    assert count > 0 and 0.99 * 0.05 * available < taken <= 0.05 * available


def test_what_the_process_holds_counts(vllm, gpu, torch, monkeypatch):
    """kvant's own copies are no memory of torch. A process that has more than it may take leaves nothing."""
    from kvant.vllm import tail, versions

    gpu()
    before = copies(server(torch), 1000)[1]
    pages = {device: SimpleNamespace(tail_bytes=20 * GIB, device=(device, 0)) for device in ("cuda", "cpu")}
    monkeypatch.setattr(tail, "_given", pages.values())
    assert before - copies(server(torch), 1000)[1] == pytest.approx(0.05 * 20 * GIB, rel=0.02)
    assert versions.kv_memory(server(torch), own=56 * GIB - 1) == 1
    assert versions.kv_memory(server(torch), own=57 * GIB) == 0
    gpu(others=70 * GIB, own=4 * GIB)  # others took more since vLLM looked
    assert versions.kv_memory(server(torch)) == 6 * GIB


def test_layers_that_are_not_kvants_share_the_memory(vllm, monkeypatch):
    """Beside states of Mamba layers, whose memory may be a freed block's, writes leave the codes of blocks complete."""
    from kvant.vllm import versions

    kinds = {"kvant's alone": None, "a layer without a cache": None, "Mamba": object()}
    for kind, spec in kinds.items():
        known = versions.layers

        def layers(config, names, known=known, kind=kind, spec=spec):
            other = SimpleNamespace(get_kv_cache_spec=lambda _: spec)
            return [*known(config, names), *[other] * (names is None and kind != "kvant's alone")]

        with monkeypatch.context() as patch:
            patch.setattr(versions, "layers", layers)
            pages = Engine(vllm, cache_dtype="kvant_tq4", exact_memory=1000).layers[0].made.impl.pages
        assert pages.tail_pages == 1 and pages.encode_at_once == (kind == "Mamba"), kind


def test_pages_with_copies_are_known(vllm):
    from kvant.vllm import tail

    pages = Engine(vllm, cache_dtype="kvant_tq4", exact_memory=1000).layers[0].made.impl.pages
    assert pages.tail_bytes > 0 and pages in tail._given


def test_a_cache_of_a_given_size(gpu, torch):
    """--kv-cache-memory-bytes is the cache's size whatever the process holds, and few blocks are a small cache."""
    from kvant.vllm import versions

    gpu(own=70 * GIB)
    given = server(torch, kv_cache_memory_bytes=10 * GIB)
    assert versions.kv_memory(given) == 10 * GIB
    assert 0.99 * 0.5 * GIB < copies(given, 1000)[1] <= 0.5 * GIB
    gpu()
    block = 64 * 8 * 166 * 32  # tq6/tq4 of 128 with centres
    for tokens in (None, 64, 256):  # of vLLM's blocks
        cache = (tokens or 64) // 64 * 4096 * block
        few = copies(server(torch, num_gpu_blocks_override=4096, block_size=tokens), 1000)[1]
        assert 0.9 * 0.05 * cache < few <= 0.05 * cache


@pytest.mark.parametrize(
    "own, requests, enough, level",
    [(70, 64, 3, "INFO"), (71.3, 64, 1, "INFO"), (71.9, 64, 0, "WARNING"), (72, 64, 0, "WARNING")],
)
def test_too_few_copies_are_said_loudly(gpu, torch, caplog, own, requests, enough, level):
    gpu(own=int(own * GIB))
    with caplog.at_level("INFO", "vllm.kvant"):
        count, taken = copies(server(torch), requests)
    (said,) = (r for r in caplog.records if r.name == "vllm.kvant")
    assert said.levelname == level and (count // 3 == enough or enough == 3 <= count // 3)
    text = said.getMessage()
    assert f"{count} to {count} blocks in each of 32 layers, {taken / 2**20:.1f} MiB" in text
    assert f"enough for {count // 3} of {requests} requests" in text and '"exact_memory": 0.1' in text


def test_no_copies_beside_a_connector(gpu, torch, caplog):
    gpu()
    config = server(torch)
    config.kv_transfer_config = transfer("OffloadingConnector")
    assert copies(config) == (0, 0)
    assert "no exact copies of first and newest tokens: a KV connector writes to blocks" in caplog.text
    caplog.clear()
    config.additional_config = {"kvant": {"tail_pages": 0}}
    assert copies(config) == (0, 0) and caplog.text == ""


def test_sleep_mode(gpu, torch, caplog):
    """kvant's own memory stays on the device, and the log says how much."""
    gpu()
    assert copies(server(torch))[0] > 0 and "sleep mode" not in caplog.text
    config = server(torch)
    config.model_config.enable_sleep_mode = True
    taken = copies(config)[1]
    assert "sleep mode: kvant's own memory stays on the device while vLLM sleeps, " in caplog.text
    assert f" {taken / 2**20:.1f} MiB of exact copies and the workspace" in caplog.text


# --- blocks that outlive the server -----------------------------------------------------------------------------------


def tiered(*tiers):
    return transfer("OffloadingConnector", spec_name="TieringOffloadingSpec", secondary_tiers=list(tiers))


def configuration(cache_dtype="kvant_tq4", connector=None, skip=(), draft=None, **options):
    speculative = None
    if draft is not None:
        speculative = SimpleNamespace(
            kv_cache_dtype=draft, attention_backend="CUSTOM", use_eagle=lambda: False, uses_draft_model=lambda: True
        )
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skip)),
        kv_transfer_config=connector,
        additional_config={"kvant": options},
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        speculative_config=speculative,
        attention_config=SimpleNamespace(backend="CUSTOM", backend_per_kind={}),
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize(
    "options, folder",
    [
        ({}, ""),
        ({"k_centre": "page", "tail_pages": 3, "fresh_keys": False, "products": 16}, ""),  # blocks have the same bytes
        ({"draft": "kvant_tq4"}, ""),
        ({"k_centre": "none"}, "kvant-k_centre-none"),
        ({"cache_dtype": "auto"}, "kvant-exact"),
        ({"cache_dtype": "bfloat16", "k_centre": "none"}, "kvant-exact"),
        ({"skip": ["5", "0"]}, "kvant-skip-0-5-bfloat16"),
        ({"draft": "auto"}, "kvant-draft-auto-bfloat16"),
        ({"draft": "kvant_tq4_tq4"}, "kvant-draft-kvant_tq4_tq4"),
        ({"cache_dtype": "auto", "draft": "kvant_tq4"}, "kvant-exact-draft-kvant_tq4"),
        ({"k_centre": "none", "skip": ["sliding_window"], "draft": "auto"},
         "kvant-k_centre-none-skip-sliding_window-draft-auto-bfloat16"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_bytes_of_a_block_depend_on(registered, torch, options, folder):
    """Beside the cache dtype. Tiers that vLLM names by model, cache dtype and layers need a folder that says so."""
    from kvant.vllm import connectors

    assert connectors.folder(configuration(**options)) == folder
    for tier, path in (("fs", "root_dir"), ("obj", "prefix")):
        named = tiered({"type": tier, path: f"/blocks/{folder or 'any'}/x"})
        connectors.refuse_shared_folders(configuration(**options, connector=named))
        plain = configuration(**options, connector=tiered({"type": tier, path: "/blocks/"}))
        if not folder:
            connectors.refuse_shared_folders(plain)
            continue
        with pytest.raises(NotImplementedError, match=rf'{path}": "/blocks/{folder}"') as error:
            connectors.refuse_shared_folders(plain)
        assert f"({folder})" in str(error.value) and repr(tier) in str(error.value)
    other = configuration(**options, connector=tiered({"type": "fs", "root_dir": f"/x/{folder}"}, {"type": "p2p"}))
    if folder:
        with pytest.raises(NotImplementedError, match="tier 'p2p'.*leave the tier out"):
            connectors.refuse_shared_folders(other)
    else:
        connectors.refuse_shared_folders(other)
    connectors.refuse_shared_folders(configuration(**options, connector=transfer("OffloadingConnector")))
    connectors.refuse_shared_folders(configuration(**options))


def test_part_of_a_name_is_no_name(registered, torch):
    from kvant.vllm import connectors

    for path in ("/blocks/kvant-k_centre-none2", "/blocks-kvant-k_centre-none", ""):
        with pytest.raises(NotImplementedError):
            connectors.refuse_shared_folders(
                configuration(k_centre="none", connector=tiered({"type": "fs", "root_dir": path}))
            )
    inner = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "secondary_tiers": [{"type": "fs", "root_dir": "/blocks"}]}}  # fmt: skip
    with pytest.raises(NotImplementedError, match='"/blocks/kvant-k_centre-none"'):
        connectors.refuse_shared_folders(
            configuration(k_centre="none", connector=transfer("MultiConnector", connectors=[inner]))
        )


def test_another_format_of_pages_is_another_folder(registered, torch, monkeypatch):
    from kvant.vllm import connectors, dtypes

    monkeypatch.setattr(dtypes, "PAGE_FORMAT", 2)
    assert connectors.folder(configuration()) == "kvant-pages-2"
    assert connectors.folder(configuration(k_centre="none")) == "kvant-k_centre-none-pages-2"


def test_layers_refuse_shared_folders(vllm, torch):
    """All of a server's layers ask, exact ones too; so does the size of a page."""
    from kvant.vllm.backend import KvantBackend
    from kvant.vllm.impl import KvantImpl
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    shared = tiered({"type": "fs", "root_dir": "/blocks"})
    for options in ({"cache_dtype": "auto"}, {"k_centre": "none"}):
        e = Engine(vllm, **{"cache_dtype": "kvant_tq4"} | options)
        e.config.kv_transfer_config = shared
        with vllm.set_current_vllm_config(e.config), pytest.raises(NotImplementedError, match="the tier 'fs'"):
            KvantImpl(4, 64, 0.125, 2, kv_cache_dtype=e.config.cache_config.cache_dtype)
    spec = FullAttentionSpec(
        block_size=64, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=KVQuantMode.CUSTOM
    )
    with vllm.set_current_vllm_config(e.config), pytest.raises(NotImplementedError, match="the tier 'fs'"):
        KvantBackend.customize_spec(spec)


def test_connectors_that_are_not_known(registered, torch, caplog):
    """One warning each: other servers may read the blocks."""
    from kvant.vllm import connectors

    connectors._warn_once.cache_clear()
    for _ in range(2):
        for name in ("LMCacheMPConnector", "ExampleConnector", "NixlConnector", "OffloadingConnector"):
            connectors.refuse_shared_folders(configuration(connector=transfer(name)))
        for spec in ("CPUOffloadingSpec", "SharedStorageOffloadingSpec"):
            connectors.refuse_shared_folders(
                configuration(connector=transfer("OffloadingConnector", spec_name=spec))
            )
    said = [m.split(" may give blocks to other servers")[0] for m in caplog.messages if "may give blocks" in m]
    assert said == ["LMCacheMPConnector", "ExampleConnector", "OffloadingConnector SharedStorageOffloadingSpec"]
    assert "(here kvant_tq4)" in caplog.messages[-1]


# The first 16 digits of SHA-256 of two blocks in each format.
BYTES = {  # around centres, and without
    "tq8": ("0f0c2881d1d74bd8", "de1fad1fbf55a73a"),
    "tq6": ("377737d488e112ad", "352e26ae1c95f866"),
    "tq5": ("b48ef2edd4cd2e26", "198a423767cd0275"),
    "tq4": ("9a60f082fc6fc26a", "2509fc09c9ff29c8"),
    "tq3": ("d1271f732503121c", "009c96cbb3101ceb"),
    "fp8": ("741bcdcc873b4c84", "f9629f64e0e457eb"),
}


@pytest.mark.parametrize("centre", ["page", "none"])
@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_of_pages(registered, torch, name, centre):
    """If this fails because encoders write other bytes than before, and older pages would be read wrongly: raise
    PAGE_FORMAT in dtypes.py, so that blocks that outlive a server get other folders."""
    import kvant
    from kvant.vllm import dtypes

    pages = kvant.Pages(kv_heads=1, head_dim=64, k=name, v=name, k_centre=centre, isa="scalar")
    numbers = torch.arange(2 * 100 * 64, dtype=torch.float64).reshape(2, 100, 1, 64)
    k, v = (torch.sin(numbers * 12.9898) * 4).float().mul(64).round().div(64)  # the same on every machine
    k = k + 3
    pool = torch.zeros(2, 1, pages.block_bytes, dtype=torch.uint8)
    tables = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    pages.begin_step(*tables, torch.tensor([0, 100], dtype=torch.int32))
    pages.write(pool, k, v, torch.arange(100))
    digest = hashlib.sha256(pool.numpy().tobytes()).hexdigest()[:16]
    assert (dtypes.PAGE_FORMAT, digest) == (1, BYTES[name][centre == "none"])


# --- options ----------------------------------------------------------------------------------------------------------


def options(additional_config):
    from kvant.vllm import versions

    return versions._options(SimpleNamespace(additional_config=additional_config))


def test_options_that_are_kvants(registered):
    known = {"tail_pages": 2, "k_centre": "none"}
    assert options({"kvant": known}) == known
    assert options({"kvant": {}}) == options({"kvant": None}) == options({}) == options(None) == options(object()) == {}
    # Keys of others are left alone.
    assert options({"kvant": known, "lmcache": 1, "kv": {}, "quant": {}, "kvcache": 2, "exact": 1, 5: 6}) == known


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"kvnat": {"tail_pages": 2}}, "has 'kvnat': kvant's options are under \"kvant\""),
        ({"Kvant": {}, "kvant": {}}, "has 'Kvant'"),
        ({"kvant_options": {}}, "has 'kvant_options'"),
        ({"kvan": {}}, "has 'kvan'"),
        ({"k_centre": "none"}, "has 'k_centre' beside \"kvant\": an option of kvant belongs inside, {\"kvant\": {\"k_"),
        ({"kvant": {}, "tail_pages": 0}, "has 'tail_pages' beside"),
        ({"kvant": {"k_center": "none"}}, "option 'k_center' (did you mean k_centre?); the options are k_centre, t"),
        ({"kvant": {"tail": 1}}, "option 'tail': it is called tail_pages"),
        ({"kvant": {"fresh": True}}, "option 'fresh': it is called fresh_keys"),
        ({"kvant": {"zzz": 1}}, "option 'zzz'; the options are k_centre"),
        ({"kvant": {"tail_pages": 1, 7: 1}}, "option 7; the options are"),
        ({"kvant": ["tail"]}, "has \"kvant\": ['tail']: must be options"),
        ({"kvant": 0}, "must be options"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_not(vllm, wrong, said):
    """They are said when the first layer is made."""
    from kvant.vllm.impl import KvantImpl

    e = Engine(vllm, cache_dtype="kvant_tq4", blocks=4)
    e.config.additional_config = wrong
    with vllm.set_current_vllm_config(e.config), pytest.raises(ValueError) as error:
        KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="kvant_tq4")
    assert said in str(error.value)


# --- draft models -----------------------------------------------------------------------------------------------------


def drafts_of(target, draft, backend="CUSTOM", method="draft_model", second_runner=False, per_kind=()):
    config = configuration(target)
    config.speculative_config = SimpleNamespace(
        kv_cache_dtype=draft,
        attention_backend=backend,
        use_eagle=lambda: method == "eagle",
        uses_draft_model=lambda: method == "draft_model",
    )
    config.attention_config.backend_per_kind = dict(per_kind)
    config.use_v2_model_runner = second_runner
    return config


def test_drafts_of_another_cache_dtype(vllm):
    """Two formats of kvant are refused when the target's first layer is made, and both are named."""
    from kvant.vllm import drafts
    from kvant.vllm.impl import KvantImpl

    for method in ("draft_model", "eagle"):
        with pytest.raises(NotImplementedError, match="--kv-cache-dtype is kvant_tq4, and .* is kvant_tq8: a server"):
            drafts.refuse(drafts_of("kvant_tq4", "kvant_tq8", method=method))
    for target, draft in (("kvant_tq4", "kvant_tq4_tq4"), ("kvant_tq4", None), ("kvant_tq4", "auto"),
                          ("auto", "kvant_tq4"), ("kvant_tq8", "kvant_tq8")):  # fmt: skip
        drafts.refuse(drafts_of(target, draft))
    drafts.refuse(drafts_of("kvant_tq4", "kvant_tq8", method="ngram"))  # no model
    e = Engine(vllm, cache_dtype="kvant_tq4")
    e.config.speculative_config = drafts_of("kvant_tq4", "kvant_tq8").speculative_config
    with vllm.set_current_vllm_config(e.config), pytest.raises(NotImplementedError, match="kvant_tq8"):
        KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="auto")  # of a layer that is skipped, too


def test_drafts_without_a_backend(registered, torch):
    """vLLM's first model runner chooses a draft's backend itself, and finds none that reads kvant's pages."""
    from kvant.vllm import drafts

    for draft in (None, "kvant_tq4"):
        with pytest.raises(NotImplementedError, match='reads kvant_tq4: add "attention_backend": "CUSTOM"'):
            drafts.refuse(drafts_of("kvant_tq4", draft, backend=None))
    drafts.refuse(drafts_of("kvant_tq4", "auto", backend=None))
    drafts.refuse(drafts_of("kvant_tq4", None, backend=None, second_runner=True))
    drafts.refuse(drafts_of("kvant_tq4", None, backend=None, method="ngram"))
    drafts.refuse(drafts_of("kvant_tq4", None, backend=None, per_kind={"full_attention": "CUSTOM"}))
    drafts.refuse(None)


def test_pages_of_another_size_are_found_at_the_start(vllm, torch):
    """Whatever led vLLM to another cache dtype than a layer's."""
    e = Engine(vllm, [{}, {}], cache_dtype="kvant_tq4", skip_layers=["1"])
    (group,) = (g for g in e.all_groups() if g.kv_cache_spec.state_content_bytes)
    assert group.kv_cache_spec.state_content_bytes == 69
    for size in (133, None):
        wrong = replace(group.kv_cache_spec, state_content_bytes=size)
        with pytest.raises(RuntimeError, match=f"layers.0.attn for {size} bytes .* kvant_tq4 takes 69"):
            type(e.builder())(wrong, group.layer_names, e.config, DEVICE)
