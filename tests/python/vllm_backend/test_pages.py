"""Specs, strides and groups: vLLM's pages are kvant's blocks."""

from __future__ import annotations

import pytest

from .engine import Engine


def spec(torch, kind="FullAttentionSpec", mode="CUSTOM", **options):
    from vllm.v1 import kv_cache_interface as interface

    options = {"block_size": 64, "num_kv_heads": 8, "head_size": 128, "dtype": torch.uint8} | options
    return getattr(interface, kind)(kv_quant_mode=interface.KVQuantMode[mode], **options)


@pytest.fixture
def backend(vllm, monkeypatch):
    from kvant.vllm import backend, dtypes

    monkeypatch.setattr(dtypes, "_of_layers", (None, "page"))
    return backend


def test_bytes_of_a_token(backend, dense_pages, torch):
    backend.dtypes.note_layer("kvant_tq6_tq4")
    made = backend.KvantBackend.customize_spec(spec(torch))
    assert made.state_content_bytes == 2 * 128 * 8  # float64 stands in for the formats
    assert made.page_size_bytes == 8 * 64 * made.state_content_bytes
    assert backend.KvantBackend.customize_spec(made) is made  # vLLM asks more than once
    one = backend.KvantBackend.customize_spec(spec(torch, block_size=1))  # and for one token
    assert one.state_content_bytes == made.state_content_bytes


def test_exact_layers_keep_their_spec(backend, torch):
    exact = spec(torch, mode="NONE", dtype=torch.bfloat16)
    assert backend.KvantBackend.customize_spec(exact) is exact


def test_where_the_formats_come_from(backend, vllm, monkeypatch, torch):
    """The configuration's name counts; outside of one, that of the layers which the process made."""
    from kvant.vllm import dtypes

    seen = []

    def token_bytes(pair, head_dim, k_centre, v_head_dim):
        assert v_head_dim == 0  # that of keys
        seen.append((str(pair), k_centre))
        return 144

    monkeypatch.setattr(dtypes, "token_bytes", token_bytes)
    config = vllm.configuration(
        cache_dtype="kvant_tq4", block_size=64, dtype=torch.float32, max_requests=1, max_tokens=64, max_model_len=64
    )
    with pytest.raises(RuntimeError, match="before it has a configuration or a layer"):
        backend.KvantBackend.customize_spec(spec(torch))
    with vllm.set_current_vllm_config(config):
        backend.KvantBackend.customize_spec(spec(torch))
    backend.dtypes.note_layer("kvant_tq6_tq4")
    backend.dtypes.note_layer("auto")  # a layer that is left exact
    backend.KvantBackend.customize_spec(spec(torch))
    with vllm.set_current_vllm_config(config):
        backend.KvantBackend.customize_spec(spec(torch))
    assert seen == [(pair, "automatic") for pair in ("tq4/tq4", "tq6/tq4", "tq4/tq4")]
    backend.dtypes.note_layer("kvant_fp8", "none")
    backend.KvantBackend.customize_spec(spec(torch))
    config.additional_config = {"kvant": {"k_centre": "none"}}
    with vllm.set_current_vllm_config(config):
        backend.KvantBackend.customize_spec(spec(torch))
    assert seen[3:] == [("fp8/fp8", "none"), ("tq4/tq4", "none")]


def test_refused_specs(backend, torch):
    backend.dtypes.note_layer("kvant_tq4")
    with pytest.raises(NotImplementedError, match="ChunkedLocalAttentionSpec"):
        backend.KvantBackend.customize_spec(spec(torch, "ChunkedLocalAttentionSpec", attention_chunk_size=256))


def test_values_of_another_size(backend, torch, monkeypatch):
    backend.dtypes.note_layer("kvant_tq6_tq4")
    sizes = [backend.KvantBackend.customize_spec(spec(torch, head_size_v=v)).state_content_bytes for v in (128, 64)]
    assert sizes[0] - sizes[1] == 64 // 2  # a scale a token and four bits a channel
    with pytest.raises(NotImplementedError, match="keys of 192 and values of 100000 numbers: sizes of 1 to "):
        backend.KvantBackend.is_supported_on_current_device(192, 100000, False)
    assert backend.KvantBackend.is_supported_on_current_device(192, 128, True)
    assert backend.KvantBackend.is_supported_on_current_device(192, 64, True)
    monkeypatch.setattr(backend.versions, "is_cuda", lambda: True)
    monkeypatch.setattr("kvant._tools.build_info", lambda: {"device": {"widths": [[192, 128]]}})
    assert backend.KvantBackend.is_supported_on_current_device(192, 128, True)
    with pytest.raises(NotImplementedError, match="kvant: devices have kernels .* or of 192/128, and not of 192/64"):
        backend.KvantBackend.is_supported_on_current_device(192, 64, True)
    backend.KvantBackend.set_head_size_v(128)
    assert [backend.dtypes.take_head_size_v(192) for _ in range(2)] == [128, 0]  # of one layer
    backend.KvantBackend.set_head_size_v(128)
    assert backend.dtypes.take_head_size_v(128) == 0


