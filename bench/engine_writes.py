#!/usr/bin/env python3
"""The writes of a step to an engine's blocks on a GPU: prompts, single tokens and drafts, with and without copies.

  KVANT_LIBRARY=build/gpu/src/libkvant.so PYTHONPATH=python python3 bench/engine_writes.py

A CUDA graph has the writes of all layers of one step (begin_step comes before, once). With --weights each layer reads
so many MiB before its write, as a model does, and the time without writes is taken off. Figures are medians of replays
in turns, in microseconds a layer; with --kernels, torch.profiler's median of each kernel as well.
"""

import argparse
import statistics
from typing import NamedTuple

import torch
from borrowed_pages import BLOCK, DEVICE, Timed, ints, measure

import kvant


class Step(NamedTuple):
    """`batch` sequences that get `tokens` each, behind `before` others."""

    batch: int
    tokens: int
    before: int

    def __str__(self):
        return f"{self.batch} x {self.tokens} behind {self.before}"


STEPS = [Step(1, 8192, 0), Step(4, 2048, 0), Step(1, 512, 37), Step(1, 1, 2085), Step(16, 1, 2085), Step(64, 1, 2085),
         Step(16, 4, 2085), Step(16, 4, 2110), Step(16, 8, 2085), Step(16, 8, 2108), Step(64, 8, 2085)]


class Writes:
    """A step's writes. Prompts of scattered blocks; rows are the same in all layers."""

    def __init__(self, step, pair, tail, options):
        k, v = pair
        heads, dim = options.kv_heads, options.head_dim
        ends = dict(tail_pages=tail, sink_pages=1, tail_sequences=step.batch) if tail else {}
        self.pages = kvant.Pages(kv_heads=heads, head_dim=dim, k=k, v=v, device=DEVICE, layers=options.layers, **ends)
        columns = -(-(step.before + step.tokens) // BLOCK)
        blocks = torch.randperm(step.batch * columns, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.table = blocks.view(step.batch, columns).to(DEVICE)
        self.pools = torch.zeros(options.layers, len(blocks), heads, self.pages.block_bytes, dtype=torch.uint8,
                                 device=DEVICE)
        self.generator = torch.Generator(device=DEVICE).manual_seed(2)
        self.shape, self.batch = (heads, dim), step.batch
        for first in range(0, step.before, 512):
            self.begin(first, min(step.before, first + 512))
            for layer in range(options.layers):
                self.write(layer)
        self.begin(step.before, step.before + step.tokens)

    def begin(self, first, end):
        at = torch.arange(first, end, device=DEVICE)
        self.slots = (self.table[:, at // BLOCK].long() * BLOCK + at % BLOCK).flatten()
        self.rows = torch.randn(2, len(self.slots), *self.shape, generator=self.generator, device=DEVICE).bfloat16()
        starts = ints([i * (end - first) for i in range(self.batch + 1)])
        self.tables = self.table, ints([end] * self.batch), starts  # whose memory the writes read
        self.pages.begin_step(*self.tables, max_query_len=end - first)

    def write(self, layer):
        self.pages.write(self.pools[layer], *self.rows, self.slots, layer=layer)


def kernels_of(timed, layers):
    """[(name, us a layer)] of the kernels of writes, and how many of each a layer has."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(6):
            timed.graph.replay()
        torch.cuda.synchronize()
    durations = {}
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and "kvant" in event.name():
            name = event.name().split("kvant::cuda::")[1].split("<")[0].split("(")[0]
            durations.setdefault(name, []).append(event.duration_ns() / 1000)
    return [f"{name} {len(all_of) / (6 * layers):.0f} x {statistics.median(all_of):.1f}"
            for name, all_of in durations.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = "tq4/tq4/1,tq6/tq4/1,tq4/tq4/0,tq6/tq4/0,bf16/bf16/0"
    parser.add_argument("--kinds", default=kinds, help="keys/values/tail")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--weights", type=int, default=0, help="MiB that a layer reads before its write")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    weights = torch.zeros(options.layers, options.weights * 2**20 // 8192, 4096, device=DEVICE, dtype=torch.bfloat16)
    x, y = weights.new_ones(4096), weights.new_empty(weights.shape[1])

    def layer_of(write):
        def run(layer):
            if options.weights:
                torch.mv(weights[layer], x, out=y)
            write(layer)

        return [lambda layer=layer: run(layer) for layer in range(options.layers)]

    print(torch.cuda.get_device_name())
    for step in STEPS:
        timed = []
        if options.weights:
            timed.append(Timed("nothing", layer_of(lambda layer: None)))
        for kind in options.kinds.split(","):
            k, v, tail = kind.split("/")
            writes = Writes(step, (k, v), int(tail), options)
            timed.append(Timed(kind, layer_of(writes.write)))
            if writes.pages.take_non_finite():
                raise SystemExit(f"{kind}, {step}: values that cannot be stored")
        found = measure(timed, options.rounds)
        without = found.pop("nothing", 0)
        print(f"{step}: " + ", ".join(f"{name} {us - without:.1f}" for name, us in found.items()), flush=True)
        if options.kernels:
            for t in timed[1 if options.weights else 0 :]:
                print(f"    {t.name}: " + ", ".join(kernels_of(t, options.layers)), flush=True)


if __name__ == "__main__":
    main()
