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


def parts(metadata):
    return [("decode" if p.is_decode else "extend", p.size, p.first, p.end, p.rows) for p in metadata.parts]


@pytest.mark.parametrize(
    "query_lens, expected",
    [
        ([1, 1, 1], [("decode", 4, 0, 3, 3)]),
        ([1] * 8, [("decode", 8, 0, 8, 8)]),
        ([1, 1, 5], [("decode", 2, 0, 2, 2), ("extend", 8, 2, 3, 7)]),
        ([5, 9], [("extend", 16, 0, 2, 14)]),
        ([1, 7, 1, 0], [("decode", 1, 0, 1, 1), ("extend", 8, 1, 4, 9)]),  # short ones behind a long one
        ([1, 1, 0, 0], [("decode", 4, 0, 4, 2)]),  # padding of a graph
        ([256], [("extend", 256, 0, 1, 256)]),
        ([1, 3, 3, 3, 3, 200], [("decode", 1, 0, 1, 1), ("extend", 4, 1, 5, 13), ("extend", 256, 5, 6, 213)]),
    ],
)
def test_division(vllm, dense_pages, torch, query_lens, expected):
    builder = Engine(vllm).builder()
    seq_lens = [n + 60 if n else 0 for n in query_lens]
    metadata = builder.build(0, common(torch, query_lens, seq_lens))
    assert parts(metadata) == expected
    (plans,) = metadata.plans.values()
    for part in metadata.parts:
        table, lengths, begins = part.plan(plans).tables
        assert lengths == seq_lens[part.first : part.end] and table.shape[0] == part.end - part.first
        assert begins[0] == sum(query_lens[: part.first]) and begins[-1] <= part.rows


def test_lengths_of_parts(vllm, dense_pages, torch):
    """The host knows bounds of lengths, of each request or of all."""
    builder = Engine(vllm).builder()
    bounds = torch.tensor([300, 900, 80], dtype=torch.int32)
    batch = common(torch, [1, 1, 60], [290, 880, 75], seq_lens_cpu_upper_bound=bounds)
    assert [part.tokens for part in builder.build(0, batch).parts] == [900, 80]
    assert [part.tokens for part in builder.build(0, common(torch, [1, 60], [290, 75])).parts] == [290, 290]


def test_an_order_that_does_not_help(vllm, dense_pages, torch):
    """Long prompts among many short ones: each part has tables of its own."""
    e = Engine(vllm)
    metadata = e.builder().build(0, common(torch, [90, 2, 2, 2, 2, 2, 2, 100]))
    assert parts(metadata) == [("extend", 128, 0, 4, 96), ("extend", 128, 4, 8, 202)]
    (plans,) = metadata.plans.values()
    assert len(plans.extend[128]) == 2 and len(plans.extend[64]) == 1
    requests = [e.request(seed) for seed in range(1, 9)]
    order = [90, 2, 2, 2, 2, 2, 2, 60]
    e.step(list(zip(requests, order)), keep_order=True)


def test_division_with_drafts(vllm, dense_pages, torch):
    builder = Engine(vllm, drafts=2).builder()
    assert builder.reorder_batch_threshold == 3
    metadata = builder.build(0, common(torch, [3, 3, 1, 2, 40], [90, 70, 64, 5, 40]))
    assert parts(metadata) == [("decode", 4, 0, 4, 9), ("extend", 64, 4, 5, 49)]


def test_capacity(vllm, dense_pages, torch):
    e = Engine(vllm, drafts=3, max_requests=6, max_tokens=256, max_model_len=1000)
    (plans,) = e.builder().plans.values()
    blocks = plans.decode[1].limits["blocks"]
    assert blocks >= 16
    assert list(plans.decode) == [1, 2, 4, 6] and list(plans.extend) == [8, 16, 32, 64, 128, 256, 274]
    assert plans.decode[6].limits == dict(batch=6, blocks=blocks, query_len=4, tokens=274)
    assert plans.extend[128][0].fresh.limits == dict(batch=4, blocks=blocks, query_len=128, tokens=274)
    assert plans.extend[274][0].fresh.limits == dict(batch=2, blocks=blocks, query_len=274, tokens=274)
    wider = common(torch, [1], [100], width=blocks + 8)  # vLLM rounds tables up
    e.builder().build(0, wider)
    with pytest.raises(ValueError, match="a batch of 7 requests and 7 tokens"):
        e.builder().build(0, common(torch, [1] * 7))