def test_models_that_name_a_backend_get_kvants_where_it_is_chosen(backend, vllm, torch, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvant.vllm import versions

    own = object()
    monkeypatch.setattr(versions, "own_backend", lambda name: (own, name))
    config = vllm.configuration(
        cache_dtype="auto", block_size=64, dtype=torch.float32, max_requests=1, max_tokens=64, max_model_len=64
    )
    for name in ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"):
        member = AttentionBackendEnum[name]
        with vllm.set_current_vllm_config(config):
            assert member.get_class() is backend.KvantBackend
            config.attention_config.backend = None
            assert member.get_class() == (own, name)
            config.cache_config.cache_dtype = "kvant_tq4"
            assert member.get_class() is backend.KvantBackend
            config.attention_config.backend = AttentionBackendEnum.CUSTOM
            config.cache_config.cache_dtype = "auto"
        assert member.get_class() == (own, name)  # outside of any configuration


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "LHBNC"])
def test_blocks_and_heads_are_contiguous(vllm, dense_pages, layout):
    from kvant.vllm.layer import pool

    e = Engine(vllm, [{}, {}], layout=layout, kv_heads=2)
    for layer in e.layers:
        cache = layer.made.kv_cache
        p = pool(cache)
        assert p.data_ptr() == cache.data_ptr() and p.shape == (48, 2, 64 * cache.shape[3])
        assert p.stride(2) == 1 and p.stride(0) % 64 == 0 and p.stride(1) % 64 == 0
        assert p.untyped_storage().nbytes() >= 2 * 48 * 2 * p.shape[2]  # that of all layers
    if layout in ("LBHNC", "BLHNC"):  # what devices need
        assert p.stride(1) == p.shape[2]
    assert e.config.cache_config.kv_cache_layout == layout


def test_layouts_of_devices(vllm, monkeypatch):
    """Devices refuse blocks whose heads lie apart, so vLLM is not offered such layouts there."""
    from kvant.vllm import versions
    from kvant.vllm.backend import KvantBackend

    def offered():
        return [layout.name for layout in KvantBackend.supported_kv_cache_layouts()]

    assert offered() == ["LBHNC", "BLHNC", "BHLNC", "LHBNC"]
    monkeypatch.setattr(versions, "is_cuda", lambda: True)
    assert offered() == ["LBHNC", "BLHNC"]


def test_the_layout_that_vllm_chooses(vllm, dense_pages):
    assert Engine(vllm).config.cache_config.kv_cache_layout == "LBHNC"


def test_block_sizes(vllm):
    from kvant.vllm.backend import KvantBackend

    assert KvantBackend.get_supported_kernel_block_sizes() == [64]
    assert [KvantBackend.get_preferred_block_size(n) for n in (16, 64, 128)] == [64, 64, 128]
    assert [KvantBackend.supports_block_size(n) for n in (None, 64, 96, 256)] == [True, True, False, True]


def test_one_token_of_every_format(vllm):
    """Blocks of 64 tokens whose bytes are a multiple of 64, so that a token has a whole number of bytes."""
    import kvant
    from kvant.vllm import dtypes

    for pair in set(dtypes.names().values()):
        for head_dim in (64, 72, 80, 96, 128, 192, 256, 512):
            for centre in ("page", "none"):
                pages = kvant.Pages(kv_heads=1, head_dim=head_dim, k=pair.k, v=pair.v, k_centre=centre)
                assert dtypes.token_bytes(pair, head_dim, centre) * 64 == pages.block_bytes
    assert [dtypes.token_bytes(dtypes.Pair("tq6", "tq4"), 128, centre) for centre in ("page", "none")] == [166, 164]
    assert dtypes.token_bytes(dtypes.Pair("tq4", "tq4"), 128) == 134


def test_the_table_in_the_documents(vllm):
    """docs/vllm.md says what a token takes."""
    import re
    from pathlib import Path

    from kvant.vllm import dtypes

    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| \**`(kvant_\w+)`\** \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) >= 9
    for name, *sizes, ratio in rows:
        made = [dtypes.token_bytes(dtypes.names()[name], head_dim) for head_dim in (64, 128, 256)]
        assert made == list(map(int, sizes)), name
        assert float(ratio) == round(512 / made[1], 1), name
