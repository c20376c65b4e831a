"""The backend as vLLM sees it: its name, its parts, what it supports, and how large its pages are."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from kvant._tools import sizes_without_kernels

from . import connectors, dtypes, versions
from .layer import BLOCK_TOKENS
from .versions import (
    AttentionBackend,
    AttentionType,
    FullAttentionSpec,
    KVCacheLayout,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def __getattr__(name: str):
    """`Backend`, the class that vLLM asks for: of models with latent attention, or of all others."""
    if name != "Backend":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return LatentBackend if versions.has_latents(versions.configuration()) else KvantBackend


class KvantBackend(AttentionBackend):
    """Attention over pages in kvant's formats, in vLLM's memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    # forward stores keys and values, too: it knows whether the pass has metadata, whose builder began the step. vLLM's
    # call of its own has slots in warm-up runs without metadata as well, and is recorded in graphs of pieces whose
    # attention is not, with the number of requests that the warm-up had.
    forward_includes_kv_cache_update: bool = True
    example: ClassVar[str] = "kvant_tq6_tq4"

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the enum member that is ours, see versions.register_backend_class

    @staticmethod
    def get_impl_cls():
        from .impl import KvantImpl

        return KvantImpl

    @staticmethod
    def get_builder_cls():
        from .metadata import KvantMetadataBuilder

        return KvantMetadataBuilder

    # --- pages --------------------------------------------------------------------------------------------------------

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [BLOCK_TOKENS]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which the bytes of one block and head are contiguous; on a device heads follow one another, too. The
        second is for models whose layers have pages of several sizes, and for connectors."""
        layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
        return layouts if versions.is_cuda() else (*layouts, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC)

    @classmethod
    def customize_spec(cls, spec):
        """Sets the bytes of a token. The spec has the same mode for all our formats, so the name comes from the
        configuration or, where vLLM calls outside of one, from the layers that this process made."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode != KVQuantMode.CUSTOM:
            return spec
        cls._check_spec(spec)
        config = versions.configuration()
        name, k_centre = versions.cache_dtype(config), versions.option(config, "k_centre")
        if name not in dtypes.names():
            name, k_centre = dtypes.of_layers()
        if name not in dtypes.names():
            raise RuntimeError(
                "kvant: vLLM sizes pages before it has a configuration or a layer that name a cache dtype of kvant"
            )
        size = cls._token_bytes(spec, name, k_centre)
        reason = connectors.why_not(versions.connectors(config), spec.num_kv_heads, size)
        if reason is not None:
            raise NotImplementedError(f"kvant: {reason}")
        connectors.refuse_shared_folders(config)
        return replace(spec, state_content_bytes=size)

    @classmethod
    def _check_spec(cls, spec) -> None:
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise NotImplementedError(
                f"kvant: layers with a {type(spec).__name__} are not supported: attention over all keys and sliding "
                "windows are"
            )

    @classmethod
    def _token_bytes(cls, spec, name: str, k_centre: str) -> int:
        v_head_dim = dtypes.own_size(spec.head_size, spec.head_size_v)
        return dtypes.token_bytes(dtypes.names()[name], spec.head_size, k_centre, v_head_dim)

    # --- values of another size than keys -----------------------------------------------------------------------------

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """The size of values in the layer that vLLM makes next."""
        dtypes.note_head_size_v(head_size_v)

    @classmethod
    def is_supported_on_current_device(cls, head_size: int, head_size_v: int, has_sinks: bool) -> bool:
        """vLLM asks before it makes such a layer, and would take another backend if this were false."""
        largest, reason = dtypes.build()["largest_head_dim"], None
        if not (1 <= head_size <= largest and 1 <= head_size_v <= largest):
            reason = f"keys of {head_size} and values of {head_size_v} numbers: sizes of 1 to {largest} are supported"
        elif versions.is_cuda():
            reason = sizes_without_kernels(head_size, head_size_v)
        if reason is not None:
            raise NotImplementedError(f"kvant: {reason}")
        return True

    # --- what is supported --------------------------------------------------------------------------------------------

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in dtypes.EXACT or kv_cache_dtype in dtypes.names()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= dtypes.build()["largest_head_dim"]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or capability >= (8, 0)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # on a device the split of keys follows the batch

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ) -> str | None:
        """Refuses formats and sizes without kernels in this build. It may not start a driver: vLLM may still fork.
        vLLM itself has refused some of this in a few words; these reasons stand beside them."""
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            if versions.checkpoint_chose(kv_cache_dtype):
                return (
                    f"the checkpoint's quantization config asks for the cache dtype {kv_cache_dtype}, which is not "
                    f"kvant's: give --kv-cache-dtype {cls.example}, or another of kvant's, which replaces it"
                )
            return f"--kv-cache-dtype {kv_cache_dtype} is not kvant's: choose one such as {cls.example}"
        if not cls.supports_block_size(block_size):
            return (
                f"--block-size {block_size}: kvant's blocks have {BLOCK_TOKENS} tokens: leave out --block-size, or "
                f"give a multiple of {BLOCK_TOKENS}"
            )
        if not versions.is_cuda():
            return None
        device = dtypes.build()["device"]
        if device is None:
            return "this build of kvant has no CUDA kernels: install a wheel that has, or build one with ./dev wheel"
        return cls._without_kernels(device, head_size, kv_cache_dtype, dtype)

    @classmethod
    def _without_kernels(cls, device, head_size: int, kv_cache_dtype, dtype) -> str | None:
        pair = dtypes.parse(kv_cache_dtype, dtype)
        if str(pair) not in device["pairs"]:
            return f"this build of kvant has no CUDA kernels for {pair}: it has {', '.join(device['pairs'])}"
        if head_size not in device["head_dims"]:
            sizes = ", ".join(map(str, device["head_dims"]))
            return f"kvant has no CUDA kernels for head_size {head_size}: it has {sizes}"
        return None


