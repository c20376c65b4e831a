"""What stands beside caches: facts about the library, merging, and the command line tool's measurements from Python."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence as SequenceOf
from ctypes import byref
from pathlib import Path
from typing import Any

from . import _arguments, _c, _tensors
from ._errors import BY_STATUS, InvalidArgument, KvantError, Unsupported
from ._signals import attempt


def version() -> str:
    """The library's version, for example "0.1.0"."""
    return _c.version().decode()


def info() -> dict[str, Any]:
    """Facts about this build and this machine: formats, head_dims, instruction sets, backends, threads."""
    return json.loads(_c.text(_c.info))


def build_info() -> dict[str, Any]:
    """Facts about this build alone: formats, head_dims, and what has kernels for devices. Starts no driver."""
    return json.loads(_c.text(_c.build_info))


def sizes_without_kernels(head_dim: int, v_head_dim: int) -> str | None:
    """Why devices have no kernels for keys and values of two sizes; None: this build has these kernels, or none."""
    device = build_info()["device"]
    if head_dim == v_head_dim or device is None or [head_dim, v_head_dim] in device["widths"]:
        return None
    served = " or of ".join(["one size", *(f"{k}/{v}" for k, v in device["widths"])])
    return f"devices have kernels for keys and values of {served}, and not of {head_dim}/{v_head_dim}"


def formats() -> list[dict[str, Any]]:
    """The storage formats: name, bits a value, whether they are dense, a summary."""
    return info()["formats"]


def bf16(bits: Any) -> _tensors.Bf16Array:
    """Marks a numpy array of uint16 as bfloat16 bits, a dtype that numpy lacks."""
    import numpy as np

    if not isinstance(bits, np.ndarray) or bits.dtype != np.uint16:
        raise InvalidArgument(
            f"bits is a {type(bits).__name__} of dtype {getattr(bits, 'dtype', None)}: must be a numpy array of uint16"
        )
    return _tensors.Bf16Array(bits)


def merge(partials: Iterable[tuple[Any, Any]], *, stream: Any = None) -> tuple[Any, Any]:
    """Merges attention over disjoint sets of keys, in the order given, by the log-sum-exp rule.

    partials: (out, lse) pairs as Plan.run returns them with f32 outputs: out [..., head_dim], lse [...]. Torch tensors,
        all on one device, or arrays in host memory. Rows without keys (lse -inf) count for nothing.
    stream: CUDA tensors only: the stream to enqueue on, None: torch's current one. A merge is one launch, of 64
        partials at most, and a CUDA graph can record it; tensors whose rows are not evenly spaced are copied first.
    Returns (out, lse) of the same shapes in f32: torch tensors where there were such, else numpy. Where no partial has
        keys, out is 0 and lse is -inf.
    Errors: InvalidArgument; Unsupported for CUDA tensors without kvant's CUDA backend.
    """
    import numpy as np

    pairs = [
        tuple(_arguments.items(f"partials[{i}]", pair, "tensors (out, lse)", 2, "pair"))
        for i, pair in enumerate(_arguments.items("partials", partials, "pairs (out, lse)"))
    ]
    if not pairs:
        raise InvalidArgument("partials is empty: give at least one (out, lse)")
    device = next((x.device for pair in pairs for x in pair if _tensors.is_torch(x)), None)
    read = _host_partial if device is None else functools.partial(_torch_partial, device=device)
    pairs = [
        tuple(read(x, f"partials[{i}]: {name}") for name, x in zip(("out", "lse"), pair))
        for i, pair in enumerate(pairs)
    ]
    shape, rows = pairs[0][0].shape, pairs[0][1].shape
    for i, (o, l) in enumerate(pairs):
        if o.shape != shape or l.shape != rows or len(shape) == 0 or shape[:-1] != rows:
            raise InvalidArgument(
                f"partials[{i}] has shapes {tuple(o.shape)} and {tuple(l.shape)}: must be [..., head_dim] and [...], "
                "all alike"
            )
    if device is not None and device.type == "cuda":
        return _merge_on_device(pairs, device, stream)
    if stream is not None:
        raise InvalidArgument("stream is given, but partials are in host memory: the merge is done when it returns")
    if device is not None:
        out, lse = merge([tuple(x.numpy() for x in pair) for pair in pairs])
        torch = sys.modules["torch"]
        return torch.from_numpy(out), torch.from_numpy(lse)
    c = (_c.Partial * len(pairs))(*((o.ctypes.data, l.ctypes.data) for o, l in pairs))
    out, lse = np.empty(shape, np.float32), np.empty(rows, np.float32)
    _c.check(_c.merge(c, len(pairs), int(np.prod(rows)), shape[-1], out.ctypes.data, lse.ctypes.data))
    return out, lse


def _torch_partial(x: Any, name: str, device: Any) -> Any:
    torch = sys.modules["torch"]
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {device}: must be on the CPU or on a CUDA device")
    if not _tensors.is_torch(x) or x.device != device or x.dtype != torch.float32 or x.layout is not torch.strided:
        raise InvalidArgument(f"{name} must be an f32 tensor on {device}, of a dense layout")
    found, error = attempt(lambda: x.detach().resolve_neg())
    place = _tensors.place(_arguments.device(device), None, "others are")
    _tensors.describe(x if error is not None else found, name, place)  # refuses one without memory
    return found


