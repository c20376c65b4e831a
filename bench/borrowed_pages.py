#!/usr/bin/env python3
"""Pages in an engine's blocks on a GPU, without and with an exact tail, beside kvant's own caches and FlashAttention-3.

  KVANT_LIBRARY=build/gpu/src/libkvant.so PYTHONPATH=python python3 bench/borrowed_pages.py --json rows.json

Times are of CUDA graphs of several calls, launched in turns with those of the others of a table, between two events;
the figure is the median, in microseconds a call. The calls of a graph go to layers of their own, which together are
several times as large as the L2 cache. FlashAttention-3 (over fp8 tokens in one piece) takes part where the wheel
fa3-fwd is installed.

Three tables: writes and other calls of a decoding step; decoding (--rows); prompts from pages alone and with the step's
own keys and values (fresh).
"""

import argparse
import json
import statistics
from typing import NamedTuple

import torch

import kvant

BLOCK = 64
DEVICE = "cuda:0"
COLD = 240 << 20  # bytes that the layers of a graph have at least


class Row(NamedTuple):
    q_heads: int
    kv_heads: int
    dim: int
    batch: int
    length: int
    queries: int = 1
    window: int = 0

    def __str__(self):
        more = (f" w{self.window}" if self.window else "") + (f" q{self.queries}" if self.queries > 1 else "")
        return f"{self.q_heads}/{self.kv_heads} D{self.dim} {self.batch}x{self.length}{more}"


ROWS = [
    Row(32, 8, 128, 16, 32768),
    Row(32, 8, 128, 64, 8192),
    Row(32, 8, 128, 1, 131072),
    Row(32, 8, 128, 1, 32768),
    Row(32, 8, 128, 1, 4096),
    Row(32, 8, 128, 256, 1024),
    Row(16, 2, 256, 16, 32768),
    Row(16, 2, 256, 1, 32768),
    Row(64, 8, 128, 16, 16384),
    Row(8, 1, 512, 1, 32768),
    Row(32, 32, 128, 8, 8192),
    Row(28, 4, 128, 16, 16384),
    Row(32, 8, 128, 16, 32768, window=4096),
    Row(32, 8, 128, 16, 32768, queries=2),
    Row(32, 8, 128, 16, 32768, queries=4),
    Row(32, 8, 128, 16, 32768, queries=8),
]


