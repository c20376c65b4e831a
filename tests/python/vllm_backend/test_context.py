"""Decode context parallel: ranks that share the tokens of requests, against attention over all of these tokens."""

from __future__ import annotations

import random

import pytest

from .engine import ON_CPU, Engine
from .ranks import Ranks
from .test_layers import SLOPES, a_day

SHARES = [(2, 1), (2, 64), (4, 1), (4, 16)]  # ranks, interleave
pytestmark = pytest.mark.skipif(not ON_CPU, reason="ranks are threads of one process, without Triton")


@pytest.fixture
def ranks(vllm, monkeypatch):
    return lambda *args, **options: Ranks(monkeypatch, vllm, *args, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": [1.0, -2.0, 0.0, 6.0]}], ids=lambda o: "+".join(o))
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_ranks_find_what_one_finds(ranks, torch, share, options):
    if "sinks" in options:
        options = {"sinks": torch.tensor(options["sinks"])}
    a_day(ranks(*share, [options], cache_dtype="auto"))


@pytest.mark.parametrize("cache_dtype", ["kvant_tq8", "kvant_tq4"])
def test_formats(vllm, ranks, cache_dtype):
    """Each rank encodes its own tokens. Together they lose what one rank loses; errors of one head vary more."""
    options = dict(cache_dtype=cache_dtype, tail_pages=0)
    one = Engine(vllm, q_heads=4, kv_heads=1, **options)
    a_day(one, tolerance=1.0)
    for share in SHARES:
        e = ranks(*share, **options)
        a_day(e, tolerance=(1.25 if share[0] == 2 else 1.75) * one.worst)
        assert e.worst > 0.8 * one.worst
        assert all(rank.layers[0].made.impl.check.steps > 0 for rank in e.of)


def test_half_precision(ranks, torch):
    a_day(ranks(2, 1, cache_dtype="auto", dtype=torch.bfloat16), tolerance=1e-2)


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_exact_ends(ranks, share):
    """A rank's first and newest tokens are exact, so a request's are."""
    e = ranks(*share, cache_dtype="kvant_tq2", exact_memory=1000)
    a, b = e.request(1), e.request(2)
    e.step([(a, 100)])
    for _ in range(3):
        e.step([(a, 1), (b, 20)])
    for _ in range(3):
        e.step([(a, 1), (b, 1)])
    assert all(pages.sink_pages == 1 for rank in e.of for pages in rank.builder().own_pages)


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_ranks_without_tokens(ranks, share):
    """The first token is on the first rank alone; so are 64 with turns of 64."""
    e = ranks(*share, cache_dtype="auto")
    a, b, c = (e.request(seed) for seed in (1, 2, 3))
    e.step([(a, 1)])
    e.step([(a, 1), (b, 2)])
    e.step([(a, 1), (b, 5), (c, 200)])  # more queries than tokens before them; one prompt has none
    for _ in range(3):
        e.step([(a, 1), (b, 1), (c, 1)])


def test_steps_of_more_tokens_than_a_rank_has(ranks):
    e = ranks(4, 1, cache_dtype="auto", max_tokens=600, max_model_len=640)
    a, b = e.request(1), e.request(2)
    e.step([(a, 500), (b, 90)])
    e.step([(a, 1), (b, 520)])
    e.step([(a, 1), (b, 1)])


@pytest.mark.parametrize("share", [(2, 32), (4, 1)], ids=str)
def test_random_steps(ranks, share):
    rng, most = random.Random(share[0]), 300
    e = ranks(*share, [{}, {"softcap": 5.0}], cache_dtype="auto", max_tokens=most, max_model_len=900, max_requests=6)
    prompts = {}  # requests, and how long their prompts are
    for step in range(30):
        if len(prompts) < 5:
            prompts[e.request(step + 1)] = rng.choice([3, 40, 150, 290, 500])
        batch, left = [], most
        for r, length in prompts.items():
            new = 1 if r.length >= length else min(length - r.length, rng.choice([1, 5, 64, 130, 300]))
            if new <= left:
                batch.append((r, new))
                left -= new
        e.step(batch)
        for r in [r for r in prompts if rng.random() < 0.1]:
            e.preempt(r)
            if rng.random() < 0.5:
                del prompts[r]


def test_a_prefix_hit(ranks):
    e = ranks(2, 1, cache_dtype="auto")
    first = e.request(1)
    e.step([(first, 200)])
    second = e.request(2, prefix_of=first, prefix_blocks=1)
    assert second.length == 128
    e.step([(first, 1), (second, 10)])
    e.step([(first, 1), (second, 1)])


def test_larger_blocks_are_split(ranks):
    a_day(ranks(2, 128, block_size=128, blocks=24, cache_dtype="auto"))


def test_steps_of_graphs(ranks):
    """Trial runs store nothing, rows of padding do no harm, and what graphs read stays where it is."""
    e = ranks(2, 1, cache_dtype="kvant_tq8")
    a, b = e.request(1), e.request(2)
    e.step([(a, 90), (b, 70)], tolerance=0.02)
    local = [rank.builder().local for rank in e.of]
    tensors = [x for x in vars(local[0]).values() if hasattr(x, "data_ptr")]
    places = [x.data_ptr() for x in tensors]
    e.dummy_step([1] * 4, 500, True)
    e.dummy_step([1] * 8, 1, False)
    e.step([(a, 1), (b, 1)], pad_to=(4, 4), tolerance=0.02)
    e.step([(a, 1)], pad_to=(8, 8), tolerance=0.02)
    assert len(places) == 8 and places == [x.data_ptr() for x in tensors]
    assert local[0].slots[1:].max() == -1 and local[1].lengths[0] + local[0].lengths[0] == a.length


def test_exchanges(ranks):
    """Queries, sums and results of each layer; nothing where no rank has an older token."""
    e = ranks(2, 1, [{}, {}], cache_dtype="auto")
    a, b = e.request(1), e.request(2)
    e.step([(a, 70), (b, 80)])
    assert e.group.exchanges == 0
    e.step([(a, 1), (b, 1)])
    assert e.group.exchanges == 6
    e.step([(a, 1), (b, 30)])
    assert e.group.exchanges == 12


def test_vllm_takes_the_layers(ranks):
    from kvant.vllm import versions
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

    config = ranks(2, 1).of[0].config
    check_attention_cp_compatibility(config)
    assert versions.merge_ranks(config) is dcp.cp_lse_ag_out_rs
    config.parallel_config.dcp_comm_backend = "a2a"
    assert versions.merge_ranks(config) is dcp.dcp_a2a_lse_reduce


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"drafts": 2}, "--speculative-config"),
        ({"layers": [{"window": 100}]}, "sliding window"),
        ({"layers": [{"alibi_slopes": SLOPES[:2]}]}, "ALiBi"),
        ({"fresh_keys": False}, "fresh_keys = false"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_refused(ranks, options, reason):
    with pytest.raises(NotImplementedError, match=f"--decode-context-parallel-size 2: .*{reason}"):
        ranks(2, 1, **options)
