"""Contents of weights: of each tensor a checksum of all its bytes, which is read once, and signs of a change, which are
read at each look-up."""

from __future__ import annotations

import dataclasses
import enum
import os
import random
import weakref
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from kvant._signals import attempt

_WHOLE = 1 << 16  # bytes up to which a tensor is hashed as it is
_COLUMNS = 4096  # of 64 bits
_VALUES = 1 << 13  # that a look-up reads of all tensors together
_FEWEST, _MOST = 32, 4096  # of each tensor
_JOINED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SECRET = random.SystemRandom().getrandbits(32)  # where a tensor is sampled: elsewhere in each process


class Weight(NamedTuple):
    """A tensor of a model, by name. tensor: None where `load` reads it from a file, whose state is `file`."""

    name: str
    tensor: torch.Tensor | None
    load: Callable[[], torch.Tensor] | None = None
    file: Any = None


class Unreadable(ValueError):
    """Weights that cannot be compared, with the reason."""


# --- where a tensor is ---


def plain(name: str, x: torch.Tensor, facts: list) -> list[tuple[str, torch.Tensor]]:
    """The ordinary tensors that a tensor is made of: torchao's, quanto's and DTensor's classes wrap several."""
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return [(name, x)]
    if hasattr(x, "__tensor_flatten__"):
        inner, context = x.__tensor_flatten__()
        facts.append((name, type(x).__name__, describe(context, name)))
        return [pair for key in inner for pair in plain(f"{name}.{key}", getattr(x, key), facts)]
    found = [(name, x)]
    for key, value in vars(x).items():  # bitsandbytes keeps scales as attributes of the parameter
        if isinstance(value, torch.Tensor):
            found.append((f"{name}.{key}", value))
    return found


def offloaded(name: str, key: str, source: Mapping | None) -> Weight:
    """A weight that is on torch's meta device. source: the map from which accelerate's hook takes it for a forward
    pass."""
    keys = source
    while keys is not None and hasattr(keys, "dataset") and hasattr(keys, "prefix"):  # accelerate's PrefixedDataset
        keys, key = keys.dataset, f"{keys.prefix}{key}"
    if keys is None or key not in keys:
        raise Unreadable(
            f"the weight {name} is on the meta device, and no hook of accelerate says where its values are: load the "
            "model with its weights (from_pretrained), or attach accelerate's hooks before (cpu_offload, disk_offload)"
        )
    held = getattr(keys, "state_dict", None)
    if isinstance(held, dict) and key in held:  # beside files
        return Weight(name, held[key])
    index = getattr(keys, "index", None)
    if isinstance(index, Mapping) and key in index:
        path = index[key].get("safetensors_file") or os.path.join(keys.save_folder, f"{key}.dat")
        state, error = attempt(os.stat, path, refusals=(OSError,))
        if error is not None:
            raise Unreadable(f"the weight {name} is in {path}: {error.strerror}")
        return Weight(name, None, lambda: keys[key], (path, state.st_ino, state.st_size, state.st_mtime_ns))
    return Weight(name, keys[key])


def describe(value: Any, where: str) -> Any:
    """A value of a state dict as JSON has it, the same in every process."""
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        found = [describe(one, where) for one in value]
        return sorted(found, key=repr) if isinstance(value, (set, frozenset)) else found
    if isinstance(value, Mapping):
        return {str(key): describe(one, where) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return checksum(value, where).hex()
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, describe(vars(value), where)]
    for method in ("to_dict", "getvalue"):  # configurations, io.BytesIO
        if hasattr(value, method):
            return [type(value).__name__, describe(getattr(value, method)(), where)]
    raise Unreadable(f"{where} holds a {type(value).__name__}, which kvant cannot compare")


# --- all of a tensor ---


def _bytes(x: torch.Tensor) -> bytes:
    return bytes(x.cpu().numpy())


