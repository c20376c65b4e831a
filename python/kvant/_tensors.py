"""Tensors of any library as kvant_tensor: a pointer, a dtype, a shape and strides. Nothing is copied.

Taken in this order: torch tensors (by data_ptr), numpy arrays (by __array_interface__), arrays of CuPy and Numba (by
__cuda_array_interface__), and whatever else has __dlpack__ (JAX, TensorFlow, ...). No such library is imported here.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _c, _dlpack, _overlap, _streams
from ._errors import InvalidArgument
from ._signals import attempt

CPU = ("cpu", 0)

_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "bool": 1, "uint8": 1, "int32": 4, "int64": 8}
FLOATS = ("f32", "f16", "bf16")
_NOWHERE = 64  # an address that nobody reads
_FAR = 1 << 60  # elements: so many are nowhere, and offsets in bytes fit 63 bits


class Place(NamedTuple):
    """Where the tensors of a call must be, and on which CUDA stream the call is enqueued."""

    kind: str
    number: int
    stream: int = 0
    owner: str = "the cache is"


def place(device: tuple[str, int], stream: Any, owner: str) -> Place:
    """The place of a call. stream: as the caller gave it, or None."""
    if device[0] != "cpu":
        return Place(*device, stream_of(device, stream), owner)
    if stream is not None:
        raise InvalidArgument(
            f"stream is given, but {owner} in host memory, where calls are done when they return: leave it out"
        )
    return Place(*device, 0, owner)


@dataclass
class Described:
    """The facts about a tensor that kvant needs. `owner` keeps the memory alive."""

    data: int
    dtype: str  # "f32"; another name where kvant has no such dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    device: tuple[str, int]  # ("cpu", 0) or ("cuda", index)
    owner: Any
    read_only: bool = False
    stream: int | None = None  # on which the data will be ready; None: that of the call, or ready
    low: int = 0  # its first byte, and the one behind its last; equal where it has no element
    high: int = 0

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return _SIZES[self.dtype]


class Bf16Array:
    """A numpy array of uint16 whose bits are bfloat16 numbers: numpy itself has no such dtype. Made by kvant.bf16()."""

    def __init__(self, bits):
        self.bits = bits

    @property
    def shape(self):
        return self.bits.shape


def torch_module() -> Any:
    """The module torch, or None while nobody has imported it, or another thread still does: then parts are missing."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def is_torch(x: Any) -> bool:
    tensors = getattr(sys.modules.get("torch"), "Tensor", None)  # none yet while torch is being imported
    return tensors is not None and isinstance(x, tensors)


_torch_dtypes: dict = {}


def torch_dtype(dtype: Any) -> str | None:
    """The name of a torch dtype, None if kvant has no such dtype."""
    if not _torch_dtypes:
        torch = sys.modules["torch"]
        names = ("float32", "float16", "bfloat16", "bool", "uint8", "int32", "int64")
        _torch_dtypes.update(zip((getattr(torch, n) for n in names), _SIZES))
    return _torch_dtypes.get(dtype)


_NUMPY_DTYPES = {"<f4": "f32", "<f2": "f16", "|b1": "bool", "|u1": "uint8", "<i4": "int32", "<i8": "int64"}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a tensor whose interface names none."""
    stride, at = [], 1
    for n in reversed(shape):
        stride.append(at)
        at *= n
    return tuple(stride[::-1])


def _of_interface(x: Any, interface: Any, device: tuple[str, int], name: str, dtype: str | None = None) -> Described:
    try:
        typestr, shape, strides = interface["typestr"], tuple(interface["shape"]), interface.get("strides")
        data, read_only = interface["data"]
        data = 0 if data is None else int(data)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgument(f"{name} is a {type(x).__name__} whose array interface is not complete") from None
    if dtype is None:
        dtype = _NUMPY_DTYPES.get(typestr)
    if dtype is None and str(getattr(x, "dtype", "")) == "bfloat16":  # of the package ml_dtypes
        dtype = "bf16"
    if dtype is None:
        return Described(data, str(getattr(x, "dtype", typestr)), shape, (), device, x)
    size = _SIZES[dtype]
    if strides is None:
        stride = contiguous_strides(shape)
    else:
        if any(s % size for s in strides):
            raise InvalidArgument(
                f"{name} has strides of {strides} bytes: they must be multiples of {size}, its element size"
            )
        stride = tuple(s // size for s in strides)
    return Described(data, dtype, shape, stride, device, (x, interface), bool(read_only))


def _of_torch(x: Any, name: str) -> Described:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}: must be a dense tensor; use .to_dense()")
    facts, error = attempt(_torch_facts, x)
    if error is not None:  # of torch.func, a compiler's tracing, nested tensors, parameters that are made later
        raise InvalidArgument(f"{name} is a torch tensor without memory of its own: {error}") from None
    needs_gradient, negated, data, shape, stride, stored = facts
    if needs_gradient and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires a gradient: kvant has no backward pass; use torch.no_grad() or .detach()"
        )
    if negated:
        raise InvalidArgument(
            f"{name} is a view of numbers that torch has not negated yet: use .resolve_neg(), or for an output a "
            "tensor of its own memory"
        )
    device = CPU if x.device.type == "cpu" else (x.device.type, x.device.index or 0)
    dtype = torch_dtype(x.dtype)
    if dtype is not None and 0 not in shape:
        needed = _SIZES[dtype] * (1 + sum(s * (n - 1) for n, s in zip(shape, stride)))
        if data == 0 or stored < needed:
            memory = "no memory" if data == 0 else f"{max(stored, 0)} bytes of memory where it needs {needed}"
            raise InvalidArgument(
                f"{name} is a torch tensor on {x.device} of shape {list(shape)} with {memory}: its storage was freed "
                "or resized, or never there (meta and fake tensors); give a tensor that has its numbers"
            )
    return Described(data, dtype or str(x.dtype), shape, stride, device, x)


def _torch_facts(x: Any) -> tuple[bool, bool, int, tuple[int, ...], tuple[int, ...], int]:
    """Whether it needs a gradient, and is to be negated; address, shape, strides; bytes from its first element to the
    storage's end."""
    stored = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    return x.requires_grad, x.is_neg(), x.data_ptr(), tuple(x.shape), tuple(x.stride()), stored


