"""The builder, with metadata made by hand: how a batch is divided, what graphs may hold, what is refused."""

from __future__ import annotations

import pytest

from .engine import Engine


def common(torch, query_lens, seq_lens=None, *, width=16, **options):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    begins = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens or query_lens, dtype=torch.int32)
    n = len(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=begins,
        query_start_loc_cpu=begins.clone(),
        seq_lens=lengths,
        num_reqs=n,
        num_actual_tokens=int(begins[-1]),
        max_query_len=max(query_lens),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(n * width, dtype=torch.int32).view(n, width) % 40,
        slot_mapping=torch.full((int(begins[-1]),), -1, dtype=torch.int64),
        **options,
    )


@pytest.mark.parametrize(
    "query_lens, decodes, tokens",
    [
        ([1, 1, 1], 3, 3),
        ([1, 1, 5], 2, 2),
        ([5, 9], 0, 0),
        ([1, 7, 1, 0], 1, 1),  # what follows a long one is not divided again
        ([1, 1, 0, 0], 4, 2),  # padding of a graph
    ],
)
def test_division(vllm, dense_pages, torch, query_lens, decodes, tokens):
    builder = Engine(vllm).builder()
    seq_lens = [n + 60 if n else 0 for n in query_lens]
    metadata = builder.build(0, common(torch, query_lens, seq_lens))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (decodes, tokens)
    (plans,) = metadata.plans.values()
    n = len(query_lens)
    assert (plans.decode.steps, plans.extend.steps) == (int(decodes > 0), int(decodes < n))
    if decodes < n:
        table, lengths, begins = plans.extend.tables
        assert lengths == seq_lens[decodes:] and begins[0] == tokens and table.shape[0] == n - decodes


def test_division_with_drafts(vllm, dense_pages, torch):
    builder = Engine(vllm, drafts=2).builder()
    assert builder.reorder_batch_threshold == 3
    metadata = builder.build(0, common(torch, [3, 3, 1, 2, 40], [90, 70, 64, 5, 40]))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 9)


def test_capacity(vllm, dense_pages, torch):
    e = Engine(vllm, drafts=3, max_requests=8, max_tokens=256, max_model_len=1000)
    (plans,) = e.builder().plans.values()
    assert plans.decode.limits | {"blocks": 0} == dict(batch=8, blocks=0, query_len=4, tokens=32)
    assert plans.extend.limits | {"blocks": 0} == dict(batch=8, blocks=0, query_len=280, tokens=280)
    assert plans.decode.limits["blocks"] >= 16
    wider = common(torch, [1], [100], width=plans.decode.limits["blocks"] + 8)  # vLLM rounds tables up
    e.builder().build(0, wider)


def test_cuda_graphs(vllm, dense_pages, torch):
    from vllm.v1.attention.backend import AttentionCGSupport

    e = Engine(vllm, drafts=3)
    builder = e.builder()
    assert builder.get_cudagraph_support(e.config, None) == AttentionCGSupport.UNIFORM_BATCH
    assert e.cudagraphs.min_cg_attn_backend == "KvantBackend"
    assert builder.get_varlen_cudagraph_max_query_len(e.config, None) == 4
    metadata = builder.build_for_cudagraph_capture(common(torch, [4] * 8, [1000] * 8))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (8, 32)


def test_draft_models_set_tables_again(vllm, dense_pages, torch):
    builder = Engine(vllm).builder()
    assert builder.supports_draft_decode_metadata_update
    batch = common(torch, [1, 1], [64, 70])
    metadata = builder.build_for_drafting(batch, 0)
    batch.seq_lens += 1  # in place, by a kernel of vLLM
    builder.update_draft_decode_metadata(metadata)
    (plans,) = metadata.plans.values()
    assert plans.decode.tables[1] == [65, 71]


def test_layers_that_are_equal_share_plans(vllm, dense_pages):
    e = Engine(vllm, [{}, {}, {"softcap": 3.0}, {"q_heads": 8}])
    sizes = sorted(len(g.get_metadata_builder(0).plans) for g in e.all_groups())
    assert sizes == [1, 2]  # vLLM has a builder for each number of query heads


def test_fast_prefill_copies_the_metadata(vllm, dense_pages, torch):
    """vLLM wraps the builder for models whose last layers share caches, and copies the fields of its result."""
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    from kvant.vllm.backend import KvantBackend

    e = Engine(vllm)
    wrapped = create_fast_prefill_custom_backend("Fast", KvantBackend).get_builder_cls()
    builder = wrapped(e.specs["model.layers.0.attn"], ["model.layers.0.attn"], e.config, torch.device("cpu"))
    batch = common(
        torch,
        [5, 7],
        [90, 70],
        logits_indices_padded=torch.tensor([4, 11], dtype=torch.int32),
        num_logits_indices=2,
        max_logits_per_req=1,
    )
    metadata = builder.build(0, batch)
    assert metadata.num_decodes == 2 and metadata.plans and metadata.num_logits_indices == 2


def test_refused(vllm, dense_pages, torch):
    e = Engine(vllm)
    with pytest.raises(NotImplementedError, match="later tokens"):
        e.builder().build(0, common(torch, [4], causal=False))
    with pytest.raises(NotImplementedError, match="later tokens"):
        e.builder().build(0, common(torch, [4], causal=torch.tensor([True])))
    spec = e.specs["model.layers.0.attn"].copy_with_new_block_size(32)
    with pytest.raises(NotImplementedError, match="blocks of 32 tokens"):
        type(e.builder())(spec, ["model.layers.0.attn"], e.config, torch.device("cpu"))
    made, _, _ = e.metadata([(e.request(1), 1)])
    (metadata,) = made.values()
    metadata.plans = {}
    impl, cache = e.layers[0].made.impl, e.layers[0].made.kv_cache
    with pytest.raises(RuntimeError, match="no plans for a layer"):
        impl.forward(None, torch.zeros(1, 4, 64), None, None, cache, metadata, torch.zeros(1, 4, 64))