class Timed:
    def __init__(self, name, calls, least=8):
        """calls: what a graph records, one after another; all of them again until there are `least`."""
        calls = calls * -(-least // len(calls))
        self.name, self.count, self.samples = name, len(calls), []
        self.calls = calls  # whose memory the graph reads
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def sample(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.samples.append(1000 * begin.elapsed_time(end) / self.count)


def measure(timed, rounds):
    for _ in range(3):
        for t in timed:
            t.sample()
    for t in timed:
        t.samples.clear()
    for _ in range(rounds):
        for t in timed:
            t.sample()
    return {t.name: round(statistics.median(t.samples), 2) for t in timed}


def ints(x, dtype=torch.int32):
    return torch.tensor(x, dtype=dtype, device=DEVICE)


def layers_of(stored):
    """Layers of so many bytes each that are read from memory, and not from a cache."""
    return max(1, min(64, -(-COLD // stored)))


class Inputs:
    """Rows of a chunk of all sequences, the same for every contestant."""

    def __init__(self, row):
        self.chunk = max(BLOCK, min(row.length, 32768 // row.batch))
        generator = torch.Generator(device=DEVICE).manual_seed(2)
        shape = 2, row.batch * self.chunk, row.kv_heads, row.dim
        self.rows = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
        shape = row.batch * row.queries, row.q_heads, row.dim
        self.q = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    def chunks(self, length):
        return [(first, min(length, first + self.chunk)) for first in range(0, length, self.chunk)]


class Engine:
    """Sequences of one length in blocks in scattered order, or in ascending order."""

    def __init__(self, row, pair, inputs, tail=0, layers=None, scattered=True):
        self.row, self.inputs, self.length = row, inputs, row.length
        k, v = pair
        geometry = dict(kv_heads=row.kv_heads, head_dim=row.dim, k=k, v=v, device=DEVICE)
        columns = -(-row.length // BLOCK)
        if layers is None:
            layers = layers_of(row.batch * columns * row.kv_heads * kvant.Pages(**geometry).block_bytes)
        self.layers = layers
        self.pages = kvant.Pages(**geometry, tail_pages=tail, tail_sequences=row.batch if tail else 0, layers=layers)
        blocks = torch.arange(row.batch * columns, dtype=torch.int32)
        if scattered:
            blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1))]
        self.table = blocks.view(row.batch, columns).to(DEVICE)
        self.pools = torch.zeros(
            layers, row.batch * columns, row.kv_heads, self.pages.block_bytes, dtype=torch.uint8, device=DEVICE
        )
        for first, end in inputs.chunks(row.length):
            self.begin(end, end - first)
            slots = self.slots(first, end)
            keys, values = inputs.rows[:, : row.batch * (end - first)]
            for layer in range(layers):
                self.pages.write(self.pools[layer], keys, values, slots, layer=layer)
        # The newest tokens come by themselves, as in decoding.
        self.begin(row.length, row.queries)
        self.out = torch.empty_like(inputs.q)

    def slots(self, first, end):
        at = torch.arange(first, end, device=DEVICE)
        return (self.table[:, at // BLOCK].long() * BLOCK + at % BLOCK).flatten()

    def tables(self, length, queries):
        starts = range(0, queries * (self.row.batch + 1), queries)
        return self.table, ints([length] * self.row.batch), ints(list(starts))

    def begin(self, length, queries):
        self.newest = self.tables(length, queries)
        self.pages.begin_step(*self.newest)

    def plan_for(self, kernel="", **options):
        plan = self.pages.plan(
            self.row.q_heads, max_batch=self.row.batch, max_blocks=self.table.shape[1], kernel=kernel,
            max_query_len=self.row.queries, window=self.row.window, **options
        )
        plan.set_tables(*self.newest)
        return plan

    def runs(self, plan, **options):
        return [
            lambda i=i: plan.run(self.pools[i], self.inputs.q, self.out, layer=i, **options)
            for i in range(self.layers)
        ]

    def check(self, plan):
        assert not plan.take_errors() and not self.pages.take_non_finite() and self.pages.take_misses() == 0


class Own:
    """The same sequences in a cache of kvant's."""

    def __init__(self, row, pair, inputs, layers, **ends):
        self.cache = kvant.Cache(
            layers=layers, kv_heads=row.kv_heads, head_dim=row.dim, k=pair[0], v=pair[1], device=DEVICE,
            capacity_tokens=row.batch * (-(-row.length // BLOCK) + 1) * BLOCK, max_sequences=row.batch,
            max_sequence_tokens=row.length + BLOCK, **ends
        )
        self.sequences = sequences = [self.cache.sequence() for _ in range(row.batch)]
        for first, end in inputs.chunks(row.length):
            n = end - first
            self.cache.reserve(sequences, n)
            keys, values = inputs.rows[:, : row.batch * n]
            for layer in range(layers):
                self.cache.write(sequences, layer, keys, values)
        options = dict(window=row.window) if row.window else {}
        self.plan = self.cache.plan(sequences, q_heads=row.q_heads, q_len=row.queries, **options)
        self.q, self.out = inputs.q, torch.empty_like(inputs.q)
        self.layers = layers

    def runs(self):
        return [lambda i=i: self.plan.run(i, self.q, self.out) for i in range(self.layers)]


class FlashAttention3:
    """fp8 tokens in one piece a sequence: as long as the tensors are, or with lengths and a schedule in memory."""

    def __init__(self, row, inputs):
        import fa3_fwd_interface as fa3

        shape = row.batch, row.length, row.kv_heads, row.dim
        layers = layers_of(2 * row.batch * row.length * row.kv_heads * row.dim)
        generator = torch.Generator(device=DEVICE).manual_seed(3)
        fp8 = torch.float8_e4m3fn
        k, v = (torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16).to(fp8) for _ in range(2))
        self.caches = [(k, v), *((k.clone(), v.clone()) for _ in range(layers - 1))]
        self.q = inputs.q.view(row.batch, row.queries, row.q_heads, row.dim).to(fp8)
        self.lengths = ints([row.length] * row.batch)
        causal = row.queries > 1
        self.schedule = fa3.get_scheduler_metadata(
            row.batch, row.queries, row.length, row.q_heads, row.kv_heads, row.dim, self.lengths, qkv_dtype=fp8,
            causal=causal
        )

        def run(k, v, **options):
            return fa3.flash_attn_with_kvcache(self.q, k, v, causal=causal, **options)

        scheduled = dict(cache_seqlens=self.lengths, scheduler_metadata=self.schedule)
        self.ways = {
            "FA3 fp8": [lambda kv=kv: run(*kv) for kv in self.caches],
            "FA3 scheduled": [lambda kv=kv: run(*kv, **scheduled) for kv in self.caches],
        }


def small_calls(pairs, rounds):
    """One token of each of 64 sequences; begin_step, where a block begins and where none does; set_tables."""
    found, row = {}, Row(32, 8, 128, 64, 2048 + 37)
    inputs = Inputs(row)
    for pair in pairs:
        timed, keep = [], []
        for tail in (0, 1):
            e = Engine(row, pair, inputs, tail, layers=16)
            plan = e.plan_for()
            keep.append((e, plan))
            slots, rows = e.slots(e.length - 1, e.length), inputs.rows[:, :64].contiguous()
            name = f"{'/'.join(pair)} tail {tail}"

            def write(layer, e=e, slots=slots, rows=rows):
                e.pages.write(e.pools[layer], *rows, slots, layer=layer)

            timed.append(Timed(f"write, {name}", [lambda layer=layer, w=write: w(layer) for layer in range(16)]))
            timed.append(Timed(f"set_tables, {name}", [lambda e=e, plan=plan: plan.set_tables(*e.newest)] * 16))
            if tail:
                stays, begins = e.tables(e.length, 1), e.tables(2049, 1)
                timed.append(Timed(f"begin_step, none begins, {name}",
                                   [lambda e=e, t=stays: e.pages.begin_step(*t)] * 16))
                rolled = [(torch.roll(e.table, i, 1).contiguous(), *begins[1:]) for i in range(16)]  # other blocks
                timed.append(Timed(f"begin_step, 64 begin, {name}",
                                   [lambda e=e, t=t: e.pages.begin_step(*t) for t in rolled]))
        found |= measure(timed, rounds)
    return found


def decode(row, pair, rounds, with_fa3):
    inputs = Inputs(row)
    timed, keep = [], []
    for tail in (0, 1):
        ends = ", tail" if tail else ""
        engines = {"borrowed": Engine(row, pair, inputs, tail)}
        layers = engines["borrowed"].layers
        if not tail:
            engines["in order"] = Engine(row, pair, inputs, tail, scattered=False)
        own = Own(row, pair, inputs, layers, sink_pages=0, tail_pages=tail, k_centre="none")
        timed.append(Timed("own" + ends, own.runs()))
        for name, e in engines.items():
            plan = e.plan_for()
            timed.append(Timed(name + ends, e.runs(plan)))
            e.check(plan)
            error = torch.linalg.norm(e.out.float() - own.out.float()) / torch.linalg.norm(own.out.float())
            assert error < 0.01, f"{row} {pair}: outputs differ by {error}"
            keep += [e, plan]
        keep.append(own)
    if with_fa3:
        keep.append(FlashAttention3(row, inputs))
        timed += [Timed(name, calls) for name, calls in keep[-1].ways.items()]
    found = measure(timed, rounds)
    for name in ("borrowed", "in order", "borrowed, tail"):
        own = found["own, tail" if "tail" in name else "own"]
        found[f"{name} / own"] = round(found[name] / own, 3)
    if with_fa3:
        fastest = min(us for name, us in found.items() if name.startswith("FA3"))
        found["FA3 / borrowed"] = round(fastest / found["borrowed"], 2)
    return found


def prompts(rounds):
    """Chunks of a prompt over tokens that came before, from pages alone and with the chunk's keys and values."""
    found, pair = {}, ("tq6", "tq4")
    for queries, length in ((16, 16), (64, 64), (128, 128), (256, 256), (512, 512), (2048, 2048), (8192, 8192),
                            (16, 512), (64, 512), (16, 1024), (64, 1024), (64, 2048), (128, 4096), (512, 4096),
                            (2048, 32768)):
        row = Row(32, 8, 128, 1, length, queries)
        inputs = Inputs(row)
        e = Engine(row, pair, inputs, layers=8)
        keys, values = torch.randn(2, queries, row.kv_heads, row.dim, device=DEVICE).bfloat16()
        ways = {"decode kernels": e.plan_for("decode")} if queries <= 512 else {}
        ways |= {"prefill kernels": e.plan_for("prefill"), "fresh": e.plan_for(fresh_keys=True)}
        timed = [
            Timed(name, e.runs(plan, **(dict(keys=keys, values=values) if name == "fresh" else {})))
            for name, plan in ways.items()
        ]
        found[f"{queries} queries, {length} tokens"] = measure(timed, rounds) | {
            "chosen": e.plan_for().facts.kernel
        }
    return found


def table(rows):
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>14}" for name in names))
    for title, row in rows.items():
        print(f"{title:<{width}}", *(f"{row.get(name, '-'):>14}" for name in names), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", default=",".join(map(str, range(len(ROWS)))), help="numbers of ROWS, from 0")
    parser.add_argument("--pairs", default="tq4/tq4,tq6/tq4")
    parser.add_argument("--tables", default="calls,decode,prompts")
    parser.add_argument("--json")
    a = parser.parse_args()
    pairs = [tuple(pair.split("/")) for pair in a.pairs.split(",")]
    try:
        import fa3_fwd_interface  # noqa: F401

        has_fa3 = True
    except ImportError:
        has_fa3 = False
    found = {"device": torch.cuda.get_device_name()}
    print(found["device"], "with FlashAttention-3" if has_fa3 else "without FlashAttention-3", flush=True)
    if "calls" in a.tables:
        found["calls"] = {name: {"us": us} for name, us in small_calls(pairs, a.rounds).items()}
        table(found["calls"])
    if "decode" in a.tables:
        found["decode"] = {}
        for number in map(int, filter(None, a.rows.split(","))):
            for pair in pairs:
                row, first = ROWS[number], pair == pairs[0]
                with_fa3 = has_fa3 and first and row.dim <= 256 and not row.window
                found["decode"][f"{row} {'/'.join(pair)}"] = decode(row, pair, a.rounds, with_fa3)
                torch.cuda.empty_cache()
        table(found["decode"])
    if "prompts" in a.tables:
        found["prompts"] = prompts(a.rounds)
        table(found["prompts"])
    if a.json:
        with open(a.json, "w") as f:
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
