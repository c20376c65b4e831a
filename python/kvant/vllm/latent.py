"""Multi-head latent attention (DeepSeek V2 and its kin): a token's latent and rotary key, shared by all heads.

vLLM's common code for such models stays. It multiplies queries and outputs with the parts of the expanding matrix,
divides a step into requests that decode and prompts, and merges what prompts find. A layer here

    stores      latents and rotary keys in kvant's pages, in formats of their own (dtypes.parse_latent)
    decodes     by a plan over pages, whose queries and outputs are latents
    reads back  the older tokens of prompts from pages, which vLLM expands to keys and values

A prompt's own tokens are attended to as the model gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from . import dtypes, versions
from .impl import ImplOfKvant
from .layer import BLOCK_TOKENS, Layer, pool, say_once
from .metadata import KvantMetadata, KvantMetadataBuilder
from .versions import (
    AttentionType,
    MLAAttention,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)


class Stored(NamedTuple):
    """Where the older tokens of a run of prompts are."""

    blocks: torch.Tensor  # int32, in the order of requests
    rows: torch.Tensor | None  # of these blocks; None: the first ones


@dataclass
class LatentMetadata(MLACommonMetadata):
    """vLLM's facts of a step, and kvant's."""

    step: KvantMetadata = field(default_factory=KvantMetadata)
    context: list[Stored] = field(default_factory=list)  # of each chunk of vLLM's chunked context

    def __post_init__(self) -> None:
        """vLLM's list of sizes is for its own kernels: the backend knows kvant's."""


class LatentMetadataBuilder(KvantMetadataBuilder, MLACommonMetadataBuilder):
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width: int | None = None):
        if vllm_config.attention_config.use_prefill_query_quantization:
            raise NotImplementedError(
                "kvant: use_prefill_query_quantization asks for queries in fp8, and older tokens of prompts are read "
                "back in the model's dtype: leave it out of --attention-config"
            )
        for layer in versions.layers(vllm_config, layer_names):
            if type(layer) is not MLAAttention:
                raise NotImplementedError(
                    f"kvant: {type(layer).__name__} is this model's own layer of latent attention, which may store "
                    "latents itself; kvant's pages are written by kvant alone: choose another backend for this model"
                )
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, block_table_width)
        self.metadata_cls = LatentMetadata
        # Older tokens of prompts are read back by whole blocks, which may be more than the tokens of a chunk.
        workspace, padding = self.chunked_prefill_workspace, BLOCK_TOKENS * self.capacity.requests
        self.chunked_prefill_workspace = workspace.new_empty(len(workspace) + padding, workspace.shape[1])

    @staticmethod
    def determine_prefill_query_data_type(vllm_config, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> LatentMetadata:
        made = MLACommonMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)
        made.step = KvantMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)
        decoding = sum(part.rows for part in made.step.parts if part.is_decode)
        if decoding != made.num_decode_tokens:
            raise RuntimeError(f"kvant: {decoding} tokens decode, and vLLM counts {made.num_decode_tokens}")
        if made.prefill is not None and made.prefill.chunked_context is not None:
            made.context = _stored(made.prefill)
        return made

    def update_draft_decode_metadata(self, metadata: LatentMetadata) -> None:
        super().update_draft_decode_metadata(metadata.step)


def _stored(prefill) -> list[Stored]:
    """The older tokens of each chunk. A chunk has the next tokens of its requests, from the first of a block on."""
    table, found = prefill.block_table, []
    done = [0] * len(prefill.chunked_context.context_lens_list)
    for chunk in prefill.chunked_context.chunks:
        requests = range(chunk.request_slice.start, chunk.request_slice.stop)
        places, columns, rows = [], [], []
        for request, tokens in zip(requests, chunk.seq_lens.tolist()):
            begin, count = BLOCK_TOKENS * len(columns), -(-tokens // BLOCK_TOKENS)
            rows.append(torch.arange(begin, begin + tokens))
            places += [request] * count
            columns += range(done[request] // BLOCK_TOKENS, done[request] // BLOCK_TOKENS + count)
            done[request] += tokens
        at = _sent(torch.tensor([places, columns]), table.device)
        blocks = table[at[0], at[1]].to(torch.int32).contiguous()
        is_whole = all(len(x) % BLOCK_TOKENS == 0 for x in rows[:-1])
        found.append(Stored(blocks, None if is_whole else _sent(torch.cat(rows), table.device)))
    return found


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without a wait for the device."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


class LatentImpl(ImplOfKvant, MLACommonImpl[LatentMetadata]):
    """vLLM makes one for each attention layer, with the heads that this rank has."""

    supports_dcp: bool = False
    supports_pcp: bool = False
    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        **others: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"kvant: attention of type {attn_type} is not supported: decoders are")
        others |= {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in others.items():
            if value is not None:
                raise NotImplementedError(f"kvant: layers of latents with {name} are not supported")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type,
            kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim,
            v_head_dim, kv_b_proj,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self.kv_sharing_target_layer_name = None
        k_centre = self.begin(kv_cache_dtype)
        self._refuse()
        dtypes.note_latent(kv_lora_rank, qk_rope_head_dim)
        pair = dtypes.parse_latent(kv_cache_dtype, self.dtype)
        self.layer = Layer(
            pair,
            num_heads,
            1,
            qk_rope_head_dim,
            self.scale,
            k_centre="none" if pair.is_exact() else k_centre,
            keys="decoding",
            options=() if pair.is_exact() else tuple(versions.of_plans(self._config).items()),
            v_head_dim=kv_lora_rank,
            is_latent=True,
        )
        say_once(
            f"latent attention: latents of {kv_lora_rank} in {pair.v}, rotary keys of {qk_rope_head_dim} in {pair.k}, "
            f"{self.layer.block_bytes() // BLOCK_TOKENS} bytes a token and layer"
        )

    def _refuse(self) -> None:
        if self._config is None:
            return
        if not versions.option(self._config, "fresh_keys"):
            raise NotImplementedError(
                "kvant: fresh_keys = false is not supported with latent attention: vLLM gives prompts their own tokens "
                "as the model makes them; leave it out"
            )
        if versions.records_writes_alone(self._config):
            raise NotImplementedError(
                "kvant: CUDA graphs that record writes to the cache, and not attention, are not supported with latent "
                "attention: leave out use_inductor_graph_partition, splitting_ops and VLLM_USE_BREAKABLE_CUDAGRAPH, or "
                'give --compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
            )

    def reserve_workspace(self) -> None:
        """vLLM calls this where it measures memory. Older tokens of prompts may be copied once."""
        device = next(self.kv_b_proj.parameters()).device
        self.reserve(device)
        if device.type != "cpu" and self._config is not None:
            rows = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(self._config)
            _ = torch.empty(rows, self.kv_lora_rank + self.qk_rope_head_dim, dtype=self.dtype, device=device)

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale: bool = False
    ) -> None:
        """Encodes the latents and rotary keys of this step. slot_mapping: as in KvantImpl. vLLM warms up with slots of
        no request, too, before a step has begun."""
        if kv_cache.numel() == 0 or not versions.has_step():
            return
        slots = slot_mapping.flatten()
        rotary, latents = (x[: len(slots)].view(-1, 1, x.shape[-1]) for x in (k_pe, kv_c_normed))
        self.pages_on(kv_cache.device).write(pool(kv_cache), rotary, latents, slots, layer=self.number)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata: LatentMetadata, layer):
        """Requests that decode: queries and outputs are in the space of latents."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        for plan, rows in attn_metadata.step.runs(self.layer):
            plan.run(pool(kv_c_and_k_pe_cache), q[:rows], out=out[:rows], layer=self.number)
        return out, None

    def _compute_prefill_context(self, q, kv_c_and_k_pe_cache, attn_metadata: LatentMetadata, k_scale):
        """vLLM's, with latents and rotary keys that are read back from pages."""
        prefill = attn_metadata.prefill
        chunked, backend = prefill.chunked_context, prefill.prefill_backend
        output = output_lse = None
        for chunk, stored in zip(chunked.chunks, attn_metadata.context):
            rows = self._read_back(kv_c_and_k_pe_cache, stored, chunked.workspace)[: chunk.num_context_tokens]
            latents, rotary = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            dtype = versions.expansion_dtype(self.kv_b_proj)
            expanded = self.kv_b_proj(latents if dtype is None else latents.to(dtype))[0]
            expanded = expanded.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
            k_nope, v = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            found, lse = backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=self._concat_k_nope_k_pe(k_nope, rotary.unsqueeze(1)), v=v
            )
            if output is None:
                if len(chunked.chunks) == 1 and not chunked.empty_token_slices:
                    return found, lse
                output, output_lse = init_mla_context_partial(chunked, found, lse, num_tokens=q.shape[0])
            accumulate_mla_context_chunk(chunk, found, lse, output, output_lse)
        return output, output_lse

    def _read_back(self, kv_cache, stored: Stored, workspace: torch.Tensor) -> torch.Tensor:
        """Latents with their rotary keys [tokens or more, latent + rope]."""
        rows = workspace[: len(stored.blocks) * BLOCK_TOKENS]
        latents, rotary = rows.unsqueeze(1).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        self.pages_on(kv_cache.device).decode(pool(kv_cache), stored.blocks, rotary, latents)
        return rows if stored.rows is None else rows.index_select(0, stored.rows)
