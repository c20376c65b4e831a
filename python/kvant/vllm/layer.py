"""A layer as kvant sees it, and the pages that layers of one geometry share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

import kvant

from .dtypes import Pair


class Layer(NamedTuple):
    """What a plan depends on. Layers that are equal share their plans."""

    pair: Pair
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # the last so many keys, the query's own included; 0: all
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None

    def pages(self, device: torch.device):
        return _pages(self.pair, self.kv_heads, self.head_dim, _name(device))

    def plan(self, device: torch.device, *, causal: bool = True, **capacity):
        return self.pages(device).plan(
            self.q_heads,
            scale=self.scale,
            causal=causal,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            **capacity,
        )


@lru_cache(maxsize=None)
def _pages(pair: Pair, kv_heads: int, head_dim: int, device: str):
    return kvant.Pages(kv_heads=kv_heads, head_dim=head_dim, k=pair.k, v=pair.v, device=device)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device.type}:{torch.cuda.current_device() if device.index is None else device.index}"


def pool(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's [blocks, kv_heads, tokens, bytes of a token] as kvant's [blocks, kv_heads, bytes of a block], a view.

    Its storage may hold other layers and be strided; one block of one head is contiguous in every layout that the
    backend supports.
    """
    data = kv_cache if kv_cache.dtype == torch.uint8 else kv_cache.view(torch.uint8)
    blocks, heads, tokens, content = data.shape
    return data.view(blocks, heads, tokens * content)
