"""The layers of a KvantCache: each is a slot of a group."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from . import placing, versions
from .groups import Group, Step
from .proxies import KVProxy, StoredTokens


class LayersCache(Protocol):
    """The cache, as its layers know it: see KvantCache."""

    stored: torch.Tensor | None
    length: int

    def attach(self, layer: KvantLayer, keys: torch.Tensor, values: torch.Tensor) -> Any: ...
    def begin(self, group: Group, batch: int, tokens: int) -> None: ...
    def prefills_exactly(self, group: Group) -> bool: ...


class Family:
    """Layers that share a kvant cache: those whose configuration says the same geometry."""

    def __init__(self, members: list[int], geometry: versions.Geometry | None, window: int):
        self.members, self.geometry, self.window = members, geometry, window
        self.group: Group | None = None
        self.reason: str | None = None  # why there can be no group


class KvantLayer(versions.CacheLayerMixin):
    """One layer: a slot of its group."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: LayersCache, index: int, family: Family, original: Any):
        # The base class would set keys, values and is_initialized, which are properties here.
        # Weak: a cycle would keep the pages until Python's collector comes by.
        self._owner = weakref.ref(owner)
        self.index, self.family, self.window = index, family, family.window
        window = family.window
        self.original = original  # transformers' own layer, empty, in case this one must be left to it
        self.is_sliding = window > 0
        if window:
            self.sliding_window = window
        self.group: Group | None = None
        self.slot = 0
        self.length = 0

    def __repr__(self) -> str:
        return f"KvantLayer({self.index}{f', window {self.window}' if self.window else ''})"

    @property
    def owner(self) -> LayersCache:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(f"the cache of layer {self.index} is gone: keep the cache, not its layers")
        return owner

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds tokens. Models ask for it to tell a first forward pass from later ones."""
        return self.length > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys that transformers' layer would hold, decoded when they are read: None before the first tokens."""
        return self._stored(0)

    @keys.setter
    def keys(self, x: Any) -> None:
        self._refuse_assignment("keys")

    @property
    def values(self) -> torch.Tensor | None:
        return self._stored(1)

    @values.setter
    def values(self, x: Any) -> None:
        self._refuse_assignment("values")

    def _stored(self, which: int) -> StoredTokens | None:
        if not self.length:
            return None
        group = self.group
        if group.step is None:  # the cache was changed after its last step: what is read now is true until the next
            group.step = Step(0, 0, None, None)
        tokens = min(self.length, self.window - 1) if self.window else self.length
        dim = (group.cache.head_dim, group.cache.v_head_dim)[which]
        shape = (len(group.rows), group.cache.kv_heads, tokens, dim)
        return StoredTokens(shape, self.dtype, self.device, self, group.step, which)

    def _refuse_assignment(self, name: str) -> None:
        raise RuntimeError(
            f"cache.layers[{self.index}].{name} cannot be assigned: kvant stores them packed. Use crop, reset, "
            "reorder_cache or batch_select_indices of the cache, or leave the layer to transformers with "
            f"skip_layers=[{self.index}]"
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first update finds the layer's group."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Stores keys and values of new tokens; returns what stands for all of the layer's."""
        if key_states.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("kvant has no backward pass: call the model under torch.no_grad(), or without a cache")
        owner = self.owner
        if self.group is None:
            left = owner.attach(self, key_states, value_states)
            if left is not None:
                return left.update(key_states, value_states, *args, **kwargs)
        group = self.group
        batch, heads, tokens, _ = key_states.shape
        past = self.length
        if group.length == past:
            owner.begin(group, batch, tokens)
        elif group.length != past + tokens:
            raise RuntimeError(
                f"layer {self.index} has {past} tokens and gets {tokens}, where others have {group.length}: "
                "a forward pass ended before its last layer; "
                "call cache.reset(), or crop the cache to what all layers hold"
            )
        group.write(self.slot, key_states, value_states)
        self.length = past + tokens
        window = self.window
        shape = (batch, heads, (min(past, window - 1) if window else past) + tokens)
        exact = owner.prefills_exactly(group)
        first = exact and past == 0
        own = exact and group.takes_own(tokens, first)
        step = group.step
        return tuple(
            KVProxy(
                (*shape, x.shape[3]), x.dtype, x.device, self, step, which, x if first else None, x if own else None
            )
            for which, x in enumerate((key_states, value_states))
        )

    def decode(self, proxy: KVProxy) -> torch.Tensor:
        """The numbers that a proxy stands for."""
        if proxy.step is not self.group.step:
            raise RuntimeError(f"keys or values of layer {self.index} are used after the step they belong to")
        if self.length != self.group.length:
            raise RuntimeError(f"keys or values of layer {self.index} are read before its part of a forward pass")
        owner = self.owner
        return placing.decode(owner.stored, owner.length, self.group, self.slot, proxy)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = max(self.length - self.window + 1, 0) if self.window else 0
        return self.length + int(query_length) - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.window or -1

    def _whole(self, name: str):
        raise RuntimeError(f"call {name} of the cache, not of a layer: layers of a kvant cache share sequences")

    def reset(self) -> None:
        self._whole("reset()")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._whole("reorder_cache()")

    def crop(self, tokens_to_remove: int) -> None:
        self._whole("crop()")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._whole("batch_repeat_interleave()")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._whole("batch_select_indices()")

    def offload(self) -> None:
        raise RuntimeError("a kvant cache is not offloaded: its pages stay where they are")

    prefetch = offload
