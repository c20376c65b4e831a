#!/usr/bin/env python3
"""A decoding step as a serving engine runs it on a GPU: kernels between the weights of a model's layers.

  KVANT_LIBRARY=build/gpu/src/libkvant.so PYTHONPATH=python python3 bench/engine_step.py

A CUDA graph has a number of layers. Each reads its weights (so that neither code, tables nor pages are in a cache),
then a small kernel makes q, k and v, in the place of rotary embeddings; then come the write of one token a sequence and
attention. Before, eight steps of every configuration are compared with kvant on the CPU (the bytes of all blocks, and
outputs), and replays of the graph, each with other inputs, with calls that wait for each other (the same bits).

us: of a layer in the graph, less a layer of the graph that has weights and the small kernel alone; medians of replays
in turns. The other columns are medians of torch.profiler's times, in microseconds from the small kernel's start.
bf16: FlashAttention-3 where the wheel fa3-fwd is installed, and kvant's own bf16 pages.
"""

import argparse
import statistics
from typing import NamedTuple

import torch
from borrowed_pages import BLOCK, DEVICE, Timed, ints, measure

import kvant

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPE = dict(kv_heads=KV_HEADS, head_dim=DIM)
CHECKED = 8  # steps


class Kind(NamedTuple):
    k: str
    v: str
    tail: int

    def __str__(self):
        return f"{self.k}/{self.v}" + (f" tail {self.tail}" if self.tail else "")


