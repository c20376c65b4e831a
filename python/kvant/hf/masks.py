"""Attention masks that are built only if something other than kvant reads them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import versions

_asked = threading.local()


def ask(cache: Any) -> None:
    """transformers reads the sizes of a mask from `cache`: the mask that this thread makes next is for this cache.

    transformers does not hand the cache to mask functions, but asks it for the sizes right before.
    """
    _asked.cache = weakref.ref(cache)


def _take_asked() -> Any:
    reference, _asked.cache = getattr(_asked, "cache", None), None
    return None if reference is None else reference()


class LazyMask(torch.Tensor):
    """A boolean mask [batch, 1, queries, keys] that says what it is: kind "causal", "sliding" (window) or "overlay".

    A tensor, because models slice masks and look at their shapes. Any other operation builds it.
    """

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], kind: str, window: int, queries: int | None = None):
        count = arguments["q_length"] if queries is None else queries
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (arguments["batch_size"], 1, count, arguments["kv_length"]),
            dtype=torch.bool,
            device=arguments.get("device", "cpu"),
        )
        self.arguments, self.kind, self.window, self.queries, self._dense = arguments, kind, window, queries, {}
        return self

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"LazyMask({self.kind!r}, {tuple(self.shape)})"

    @property
    def first_key(self) -> int:
        """Position of the first column, counted as Hugging Face does: padding is counted."""
        return self.arguments.get("kv_offset", 0)

    def sees_ahead(self) -> int:
        """Where the tokens end that earlier ones of the step see; 0: none does. The mask is built, and kept."""
        offset = int(self.arguments.get("q_offset", 0)) - self.first_key
        keys = self.dense().triu(offset + 1).flatten(0, 2).any(0).nonzero()
        return int(keys[-1]) + 1 + self.first_key if len(keys) else 0

    def moved(self, device: Any) -> dict[str, Any]:
        """The arguments that are on another device."""
        padding = self.arguments.get("attention_mask")
        return {"device": device, "attention_mask": padding if padding is None else padding.to(device)}

    def dense(self, may_skip: bool = False) -> torch.Tensor | None:
        """The mask itself, [batch, 1, queries, keys]. may_skip: None where sdpa's own causality does."""
        may_skip = may_skip and self.queries is None
        if may_skip not in self._dense:
            arguments = dict(self.arguments)
            if not may_skip:
                arguments["allow_is_causal_skip"] = arguments["allow_is_bidirectional_skip"] = False
            mask = versions.sdpa_mask(**arguments)
            if mask is not None:
                mask = mask.expand(arguments["batch_size"], -1, -1, -1)
                if self.queries is not None:
                    mask = mask[:, :, mask.shape[2] - self.queries :]
            self._dense[may_skip] = mask
        return self._dense[may_skip]

    def __getitem__(self, index: Any) -> torch.Tensor:
        everything = slice(None)
        if (
            isinstance(index, tuple)
            and len(index) == 4
            and index[0] == index[1] == index[3] == everything
            and isinstance(index[2], slice)
            and index[2].step in (None, 1)
            and len(range(*index[2].indices(self.shape[2]))) > 0
            and index[2].indices(self.shape[2])[1] == self.shape[2]
        ):
            return LazyMask(self.arguments, self.kind, self.window, len(range(*index[2].indices(self.shape[2]))))
        return self.dense()[index]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        if function is torch.ops.aten._to_copy.default and set(kwargs or {}) == {
            "device"
        }:  # a model over several devices
            mask = args[0]
            return LazyMask({**mask.arguments, **mask.moved(kwargs["device"])}, mask.kind, mask.window, mask.queries)
        args, kwargs = tree_map(_built, (args, kwargs or {}))
        return function(*args, **kwargs)


def _built(x: Any) -> Any:
    return x.dense() if isinstance(x, LazyMask) else x


def make(**arguments: Any) -> LazyMask:
    """The mask function that transformers calls for the attention implementation "kvant"."""
    kind, window = versions.mask_kind(arguments)
    cache = _take_asked()
    given = arguments.get("attention_mask")
    if given is not None and given.ndim != 2:
        raise ValueError(
            f"attention_mask has {given.ndim} dimensions, {list(given.shape)}: must be [batch, tokens], or "
            "[batch, heads, queries, keys] with heads 1 for all"
        )
    made = LazyMask(arguments, kind, window)
    if cache is None:
        return made
    if kind == "overlay" and made.shape[2] > 1:
        end = made.sees_ahead()
        if end:
            cache.conversation.saw_ahead(end)
    if not cache.note_padding(arguments.get("attention_mask"), arguments.get("q_offset", 0), arguments["q_length"]):
        made.kind, made.window = "overlay", 0
    return made
