"""The shared library: its functions by their names in kvant.h, without the prefix kvant_. No arithmetic, no policy.

_c_api.py has the structs and the functions' types, made from include/kvant/kvant.h. ctypes releases the GIL during
every call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import byref, c_int64, c_size_t, c_uint64, c_void_p, py_object
from pathlib import Path

from . import _errors
from ._c_api import *  # noqa: F403
from ._c_api import FUNCTIONS
from ._signals import Ref, make_anchor


def _candidates() -> list[Path]:
    chosen = os.environ.get("KVANT_LIBRARY")
    if chosen:  # nothing else is tried: a library that was asked for is never replaced in silence
        return [Path(chosen)]
    here = Path(__file__).resolve().parent
    name = "libkvant.dylib" if sys.platform == "darwin" else "libkvant.so"
    checkout = here.parent.parent
    return [here / name, checkout / "build" / "py" / "src" / name, checkout / "build" / "gpu" / "src" / name]


def _load() -> tuple[ctypes.CDLL, Path]:
    tried = _candidates()
    for path in tried:
        if path.exists():
            path = path.absolute()  # the system would look for a bare name in its own folders
            try:
                return ctypes.CDLL(str(path)), path
            except OSError as error:
                raise ImportError(f"kvant's shared library could not be loaded: {error}", path=str(path)) from None
    raise ImportError(
        "kvant's shared library was not found; tried "
        + ", ".join(str(p) for p in tried)
        + ". Install the wheel, build the library (./dev py-build), or set KVANT_LIBRARY to its path."
    )


lib, library_path = _load()


def _bind(name, result, *arguments):
    try:
        function = getattr(lib, name)
    except AttributeError:
        what = "the library is older than this package; build or install both"
        if not hasattr(lib, "kvant_version"):
            what = "it is not kvant's shared library; set KVANT_LIBRARY to the path of libkvant.so, or unset it"
        raise ImportError(f"{library_path} has no {name}: {what}", path=str(library_path)) from None
    function.argtypes, function.restype = arguments, result
    return function


globals().update({name: _bind(f"kvant_{name}", *types) for name, types in FUNCTIONS.items()})


def _finaliser(name):
    """C's NAME(object), to be called with a second argument, which C does not see."""
    function = lib[name]
    function.argtypes, function.restype = (c_void_p, py_object), None
    return function


class _Handle(c_void_p):
    """An object of the library, destroyed when nobody has it any more: calls in other threads keep it until they
    return. It is made before the library's call that fills it."""

    _finalisers: set[Ref] = set()  # keeps the references, those of the living and some of the gone
    _most = 64

    def __init__(self):
        super().__init__()
        self._anchor = make_anchor()
        value = c_void_p.from_address(ctypes.addressof(self))  # outlives the anchor
        known = _Handle._finalisers
        if len(known) >= _Handle._most:
            known -= {ref for ref in list(known) if ref() is None}
            _Handle._most = 2 * len(known) + 64
        known.add(Ref(self._anchor, functools.partial(self._destroy, value)))


class BasesHandle(_Handle):
    _destroy = _finaliser("kvant_bases_destroy")


class CacheHandle(_Handle):
    _destroy = _finaliser("kvant_cache_destroy")


class PlanHandle(_Handle):
    _destroy = _finaliser("kvant_plan_destroy")


class SnapshotHandle(_Handle):
    _destroy = _finaliser("kvant_snapshot_destroy")


class PagesHandle(_Handle):
    _destroy = _finaliser("kvant_pages_destroy")


class PagesPlanHandle(_Handle):
    _destroy = _finaliser("kvant_pages_plan_destroy")


def check(status: int) -> None:
    """Raises the exception of a status that is not KVANT_OK, with the library's sentence."""
    if status != 0:
        message = last_error().decode("utf-8", "replace")
        raise _errors.BY_STATUS.get(status, _errors.InternalError)(message)


def text(function, *arguments) -> str:
    """The text that a function of the form f(..., buffer, capacity, &size) writes."""
    size = c_size_t()
    check(function(*arguments, None, 0, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(function(*arguments, buffer, size.value, byref(size)))
    return buffer.value.decode("utf-8")


def sequences(ids) -> ctypes.Array:
    """Sequence ids as a C array."""
    ids = list(ids)
    return (c_uint64 * len(ids))(*ids)


def counts(numbers) -> ctypes.Array:
    """Token counts as a C array."""
    numbers = list(numbers)
    return (c_int64 * len(numbers))(*numbers)