class Sequences:
    """Sequences of one length, in pages on a device. `rows`: keys and values of all tokens."""

    def __init__(self, kind, batch, length, layers, rows, device, max_blocks=0):
        self.batch, self.layers, self.rows, self.device = batch, layers, rows.to(device), device
        ends = dict(tail_pages=kind.tail, sink_pages=1, tail_sequences=batch) if kind.tail else {}
        self.pages = kvant.Pages(**SHAPE, k=kind.k, v=kind.v, device=device, layers=layers, **ends)
        columns = (length + CHECKED) // BLOCK + 1
        order = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(1))
        self.table = order.to(torch.int32).view(batch, columns).to(device)
        self.pools = torch.zeros(layers, batch * columns, KV_HEADS, self.pages.block_bytes, dtype=torch.uint8,
                                 device=device)
        self.plan = self.pages.plan(Q_HEADS, max_batch=batch, max_blocks=max(columns, max_blocks), max_query_len=1)
        for first in range(0, length, 512):
            self.begin(first, min(length, first + 512))
            for layer in range(layers):
                self.write(layer, *self.given)

    def begin(self, first, end):
        at = torch.arange(first, end, device=self.device)
        self.slots = (self.table[:, at // BLOCK].long() * BLOCK + at % BLOCK).flatten()
        self.given = self.rows[:, :, first:end].flatten(1, 2).contiguous()
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * (end - first)
        self.tables = self.table, ints([end] * self.batch).to(self.device), starts
        self.pages.begin_step(*self.tables, max_query_len=end - first)

    def write(self, layer, keys, values):
        self.pages.write(self.pools[layer], keys, values, self.slots, layer=layer)

    def step(self, position):
        self.begin(position, position + 1)
        self.plan.set_tables(*self.tables)


def check(kind, batch, rows, q):
    """Steps of one token over the end of a block, with the CPU's bytes and outputs."""
    length = rows.shape[2] - BLOCK - CHECKED // 2
    here, there = (Sequences(kind, batch, length, 1, rows, device) for device in ("cpu", DEVICE))
    worst = 0.0
    for position in range(length, length + CHECKED):
        out = []
        for s in (here, there):
            s.step(position)
            s.write(0, *s.given)
            out.append(s.plan.run(s.pools[0], q.to(s.device), layer=0).float().cpu())
        if not torch.equal(here.pools.cpu(), there.pools.cpu()):
            raise SystemExit(f"{kind}, {batch} sequences, position {position}: bytes differ from the CPU's")
        worst = max(worst, float(torch.linalg.norm(out[1] - out[0]) / torch.linalg.norm(out[0])))
    if not worst < 6e-3 or there.plan.take_errors() or there.pages.take_non_finite():
        raise SystemExit(f"{kind}, {batch} sequences: outputs differ from the CPU's by {worst}")


def check_graph(timed, source, made, s, q, keys, values, out):
    """A graph's last outputs, for other inputs each time, are those of launches that wait for each other."""
    last = s.layers - 1
    for _ in range(CHECKED):
        source.normal_()
        timed.graph.replay()
        found = out.clone()
        made.copy_(source)
        for call in (lambda: s.write(last, keys, values), lambda: s.plan.run(s.pools[last], q, out, layer=last)):
            torch.cuda.synchronize()
            call()
        if not torch.equal(found, out):
            raise SystemExit(f"{timed.name}: outputs of a graph differ from those of calls one by one")


def flash_attention_3(batch, length, layers, made):
    """A layer's store and attention, over tokens in one piece."""
    import fa3_fwd_interface as fa3

    caches = torch.randn(layers, 2, batch, length + BLOCK, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    lengths = ints([length + 1] * batch)
    slots = torch.arange(batch, device=DEVICE) * (length + BLOCK) + length
    schedule = fa3.get_scheduler_metadata(batch, 1, length + BLOCK, Q_HEADS, KV_HEADS, DIM, lengths,
                                          qkv_dtype=torch.bfloat16, causal=True)
    heads = Q_HEADS, 2 * KV_HEADS

    def run(layer):
        q, kv = made.view(batch, -1, DIM).split(heads, 1)
        caches[layer].view(2, -1, KV_HEADS, DIM).index_copy_(1, slots, kv.unflatten(1, (2, KV_HEADS)).transpose(0, 1))
        fa3.flash_attn_with_kvcache(q.unsqueeze(1), *caches[layer], cache_seqlens=lengths, scheduler_metadata=schedule,
                                    causal=True)

    return run


def kernels_of(timed, layers):
    """[(name, start, end)] of a layer, from the small kernel's start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(6):
            timed.graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    events = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events)
    each = len(events) // (6 * layers)
    times = [[] for _ in range(each - 1)]
    for i in range(layers // 2, 6 * layers):  # without the first ones
        layer = events[i * each : (i + 1) * each]
        for j, (start, end, name) in enumerate(layer[1:]):
            times[j].append((start - layer[1][0], end - layer[1][0], name))
    found = []
    for of_kernel in times:
        middle = [statistics.median(t[i] for t in of_kernel) / 1000 for i in (0, 1)]
        found.append((of_kernel[-1][2], *middle))
    return found


def measure_batch(batch, length, kinds, options):
    layers = options.layers
    weights = torch.randn(layers, options.weights * 2**20 // 8192, 4096, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(4096, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty(weights.shape[1], device=DEVICE, dtype=torch.bfloat16)
    source = torch.randn(batch, (Q_HEADS + 2 * KV_HEADS) * DIM, device=DEVICE).bfloat16()
    made = torch.empty_like(source)
    rows = torch.randn(2, batch, length + CHECKED, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows[0] += torch.randn(KV_HEADS, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    q, keys, values = made.view(batch, -1, DIM).split((Q_HEADS, KV_HEADS, KV_HEADS), 1)

    def layer_of(own):
        def run(layer):
            torch.mv(weights[layer], x, out=y)
            torch.mul(source, 1, out=made)
            own(layer)

        return run

    timed = [Timed("nothing", [lambda i=i: layer_of(lambda layer: None)(i) for i in range(layers)])]
    for kind in kinds:
        check(kind, batch, rows[:, :, : 6 * BLOCK], source.view(batch, -1, DIM)[:, :Q_HEADS].contiguous())
        s = Sequences(kind, batch, length, layers, rows, DEVICE, options.max_blocks)
        s.step(length)
        out = torch.empty_like(q.contiguous())

        def own(layer, s=s, out=out):
            s.write(layer, keys, values)
            s.plan.run(s.pools[layer], q, out, layer=layer)

        run = layer_of(own)
        timed.append(Timed(str(kind), [lambda i=i, run=run: run(i) for i in range(layers)]))
        check_graph(timed[-1], source, made, s, q, keys, values, out)
    try:
        run = layer_of(flash_attention_3(batch, length, layers, made))
        timed.append(Timed("FA3 bf16", [lambda i=i, run=run: run(i) for i in range(layers)]))
    except ImportError:
        pass
    found = measure(timed, options.rounds)
    print(f"{batch} x {length}, {layers} layers of {options.weights} MiB: {found['nothing']} us without attention")
    for t in timed[1:]:
        parts = []
        for name, start, end in kernels_of(t, layers)[1:]:
            short = next((n for n in ("few_slots", "attend", "merge", "copied_rows") if n in name), name[:24])
            parts.append(f"{short} {start:.1f} to {end:.1f}")
        print(f"  {t.name:16} {found[t.name] - found['nothing']:6.1f} us   {', '.join(parts)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,64", help="numbers of sequences")
    parser.add_argument("--length", type=int, default=2048 + 37)
    parser.add_argument("--kinds", default="tq4/tq4/1,tq6/tq4/1,tq4/tq4/0,bf16/bf16/0", help="keys/values/tail")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--weights", type=int, default=256, help="MiB a layer")
    parser.add_argument("--max-blocks", type=int, default=0, help="of a sequence in the plan, if more than it has")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    kinds = [Kind(k, v, int(tail)) for k, v, tail in (kind.split("/") for kind in options.kinds.split(","))]
    print(torch.cuda.get_device_name())
    for batch in map(int, options.batches.split(",")):
        measure_batch(batch, options.length, kinds, options)


if __name__ == "__main__":
    main()
