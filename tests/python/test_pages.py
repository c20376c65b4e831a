"""kvant.Pages: encoded pages in an engine's blocks, from torch and numpy.

KVANT_TEST_DEVICE=cuda runs those that take `device` on a GPU, and those that need one."""
import math

import pytest

import kvant

BLOCK = 64


def reference(q, k, v, *, position, scale, window=0, sinks=0, softcap=0.0, slopes=None, sink_logits=None):
    """float64 attention of one query [q_heads, D] over k, v [tokens, kv_heads, D]; -> out, lse."""
    import torch

    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    s = torch.einsum("hd,thd->ht", q.double(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    keys = torch.arange(k.shape[0], device=k.device)
    if slopes is not None:
        s = s - torch.tensor(slopes, dtype=torch.float64, device=k.device)[:, None] * (position - keys).abs()
    seen = keys <= position
    if window:
        seen &= (keys > position - window) | (keys < sinks)
    s = s.masked_fill(~seen, -math.inf)
    if sink_logits is not None:
        s = torch.cat([s, sink_logits.double()[:, None]], dim=1)
    lse = torch.logsumexp(s, dim=1)
    weights = torch.exp(s - lse[:, None])[:, : k.shape[0]]
    return torch.einsum("ht,thd->hd", weights, v), lse


class Engine:
    """A pool, sequences of given (length, queries), and what attention must give."""

    def __init__(self, torch, device, *, k="tq4", v="tq4", kv_heads=2, head_dim=64, lengths=((130, 1),), dtype=None,
                 layers_between=False):
        self.torch, self.device = torch, device
        self.pages = kvant.Pages(kv_heads=kv_heads, head_dim=head_dim, k=k, v=v, device=device)
        self.lengths = lengths
        generator = torch.Generator().manual_seed(1)
        dtype = dtype or torch.float32
        blocks = sum(-(-n // BLOCK) for n, _ in lengths) + 3
        # As an engine has it that keeps all layers of a block together: this layer is one of three.
        shape = (blocks, 3 if layers_between else 1, kv_heads, self.pages.block_bytes)
        self.memory = torch.full(shape, 0xFF, dtype=torch.uint8).to(device)
        self.pool = self.memory[:, shape[1] // 2]
        free = torch.randperm(blocks, generator=generator).tolist()
        columns = max(-(-n // BLOCK) for n, _ in lengths) + 1
        table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
        self.keys, self.values, slots = [], [], []
        for i, (n, _) in enumerate(lengths):
            mine = [free.pop() for _ in range(-(-n // BLOCK))]
            table[i, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            slots += [mine[t // BLOCK] * BLOCK + t % BLOCK for t in range(n)]
            for side in (self.keys, self.values):
                side.append(torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype).to(device))
        self.table = table.to(device)
        self.seq_lens = torch.tensor([n for n, _ in lengths], dtype=torch.int32, device=device)
        starts = [0]
        for _, queries in lengths:
            starts.append(starts[-1] + queries)
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        written = [0]
        for n, _ in lengths:
            written.append(written[-1] + n)
        self.written = torch.tensor(written, dtype=torch.int32, device=device)  # on a device the pages look at it later
        self.pages.begin_step(self.table, self.seq_lens, self.written)
        self.pages.write(self.pool, torch.cat(self.keys), torch.cat(self.values), self.slots)

    def plan(self, q_heads, **options):
        plan = self.pages.plan(q_heads, max_batch=len(self.lengths) + 2, max_blocks=self.table.shape[1],
                               max_query_len=max(q for _, q in self.lengths), **{"products": 16, **options})
        plan.set_tables(self.table, self.seq_lens, self.starts)
        return plan

    def stored(self, i):
        """Keys and values of sequence i as they are stored."""
        torch, p = self.torch, self.pages
        n = self.lengths[i][0]
        ids = self.table[i, : -(-n // BLOCK)].contiguous()
        out = [torch.empty(len(ids) * BLOCK, p.kv_heads, p.head_dim, device=self.device) for _ in range(2)]
        p.decode(self.pool, ids, *out)
        return [x[:n] for x in out]

    def expected(self, q, **options):
        torch = self.torch
        outs, lses = [], []
        for i, (n, queries) in enumerate(self.lengths):
            k, v = self.stored(i)
            for j in range(queries):
                out, lse = reference(q[len(outs)], k, v, position=n - queries + j, **options)
                outs.append(out)
                lses.append(lse)
        return torch.stack(outs), torch.stack(lses)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("k, v, head_dim", [("tq4", "tq4", 128), ("tq6", "tq4", 64), ("fp8", "fp8", 64),
                                            ("f16", "f16", 128)])
def test_attention_of_a_ragged_batch(torch, device, k, v, head_dim):
    engine = Engine(torch, device, k=k, v=v, head_dim=head_dim, lengths=((130, 1), (64, 3), (1, 1), (200, 40)),
                    layers_between=True)
    q_heads = 6
    plan = engine.plan(q_heads)
    q = torch.randn(45, q_heads, head_dim, device=device)
    out, lse = plan.run(engine.pool, q, lse=True)
    expected, expected_lse = engine.expected(q, scale=head_dim**-0.5)
    assert relative(out, expected) < 2e-3
    assert (lse.double() - expected_lse).abs().max() < 5e-3
    others = [i for i in range(3) if i != 1]
    assert (engine.memory[:, others] == 0xFF).all(), "bytes of other layers were written"
    assert not plan.take_errors() and not engine.pages.take_non_finite()


def test_fresh_keys(torch, device):
    engine = Engine(torch, device, lengths=((130, 1), (64, 64), (200, 90)), dtype=torch.bfloat16)
    q = torch.randn(155, 4, 64, device=device)
    try:
        plan = engine.plan(4, fresh_keys=True)
    except kvant.Unsupported:
        pytest.skip("this device has no prefill kernels")
    assert "fresh" in plan.explain()
    own = [torch.cat([x[i][n - queries :] for i, (n, queries) in enumerate(engine.lengths)])
           for x in (engine.keys, engine.values)]
    out = plan.run(engine.pool, q, keys=own[0], values=own[1])
    stored = engine.stored

    def mixed(i):
        n, queries = engine.lengths[i]
        return [torch.cat([old[: n - queries], x[i][n - queries :].float()])
                for old, x in zip(stored(i), (engine.keys, engine.values))]

    engine.stored = mixed
    assert relative(out, engine.expected(q, scale=0.125)[0]) < (2e-3 if device == "cpu" else 8e-3)


def test_products_of_8_bits(torch, device):
    if device != "cpu":
        with pytest.raises(kvant.Unsupported, match="products is 8: 16 bits are as fast at head_dim 64"):
            Engine(torch, device, k="tq6", v="tq4").plan(4, products=8)
        return
    engine = Engine(torch, device, k="tq6", v="tq4", head_dim=128, lengths=((320, 200), (130, 1)))
    q = torch.randn(201, 4, 128, device=device)
    sixteen, eight = (engine.plan(4, products=bits) for bits in (16, 8))
    expected, got = sixteen.run(engine.pool, q), eight.run(engine.pool, q)
    assert 1e-4 < relative(got, expected.double()) < 2e-2  # other bits, and near
    assert "products   8 bits: forced" in eight.explain() and "8 bits" not in sixteen.explain()
    with pytest.raises(kvant.InvalidArgument, match="products = 7: must be 8 or 16 bits"):
        engine.plan(4, products=7)
    dense = Engine(torch, device, k="bf16", v="bf16")
    with pytest.raises(kvant.Unsupported, match="products is 8, but the cache stores bf16/bf16"):
        dense.plan(4, products=8)


def test_exact_tail(torch, device):
    """The newest pages are read exactly in each layer; without a step's begin they are not."""
    kv_heads, dim, length = 2, 64, 150
    pages = kvant.Pages(kv_heads=kv_heads, head_dim=dim, k="tq4", v="tq4", device=device, tail_pages=1,
                        tail_sequences=2, layers=2, k_centre="none")
    assert pages.tail_bytes == 2 * (2 * 3 + 2) * kv_heads * 2 * BLOCK * dim * 2
    pools = [torch.zeros(8, kv_heads, pages.block_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    plan = pages.plan(4, max_batch=2, max_blocks=4, max_query_len=length)
    assert "the newest 64 to 127 tokens" in plan.explain() and "bf16" in plan.explain()
    table = torch.tensor([[5, 2, 7, -1]], dtype=torch.int32, device=device)
    slots = torch.tensor([int(table[0, t // BLOCK]) * BLOCK + t % BLOCK for t in range(length)], device=device)
    rows = [torch.randn(2, length, kv_heads, dim, device=device).bfloat16() for _ in range(2)]
    q = torch.randn(1, 4, dim, device=device)

    def steps(begins):
        for first, end in ((0, 149), (149, 150)):
            tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([end], [0, end - first])]
            if begins:
                pages.begin_step(table, *tables)
            plan.set_tables(table, *tables)
            for layer in range(2):
                pages.write(pools[layer], *rows[layer][:, first:end], slots[first:end], layer=layer)
        return [plan.run(pools[layer], q, layer=layer) for layer in range(2)]

    encoded, exact = steps(False), steps(True)
    assert pages.take_misses() == 0
    for layer in range(2):
        stored = [torch.empty(3 * BLOCK, kv_heads, dim, device=device) for _ in range(2)]
        pages.decode(pools[layer], table[0, :3].contiguous(), *stored)
        k, v = (x[:length].clone() for x in stored)
        assert relative(encoded[layer], reference(q[0], k, v, position=149, scale=dim**-0.5)[0][None]) < 2e-3
        k[BLOCK:], v[BLOCK:] = rows[layer].float()[:, BLOCK:]  # 150 tokens: the page of the last 22 and the one before
        assert relative(exact[layer], reference(q[0], k, v, position=149, scale=dim**-0.5)[0][None]) < 2e-3
        assert relative(encoded[layer], exact[layer].double()) > 1e-2
    # Another sequence has the first block, which has no copy: read encoded, and counted.
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([65], [0, 1]))
    pages.begin_step(table[:, [0, 1]].contiguous(), lengths, starts)
    assert pages.take_misses() == 1  # a step of more than 64 tokens gives none to a page that is behind the tail

    for at_once in (False, True):
        made = kvant.Pages(kv_heads=2, head_dim=64, tail_pages=1, tail_sequences=1, encode_at_once=at_once)
        assert made.encode_at_once is at_once
    for wrong, words in ((dict(tail_pages=1), "tail_sequences"),
                         (dict(tail_pages=1, tail_sequences=1, exact="f8"), "exact = "),
                         (dict(tail_pages=-1), "tail_pages"), (dict(sink_pages=1), "beside a tail only"),
                         (dict(tail_pages=1, tail_sequences=1, exact_copies=0), "exact_copies is 0"),
                         (dict(tail_pages=1, tail_sequences=1, sink_pages=65), "sink_pages")):
        with pytest.raises(kvant.InvalidArgument, match=words):
            kvant.Pages(kv_heads=1, head_dim=64, device=device, **wrong)
    with pytest.raises(kvant.InvalidArgument, match="pool.layer is 2"):
        plan.run(pools[0], q, layer=2)


def test_exact_first_pages(torch, device):
    """With sink_pages the first block stays exact when the tail has moved on. With too few copies the blocks that are
    being written have them first, and the newest full one goes without."""
    dim, length = 64, 64 * 6
    rows = torch.randn(2, length, 1, dim, device=device).bfloat16()
    q = torch.randn(1, 2, dim, device=device)
    table = torch.arange(7, dtype=torch.int32, device=device)[None]
    slots = torch.arange(length, device=device)

    def engine(**options):
        pages = kvant.Pages(kv_heads=1, head_dim=dim, k="tq4", v="tq4", device=device, tail_pages=1, tail_sequences=2,
                            k_centre="none", **options)
        pool = torch.zeros(8, 1, pages.block_bytes, dtype=torch.uint8, device=device)
        plan = pages.plan(2, max_batch=2, max_blocks=7, max_query_len=BLOCK)
        for first in range(0, length, 32):
            tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([first + 32], [0, 32])]
            pages.begin_step(table, *tables)
            pages.write(pool, *rows[:, first : first + 32], slots[first : first + 32])
        tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([length], [0, 1])]
        pages.begin_step(table, *tables)
        plan.set_tables(table, *tables)
        stored = [torch.empty(6 * BLOCK, 1, dim, device=device) for _ in range(2)]
        pages.decode(pool, table[0, :6].contiguous(), *stored)
        return pages, plan.run(pool, q), stored

    for options, copies, exact in (({}, 2 * 3 + 2, [5]), ({"sink_pages": 1}, 2 * 4 + 2, [0, 5]),
                                   ({"sink_pages": 2, "exact_copies": 9}, 9, [0, 1, 5]),
                                   ({"sink_pages": 1, "exact_copies": 2}, 2, [0, 5])):
        pages, out, (k, v) = engine(**options)
        assert pages.tail_copies == copies and pages.tail_bytes == copies * 2 * BLOCK * dim * 2
        assert pages.take_misses() > 0 if copies == 2 else pages.take_misses() == 0
        for page in exact:
            here = slice(page * BLOCK, (page + 1) * BLOCK)
            k[here], v[here] = rows.float()[:, here]
        assert relative(out, reference(q[0], k, v, position=length - 1, scale=dim**-0.5)[0][None]) < 2e-3, options


def test_options_of_logits(torch, device):
    engine = Engine(torch, device, lengths=((300, 2), (90, 5)))
    slopes = [0.1, 0.0, 0.05, 0.2]
    sink_logits = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    plan = engine.plan(4, scale=0.2, softcap=20.0, alibi_slopes=slopes, window=70, window_sinks=4)
    q = torch.randn(7, 4, 64, device=device, dtype=torch.bfloat16)
    out = torch.empty(7, 4, 64, device=device)
    assert plan.run(engine.pool, q, out, sink_logits=sink_logits) is out
    expected, _ = engine.expected(q.float(), scale=0.2, softcap=20.0, slopes=slopes, window=70, sinks=4,
                                  sink_logits=sink_logits)
    assert relative(out, expected) < 5e-3


def test_the_bytes_are_those_of_a_cache(torch):
    engine = Engine(torch, "cpu", k="tq6", v="tq4", lengths=((150, 1),), dtype=torch.bfloat16)
    cache = kvant.Cache(kv_heads=2, head_dim=64, k="tq6", v="tq4", sink_pages=0, tail_pages=0)
    sequence = cache.sequence()
    sequence.append(0, engine.keys[0], engine.values[0])
    q = torch.randn(1, 4, 64)
    out = engine.plan(4).run(engine.pool, q)
    assert torch.equal(out, cache.attend(sequence, layer=0, q=q))


def test_padding_and_sequences_without_queries(torch, device):
    engine = Engine(torch, device, lengths=((100, 1), (70, 3)))
    q = torch.randn(4, 4, 64, device=device)
    expected = engine.plan(4).run(engine.pool, q)
    plan = engine.pages.plan(4, max_batch=8, max_blocks=4, max_query_len=3, max_tokens=9)
    table = torch.full((8, 4), 2**30, dtype=torch.int32, device=device)
    table[1, :2], table[4, :2] = engine.table[0, :2], engine.table[1, :2]
    lengths = torch.tensor([0, 100, 0, 50, 70, 0, 0, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 0, 1, 1, 1, 4, 4, 4, 4], dtype=torch.int32, device=device)
    plan.set_tables(table, lengths, starts)
    padded = torch.cat([q, torch.full((5, 4, 64), math.nan, device=device)])
    out = torch.full((9, 4, 64), 7.0, device=device)
    plan.run(engine.pool, padded, out)
    assert relative(out[:4], expected.double()) < 1e-3
    assert (out[4:] == 7).all()
    assert not plan.take_errors()


@pytest.mark.parametrize("k, head_dim, kernel", [("tq4", 128, "decode"), ("tq4", 128, "prefill"), ("bf16", 64, ""),
                                                 ("tq6", 64, "")])
def test_queries_of_tokens_that_lie_elsewhere(torch, device, k, head_dim, kernel):
    """Queries that see all keys may be more than these; without keys a row is 0, with an lse of -inf."""
    if device == "cpu":
        kernel = ""
    elif kernel == "prefill" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("prefill kernels are for compute capability 9.0")
    engine = Engine(torch, device, k=k, v="bf16" if k == "bf16" else "tq4", head_dim=head_dim,
                    lengths=((70, 190), (0, 3), (130, 1), (5, 40), (0, 1), (400, 300)))
    plan = engine.plan(8, is_causal=False, kernel=kernel)
    q = torch.randn(535, 8, head_dim, device=device)
    out, lse = plan.run(engine.pool, q, lse=True)
    assert not plan.take_errors()
    row = 0
    for i, (n, queries) in enumerate(engine.lengths):
        here = slice(row, row + queries)
        row += queries
        if n == 0:
            assert (out[here] == 0).all() and (lse[here] == -math.inf).all()
            continue
        keys, values = engine.stored(i)
        expected = [reference(x, keys, values, position=n, scale=head_dim**-0.5) for x in q[here]]
        assert relative(out[here], torch.stack([x for x, _ in expected])) < 5e-3
        assert (lse[here].double() - torch.stack([x for _, x in expected])).abs().max() < 5e-3
    for options in ({}, {"is_causal": False, "fresh_keys": True}):
        try:
            plan = engine.pages.plan(8, max_batch=6, max_blocks=8, max_query_len=300, **options)
        except kvant.Unsupported:
            continue
        if device == "cpu":
            with pytest.raises(kvant.InvalidArgument, match="their own tokens count"):
                plan.set_tables(engine.table, engine.seq_lens, engine.starts)
        else:
            plan.set_tables(engine.table, engine.seq_lens, engine.starts)
            assert plan.take_errors()


def test_skipped_slots_strides_and_lists(torch, device):
    engine = Engine(torch, device, lengths=((130, 1),))
    pool = torch.full_like(engine.pool, 0xFF)
    n = 130
    # Keys and values beside each other, as a projection gives them, with rows of padding between tokens.
    qkv = torch.full((2 * n, 2, 2, 64), math.nan, device=device)
    qkv[::2, 0], qkv[::2, 1] = engine.keys[0], engine.values[0]
    slots = torch.full((2 * n,), -1, dtype=torch.int64, device=device)
    slots[::2] = engine.slots
    if device == "cpu":
        engine.pages.write(pool, qkv[:, 0], qkv[:, 1], slots.tolist())
    # On a device the tokens of an octet must be neighbours.
    engine.pages.write(pool, qkv[::2, 0], qkv[::2, 1], engine.slots)
    ids = engine.table[0, :3].tolist()
    assert torch.equal(pool[ids], engine.pool[ids])


def test_copy_and_blocks_that_are_used_again(torch, device):
    engine = Engine(torch, device, lengths=((130, 1), (40, 1)))
    a, b, c = engine.table[0, :3].tolist()
    free = [i for i in range(engine.pool.shape[0]) if i not in engine.table.flatten().tolist()]
    engine.pages.copy(engine.pool, [a, c], [free[0], free[1]])
    assert torch.equal(engine.pool[free[0]], engine.pool[a]) and torch.equal(engine.pool[free[1]], engine.pool[c])
    # The block of another sequence gets one token, and holds nothing of what was there.
    engine.pages.write(engine.pool, engine.keys[1][:1], engine.values[1][:1],
                       torch.tensor([b * BLOCK], device=device))
    k, v = (torch.empty(BLOCK, 2, 64, device=device) for _ in range(2))
    engine.pages.decode(engine.pool, [b], k, v)
    assert relative(k[:1], engine.keys[1][:1].double()) < 0.2 and (v[1:] == 0).all()
    assert k[1:].isfinite().all()  # those of the block's centre


def test_numpy():
    np = pytest.importorskip("numpy")
    pages = kvant.Pages(kv_heads=1, head_dim=64, k="tq8", v="tq8")
    memory = np.full(4 * pages.block_bytes + 64, 255, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: 4 * pages.block_bytes]
    pool = memory.reshape(4, 1, 64, pages.block_bytes // 64)
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((70, 1, 64)).astype(np.float32)
    with pytest.raises(kvant.InvalidArgument, match="begin_step"):
        pages.write(pool, keys, keys, np.arange(64, 134))
    pages.begin_step(np.array([[1, 2]], np.int32), [70], [0, 70])
    pages.write(pool, keys, keys, np.arange(64, 134))
    plan = pages.plan(2, max_batch=1, max_blocks=2)
    plan.set_tables(np.array([[1, 2]], np.int32), [70], [0, 1])
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    out = plan.run(pool, q)
    s = np.einsum("hd,td->ht", q[0], keys[:, 0]) / 8
    w = np.exp(s - s.max(axis=1, keepdims=True))
    expected = (w / w.sum(axis=1, keepdims=True)) @ keys[:, 0]
    assert np.linalg.norm(out[0] - expected) < 0.02 * np.linalg.norm(expected)
    assert "blocks of 64 tokens" in plan.explain() and "tq8/tq8" in plan.explain()


def test_refusals(torch):
    with pytest.raises(kvant.Unsupported, match="lut4"):
        kvant.Pages(kv_heads=1, head_dim=64, k="lut4")
    engine = Engine(torch, "cpu", lengths=((130, 1),))
    pages, pool, plan = engine.pages, engine.pool, engine.plan(4)
    assert pages.block_tokens == 64 and pages.block_bytes % 64 == 0
    q = torch.zeros(1, 4, 64)
    for wrong, words in ((pool.float(), "uint8"), (pool[:, :1], "kv_heads"), (pool[..., :64], "block_bytes")):
        with pytest.raises(kvant.InvalidArgument, match=words):
            plan.run(wrong, q)
    with pytest.raises(kvant.InvalidArgument, match="int64"):
        pages.write(pool, engine.keys[0], engine.values[0], engine.slots.int())
    with pytest.raises(kvant.NonFinite, match="row 0"):
        pages.write(pool, torch.full((1, 2, 64), math.nan), torch.zeros(1, 2, 64), [0])
    with pytest.raises(kvant.InvalidArgument, match=r"slots\[0\]"):
        pages.write(pool, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), [10**9])
    with pytest.raises(kvant.InvalidArgument, match="int32"):
        plan.set_tables(engine.table.long(), engine.seq_lens, engine.starts)
    with pytest.raises(kvant.InvalidArgument, match="max_blocks"):
        plan.set_tables(engine.table, [1000], [0, 1])
    with pytest.raises(kvant.InvalidArgument, match="query_start_loc"):
        plan.set_tables(engine.table, [130], [0])
    with pytest.raises(kvant.InvalidArgument, match="max_tokens"):
        plan.run(pool, torch.zeros(10, 4, 64))
    with pytest.raises(kvant.InvalidArgument, match="stream"):
        plan.run(pool, q, stream=1)
    with pytest.raises(kvant.InvalidArgument, match="keys and values"):
        plan.run(pool, q, keys=torch.zeros(1, 2, 64), values=torch.zeros(1, 2, 64))
    with pytest.raises(kvant.InvalidArgument, match="lse"):
        plan.run(pool, q, lse=torch.zeros(2, 4))
    table = engine.table.clone()
    table[0, 0] = 10**6
    plan.set_tables(table, engine.seq_lens, engine.starts)
    with pytest.raises(kvant.InvalidArgument, match="1000000"):
        plan.run(pool, q)


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(device):
    if device != "cuda":
        pytest.skip("needs KVANT_TEST_DEVICE=cuda")
    return device


@pytest.mark.parametrize("k, v, head_dim", [("tq4", "tq4", 128), ("tq6", "tq4", 64), ("tq5", "tq3", 128),
                                            ("fp8", "fp8", 128)])
def test_a_device_stores_the_same_bytes(torch, cuda, k, v, head_dim):
    engines = [Engine(torch, d, k=k, v=v, head_dim=head_dim, lengths=((130, 1), (64, 1), (7, 1)), dtype=torch.bfloat16)
               for d in ("cpu", cuda)]
    assert torch.equal(engines[0].memory, engines[1].memory.cpu())


def test_graph_replays_follow_the_tables(torch, cuda):
    engine = Engine(torch, cuda, lengths=((130, 1), (200, 1)))
    plan = engine.plan(4)
    q, out = torch.randn(2, 4, 64, device=cuda), torch.zeros(2, 4, 64, device=cuda)
    new_k, new_v = (torch.randn(2, 2, 64, device=cuda) for _ in range(2))
    slots = torch.tensor([-1, -1], device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.set_tables(engine.table, engine.seq_lens, engine.starts)
        engine.pages.write(engine.pool, new_k, new_v, slots)
        plan.run(engine.pool, q, out)
    for step in range(70):  # across the ends of blocks
        if step > 0:
            engine.lengths = tuple((n + 1, 1) for n, _ in engine.lengths)
            for i, (n, _) in enumerate(engine.lengths):
                page = (n - 1) // BLOCK
                if page >= engine.table.shape[1]:
                    pytest.fail("the test's table is too short")
                if engine.table[i, page] < 0:
                    used = set(engine.table.flatten().tolist())
                    engine.table[i, page] = next(b for b in range(engine.pool.shape[0]) if b not in used)
                slots[i] = engine.table[i, page] * BLOCK + (n - 1) % BLOCK
            engine.seq_lens.copy_(torch.tensor([n for n, _ in engine.lengths], dtype=torch.int32))
            new_k.normal_()
            new_v.normal_()
        q.normal_()
        graph.replay()
        if step % 10 in (0, 9):
            expected, _ = engine.expected(q, scale=0.125)
            assert relative(out, expected) < 2e-3, step
    assert not plan.take_errors()


def test_what_does_not_fit_is_told(torch, cuda):
    engine = Engine(torch, cuda, lengths=((130, 1), (100, 1)))
    plan = engine.pages.plan(4, max_batch=2, max_blocks=3, max_query_len=1, check_ids=True)
    q = torch.randn(2, 4, 64, device=cuda)
    plan.set_tables(engine.table, engine.seq_lens, engine.starts)
    good = plan.run(engine.pool, q)
    assert not plan.take_errors()
    table = engine.table.clone()
    table[0, 1] = 10**6
    plan.set_tables(table, engine.seq_lens, engine.starts)
    out = torch.zeros_like(q)

    def close(x, y):  # how keys are split follows the batch, and with it the last digits
        return torch.allclose(x, y, rtol=1e-4, atol=1e-5)

    for _ in range(2):
        plan.run(engine.pool, q, out)
        assert out[0].isnan().all() and close(out[1], good[1])
    assert plan.take_errors() and not plan.take_errors()
    plan.set_tables(engine.table, torch.tensor([1000, 100], dtype=torch.int32, device=cuda), engine.starts)
    out.fill_(3)
    plan.run(engine.pool, q, out)
    assert (out[0] == 3).all() and close(out[1], good[1])
    assert plan.take_errors()
    # A slot outside the pool, and a value that is not finite.
    assert not engine.pages.take_non_finite()
    row = torch.ones(1, 2, 64, device=cuda)
    engine.pages.write(engine.pool, row, row, [10**9])
    assert engine.pages.take_non_finite()
    last = int(engine.table[1, 1]) * BLOCK + 35
    row[0, 0, 5] = math.inf
    engine.pages.write(engine.pool, row, row, [last])
    assert engine.pages.take_non_finite() and not engine.pages.take_non_finite()
    plan.set_tables(engine.table, engine.seq_lens, engine.starts)
    out = plan.run(engine.pool, q)
    assert out[1, :2].isnan().all() and close(out[0], good[0])


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_chunks_of_prompts_on_a_device(torch, cuda, kernel):
    if kernel == "prefill" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("prefill kernels are for compute capability 9.0")
    engine = Engine(torch, cuda, k="tq4", v="tq4", head_dim=128, lengths=((700, 300), (64, 1), (257, 257)))
    plan = engine.plan(8, kernel=kernel)
    assert plan.facts.kernel == kernel
    q = torch.randn(558, 8, 128, device=cuda)
    out = plan.run(engine.pool, q)
    expected, _ = engine.expected(q, scale=128**-0.5)
    assert relative(out, expected) < 5e-3
