"""Tensors of other libraries by DLPack, of version 1 (which tells read-only memory and copies) or before."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from functools import partial
from typing import Any, NamedTuple

from ._errors import InvalidArgument
from ._signals import attempt

_READ_ONLY, _COPIED = 1, 2
_CPU, _CUDA, _PINNED, _MANAGED = 1, 2, 3, 13
# Their arrays never change, and DLPack before version 1 cannot say so.
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


class _Device(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _Type(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


_TYPES = {
    (2, 32): "f32",
    (2, 16): "f16",
    (4, 16): "bf16",
    (6, 8): "bool",
    (1, 8): "uint8",
    (0, 32): "int32",
    (0, 64): "int64",
}


class Taken(NamedTuple):
    data: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # in elements; None: contiguous
    device: tuple[str, int]
    read_only: bool
    capsule: Any


def _export(x: Any, name: str, stream: int) -> Any:
    """x's capsule. On a device the producer makes `stream` wait for what it has enqueued."""
    where, error = attempt(x.__dlpack_device__) if hasattr(x, "__dlpack_device__") else ((_CPU, 0), None)
    if error is None:
        options = {"stream": stream or 1} if where[0] in (_CUDA, _MANAGED) else {}  # 1: the legacy default stream
        capsule, error = attempt(partial(x.__dlpack__, max_version=(1, 0), **options))
        if isinstance(error, TypeError):  # a library that knows DLPack before version 1 only
            capsule, error = attempt(partial(x.__dlpack__, **options))
    if error is not None:
        raise InvalidArgument(f"{name} is a {type(x).__name__} that gives no DLPack tensor: {error}") from error
    return capsule


def take(x: Any, name: str, stream: int) -> Taken:
    """The facts of an object with __dlpack__. The capsule is never marked as used, so that its own destructor frees
    it."""
    capsule = _export(x, name, stream)
    is_valid, get = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.restype, is_valid.argtypes = c_int32, [py_object, c_char_p]
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    read_only = type(x).__module__.split(".")[0] in _IMMUTABLE
    if is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(get(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise InvalidArgument(f"{name} has a DLPack tensor of version {managed.major}: kvant reads version 1")
        t, read_only = managed.tensor, read_only or bool(managed.flags & (_READ_ONLY | _COPIED))
    elif is_valid(capsule, b"dltensor"):
        t = _Tensor.from_address(get(capsule, b"dltensor"))  # DLManagedTensor begins with it
    else:
        raise InvalidArgument(f"{name} is a {type(x).__name__} whose __dlpack__ gives no DLPack capsule")
    dtype = _TYPES.get((t.dtype.code, t.dtype.bits)) if t.dtype.lanes == 1 else None
    if dtype is None:
        dtype = str(getattr(x, "dtype", f"DLPack code {t.dtype.code}, {t.dtype.bits} bits, {t.dtype.lanes} lanes"))
    if t.device.type not in (_CPU, _CUDA, _PINNED, _MANAGED):
        raise InvalidArgument(f"{name} is on a device of DLPack type {t.device.type}: kvant takes CPU and CUDA memory")
    return Taken(
        (t.data or 0) + t.byte_offset,
        dtype,
        tuple(t.shape[: t.ndim]),
        tuple(t.strides[: t.ndim]) if t.strides else None,
        ("cuda", t.device.id) if t.device.type in (_CUDA, _MANAGED) else ("cpu", 0),
        read_only,
        capsule,
    )
