"""Once a step: the batch's tables for the plans of a group of layers.

vLLM puts short requests first: one token, or with speculative decoding the drafts to verify. These go to a decode plan,
chosen by their number. The others are chunks of prompts, by ascending length, and go to extend plans, chosen by length,
which are given the chunk's own keys and values. Plans for the server's limits are made with the builder, so that
nothing is allocated later; each step only copies tables to where kernels and recorded CUDA graphs read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from . import versions
from .context import LocalTokens
from .layer import BLOCK_TOKENS, Capacity, Layer, Plans
from .tail import give_pages
from .versions import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder


class Part(NamedTuple):
    """Requests of a batch that one plan serves."""

    is_decode: bool
    size: int  # of the plan: requests (decode), or queries of a request (extend)
    copy: int  # among plans of that size
    first: int  # request
    end: int
    rows: int  # of the batch, up to the end of this part
    tokens: int = 0  # of its longest request, at most

    def plan(self, plans: Plans):
        if self.is_decode:
            return plans.decode[self.size]
        return plans.extend[self.size][self.copy].choose(self.end - self.first, self.tokens)


@dataclass
class KvantMetadata(AttentionMetadata):
    """The facts of a step that layers need. Every field has a default: vLLM makes subclasses and copies the fields."""

    num_actual_tokens: int = 0
    parts: list[Part] = field(default_factory=list)
    plans: dict[Layer, Plans] = field(default_factory=dict)
    # As vLLM gave them, for draft models whose tables are set again from the same memory.
    block_table: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    max_query_len: int = 0
    has_prompts: bool = False
    # With decode context parallel: what this rank has, and whether a prompt of the step has older tokens.
    local: LocalTokens | None = None
    has_context: bool = False

    def runs(self, layer: Layer):
        """(plan, rows) of each part that reads keys of the layer's kind, for one layer."""
        plans = self.plans.get(layer)
        if plans is None:
            raise RuntimeError(f"kvant: the metadata of this step has no plans for a layer of {layer}")
        return [(part.plan(plans), part.rows) for part in self.parts if self.reads(part, layer)]

    def reads(self, part: Part, layer: Layer) -> bool:
        if layer.keys == "own":
            return not part.is_decode
        return layer.keys == "all" or part.is_decode or (layer.keys == "shared" and self.has_context)


def divide(common, capacity: Capacity) -> list[Part]:
    """The parts of a batch: decoding requests at the front, then prompts in as few parts as plans allow. Reads the
    host's lengths only."""
    begins = common.query_start_loc_cpu.tolist()[: common.num_reqs + 1]
    counts = [end - begin for begin, end in zip(begins, begins[1:])]
    if len(counts) > capacity.requests or common.num_actual_tokens > capacity.tokens:
        raise ValueError(
            f"kvant: a batch of {len(counts)} requests and {common.num_actual_tokens} tokens, but the server's limits "
            f"are {capacity.requests} and {capacity.tokens}"
        )
    bounds = common.seq_lens_cpu_upper_bound  # the lengths themselves are on the device
    lengths = [common.max_seq_len] * len(counts) if bounds is None else bounds.tolist()
    if common.max_query_len <= capacity.decode_queries:  # as vLLM counts, whose bound may be above the host's lengths
        decodes = len(counts)
    else:
        decodes = next((i for i, n in enumerate(counts) if n > capacity.decode_queries), len(counts))
    parts = []
    if decodes > 0:
        size = next(n for n in capacity.decodes() if n >= decodes)
        rows = common.num_actual_tokens if decodes == len(counts) else begins[decodes]
        parts.append(Part(True, size, 0, 0, decodes, rows, max(lengths[:decodes])))
    first = decodes
    while first < len(counts):
        size, end, same_size = capacity.extend(counts[first])[0], first + 1, first
        while end < len(counts):
            larger, most = capacity.extend(max(size, counts[end]))
            if end + 1 - first > most:
                # All requests of one size fit their plan. Those that came last leave this part, if that is shorter
                # then, so that ascending lengths need each plan once.
                if larger == size and same_size > first:
                    end = same_size
                    size = capacity.extend(max(counts[first:end]))[0]
                break
            if larger > size:
                size, same_size = larger, end
            end += 1
        copy = sum(not part.is_decode and part.size == size for part in parts)
        parts.append(Part(False, size, copy, first, end, begins[end], max(lengths[first:end])))
        first = end
    return parts


def has_context(common, parts: list[Part]) -> bool:
    """Whether a prompt has tokens before those of the step. All ranks find the same, as they exchange results then."""
    bounds, begins = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu
    if bounds is None:
        return any(not part.is_decode for part in parts)
    here = slice(next((p.first for p in parts if not p.is_decode), common.num_reqs), common.num_reqs)
    counts = begins[1 : common.num_reqs + 1] - begins[: common.num_reqs]
    return bool((bounds[: common.num_reqs] > counts)[here].any())


