"""The ranks of decode context parallel in one process: an engine each, in a thread each, and a group that exchanges
tensors between them as vLLM's does between processes."""

from __future__ import annotations

import threading

import torch

from . import dense
from .engine import Engine


class Group:
    """vLLM's GroupCoordinator."""

    def __init__(self, ranks):
        self.world_size = ranks
        self.barrier = threading.Barrier(ranks)
        self.parts = [None] * ranks
        self.mine = threading.local()
        self.exchanges = 0

    @property
    def rank_in_group(self):
        return self.mine.rank

    def exchange(self, x):
        assert x.is_contiguous()
        self.parts[self.rank_in_group] = x
        self.barrier.wait(60)
        parts = list(self.parts)
        self.exchanges += self.rank_in_group == 0
        self.barrier.wait(60)
        return parts

    def all_gather(self, x, dim=-1):
        return torch.cat(self.exchange(x), dim)

    def reduce_scatter(self, x, dim=-1):
        return torch.stack(self.exchange(x)).sum(0).chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def run(self, work):
        """work(rank) of all ranks at once; their results, or the first error."""
        results, errors = [None] * self.world_size, []

        def one(rank):
            self.mine.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results


class Rank(Engine):
    """One rank's engine: it has its own heads, and all keys and values."""

    def __init__(self, group, rank, interleave, vllm, layers, *, q_heads, **options):
        self.ranks, self.rank, self.interleave = group.world_size, rank, interleave
        parallel = {"decode_context_parallel_size": self.ranks, "cp_kv_cache_interleave_size": interleave}
        layers = [
            layer | ({"sinks": layer["sinks"].chunk(self.ranks)[rank]} if "sinks" in layer else {}) for layer in layers
        ]
        super().__init__(vllm, layers, q_heads=q_heads // self.ranks, kv_heads=1, parallel=parallel, **options)

    def slot(self, ids, position, size):
        block, place = divmod(position, size * self.ranks)
        if place // self.interleave % self.ranks != self.rank:
            return -1
        turns, rest = place // (self.interleave * self.ranks), place % self.interleave
        return int(ids[block]) * size + turns * self.interleave + rest

    def build(self, begins, most, lengths, *rest, **options):
        return super().build(begins, most, lengths, *rest, seq_lens_cpu_upper_bound=lengths.clone(), **options)

    def tensors(self, r, layer, positions, which, heads):
        if which != 0:
            return super().tensors(r, layer, positions, which, heads)
        return super().tensors(r, layer, positions, 0, heads * self.ranks).chunk(self.ranks, dim=1)[self.rank]

    def forward(self, made, slots, inputs):
        """Without vLLM's layers, whose context is one for the whole process."""
        outputs = []
        for layer, x in zip(self.layers, inputs):
            rows = [t.view(t.shape[0], -1, layer.head_dim) for t in x]
            out = torch.full_like(rows[0], float("nan"))
            metadata = made[layer.made.layer_name]
            outputs.append(layer.made.impl.forward(layer.made, *rows, layer.made.kv_cache, metadata, out).flatten(1))
        return outputs


class Ranks:
    """As Engine: a step runs on all ranks."""

    def __init__(self, monkeypatch, vllm, ranks, interleave=1, layers=({},), *, q_heads=4, **options):
        from kvant.vllm import versions
        from vllm.distributed import parallel_state
        from vllm.v1.attention.ops import dcp

        self.group = Group(ranks)
        monkeypatch.setattr(parallel_state, "_DCP", self.group)
        monkeypatch.setattr(dcp, "correct_attn_out", dense.correct_attn_out)
        monkeypatch.setattr(versions, "slots", lambda name: True)
        self.of = []
        for rank in range(ranks):
            self.group.mine.rank = rank
            self.of.append(Rank(self.group, rank, interleave, vllm, layers, q_heads=q_heads, **options))
        for rank in self.of:
            rank.free = list(self.of[0].free)

    def request(self, seed, **options):
        return self.of[0].request(seed, **options)

    def preempt(self, r):
        self.of[0].preempt(r)

    def step(self, batch, pad_to=None, tolerance=2e-5):
        batch = sorted(batch, key=lambda b: (b[1] > 1, b[1] != 1, b[1]))
        made = [self.of[0].metadata(batch, pad_to)]  # takes the blocks of the step, for all ranks
        for rank in range(1, len(self.of)):
            self.group.mine.rank = rank
            made.append(self.of[rank].metadata(batch, pad_to))

        def work(rank):
            e = self.of[rank]
            metadata, slots, rows = made[rank]
            return e.forward(metadata, slots, e.inputs(batch, rows))

        outputs = self.group.run(work)
        lengths = [r.length for r, _ in batch]
        for rank, e in enumerate(self.of):
            for (r, _), length in zip(batch, lengths):
                r.length = length
            e.finish(batch, outputs[rank], tolerance)

    def dummy_step(self, *args):
        self.group.run(lambda rank: self.of[rank].dummy_step(*args))

    @property
    def worst(self):
        return max(e.worst for e in self.of)