def _of_dlpack(x: Any, name: str, stream: int) -> Described:
    t = _dlpack.take(x, name, stream)
    stride = contiguous_strides(t.shape) if t.stride is None else t.stride
    return Described(t.data, t.dtype, t.shape, stride, t.device, (x, t.capsule), t.read_only)


def _facts(x: Any, name: str, stream: int) -> Described:
    if is_torch(x):
        return _of_torch(x, name)
    if isinstance(x, Bf16Array):
        return _of_interface(x.bits, x.bits.__array_interface__, CPU, name, "bf16")
    interface = getattr(x, "__array_interface__", None)
    if interface is not None:
        return _of_interface(x, interface, CPU, name)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        index = int(getattr(getattr(x, "device", 0), "id", 0))  # CuPy says which; Numba's arrays are on the current one
        d = _of_interface(x, interface, ("cuda", index), name)
        if interface.get("mask") is not None:
            raise InvalidArgument(f"{name} is an array with a mask of its own: kvant would not see the mask")
        d.stream = _streams.of_interface(name, interface.get("stream"))
        return d
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(x, name, stream)
    raise InvalidArgument(
        f"{name} is a {type(x).__name__}: kvant takes numpy arrays, torch tensors, and anything with DLPack"
    )


def describe(x: Any, name: str, where: Place, dtypes: tuple[str, ...] = FLOATS, mutable: bool = False) -> Described:
    """Pointer, dtype, shape and strides of a tensor of any library, which is where a call needs it. mutable: an
    output."""
    d = _facts(x, name, where.stream)
    if d.dtype not in dtypes:
        hint = "; mark raw bfloat16 bits with kvant.bf16(array)" if d.dtype == "uint16" and "bf16" in dtypes else ""
        if d.dtype in ("float64", "torch.float64") and "f32" in dtypes:
            hint = f"; convert it by {'.float()' if is_torch(x) else '.astype(numpy.float32)'}"
        raise InvalidArgument(f"{name} has dtype {d.dtype}: must be {' or '.join(dtypes)}{hint}")
    if d.device != where[:2]:
        raise InvalidArgument(
            f"{name} is on {d.device[0]}:{d.device[1]}, but {where.owner} on {where.kind}:{where.number}"
        )
    size, before, behind = _SIZES[d.dtype], 0, 1
    for n, stride in zip(d.shape, d.stride):
        if not 0 < n < _FAR:
            if n != 0:
                raise InvalidArgument(f"{name} has shape {list(d.shape)}: must be dimensions of memory")
            behind = before = 0
            break
        if stride < 0:
            before -= stride * (n - 1)
        else:
            behind += stride * (n - 1)
    if d.data == 0 and behind == 0:  # torch's empty tensors; to the library null is a tensor that was left out
        d.data = _NOWHERE
    if behind > 0:
        if before + behind > _FAR:
            raise InvalidArgument(f"{name} has strides {list(d.stride)}, with which it reaches beyond any memory")
        if d.data % size != 0:
            raise InvalidArgument(f"{name} begins at address {d.data:#x}, within an element of {size} bytes: copy it")
    d.low, d.high = d.data - before * size, d.data + behind * size
    if mutable:
        if d.read_only:
            raise InvalidArgument(f"{name} is read-only memory, or a copy of what it stands for: give a writable one")
        _overlap.check_own_memory(d, name)
    if d.stream is not None:
        _streams.wait(d.device[1], d.stream, where.stream)
    return d


