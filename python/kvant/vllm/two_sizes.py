"""The backends of vLLM's models whose keys and values have different sizes, such as MiMo V2.

These models name FLASH_ATTN_DIFFKV or TRITON_ATTN_DIFFKV themselves, whatever --attention-backend says. The classes
here stand behind these names: kvant's where the server names kvant's backend or one of its cache dtypes, and vLLM's own
elsewhere.
"""

from __future__ import annotations

from . import dtypes, versions

# Names in this module, and vLLM's names of backends.
NAMES = {"FlashAttention": "FLASH_ATTN_DIFFKV", "Triton": "TRITON_ATTN_DIFFKV"}


def __getattr__(name: str):
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    config = versions.configuration()
    if versions.is_chosen(config) or versions.cache_dtype(config) in dtypes.names():
        from .backend import KvantBackend

        return KvantBackend
    return versions.own_backend(NAMES[name])