def _check_sizes(kv_cache_spec, layers, names) -> None:
    """Raises if vLLM sized the pages of a layer for another cache dtype than the layer's: its spec carries none."""
    given = kv_cache_spec.state_content_bytes
    for name, layer in zip(names, layers):
        needed = layer.impl.layer.content_bytes()
        if given != needed:
            raise RuntimeError(
                f"kvant: vLLM sized the pages of {name} for {given} bytes a token and head, and the layer's "
                f"{layer.impl.kv_cache_dtype} takes {needed}: a server has one cache dtype of kvant, and exact layers"
            )


class KvantMetadataBuilder(AttentionMetadataBuilder[KvantMetadata]):
    # Graphs hold the decode plan alone; batches with chunks of prompts run between graphs.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    requires_block_table_width: ClassVar[bool] = True
    supports_draft_decode_metadata_update: ClassVar[bool] = True  # set_tables can be recorded in a graph

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width: int | None = None):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if versions.has_microbatches(vllm_config):
            raise NotImplementedError(
                "kvant: batches that are cut in two and run side by side are not supported, since pages follow the "
                "tables of one batch: leave out --enable-dbo and --ubatch-size"
            )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if kv_cache_spec.block_size != BLOCK_TOKENS:
            raise NotImplementedError(
                f"kvant: blocks of {kv_cache_spec.block_size} tokens reach the kernels: leave --block-size at "
                f"{BLOCK_TOKENS} or a multiple of it"
            )
        _check_sizes(kv_cache_spec, versions.layers(vllm_config, layer_names), layer_names)
        self.capacity = Capacity.of(vllm_config, self.reorder_batch_threshold, block_table_width)
        self.own_pages = give_pages(vllm_config, layer_names, device, self.capacity)
        self.local = None
        if versions.context_parallel(kv_cache_spec)[0] > 1:
            self.local = LocalTokens(vllm_config, kv_cache_spec, self.capacity, device)
        self.plans: dict[Layer, Plans] = {}
        self.pages: dict[Layer, Any] = {}
        for layer in versions.layers(vllm_config, layer_names):
            pages = layer.impl.pages or layer.impl.layer.pages(device)
            for planned in layer.impl.planned():
                if planned not in self.plans:
                    self.pages[planned] = pages
                    self.plans[planned] = planned.plans(pages, self.capacity)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> KvantMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("kvant: attention to later tokens is not supported over vLLM's cache")
        parts = divide(common, self.capacity)
        for part in parts:
            if part.copy > 0:  # several parts of one size: prompts of mixed lengths, in an order that does not help
                for layer, plans in self.plans.items():
                    while layer.keys != "decoding" and len(plans.extend[part.size]) <= part.copy:
                        plans.extend[part.size].append(
                            layer.extend_plan(self.pages[layer], self.capacity, part.size)
                        )
        metadata = KvantMetadata(
            num_actual_tokens=common.num_actual_tokens,
            parts=parts,
            plans=self.plans,
            block_table=common.block_table_tensor[:, : self.capacity.blocks],
            seq_lens=common.seq_lens[: common.num_reqs],
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            has_prompts=any(not part.is_decode for part in parts),
            local=self.local,
            has_context=self.local is not None and has_context(common, parts),
        )
        if self.local is not None:
            self.local.set(common)
        self._set_tables(metadata)
        return metadata

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec) -> int | None:
        """Kernels read lengths from the device's tables, so one graph serves any lengths that its plan holds."""
        return versions.max_decode_query_len(vllm_config)

    def update_draft_decode_metadata(self, metadata: KvantMetadata) -> None:
        """The same tables again, after a draft step changed them in place. vLLM may record the call in a graph."""
        self._set_tables(metadata)

    def _set_tables(self, metadata: KvantMetadata) -> None:
        table, lengths, begins = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        batch, local = len(lengths), self.local
        stored, rows = (lengths, begins) if local is None else (local.lengths[:batch], local.begins)
        for pages in self.own_pages:  # a graph that holds writes reads these tensors again: vLLM keeps their memory
            pages.begin_step(table[:batch], stored, rows[: batch + 1], max_query_len=metadata.max_query_len)
        for layer, plans in self.plans.items():
            for part in metadata.parts:
                if not metadata.reads(part, layer):
                    continue
                blocks, tokens = table, lengths
                if layer.keys == "own":
                    blocks, tokens = local.no_blocks, local.counts
                elif layer.keys == "shared":
                    tokens = local.lengths if part.is_decode else local.before
                here = slice(part.first, part.end)
                part.plan(plans).set_tables(blocks[here], tokens[here], begins[part.first : part.end + 1])