def _host_partial(x: Any, name: str) -> Any:
    import numpy as np

    found, error = attempt(np.asarray, x)  # an error: of an array on a device, for one
    if error is None and found.dtype.kind in "fiu":
        return np.asarray(found, np.float32, order="C")
    raise InvalidArgument(f"{name} is a {type(x).__name__}: must be an array of real numbers in host memory")


def _even_rows(x: Any, columns: int) -> tuple[Any, int]:
    """x as rows of `columns` neighbouring elements, and the elements from one row to the next."""
    flat = x.reshape(-1, columns)  # a view where strides allow it
    if columns > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, max(flat.stride(0), columns)


def _merge_on_device(pairs: SequenceOf[tuple[Any, Any]], device: Any, stream: Any) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    out, lse = torch.empty(pairs[0][0].shape, device=device), torch.empty(pairs[0][1].shape, device=device)
    head_dim = out.shape[-1]
    even = [(_even_rows(o, head_dim), _even_rows(l, 1)) for o, l in pairs]
    if any((o[1], l[1]) != (even[0][0][1], even[0][1][1]) for o, l in even):
        even = [((o[0].contiguous(), head_dim), (l[0].contiguous(), 1)) for o, l in even]
    c = (_c.Partial * len(even))(*((o[0].data_ptr(), l[0].data_ptr()) for o, l in even))
    strides = even[0][0][1], even[0][1][1]
    handle = _tensors.stream_of(("cuda", out.get_device()), stream)
    _c.check(
        _c.merge_on_device(c, len(even), lse.numel(), head_dim, *strides, out.data_ptr(), lse.data_ptr(), handle)
    )
    return out, lse


# --- the command line tool --------------------------------------------------------------------------------------------


def tool() -> str:
    """Path of the command line tool: KVANT_CLI, else the wheel's, else that of a checkout, else the one on PATH."""
    chosen = os.environ.get("KVANT_CLI")
    if chosen:  # a name without a folder: here, else on PATH
        found = str(Path(chosen).absolute()) if Path(chosen).is_file() else shutil.which(chosen)
        if found is None:
            raise Unsupported(f'KVANT_CLI is "{chosen}": there is no such program; set it to the path of the tool')
        return found
    here = Path(__file__).resolve().parent
    for path in (here / "bin" / "kvant", here.parent.parent / "build" / "release" / "bin" / "kvant"):
        if path.exists():
            return str(path)
    found = shutil.which("kvant-cli")
    if found:
        return found
    raise Unsupported(
        "this installation has no command line tool: install the wheel, or build the tool with ./dev build"
    )


def _run_tool(*arguments: str) -> None:
    done = subprocess.run([tool(), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("kvant: ")
        raise (InvalidArgument if done.returncode == 2 else KvantError)(message)


def _captures(given: Any) -> list[str]:
    files = [given] if isinstance(given, (str, bytes, os.PathLike)) else _arguments.items("captures", given, "files")
    return [_arguments.path("captures", file) for file in files]


def eval(  # noqa: A001 (the name of the command)
    captures: str | Path | SequenceOf[str | Path],
    formats: str | SequenceOf[str] = (),
    *,
    basis: str | Path | None = None,
    report: str | Path | None = None,
    arguments: SequenceOf[str] = (),
) -> dict[str, Any]:
    """Replays decoding over captured queries, keys and values: error, memory and time of each format (`kvant eval`).

    captures: safetensors files, as kvant.hf.capture writes them. formats: "tq4", ["tq4", "tq6/tq4"], ...; empty: all.
    basis: a file of kvant.calibrate. report: writes an HTML page there. arguments: further ones of `kvant eval --help`.
    Returns {"rows": [...]}, one row for each layer and format, as `kvant eval --json` writes them.
    Errors: InvalidArgument, KvantError with the tool's sentence.
    """
    files = _captures(captures)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "eval.json")
        command = ["eval", *files, "--json", path]
        if formats:
            command += ["--formats", formats if isinstance(formats, str) else ",".join(formats)]
        if basis is not None:
            command += ["--basis", _arguments.path("basis", basis)]
        if report is not None:
            command += ["--report", _arguments.path("report", report)]
        _run_tool(*command, *arguments)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def calibrate(
    captures: str | Path | SequenceOf[str | Path], path: str | Path, *, arguments: SequenceOf[str] = ()
) -> None:
    """Estimates calibrated bases from captured tensors of other text than they will be used on (`kvant calibrate`).

    captures: safetensors files, as kvant.hf.capture writes them. path: the file to write, for
        kvant.hf.enable(bases=path) or kvant.Cache(bases=path, k_basis="calibrated", v_basis="calibrated").
    Errors: InvalidArgument, KvantError with the tool's sentence.
    """
    _run_tool("calibrate", *_captures(captures), "--output", _arguments.path("path", path), *arguments)