def tensor(x: Any, name: str, device: tuple, sequences: int, mutable: bool = False):
    """x as a C struct, and what keeps its memory alive.

    x: [tokens, heads, head_dim], the rows of the call's sequences one after another, or [batch, tokens, heads,
        head_dim], a row of the batch for each of the call's `sequences`. Any strides whose last is 1.
    device: a Place, or a device.
    """
    d = describe(x, name, Place(*device), mutable=mutable)
    return fill(_c.MutableTensor() if mutable else _c.Tensor(), d, name, sequences), d


def fill(t, d: Described, name: str, sequences: int):
    """Writes a described tensor into a C struct. The struct says where the rows of each sequence begin, and not for how
    many sequences there is memory: that is checked here."""
    t.data, t.dtype = d.data, _c.DTYPE[d.dtype]
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
        elif batch > 1 and rows > 0:
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
    elif 0 not in d.shape and not any(t.stride):  # to the library: contiguous
        _repeat(t, d, name)
    return t


def _repeat(t, d: Described, name: str) -> None:
    """A tensor that is one number for all: a vector of that number, which is repeated."""
    if d.device != CPU or t.shape[2] > 4096 or t.batch_stride != 0:
        raise InvalidArgument(f"{name} has strides {list(d.stride)}, one number for many vectors: copy the tensor")
    vector = ctypes.create_string_buffer(ctypes.string_at(d.data, d.size) * t.shape[2], d.size * t.shape[2])
    t.data, t.stride[2], d.owner = ctypes.addressof(vector), 1, (d.owner, vector)


def memory(x: Any, name: str, where: Place) -> tuple[int, int, Any]:
    """(address, bytes, owner) of contiguous memory of any dtype."""
    d = describe(x, name, where, tuple(_SIZES), mutable=True)
    count = 1
    for n in d.shape:
        count *= n
    if any(n > 1 and s != c for n, s, c in zip(d.shape, d.stride, contiguous_strides(d.shape))):
        raise InvalidArgument(f"{name} has strides {list(d.stride)}: must be contiguous")
    return d.data, count * d.size, d


def mask(x: Any, first_key: int, device: tuple):
    """A mask tensor [batch, q_heads, queries, keys] (dimensions of 1 broadcast; fewer dimensions are filled from the
    left)."""
    d = describe(x, "mask", Place(*device), (*FLOATS, "bool"))
    if not 1 <= len(d.shape) <= 4 or 0 in d.shape:
        raise InvalidArgument(
            f"mask has shape {list(d.shape)}: must be [batch, q_heads, queries, keys], or the last of these, 1 or more"
        )
    m = _c.MaskTensor()
    m.data, m.dtype, m.first_key = d.data, _c.DTYPE[d.dtype], first_key
    m.shape[:] = (1,) * (4 - len(d.shape)) + d.shape
    strides = (ctypes.c_int64 * 4)(*(0,) * (4 - len(d.shape)), *d.stride)
    m.stride = strides
    return m, (d, strides)


def empty_like(x: Any, shape: tuple[int, ...], dtype: str | None = None):
    """A new tensor of x's library, device and (unless dtype says otherwise) dtype."""
    if is_torch(x):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=x.dtype if dtype is None else torch.float32, device=x.device)
    import numpy as np

    if isinstance(x, Bf16Array) and dtype is None:
        return Bf16Array(np.empty(shape, np.uint16))
    if hasattr(x, "__cuda_array_interface__"):
        cupy = sys.modules.get("cupy")
        if not hasattr(cupy, "empty"):
            raise InvalidArgument("out is not given: kvant cannot allocate memory of this library; pass out=")
        return cupy.empty(shape, dtype=x.dtype if dtype is None else np.float32)
    own = dtype is None and isinstance(getattr(x, "dtype", None), np.dtype)  # numpy's arrays, and those of JAX
    return np.empty(shape, x.dtype if own else np.float32)


def given_back(out: Any, lse: Any, made: tuple[bool, bool], x: Any) -> Any:
    """The result of a run over x: out, or (out, lse). made: which of the two empty_like made. Where x is JAX's, whose
    arrays never change, these become arrays of JAX after they were written."""
    jax = sys.modules.get("jax")
    if jax is not None and type(x).__module__.split(".")[0] in ("jax", "jaxlib"):
        out, lse = (jax.device_put(y, x.sharding) if is_new else y for y, is_new in zip((out, lse), made))
    return out if lse is None else (out, lse)


def stream_of(device: tuple[str, int], stream: Any = None) -> int:
    """The CUDA stream to enqueue on: the one given (a number, or an object of torch or CuPy), else torch's current
    one."""
    if stream is not None:
        return _streams.number(stream)
    torch = torch_module()
    if torch is None or not torch.cuda.is_available():
        return 0
    return torch.cuda.current_stream(device[1]).cuda_stream
