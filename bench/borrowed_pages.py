#!/usr/bin/env python3
"""Pages in an engine's blocks on a GPU, without and with an exact tail, beside kvant's own caches.

  KVANT_LIBRARY=build/gpu/src/libkvant.so PYTHONPATH=python python3 bench/borrowed_pages.py --json rows.json

Times are of CUDA graphs of several calls, launched in turns with those of the others of a table, between two events;
the figure is the median, in microseconds a call. Calls of a graph go to layers of their own where that matters.
"""

import argparse
import json
import statistics

import torch

import kvant

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
DEVICE = "cuda:0"


class Timed:
    def __init__(self, name, calls):
        """calls: what a graph records, one after another."""
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


class Engine:
    """Sequences of one length in blocks in scattered order."""

    def __init__(self, pair, batch, length, tail, layers=1, most=512):
        self.batch, self.length, self.layers = batch, length, layers
        k, v = pair
        self.pages = kvant.Pages(kv_heads=KV_HEADS, head_dim=DIM, k=k, v=v, device=DEVICE, tail=tail,
                                 tail_sequences=batch if tail else 0, layers=layers)
        columns = -(-length // BLOCK)
        blocks = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.table = blocks.view(batch, columns).to(DEVICE)
        self.pools = [torch.zeros(batch * columns, KV_HEADS, self.pages.block_bytes, dtype=torch.uint8, device=DEVICE)
                      for _ in range(layers)]
        chunk = max(BLOCK, min(length, 65536 // batch))
        generator = torch.Generator(device=DEVICE).manual_seed(2)
        self.rows = torch.randn(2, batch * chunk, KV_HEADS, DIM, generator=generator, device=DEVICE).bfloat16()
        for first in range(0, length, chunk):
            end = min(length, first + chunk)
            self.begin(end, end - first)
            slots = self.slots(first, end)
            for layer, pool in enumerate(self.pools):
                self.pages.write(pool, self.rows[0], self.rows[1], slots, layer=layer)
        # The newest token comes by itself, as in decoding.
        self.begin(length, 1)
        self.plan = self.pages.plan(HEADS, max_batch=batch, max_blocks=columns, kernel="decode")
        self.set_tables()
        self.q = torch.randn(batch, HEADS, DIM, generator=generator, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)
        assert not self.plan.take_errors() and not self.pages.take_non_finite() and self.pages.take_misses() == 0

    def slots(self, first, end):
        at = torch.arange(first, end, device=DEVICE)
        return (self.table[:, at // BLOCK].long() * BLOCK + at % BLOCK).flatten()

    def tables(self, length, queries):
        return self.table, ints([length] * self.batch), ints([queries * i for i in range(self.batch + 1)])

    def begin(self, length, queries):
        self.newest = self.tables(length, queries)
        self.pages.begin_step(*self.newest)

    def set_tables(self):
        self.plan.set_tables(*self.newest)

    def run(self):
        self.plan.run(self.pools[0], self.q, self.out)


class Own:
    """The same sequences in a cache of kvant's."""

    def __init__(self, pair, batch, length, sinks, tail, centre):
        capacity = batch * (-(-length // BLOCK) + 1) * BLOCK
        self.cache = kvant.Cache(layers=1, kv_heads=KV_HEADS, head_dim=DIM, k=pair[0], v=pair[1], device=DEVICE,
                                 sink_pages=sinks, tail_pages=tail, k_centre=centre, capacity_tokens=capacity,
                                 max_sequences=batch, max_sequence_tokens=length + BLOCK)
        self.sequences = [self.cache.sequence() for _ in range(batch)]
        chunk = max(BLOCK, min(length, 65536 // batch))
        generator = torch.Generator(device=DEVICE).manual_seed(2)
        rows = torch.randn(2, batch * chunk, KV_HEADS, DIM, generator=generator, device=DEVICE).bfloat16()
        for first in range(0, length, chunk):
            n = min(length - first, chunk)
            self.cache.reserve(self.sequences, n)
            self.cache.write(self.sequences, 0, rows[0, : batch * n], rows[1, : batch * n])
        self.plan = self.cache.plan(self.sequences, q_heads=HEADS)
        self.q = torch.randn(batch, HEADS, DIM, generator=generator, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)

    def run(self):
        self.plan.run(0, self.q, self.out)


def small_calls(rounds):
    """One token of each of 64 sequences; begin_step, where a block begins and where none does; set_tables."""
    found = {}
    for pair in (("tq4", "tq4"), ("tq6", "tq4")):
        timed = []
        for tail in (0, 1):
            e = Engine(pair, 64, 2048 + 37, tail, layers=16)
            slots, rows = e.slots(e.length - 1, e.length), e.rows[:, :64].contiguous()
            name = f"{'/'.join(pair)} tail {tail}"

            def write(layer, e=e, slots=slots, rows=rows):
                e.pages.write(e.pools[layer], *rows, slots, layer=layer)

            calls = [lambda layer=layer, write=write: write(layer) for layer in range(16)]
            timed.append(Timed(f"write, {name}", calls))
            timed.append(Timed(f"set_tables, {name}", [e.set_tables] * 16))
            if tail:
                stays, begins = e.tables(e.length, 1), e.tables(2049, 1)
                timed.append(Timed(f"begin_step, none begins, {name}",
                                   [lambda e=e, t=stays: e.pages.begin_step(*t)] * 16))
                rolled = [(torch.roll(e.table, i, 1).contiguous(), *begins[1:]) for i in range(16)]  # other blocks
                timed.append(Timed(f"begin_step, 64 begin, {name}",
                                   [lambda e=e, t=t: e.pages.begin_step(*t) for t in rolled]))
        found |= measure(timed, rounds)
    return found


def decodes(shapes, rounds):
    found = {}
    for batch, length in shapes:
        for pair in (("tq4", "tq4"), ("tq6", "tq4")):
            timed, keep = [], []
            for name, make in (
                ("own, no ends", lambda: Own(pair, batch, length, 0, 0, "none")),
                ("borrowed", lambda: Engine(pair, batch, length, 0)),
                ("own, tail", lambda: Own(pair, batch, length, 0, 1, "none")),
                ("borrowed, tail", lambda: Engine(pair, batch, length, 1)),
                ("own, as created by default", lambda: Own(pair, batch, length, None, None, "automatic")),
            ):
                keep.append(make())
                timed.append(Timed(name, [keep[-1].run] * 8))
            found[f"{batch} x {length} {'/'.join(pair)}"] = measure(timed, rounds)
            del timed, keep
            torch.cuda.empty_cache()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", default="16x32768,64x4096,1x131072", help="sequences x keys")
    parser.add_argument("--json")
    a = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in a.shapes.split(",")]
    found = {"device": torch.cuda.get_device_name(), "calls": small_calls(a.rounds)}
    print(json.dumps(found, indent=1), flush=True)
    found["decode"] = decodes(shapes, a.rounds)
    print(json.dumps(found["decode"], indent=1), flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
