"""KV connectors: vLLM's own OffloadingConnector sees blocks as bytes, which return as they were; what cannot work is
refused when vLLM starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .engine import Engine


def transfer(name, **extra):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.fixture
def size(vllm, registered, torch, monkeypatch):
    """size(connector, ...): bytes of a token of a layer under a configuration with that connector."""
    from kvant.vllm import backend, versions
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    def of(connector, kv_heads=1, head_dim=128, name="kvant_tq4", k_centre="none"):
        spec = FullAttentionSpec(
            block_size=64, num_kv_heads=kv_heads, head_size=head_dim, dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
        )  # fmt: skip
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=name),
            kv_transfer_config=connector,
            additional_config={"kvant": {"k_centre": k_centre}},
        )
        monkeypatch.setattr(versions, "configuration", lambda: config)
        return backend.KvantBackend.customize_spec(spec).state_content_bytes

    return of


def test_one_head_of_132_bytes_never_reaches_lmcache(size):
    lmcache = transfer("LMCacheConnectorV1")
    assert size(None) == 132
    for connector in (lmcache, transfer("LMCacheMPConnector"),
                      transfer("MultiConnector", connectors=[{"kv_connector": "OffloadingConnector"},
                                                             {"kv_connector": "LMCacheMPConnector"}])):
        with pytest.raises(NotImplementedError, match="132 bytes a token for the index plane.*choose another"):
            size(connector)
        assert size(connector, k_centre="page") == 134
        assert size(connector, kv_heads=2) == 132
        assert size(connector, name="kvant_tq6_tq4") == 164
    assert size(transfer("OffloadingConnector")) == size(transfer("NixlConnector")) == 132


def test_other_refusals(size):
    with pytest.raises(NotImplementedError, match="sizes its chunks from head_size"):
        size(transfer("LMCacheConnectorV1", use_native=True), kv_heads=8)
    assert size(transfer("LMCacheConnectorV1", use_native=False), kv_heads=8) == 132
    with pytest.raises(NotImplementedError, match="random numbers"):
        size(transfer("DecodeBenchConnector"), kv_heads=8)


def test_no_page_looks_like_plain_keys_and_values(registered):
    """vLLM maps pages between tensor parallel sizes where a token has 2 * head_size bytes, as plain uint8 would."""
    from kvant.vllm import dtypes

    for pair in dtypes.names().values():
        for head_dim in (64, 96, 128, 192, 256, 512):
            for centre in ("page", "none"):
                assert dtypes.token_bytes(pair, head_dim, centre) != 2 * head_dim


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("layers", [[{}, {}], [{}, {"head_dim": 128}], [{}, {"window": 128}]], ids=str)
def test_blocks_return_from_the_offloading_connector(vllm, torch, layout, layers):
    """Blocks leave through the tensors that vLLM's OffloadingConnector moves, and return to others, in all bytes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

    e = Engine(vllm, layers, cache_dtype="kvant_tq8", layout=layout, tail_pages=0)
    e.config.kv_transfer_config = transfer("OffloadingConnector")
    e.config.model_config.get_total_num_kv_heads = lambda: 2
    spec = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
        get_worker=lambda kv_caches: kv_caches,
    )
    worker = OffloadingConnectorWorker(spec, e.config, e.cache)
    worker.register_kv_caches({f"model.layers.{i}.attn": layer.made.kv_cache for i, layer in enumerate(e.layers)})
    moved = worker.worker.tensors

    r = e.request(1)
    e.step([(r, 190)], tolerance=2e-2)
    kept = [[t.tensor[ids].clone() for ids in r.blocks] for t in moved]  # of each region, the blocks of each group
    old = [list(ids) for ids in r.blocks]
    for region in moved:
        region.tensor[sorted({b for ids in old for b in ids})] = 77
    for group, ids in enumerate(r.blocks):
        new = [e.free.pop() for _ in ids]
        for region, groups in zip(moved, kept):
            region.tensor[new] = groups[group]
        r.blocks[group] = new
        e.free = ids + e.free
    e.step([(r, 1)], tolerance=2e-2)  # compared with float64 attention over all tokens
    e.step([(r, 60)], tolerance=2e-2)
    assert 1e-3 < e.worst < 2e-2
