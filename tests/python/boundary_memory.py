"""Guarded memory and tensors in it, for boundary_fuzz.py: a byte too far, before or behind, ends the process."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvant

_PAGE = mmap.PAGESIZE
_NONE, _READ = 0, mmap.PROT_READ
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _protect(address: int, size: int, how: int) -> None:
    if _libc.mprotect(address, size, how) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class Memory:
    """`size` bytes between pages that nobody may touch: they begin right behind one, or end right before the other."""

    def __init__(self, size: int, at_end: bool):
        size = max(size, 1)
        pages = -(-size // _PAGE)
        self.map = mmap.mmap(-1, (pages + 2) * _PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.begin, self.pages = self.address + _PAGE, pages
        _protect(self.address, _PAGE, _NONE)
        _protect(self.begin + pages * _PAGE, _PAGE, _NONE)
        offset = pages * _PAGE - size if at_end else 0
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self.begin + offset), np.uint8)
        self.bytes.flags.writeable = True

    def freeze(self) -> None:
        """Writes end the process from now on."""
        _protect(self.begin, self.pages * _PAGE, _READ)


@dataclass
class Made:
    """An argument as it is given, and the numbers that numpy sees in it."""

    given: Any
    numbers: Any  # float64, of the shape that was wanted; None: the call must be refused
    may_refuse: bool = False
    memory: Any = None
    view: Any = None  # of the memory: where the numbers are, as an array of the element's bits

    def before(self) -> None:
        self.snapshot = None if self.memory is None else self.memory.bytes.copy()

    def untouched(self, written: bool) -> bool:
        """Whether all memory is as it was, but for the elements themselves if the call wrote them."""
        if self.memory is None:
            return True
        now = self.memory.bytes.copy()
        if written:
            elements = np.zeros(len(now), bool)
            index = np.arange(len(now)).astype(np.int64)
            at = self.view.__array_interface__["data"][0] - self.memory.bytes.__array_interface__["data"][0]
            offsets = np.zeros((), np.int64)
            for n, s in zip(self.view.shape, self.view.strides):
                offsets = offsets[..., None] + np.arange(n) * s
            for byte in range(self.view.itemsize):
                elements[index[(offsets + at + byte).ravel()]] = True
            now[elements] = self.snapshot[elements]
        return bool((now == self.snapshot).all())


class OnlyDlpack:
    """An array for those who know DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        self.options = options
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldDlpack(OnlyDlpack):
    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _lay_out(rng, shape: tuple[int, ...], size: int, kind: str):
    """(memory, byte offset, strides) of a tensor of `shape` with elements of `size` bytes."""
    n = len(shape)
    if n == 0:
        kind = "contiguous"
    order, gaps, signs = list(range(n)), [0] * n, [1] * n
    if kind == "heads first" and n >= 3:
        order[-3], order[-2] = order[-2], order[-3]
    elif kind == "permuted" and n >= 2:
        order[:-1] = rng.permutation(n - 1).tolist()
    elif kind == "apart":
        gaps[rng.integers(0, n)] = int(rng.integers(1, 70))
    elif kind == "backwards":
        for i in range(max(1, n - 1)):
            signs[i] = int(rng.choice([-1, 1]))
    repeated = set()
    if kind == "repeated":
        repeated = {i for i in range(n) if rng.random() < 0.5} or {0}
    strides, at = [0] * n, size
    step = at * (2 if kind == "every second" else 1)
    for i in reversed(order):
        if i in repeated:
            continue
        strides[i] = step * signs[i] * (-1 if kind == "reversed" and i == n - 1 else 1)
        step *= shape[i]
        step += gaps[i] * size
    low = sum(min(0, s * (m - 1)) for s, m in zip(strides, shape) if m)
    high = sum(max(0, s * (m - 1)) for s, m in zip(strides, shape) if m) + size
    return Memory(high - low, bool(rng.random() < 0.7)), -low, tuple(strides)


LAYOUTS = ["contiguous"] * 4 + ["heads first", "permuted", "apart", "backwards"]
ODD_LAYOUTS = ["repeated", "every second", "reversed"]
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "bool": np.bool_, "int32": np.int32}


def make(rng, numbers: np.ndarray, dtype: str, layout: str, owner: str, *, frozen: bool = False) -> Made:
    """numbers in guarded memory. owner: "numpy", "torch", "dlpack" or "old dlpack"."""
    element = np.dtype(DTYPES[dtype])
    memory, offset, strides = _lay_out(rng, numbers.shape, element.itemsize, layout)
    view = np.ndarray(numbers.shape, element, memory.bytes, offset, strides)
    bits = to_bf16(numbers) if dtype == "bf16" else numbers.astype(element)
    view[...] = bits
    seen = from_bf16(view.copy()) if dtype == "bf16" else view.astype(np.float64)
    given: Any = view
    if frozen:
        given = view.view()
        given.flags.writeable = False
        memory.freeze()
    if owner == "torch" and not frozen and all(s >= 0 for s in strides):
        import torch

        base = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "bool": torch.bool,
                 "int32": torch.int32}  # fmt: skip
        flat = base.view(types[dtype]) if len(memory.bytes) % element.itemsize == 0 else None
        if flat is not None:
            given = torch.as_strided(
                flat, numbers.shape, [s // element.itemsize for s in strides], offset // element.itemsize
            )
    elif dtype == "bf16":
        given = kvant.bf16(given)
    elif owner == "dlpack":
        given = OnlyDlpack(given)
    elif owner == "old dlpack" and not frozen:
        given = OldDlpack(given)
    return Made(given, seen, layout in ODD_LAYOUTS, memory, view)
