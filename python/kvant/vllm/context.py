"""Decode context parallel: the ranks of a group have the same kv head and share the tokens of each request.

vLLM gives them out in turns of so many tokens (its interleave size), and all ranks have the same block table. So a rank
has a request's tokens in order, but not all of them: to its pages they are a sequence of its own. Centres, exact
blocks and lengths count this rank's tokens.

A layer's queries see two kinds of keys, and vLLM's functions exchange what ranks found (as in its FLASH_ATTN):

    shared   those in pages: a rank reads its own, for the queries of all ranks, and the results are merged
    own      those of the step itself, which every rank was given: of prompts. A decoding request's are in pages, too

No key has to be hidden from a query but among a step's own.
"""

from __future__ import annotations

import torch

import kvant

from . import versions


def refuse(impl) -> None:
    """Raises for layers that cannot be right, or were not built, where ranks have only some of the keys."""
    config, layer = impl._config, impl.layer
    reason = ""
    if config.speculative_config is not None:
        reason = "speculative decoding is not supported with it: leave out --speculative-config"
    elif layer.window > 0:
        reason = "this model has layers with a sliding window, whose positions a rank does not know"
    elif layer.alibi_slopes is not None:
        reason = "this model has ALiBi, whose positions a rank does not know"
    elif impl.kv_sharing_target_layer_name is not None:
        reason = "this model has layers that share a cache, which are not given the keys of a step"
    elif not versions.option(config, "fresh_keys"):
        reason = "a prompt's own keys are with all ranks only as they are given: leave out fresh_keys = false"
    elif versions.is_cuda() and impl.dtype == torch.float32:
        reason = "prompts take keys in 16 bits on a GPU: choose --dtype bfloat16 or float16"
    if reason:
        raise NotImplementedError(f"kvant: --decode-context-parallel-size {impl.dcp_world_size}: {reason}")


class LocalTokens:
    """A rank's part of a step. Its tensors stay where they are: recorded graphs read them again."""

    def __init__(self, vllm_config, spec, capacity, device: torch.device) -> None:
        self.ranks, self.rank = versions.context_parallel(spec)
        self.interleave = versions.interleave(vllm_config)
        requests, tokens = capacity.requests, capacity.tokens
        numbers = {"dtype": torch.int32, "device": device}
        self.lengths = torch.zeros(requests, **numbers)  # tokens of this rank, with those of the step
        self.before = torch.zeros(requests, **numbers)  # without them
        self.counts = torch.zeros(requests, **numbers)  # tokens of the step, of all ranks
        self.begins = torch.zeros(requests + 1, **numbers)  # where a request's tokens of the step begin, of this rank
        # Which rows of the step this rank stores, and where; then rows that nobody stores. One more for all the others.
        self.rows = torch.zeros(tokens + 1, dtype=torch.int64, device=device)
        self.slots = torch.full((tokens + 1,), -1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(tokens, device=device)
        # A step's own keys are in no page, so their tables are not read.
        self.no_blocks = torch.zeros(requests, capacity.own().blocks, **numbers)

    def set(self, common) -> None:
        n = common.num_reqs
        lengths, begins = common.seq_lens[:n], common.query_start_loc[: n + 1]
        counts = begins[1:] - begins[:-1]
        self.counts[:n] = counts
        self.lengths[:n] = self._of_rank(lengths)
        self.before[:n] = self._of_rank((lengths - counts).clamp(min=0))
        self.begins[1 : n + 1] = (self.lengths[:n] - self.before[:n]).cumsum(0)
        slots = common.slot_mapping[: common.num_actual_tokens]
        mine = slots >= 0
        places = torch.where(mine, mine.cumsum(0) - 1, len(self.slots) - 1)
        self.rows.zero_().scatter_(0, places, self._numbers[: len(slots)])
        self.slots.fill_(-1).scatter_(0, places, slots)

    def _of_rank(self, lengths: torch.Tensor) -> torch.Tensor:
        return versions.local_lengths(lengths, self.ranks, self.rank, self.interleave)

    def take(self, *tensors: torch.Tensor):
        """The rows of this rank and their slots; as many as there are rows, so that shapes do not follow the step."""
        n = min(tensors[0].shape[0], len(self.slots) - 1)
        return *(x.index_select(0, self.rows[:n]) for x in tensors), self.slots[:n]


def attend(impl, metadata, query, key, value, cache, output, sink_logits) -> None:
    """A layer's attention; its keys and values are stored."""
    first = metadata.parts[0] if metadata.parts else None
    decoding = first.rows if first is not None and first.is_decode else 0  # rows; prompts are behind them
    rows = metadata.num_actual_tokens if metadata.has_context else decoding
    own_lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    for plan, end in metadata.runs(impl.layer.own()):
        plan.run(
            cache, query[:end], out=output[:end], lse=own_lse[:end], sink_logits=sink_logits, keys=key[:end],
            values=value[:end],
        )
    if rows == 0:  # on all ranks
        return
    group = versions.context_group()
    queries = group.all_gather(query[:rows].contiguous(), dim=1)
    found = queries.new_empty(*queries.shape[:2], output.shape[-1])
    lse = queries.new_empty(queries.shape[:2], dtype=torch.float32)
    for plan, end in metadata.runs(impl.layer.shared(impl.dcp_world_size)):
        plan.run(cache, queries[:end], out=found[:end], lse=lse[:end], layer=impl.number)
    found, lse = versions.merge_ranks(impl._config)(found, lse, group, return_lse=True)
    if decoding > 0:
        merged = found[:decoding]
        if sink_logits is not None:  # they count once
            merged = merged * torch.sigmoid(lse[:decoding] - sink_logits)[..., None]
        output[:decoding] = merged
    if rows > decoding:
        here = slice(decoding, rows)
        merged, _ = kvant.merge([(output[here].float(), own_lse[here]), (found[here].float(), lse[here])])
        output[here] = merged