def checksum(x: torch.Tensor, name: str) -> bytes:
    """128 bits of a tensor's shape, dtype and bytes. Integer sums of rows and of columns are exact, so that every
    device and number of threads finds the same, at the speed of its memory; their hash tells of each changed byte."""
    if x.device.type == "meta":
        raise Unreadable(f"the weight {name} is on the meta device: its values are not known")
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        digest = blake2b(f"{x.dtype} {list(x.shape)}".encode(), digest_size=16)
        if x.is_quantized:
            if x.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
                scales = [x.q_per_channel_scales(), x.q_per_channel_zero_points(), torch.tensor(x.q_per_channel_axis())]
            else:
                scales = [torch.tensor([x.q_scale(), x.q_zero_point()], dtype=torch.float64)]
            for part in [x.int_repr(), *scales]:
                digest.update(checksum(part, name))
            return digest.digest()
        if x.layout is not torch.strided:
            x = x.to_dense()
        data = x.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS) if data.numel() > _WHOLE else 0
        if whole:
            main = data[:whole]
            if main.data_ptr() % 8:
                main = main.clone()
            rows = main.view(torch.int64).view(-1, _COLUMNS)
            digest.update(_bytes(torch.cat([rows.sum(1), rows.sum(0)])))
        digest.update(_bytes(data[whole:]))
        return digest.digest()


# --- signs of a change ---


def stamps(tensors: list[torch.Tensor]) -> list:
    """Signs that every ordinary change of tensors leaves: their places, shapes, and versions, which writes through
    `.data` and those to inference tensors do not count. One flat list: thousands of tuples would call the collector."""
    found: list = []
    for x in tensors:
        found += (x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype, *x.shape, *x.stride())
    return found


class Sampler:
    """Some values of each tensor in memory, as bytes, with one transfer for each device.

    Their number is bounded for all tensors together: a write through `.data` to a few rows can stay between them. The
    places of the values are decided once for tensors that stay where they are.
    """

    def __init__(self) -> None:
        self._stamps: list = []
        self._places: dict[tuple, list[tuple[int, tuple]]] = {}  # of each device and dtype: (tensor, of as_strided)
        self._other: list[int] = []  # whose values are not at even distances

    def read(self, tensors: list[torch.Tensor], now: list) -> list[bytes]:
        """now: the stamps of the tensors."""
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            if now != self._stamps:
                self._decide(tensors)
                self._stamps = now
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for (device, dtype), places in self._places.items():
                parts = [tensors[i].as_strided(*place) for i, place in places]
                if dtype not in _JOINED:
                    parts = [x.view(_INTEGERS[x.itemsize]) for x in parts]
                by_device.setdefault(device, []).append(torch.cat(parts).view(torch.uint8))
            for i in self._other:
                x = tensors[i]
                at = [torch.linspace(0, size - 1, _FEWEST, dtype=torch.float64).long().to(x.device) for size in x.shape]
                by_device.setdefault(x.device, []).append(x[tuple(at)].contiguous().view(torch.uint8))
            return [_bytes(torch.cat(parts)) for parts in by_device.values()]

    def _decide(self, tensors: list[torch.Tensor]) -> None:
        self._places, self._other = {}, []
        each = min(max(_VALUES // max(len(tensors), 1), _FEWEST), _MOST)
        for i, x in enumerate(tensors):
            if x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
                continue
            n, begin = x.numel(), x.storage_offset()
            if not (x.is_contiguous() or (x.ndim == 2 and x.t().is_contiguous())):
                self._other.append(i)
                continue
            count, step = min(n, each), 1
            if n > each:
                step = (n // each - 1) | 1  # odd: not the same column of each row
                begin += _SECRET * (i + 1) % (n - (each - 1) * step)
            self._places.setdefault((x.device, x.dtype), []).append((i, ((count,), (step,), begin)))


class Contents:
    """Checksums of weights, which are read again where there is a sign of a change. Holds no tensor."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[weakref.ref | None, list, list, bytes]] = {}

    def of(self, weight: Weight) -> bytes:
        x = weight.tensor
        if x is None:
            key, now, read = (weight.name, weight.file), [], []
        else:
            key, now = id(x), stamps([x])
            read = Sampler().read([x], [now])
        known = self._known.get(key)
        if known is None or known[1:3] != (now, read) or (x is not None and known[0]() is not x):
            found = checksum(weight.load() if x is None else x, weight.name)
            known = self._known[key] = (None if x is None else weakref.ref(x), now, read, found)
        return known[3]

    def forget_the_dead(self) -> None:
        self._known = {key: known for key, known in self._known.items() if known[0] is None or known[0]() is not None}
