"""Once a step: the batch's tables for the plans of a group of layers.

vLLM puts short requests first: one token, or with speculative decoding the drafts to verify. They go to a decode plan
and the others, chunks of prompts, to an extend plan. Both have the capacity of the server's limits and are made with
the builder, so that nothing is allocated later; each step only copies tables to where kernels and recorded CUDA graphs
read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from . import versions
from .layer import BLOCK_TOKENS, Capacity, Layer, Plans
from .versions import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder


@dataclass
class KvantMetadata(AttentionMetadata):
    """The facts of a step that layers need. Every field has a default: vLLM makes subclasses and copies the fields."""

    num_actual_tokens: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    plans: dict[Layer, Plans] = field(default_factory=dict)
    # As vLLM gave them, for draft models whose tables are set again from the same memory.
    block_table: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None


def split(common, threshold: int) -> tuple[int, int]:
    """Requests at the front of at most `threshold` queries, and their tokens. Needs lengths on the host only."""
    if common.max_query_len <= threshold:
        return common.num_reqs, common.num_actual_tokens
    begins = common.query_start_loc_cpu
    is_long = (begins[1:] - begins[:-1]) > threshold
    if not bool(is_long.any()):
        return common.num_reqs, common.num_actual_tokens
    first = int(is_long.int().argmax())
    return first, int(begins[first])


class KvantMetadataBuilder(AttentionMetadataBuilder[KvantMetadata]):
    # Graphs hold the decode plan alone; batches with chunks of prompts run between graphs.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    requires_block_table_width: ClassVar[bool] = True
    supports_draft_decode_metadata_update: ClassVar[bool] = True  # set_tables can be recorded in a graph

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width: int | None = None):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if kv_cache_spec.block_size != BLOCK_TOKENS:
            raise NotImplementedError(
                f"kvant: blocks of {kv_cache_spec.block_size} tokens reach the kernels: leave --block-size at "
                f"{BLOCK_TOKENS} or a multiple of it"
            )
        self.capacity = Capacity.of(vllm_config, self.reorder_batch_threshold, block_table_width)
        self.plans: dict[Layer, Plans] = {}
        for layer in versions.layers(vllm_config, layer_names):
            if layer.impl.layer not in self.plans:
                self.plans[layer.impl.layer] = layer.impl.layer.plans(device, self.capacity)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> KvantMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("kvant: attention to later tokens is not supported over vLLM's cache")
        decodes, decode_tokens = split(common, self.reorder_batch_threshold)
        metadata = KvantMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            plans=self.plans,
            block_table=common.block_table_tensor[:, : self.capacity.blocks],
            seq_lens=common.seq_lens[: common.num_reqs],
            query_start_loc=common.query_start_loc,
        )
        self._set_tables(metadata, common.num_reqs)
        return metadata

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec) -> int | None:
        """Kernels read lengths from the device's tables, so one graph serves any lengths that its plan holds."""
        return versions.max_decode_query_len(vllm_config)

    def update_draft_decode_metadata(self, metadata: KvantMetadata) -> None:
        """The same tables again, after a draft step changed them in place. vLLM may record the call in a graph."""
        self._set_tables(metadata, metadata.seq_lens.shape[0])

    def _set_tables(self, metadata: KvantMetadata, requests: int) -> None:
        table, lengths, begins = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        n = metadata.num_decodes
        for plans in self.plans.values():
            if n > 0:
                plans.decode.set_tables(table[:n], lengths[:n], begins[: n + 1])
            if n < requests:
                plans.extend.set_tables(table[n:requests], lengths[n:requests], begins[n : requests + 1])
