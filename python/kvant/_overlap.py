"""Outputs whose elements share memory, with one another or with a tensor that is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._errors import InvalidArgument

_MOST_WORK = 10000  # of numpy's search for a shared byte; beyond that tensors count as overlapping


class _Bytes:
    """A tensor as numpy takes it, in bytes. numpy only does arithmetic on the address."""

    def __init__(self, d: Any):
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{d.size}",
            "data": (d.data, True),
            "shape": d.shape,
            "strides": tuple(s * d.size for s in d.stride),
        }


def _shared(a: Any, b: Any) -> bool:
    if a.high <= b.low or b.high <= a.low or a.low == a.high or b.low == b.high:
        return False
    import numpy as np

    try:
        return bool(np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)), max_work=_MOST_WORK))
    except (getattr(np, "exceptions", np).TooHardError, ValueError, OverflowError):
        return True


def check_own_memory(d: Any, name: str) -> None:
    """Refuses an output of which two elements may be one."""
    # A step must lead beyond all that the dimensions within it reach. Mostly the last dimension is the innermost one.
    in_order = zip(d.stride[::-1], d.shape[::-1])
    if d.low != d.high and not (_nested(in_order) or _nested(sorted(zip(map(abs, d.stride), d.shape)))):
        raise InvalidArgument(
            f"{name} has shape {list(d.shape)} and strides {list(d.stride)}: its elements overlap, and an output's "
            "must not; give a tensor of its own memory, not an expanded one"
        )


def _nested(dimensions: Iterable[tuple[int, int]]) -> bool:
    reach = 0
    for stride, n in dimensions:
        if n > 1:
            if stride <= reach:
                return False
            reach += stride * (n - 1)
    return True


def check_apart(outputs: list[tuple[str, Any]], inputs: list[tuple[str, Any]]) -> None:
    """Refuses outputs that share memory with one another or with an input. Pairs of a name and a described tensor."""
    for i, (name, out) in enumerate(outputs):
        for other, d in outputs[:i] + inputs:
            if _shared(out, d):
                raise InvalidArgument(f"{name} shares memory with {other}: an output must have memory of its own")
