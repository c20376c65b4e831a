"""Between positions as Hugging Face counts them, padding included, and the rows that kvant stores, which have none.

stored: which positions of each row kvant has, [rows, length] bool; None: all.
"""

from __future__ import annotations

from typing import Any

import torch

from .groups import Group
from .proxies import KVProxy


def decode(stored: torch.Tensor | None, length: int, group: Group, slot: int, proxy: KVProxy) -> torch.Tensor:
    """Keys or values [rows, kv_heads, tokens, head_dim], contiguous; 0 where padding is."""
    batch, heads, tokens, dim = proxy.shape
    if stored is None:
        out = torch.empty((batch, heads, tokens, dim), dtype=proxy.dtype, device=proxy.device)
        group.decode(slot, proxy.which, [n - tokens for n in group.rows], out, batch_stride=True)
        return out
    row, position = stored[:, length - tokens :].nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=batch).tolist()
    packed = torch.empty((len(row), heads, dim), dtype=proxy.dtype, device=proxy.device)
    group.decode(slot, proxy.which, [n - c for n, c in zip(group.rows, counts)], packed, batch_stride=False)
    out = torch.zeros((batch, tokens, heads, dim), dtype=proxy.dtype, device=proxy.device)
    out[row, position] = packed
    return out.transpose(1, 2).contiguous()


def place_mask(
    stored: torch.Tensor | None, length: int, group: Group, mask: torch.Tensor, queries: int
) -> tuple[torch.Tensor, int, int]:
    """A mask over the newest keys as transformers counts them, as (mask over stored tokens, its first key, a
    window)."""
    keys, longest = mask.shape[3], max(group.rows)
    # A plan without a window has its cache's: a window of all keys leaves everything to the mask.
    all_keys = longest if group.window else 0
    if stored is None:  # keys before the first one are hidden, whatever a window has released of them
        return mask, length - keys, all_keys
    step, batch = group.step, len(group.rows)
    mask = mask.expand(batch, -1, queries, -1)
    # Each stored token's column is its position in its row; padding goes to one more column, which is cut off.
    kept = stored[:, length - keys :]
    column = (stored.cumsum(1) - 1)[:, length - keys :]
    column = torch.where(kept, column, longest)[:, None, None, :].expand(-1, mask.shape[1], queries, -1)
    hidden = False if mask.dtype == torch.bool else float("-inf")
    placed = torch.full((*mask.shape[:3], longest + 1), hidden, dtype=mask.dtype, device=mask.device)
    placed.scatter_(3, column, mask)
    placed = placed[..., :longest]
    rows = torch.tensor(group.rows, device=mask.device)
    real = None if step.real is None else step.real[:, step.tokens - queries :]
    if real is not None:  # a plan's rows are the live ones, and their queries the real ones, packed
        order = (~real).long().argsort(dim=1, stable=True)
        placed = placed.gather(2, order[:, None, :, None].expand(placed.shape))
    window = group.window if longest > group.window else all_keys
    if group.window and longest > group.window:
        _check_window(placed, rows, queries if real is None else real.sum(1), window)
    if step.live is not None:
        placed = placed[torch.tensor(step.live, device=placed.device)]
    return placed, 0, window


def _check_window(placed: torch.Tensor, rows: torch.Tensor, queries: Any, window: int) -> None:
    """Refuses a mask that shows what a window may have released: rows differ in length, so that none begins at one
    key."""
    query = torch.arange(placed.shape[2], device=placed.device)
    position = (rows - queries)[:, None] + query  # [batch, queries]
    oldest = (position - window + 1)[:, None, :, None]
    visible = placed if placed.dtype == torch.bool else placed > torch.finfo(placed.dtype).min
    real = (position < rows[:, None])[:, None, :, None]
    if bool((visible & real & (torch.arange(placed.shape[3], device=placed.device) < oldest)).any()):
        raise RuntimeError(
            f"attention_mask shows keys more than {window} tokens back in a padded batch, of layers with a window of "
            f"{window}: give rows of one length, or one row at a time"
        )