def test_every_step_within_the_limits_has_plans(vllm, torch):
    """No random step needs a plan that is too small, and ordered ones need no plan twice."""
    import random

    from kvant.vllm.layer import Capacity
    from kvant.vllm.metadata import divide

    rng = random.Random(1)
    for _ in range(3000):
        requests, tokens = rng.choice([1, 3, 8, 64, 1000]), rng.choice([40, 256, 2048, 3000])
        capacity = Capacity(requests, 16, rng.choice([1, 2, 5]), tokens)
        left, lens = tokens, []
        while left > 0 and len(lens) < requests and rng.random() < 0.97:
            lens.append(min(left, int(2 ** rng.uniform(0, rng.choice([1, 6, 12])))))
            left -= lens[-1]
        if not lens:
            continue
        ordered = rng.random() < 0.5
        lens.sort() if ordered else rng.shuffle(lens)
        made = divide(common(torch, lens), capacity)
        assert [p.first for p in made] == [0, *(p.end for p in made[:-1])] and made[-1].end == len(lens)
        for p in made:
            assert p.rows == sum(lens[: p.end])
            if p.is_decode:
                assert p.size >= p.end and max(lens[: p.end]) <= capacity.decode_queries
            else:
                assert max(lens[p.first : p.end]) <= p.size
                assert p.end - p.first <= capacity.extend(p.size)[1]
        assert not ordered or all(p.copy == 0 for p in made)


def test_cuda_graphs(vllm, dense_pages, torch):
    from vllm.v1.attention.backend import AttentionCGSupport

    e = Engine(vllm, drafts=3)
    builder = e.builder()
    assert builder.get_cudagraph_support(e.config, None) == AttentionCGSupport.UNIFORM_BATCH
    assert e.cudagraphs.min_cg_attn_backend == "KvantBackend"
    assert builder.get_varlen_cudagraph_max_query_len(e.config, None) == 4
    metadata = builder.build_for_cudagraph_capture(common(torch, [4] * 8, [1000] * 8))
    assert parts(metadata) == [("decode", 8, 0, 8, 32)]


def test_draft_models_set_tables_again(vllm, dense_pages, torch):
    builder = Engine(vllm).builder()
    assert builder.supports_draft_decode_metadata_update
    batch = common(torch, [1, 1], [64, 70])
    metadata = builder.build_for_drafting(batch, 0)
    batch.seq_lens += 1  # in place, by a kernel of vLLM
    builder.update_draft_decode_metadata(metadata)
    (plans,) = metadata.plans.values()
    assert plans.decode[2].tables[1] == [65, 71]


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
    assert parts(metadata) == [("decode", 2, 0, 2, 2)] and metadata.plans and metadata.num_logits_indices == 2


def test_refused(vllm, dense_pages, torch):
    e = Engine(vllm)
    with pytest.raises(NotImplementedError, match="later tokens"):
        e.builder().build(0, common(torch, [4], causal=False))
    with pytest.raises(NotImplementedError, match="later tokens"):
        e.builder().build(0, common(torch, [4], causal=torch.tensor([True])))
    spec = e.specs["model.layers.0.attn"].copy_with_new_block_size(32)
    with pytest.raises(NotImplementedError, match="blocks of 32 tokens"):
        type(e.builder())(spec, ["model.layers.0.attn"], e.config, torch.device("cpu"))
    e.config.parallel_config.ubatch_size = 2
    with pytest.raises(NotImplementedError, match="--enable-dbo"):
        type(e.builder())(e.specs["model.layers.0.attn"], ["model.layers.0.attn"], e.config, torch.device("cpu"))
    made, _, _ = e.metadata([(e.request(1), 1)])
    (metadata,) = made.values()
    metadata.plans = {}
    impl, cache = e.layers[0].made.impl, e.layers[0].made.kv_cache
    with pytest.raises(RuntimeError, match="no plans for a layer"):
        impl.forward(None, torch.zeros(1, 4, 64), None, None, cache, metadata, torch.zeros(1, 4, 64))