class LatentBackend(KvantBackend):
    """Multi-head latent attention: pages of latents and rotary keys, which vLLM's common code for such models reads and
    writes (latent.py)."""

    forward_includes_kv_cache_update: bool = False
    example: ClassVar[str] = "kvant_tq4"

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls():
        from .latent import LatentImpl

        return LatentImpl

    @staticmethod
    def get_builder_cls():
        from .latent import LatentMetadataBuilder

        return LatentMetadataBuilder

    @classmethod
    def _check_spec(cls, spec) -> None:
        if type(spec) is not MLAAttentionSpec:
            raise NotImplementedError(
                f"kvant: layers with a {type(spec).__name__} are not supported in a model with latent attention: "
                "attention over all latents is"
            )

    @classmethod
    def _token_bytes(cls, spec, name: str, k_centre: str) -> int:
        sizes = dtypes.latent_of(spec.head_size) or versions.latent_sizes(versions.configuration())
        if sizes is None or sum(sizes) != spec.head_size:
            raise RuntimeError(
                f"kvant: vLLM sizes pages of {spec.head_size} numbers a token before it has a layer or a configuration "
                "that tell latents and rotary keys apart"
            )
        latent, rope = sizes
        return dtypes.latent_token_bytes(dtypes.parse_latent(name, spec.dtype), rope, k_centre, latent)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 < head_size <= 2 * dtypes.build()["largest_head_dim"]

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, **given) -> list[str]:
        """vLLM's reasons of a few words, and sentences for those that people will meet."""
        reasons = super().validate_configuration(**given)
        if given.get("use_dcp"):
            reasons.append(
                "kvant: --decode-context-parallel-size is not supported with latent attention: leave it out; "
                "--tensor-parallel-size and --data-parallel-size are supported"
            )
        if given.get("use_sparse"):
            reasons.append(
                "kvant: sparse attention (an indexer, as in DeepSeek V3.2) is not supported: serve this model without "
                "--attention-backend CUSTOM and a --kv-cache-dtype of kvant's"
            )
        if not given.get("use_mla", True):
            reasons.append(
                "kvant: this layer has no latents in a server whose model has them (a draft model?): give the draft "
                "model another attention_backend"
            )
        return reasons

    @classmethod
    def _without_kernels(cls, device, head_size: int, kv_cache_dtype, dtype) -> str | None:
        if dtype == torch.float32:
            return "vLLM's kernels for prompts of latent attention take 16 bits: choose --dtype bfloat16 or float16"
        if head_size in map(sum, device["latents"]):
            return None
        sizes = ", ".join(f"{latent} + {rope}" for latent, rope in device["latents"]) or "none"
        return f"kvant has no CUDA kernels for {head_size} numbers of a latent and a rotary key: it has {sizes}"
