"""KV connectors that cannot move kvant's pages. Any other one moves blocks as bytes, or is unknown here."""

from __future__ import annotations

from typing import Any

# LMCache 0.5 tells caches apart by their shapes: one kv head and 132 bytes a token of uint8 are the index plane of
# DeepSeek's sparse attention to it, whose bytes it orders in another way.
_LMCACHE, _INDEX_PLANE_BYTES = "LMCache", 132


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
