"""KV connectors that cannot move kvant's pages, and blocks that outlive a server. Any other connector moves blocks as
bytes, or is unknown here."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from . import dtypes, versions

# LMCache 0.5 tells caches apart by their shapes: one kv head and 132 bytes a token of uint8 are the index plane of
# DeepSeek's sparse attention to it, whose bytes it orders in another way.
_LMCACHE, _INDEX_PLANE_BYTES = "LMCache", 132

# Their blocks end with the server. A MultiConnector has others, which are looked at themselves.
_OF_ONE_SERVER = ("OffloadingConnector", "SimpleCPUOffloadConnector", "HiSparseConnector", "MultiConnector")
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
# Servers compare backends, cache dtypes and the bytes of a block before they exchange any.
_COMPARES = "Nixl"
# Types of tiers whose folders vLLM names by model, cache dtype and layers, and the setting with the path before that.
_PATHS = {"fs": "root_dir", "obj": "prefix"}


def why_not(connectors: list[tuple[str, dict[str, Any]]], kv_heads: int, token_bytes: int) -> str | None:
    """Why pages of a layer cannot go through the connectors of a configuration; None if they can.

    connectors: names and their extra configurations. kv_heads: of one rank.
    """
    for name, extra in connectors:
        if name == "DecodeBenchConnector":
            return f"{name} fills pages with random numbers, which are no codes of kvant: leave it out"
        if name == "LMCacheConnectorV1" and extra.get("use_native"):
            return (
                f"{name} with use_native sizes its chunks from head_size, and kvant's pages have other sizes: use "
                "OffloadingConnector"
            )
        if name.startswith(_LMCACHE) and kv_heads == 1 and token_bytes == _INDEX_PLANE_BYTES:
            return (
                f"{name} takes pages of one kv head and {_INDEX_PLANE_BYTES} bytes a token for the index plane of "
                "another kernel: choose another --kv-cache-dtype or k_centre, a smaller tensor parallel size, or "
                "OffloadingConnector"
            )
    return None


def folder(vllm_config) -> str:
    """The name of a folder for blocks of servers like this one: what the bytes of a block depend on beside the model,
    the cache dtype and the layers; empty for the defaults."""
    parts, name = [], versions.cache_dtype(vllm_config)
    if name not in dtypes.names():  # vLLM's other backends store the same numbers in another order
        parts.append("exact")
    elif versions.option(vllm_config, "k_centre") == "none":
        parts.append("k_centre-none")
    if dtypes.PAGE_FORMAT != 1:
        parts.append(f"pages-{dtypes.PAGE_FORMAT}")
    skipped = versions.skipped_layers(vllm_config)
    if skipped:
        parts.append("-".join(["skip", *sorted(skipped)]))
    draft = versions.draft(vllm_config)
    if draft is not None and draft.cache_dtype != name:
        parts.append(f"draft-{draft.cache_dtype}")
    if name in dtypes.names() and (skipped or draft is not None and draft.cache_dtype not in dtypes.names()):
        parts.append(versions.model_dtype(vllm_config))  # that of the exact layers
    return "-".join(["kvant", *parts]) if parts else ""


def refuse_shared_folders(vllm_config) -> None:
    """Raises where blocks outlive this server under a name that servers with other bytes have, too: these would read
    them as theirs. Warns where the blocks are beyond what is known here."""
    named = folder(vllm_config)
    for name, extra in versions.connectors(vllm_config):
        spec = extra.get("spec_name") or ""  # of an OffloadingConnector: a class of vLLM's or of another package
        is_known = name in _OF_ONE_SERVER and (not spec or spec in _SPECS)
        if not is_known and not name.startswith(_COMPARES):
            _warn_once(f"{name} {spec}".rstrip(), str(versions.cache_dtype(vllm_config)))
        for tier in versions.tiers(extra):
            setting = _PATHS.get(tier.get("type"))
            path = "" if setting is None else str(tier.get(setting) or "")
            if not named or named in path.split("/"):
                continue
            reason = (
                f"kvant: the tier {tier.get('type')!r} of {name} keeps blocks beyond this server, by model, layers and "
                f"cache dtype. Their bytes depend on other settings, too ({named}), so that a server with other "
                f"settings would read them as its own"
            )
            if setting is None:
                raise NotImplementedError(f"{reason}: leave the tier out, or leave these settings at their defaults")
            wanted = f"{path.rstrip('/')}/{named}" if path else named
            raise NotImplementedError(f'{reason}: give the tier a path that names them, "{setting}": "{wanted}"')


@lru_cache(maxsize=None)
def _warn_once(connector: str, cache_dtype: str) -> None:
    logging.getLogger("vllm.kvant").warning(
        "%s may give blocks to other servers, or keep them for later ones. The bytes of a block depend on "
        "--kv-cache-dtype (here %s), on kvant's options, on exact layers and on kvant's version, which kvant cannot "
        "compare there: let only servers share blocks that have all of these in common", connector, cache_dtype,
    )  # fmt: skip
