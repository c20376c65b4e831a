"""Proxies stand for the keys and values of a layer between a cache's update and attention: no numbers, until asked."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_detach = torch.ops.aten.detach.default
_copy = torch.ops.aten._to_copy.default


class KVProxy(torch.Tensor):
    """The keys or values [batch, kv_heads, tokens, head_dim] of one layer, packed in a kvant cache.

    kvant's attention knows it and reads the packed bytes. Any other operation decodes it: right, but slow, so that the
    cache warns once, or raises if it is strict.
    """

    @staticmethod
    def __new__(cls, shape, dtype, device, layer, step, which, fresh=None, own=None):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.layer = layer  # KvantLayer
        self.step = step  # of the cache when this was made; later steps make it stale
        self.which = which  # 0: keys, 1: values
        self.fresh = fresh  # the tensor itself, if it is all that the layer holds
        self.own = own  # what the step brought, if attention takes it as it is
        return self

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"KVProxy({'KV'[self.which]} of layer {self.layer.index}, {tuple(self.shape)})"

    def dense(self) -> torch.Tensor:
        """The numbers: as attention computes with them, contiguous, zeros where padding is."""
        if self.fresh is not None:
            return self.fresh
        return self.layer.decode(self)

    def __setitem__(self, index: Any, x: Any) -> None:
        self._refuse_writing("assigning to a part of them")

    def _refuse_writing(self, operation: str) -> None:
        raise RuntimeError(
            f"{operation} would change a decoded copy, not the cache: {('keys', 'values')[self.which]} of layer "
            f"{self.layer.index} are packed; pass skip_layers=[{self.layer.index}] to leave the layer to transformers"
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for i, argument in enumerate(function._schema.arguments):
                x = args[i] if i < len(args) else kwargs.get(argument.name)
                if argument.is_write and isinstance(x, KVProxy):
                    x._refuse_writing(str(function))
        if function is _detach:
            return args[0]
        if function is _copy and set(kwargs) <= {"device", "dtype"} and kwargs.get("dtype") in (None, args[0].dtype):
            if kwargs.get("device") in (None, args[0].device):
                return args[0]
        first: list[KVProxy] = []
        tree_map(lambda x: first.append(x) if isinstance(x, KVProxy) else None, (args, kwargs))
        if first[0].fresh is None and type(first[0]) is KVProxy:
            first[0].layer.owner.warn_decoding(str(function))
        args, kwargs = tree_map(_decoded, (args, kwargs))
        return function(*args, **kwargs)


class StoredTokens(KVProxy):
    """`keys` or `values` of a cache's layer: attention takes them as any tensor, decoded."""

    def dense(self) -> torch.Tensor:
        self.layer.owner.warn_decoding(f"cache.layers[{self.layer.index}].{('keys', 'values')[self.which]}")
        return super().dense()


def _decoded(x: Any) -> Any:
    return x.dense() if isinstance(x, KVProxy) else x
