"""Tensors of any library as kvant_tensor: a pointer, a dtype, a shape and strides. Nothing is copied.

Taken in this order: torch tensors (by data_ptr), numpy arrays (by __array_interface__), arrays of CuPy and Numba (by
__cuda_array_interface__), and whatever else has __dlpack__ (JAX, TensorFlow, ...). No such library is imported here.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from dataclasses import dataclass
from typing import Any

from . import _c
from ._errors import InvalidArgument

CPU = ("cpu", 0)


@dataclass
class Described:
    """The facts about a tensor that kvant needs. `owner` keeps the memory alive."""

    data: int
    dtype: int  # of the C interface
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    device: tuple[str, int]  # ("cpu", 0) or ("cuda", index)
    owner: Any


class Bf16Array:
    """A numpy array of uint16 whose bits are bfloat16 numbers: numpy itself has no such dtype. Made by kvant.bf16()."""

    def __init__(self, bits):
        self.bits = bits

    @property
    def shape(self):
        return self.bits.shape


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


_torch_dtypes: dict = {}


def torch_dtype(dtype) -> int | None:
    """The number of a torch dtype, None if kvant has no such dtype."""
    if not _torch_dtypes:
        torch = sys.modules["torch"]
        _torch_dtypes.update(
            {torch.float32: _c.F32, torch.float16: _c.F16, torch.bfloat16: _c.BF16, torch.bool: _c.BOOL}
        )
    return _torch_dtypes.get(dtype)


_NUMPY_DTYPES = {"<f4": _c.F32, "<f2": _c.F16, "|b1": _c.BOOL}


def _refuse_dtype(name: str, dtype: Any):
    hint = "; mark raw bfloat16 bits with kvant.bf16(array)" if str(dtype) in ("uint16", "<u2") else ""
    raise InvalidArgument(f"{name} has dtype {dtype}: kvant takes float32, float16, bfloat16, and bool for masks{hint}")


def contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    """In elements, of a tensor whose interface names none."""
    stride, at = [], 1
    for n in reversed(shape):
        stride.append(at)
        at *= n
    return stride[::-1]


def _of_interface(x: Any, interface: dict, device: tuple[str, int], name: str, dtype: int | None = None) -> Described:
    typestr = interface["typestr"]
    if dtype is None:
        dtype = _NUMPY_DTYPES.get(typestr)
    if dtype is None and str(getattr(x, "dtype", "")) == "bfloat16":  # of the package ml_dtypes
        dtype = _c.BF16
    if dtype is None:
        _refuse_dtype(name, getattr(x, "dtype", typestr))
    size = _c.DTYPE_SIZES[dtype]
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        stride = contiguous_strides(shape)
    else:
        if any(s % size for s in strides):
            raise InvalidArgument(
                f"{name} has strides of {strides} bytes: they must be multiples of {size}, its element size"
            )
        stride = [s // size for s in strides]
    return Described(interface["data"][0], dtype, shape, tuple(stride), device, x)


class _DlDevice(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _DlType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _DlTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _DlDevice),
        ("ndim", c_int32),
        ("dtype", _DlType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_DL_TYPES = {(2, 32): _c.F32, (2, 16): _c.F16, (4, 16): _c.BF16, (6, 8): _c.BOOL}


def _of_dlpack(x: Any, name: str) -> Described:
    capsule = x.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    # DLManagedTensor begins with its DLTensor. The capsule is never marked as used, so that its own destructor frees
    # it.
    t = _DlTensor.from_address(get(capsule, b"dltensor"))
    dtype = _DL_TYPES.get((t.dtype.code, t.dtype.bits)) if t.dtype.lanes == 1 else None
    if dtype is None:
        _refuse_dtype(name, getattr(x, "dtype", f"DLPack code {t.dtype.code}, {t.dtype.bits} bits"))
    if t.device.type not in (1, 2, 3, 13):  # CPU, CUDA, pinned, managed
        raise InvalidArgument(f"{name} is on a device of DLPack type {t.device.type}: kvant takes CPU and CUDA memory")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        stride = tuple(t.strides[i] for i in range(t.ndim))
    else:
        stride, at = (), 1
        for n in reversed(shape):
            stride, at = (at, *stride), at * n
    device = ("cuda", t.device.id) if t.device.type in (2, 13) else CPU
    return Described((t.data or 0) + t.byte_offset, dtype, shape, stride, device, (x, capsule))


def describe(x: Any, name: str) -> Described:
    """Pointer, dtype, shape, strides and device of a tensor of any library."""
    if is_torch(x):
        dtype = torch_dtype(x.dtype)
        if dtype is None:
            _refuse_dtype(name, x.dtype)
        if x.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise InvalidArgument(
                f"{name} requires a gradient: kvant has no backward pass; use torch.no_grad() or .detach()"
            )
        device = CPU if x.device.type == "cpu" else (x.device.type, x.device.index or 0)
        return Described(x.data_ptr(), dtype, tuple(x.shape), x.stride(), device, x)
    if isinstance(x, Bf16Array):
        return _of_interface(x.bits, x.bits.__array_interface__, CPU, name, _c.BF16)
    interface = getattr(x, "__array_interface__", None)
    if interface is not None:
        return _of_interface(x, interface, CPU, name)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        index = int(getattr(getattr(x, "device", 0), "id", 0))  # CuPy says which; Numba's arrays are on the current one
        return _of_interface(x, interface, ("cuda", index), name)
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(x, name)
    raise InvalidArgument(
        f"{name} is a {type(x).__name__}: kvant takes numpy arrays, torch tensors, and anything with DLPack"
    )


def tensor(x: Any, name: str, device: tuple[str, int], sequences: int, mutable: bool = False):
    """x as a C struct, and what keeps its memory alive.

    x: [tokens, heads, head_dim], the rows of the call's sequences one after another, or [batch, tokens, heads,
        head_dim], a row of the batch for each of the call's `sequences`. Any strides whose last is 1.
    """
    d = describe(x, name)
    if d.device != device:
        raise InvalidArgument(f"{name} is on {d.device[0]}:{d.device[1]}, but the cache is on {device[0]}:{device[1]}")
    return fill(_c.MutableTensor() if mutable else _c.Tensor(), d, name, sequences), d


def fill(t, d: Described, name: str, sequences: int):
    """Writes a described tensor into a C struct. The struct says where the rows of each sequence begin, and not for how
    many sequences there is memory: that is checked here."""
    t.data, t.dtype = d.data, d.dtype
    if len(d.shape) == 3:
        t.shape[:], t.stride[:], t.batch_stride = d.shape, d.stride, 0
    elif len(d.shape) == 4:
        batch, rows = d.shape[:2]
        if batch != sequences:
            raise InvalidArgument(
                f"{name} has shape {list(d.shape)}, a batch of {batch}: must be {sequences}, the sequences of the call "
                "([batch, tokens, heads, head_dim]); rows that lie one after another are [tokens, heads, head_dim]"
            )
        t.shape[:], t.stride[:], t.batch_stride = d.shape[1:], d.stride[1:], 0
        if rows == 1:
            t.shape[0], t.stride[0] = batch, d.stride[0]
        elif batch > 1:
            t.batch_stride = d.stride[0]
            if t.batch_stride == 0:  # to the library: one row after another
                raise InvalidArgument(
                    f"{name} has shape {list(d.shape)} and strides {list(d.stride)}: one row of the batch is repeated "
                    "for all sequences; copy the tensor"
                )
    else:
        raise InvalidArgument(
            f"{name} has shape {list(d.shape)}: must be [tokens, heads, head_dim] or [batch, tokens, heads, head_dim]"
        )
    if d.shape[-1] == 1:
        t.stride[2] = 1
    elif d.shape[-1] > 1 and not any(t.stride):  # to the library: contiguous
        raise InvalidArgument(
            f"{name} has strides of 0, one number for all: the numbers of a vector must lie side by side; copy the "
            "tensor"
        )
    return t


def mask(x: Any, first_key: int, device: tuple[str, int]):
    """A mask tensor [batch, q_heads, queries, keys] (dimensions of 1 broadcast; fewer dimensions are filled from the
    left)."""
    d = describe(x, "mask")
    if d.device != device:
        raise InvalidArgument(f"mask is on {d.device[0]}:{d.device[1]}, but the cache is on {device[0]}:{device[1]}")
    if len(d.shape) > 4:
        raise InvalidArgument(f"mask has shape {list(d.shape)}: must be [batch, q_heads, queries, keys]")
    shape = (1,) * (4 - len(d.shape)) + d.shape
    stride = (0,) * (4 - len(d.shape)) + d.stride
    m = _c.MaskTensor()
    m.data, m.dtype, m.first_key = d.data, d.dtype, first_key
    # An expanded dimension has a stride of 0 and a size: the same value for all, which a size of 1 says too.
    shape = tuple(1 if s == 0 else n for n, s in zip(shape, stride))
    m.shape[:] = shape
    strides = (ctypes.c_int64 * 4)(*stride)
    m.stride = strides
    return m, (d, strides)


def empty_like(x: Any, shape: tuple[int, ...], dtype: int | None = None):
    """A new tensor of x's library, device and (unless dtype says otherwise) dtype."""
    if is_torch(x):
        torch = sys.modules["torch"]
        types = {_c.F32: torch.float32, _c.F16: torch.float16, _c.BF16: torch.bfloat16}
        return torch.empty(shape, dtype=x.dtype if dtype is None else types[dtype], device=x.device)
    import numpy as np

    if isinstance(x, Bf16Array) and dtype in (None, _c.BF16):
        return Bf16Array(np.empty(shape, np.uint16))
    if hasattr(x, "__cuda_array_interface__"):
        cupy = sys.modules.get("cupy")
        if cupy is None:
            raise InvalidArgument("out is not given: kvant cannot allocate memory of this library; pass out=")
        return cupy.empty(shape, dtype=x.dtype if dtype is None else np.float32)
    if dtype is None:
        return np.empty(shape, getattr(x, "dtype", np.float32) if isinstance(x, np.ndarray) else np.float32)
    if dtype == _c.BF16:
        return Bf16Array(np.empty(shape, np.uint16))
    return np.empty(shape, {_c.F32: np.float32, _c.F16: np.float16}[dtype])


def stream_of(device: tuple[str, int], stream: Any = None) -> int:
    """The CUDA stream to enqueue on: the one given (a number, or an object of torch or CuPy), else torch's current
    one."""
    if stream is not None:
        return int(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return torch.cuda.current_stream(device[1]).cuda_stream
