"""kvant.h as ctypes sees it: the shared library, its structs and its functions. No arithmetic, no policy.

The structs mirror include/kvant/kvant.h field by field; tests/python/test_abi.py compares sizes and offsets with what a
C compiler says. ctypes releases the GIL during every call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    py_object,
)
from pathlib import Path

from . import _errors
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

F32, F16, BF16, BOOL = 0, 1, 2, 3
DTYPE_NAMES = {F32: "f32", F16: "f16", BF16: "bf16", BOOL: "bool"}
DTYPES = {name: number for number, name in DTYPE_NAMES.items()}
CENTRES = {"automatic": 0, "none": 1, "page": 2}
BASES = {"automatic": 0, "hadamard": 1, "none": 2, "calibrated": 3}


class Tensor(Structure):
    """[tokens, heads, head_dim]; strides in elements."""

    _c_name_ = "kvant_tensor"
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("shape", c_int64 * 3),
        ("stride", c_int64 * 3),
        ("batch_stride", c_int64),
    ]


class MutableTensor(Structure):
    _c_name_ = "kvant_mutable_tensor"
    _fields_ = Tensor._fields_


class CacheConfig(Structure):
    _c_name_ = "kvant_cache_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("sink_pages", c_int32),
        ("tail_pages", c_int32),
        ("exact_dtype", c_int32),
        ("k", c_char_p),
        ("v", c_char_p),
        ("window", c_int64),
        ("window_sinks", c_int64),
        ("capacity_tokens", c_int64),
        ("k_basis", c_int32),
        ("v_basis", c_int32),
        ("bases", c_void_p),
        ("basis_layers", POINTER(c_int32)),
        ("k_levels", POINTER(c_float)),
        ("v_levels", POINTER(c_float)),
        ("k_level_count", c_int32),
        ("v_level_count", c_int32),
        ("lut_scales", c_int32),
        ("threads", c_int32),
        ("isa", c_char_p),
        ("device", c_char_p),
        ("max_sequences", c_int64),
        ("max_sequence_tokens", c_int64),
        ("rollback_tokens", c_int64),
        ("k_centre", c_int32),
        ("pinned", c_int32),
    ]


class Memory(Structure):
    _c_name_ = "kvant_memory"
    _fields_ = [("struct_size", c_size_t)] + [
        (name, c_int64)
        for name in (
            "tokens",
            "encoded_bytes",
            "scale_bytes",
            "exact_bytes",
            "table_bytes",
            "total_bytes",
            "reserved_bytes",
        )
    ]


Progress = CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)


class SaveOptions(Structure):
    _c_name_ = "kvant_save_options"
    _fields_ = [
        ("struct_size", c_size_t),
        ("sequences", POINTER(c_uint64)),
        ("sequence_count", c_int64),
        ("name", c_char_p),
        ("model", c_char_p),
        ("metadata", POINTER(c_char_p)),
        ("metadata_count", c_int64),
        ("tokens", POINTER(c_int64)),
        ("token_counts", POINTER(c_int64)),
        ("token_lists", c_int64),
        ("base", c_char_p),
        ("progress", Progress),
        ("progress_context", c_void_p),
    ]


class LoadOptions(Structure):
    _c_name_ = "kvant_load_options"
    _fields_ = [
        ("struct_size", c_size_t),
        ("sequences", POINTER(c_int64)),
        ("sequence_count", c_int64),
        ("model", c_char_p),
        ("metadata", POINTER(c_char_p)),
        ("metadata_count", c_int64),
        ("tokens", POINTER(c_int64)),
        ("token_counts", POINTER(c_int64)),
        ("token_lists", c_int64),
        ("device", c_char_p),
        ("isa", c_char_p),
        ("capacity_tokens", c_int64),
        ("max_sequences", c_int64),
        ("max_sequence_tokens", c_int64),
        ("threads", c_int32),
        ("progress", Progress),
        ("progress_context", c_void_p),
    ]


class MaskTensor(Structure):
    _c_name_ = "kvant_mask_tensor"
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("shape", c_int64 * 4),
        ("stride", POINTER(c_int64)),
        ("first_key", c_int64),
    ]


class AttentionOptions(Structure):
    _c_name_ = "kvant_attention_options"
    _fields_ = [
        ("struct_size", c_size_t),
        ("q_heads", c_int32),
        ("q_len", c_int32),
        ("q_lens", POINTER(c_int32)),
        ("scale", c_double),
        ("softcap", c_double),
        ("alibi_slopes", POINTER(c_float)),
        ("is_causal", c_int32),
        ("threads", c_int32),
        ("window", c_int64),
        ("window_sinks", c_int64),
        ("split_keys", c_int64),
        ("mask", MaskTensor),
        ("backend", c_char_p),
        ("isa", c_char_p),
        ("kernel", c_char_p),
        ("fresh_keys", c_int32),
        ("products", c_int32),
    ]


class PlanFacts(Structure):
    _c_name_ = "kvant_plan_facts"
    _fields_ = [
        ("struct_size", c_size_t),
        ("workspace_bytes", c_size_t),
        ("total_queries", c_int64),
        ("kv_bytes", c_int64),
        ("threads", c_int32),
        ("splits", c_int32),
        ("isa", c_char_p),
        ("kernel", c_char_p),
        ("products", c_int32),
    ]


class Executor(Structure):
    _c_name_ = "kvant_executor"
    _fields_ = [("execute", c_void_p), ("self", c_void_p)]


class RunOptions(Structure):
    _c_name_ = "kvant_run_options"
    _fields_ = [
        ("struct_size", c_size_t),
        ("lse", c_void_p),
        ("sink_logits", c_void_p),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("executor", Executor),
    ]


class Partial(Structure):
    _c_name_ = "kvant_partial"
    _fields_ = [("out", c_void_p), ("lse", c_void_p)]


class PagesConfig(Structure):
    _c_name_ = "kvant_pages_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("k", c_char_p),
        ("v", c_char_p),
        ("device", c_char_p),
        ("isa", c_char_p),
        ("threads", c_int32),
        ("tail_pages", c_int32),
        ("tail_sequences", c_int32),
        ("layers", c_int32),
        ("exact_dtype", c_int32),
        ("k_centre", c_int32),
        ("sink_pages", c_int32),
        ("exact_copies", c_int32),
        ("encode_at_once", c_int32),
    ]


class BlockPool(Structure):
    _c_name_ = "kvant_block_pool"
    _fields_ = [
        ("data", c_void_p),
        ("blocks", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("layer", c_int32),
    ]


class PageLimits(Structure):
    _c_name_ = "kvant_page_limits"
    _fields_ = [
        ("struct_size", c_size_t),
        ("max_batch", c_int32),
        ("max_query_len", c_int32),
        ("max_blocks", c_int64),
        ("max_tokens", c_int64),
        ("check_ids", c_int32),
    ]


class PagesPlanFacts(Structure):
    _c_name_ = "kvant_pages_plan_facts"
    _fields_ = [
        ("struct_size", c_size_t),
        ("workspace_bytes", c_size_t),
        ("isa", c_char_p),
        ("kernel", c_char_p),
        ("threads", c_int32),
        ("products", c_int32),
    ]


class StepTables(Structure):
    _c_name_ = "kvant_step_tables"
    _fields_ = [
        ("struct_size", c_size_t),
        ("block_table", c_void_p),
        ("row_stride", c_int64),
        ("columns", c_int64),
        ("seq_lens", c_void_p),
        ("query_start_loc", c_void_p),
        ("batch", c_int32),
        ("max_query_len", c_int32),
    ]


_Sequences = POINTER(c_uint64)
_Counts = POINTER(c_int64)


def _function(name, *arguments, result=c_int32):
    try:
        function = getattr(lib, name)
    except AttributeError:
        what = "the library is older than this package; build or install both"
        if not hasattr(lib, "kvant_version"):
            what = "it is not kvant's shared library; set KVANT_LIBRARY to the path of libkvant.so, or unset it"
        raise ImportError(f"{library_path} has no {name}: {what}", path=str(library_path)) from None
    function.argtypes, function.restype = arguments, result
    return function


version = _function("kvant_version", result=c_char_p)
status_name = _function("kvant_status_name", c_int32, result=c_char_p)
last_error = _function("kvant_last_error", result=c_char_p)
info = _function("kvant_info", c_char_p, c_size_t, POINTER(c_size_t))
build_info = _function("kvant_build_info", c_char_p, c_size_t, POINTER(c_size_t))
bases_load = _function("kvant_bases_load", c_char_p, POINTER(c_void_p))
bases_destroy = _function("kvant_bases_destroy", c_void_p, result=None)
cache_config_init = _function("kvant_cache_config_init", POINTER(CacheConfig), c_size_t, result=None)
cache_create = _function("kvant_cache_create", POINTER(CacheConfig), POINTER(c_void_p))
cache_destroy = _function("kvant_cache_destroy", c_void_p, result=None)
add_sequence = _function("kvant_cache_add_sequence", c_void_p, POINTER(c_uint64))
fork = _function("kvant_cache_fork", c_void_p, c_uint64, POINTER(c_uint64))
remove = _function("kvant_cache_remove", c_void_p, c_uint64)
truncate = _function("kvant_cache_truncate", c_void_p, c_uint64, c_int64)
reorder = _function("kvant_cache_reorder", c_void_p, _Sequences, _Counts, c_int64)
length = _function("kvant_cache_length", c_void_p, c_uint64, POINTER(c_int64))
reserve = _function("kvant_cache_reserve", c_void_p, _Sequences, _Counts, c_int64)
write = _function("kvant_cache_write", c_void_p, _Sequences, c_int64, c_int32, POINTER(Tensor), POINTER(Tensor))
append = _function("kvant_cache_append", c_void_p, c_uint64, c_int32, POINTER(Tensor), POINTER(Tensor))
set_stream = _function("kvant_cache_set_stream", c_void_p, c_void_p)
reserve_ahead = _function("kvant_cache_reserve_ahead", c_void_p, _Sequences, _Counts, c_int64)
advance = _function("kvant_cache_advance", c_void_p, _Sequences, _Counts, c_int64)
take_non_finite = _function("kvant_cache_take_non_finite", c_void_p, POINTER(c_int32))
decode = _function(
    "kvant_cache_decode",
    c_void_p,
    _Sequences,
    _Counts,
    _Counts,
    c_int64,
    c_int32,
    POINTER(MutableTensor),
    POINTER(MutableTensor),
)
memory = _function("kvant_cache_memory", c_void_p, POINTER(Memory))
trim = _function("kvant_cache_trim", c_void_p, POINTER(c_int64))
cache_describe = _function("kvant_cache_describe", c_void_p, c_char_p, c_size_t, POINTER(c_size_t))
save = _function("kvant_save", c_void_p, c_char_p, POINTER(SaveOptions))
snapshot_open = _function("kvant_snapshot_open", c_char_p, POINTER(c_void_p))
snapshot_destroy = _function("kvant_snapshot_destroy", c_void_p, result=None)
snapshot_info = _function("kvant_snapshot_info", c_void_p, c_char_p, c_size_t, POINTER(c_size_t))
snapshot_tokens = _function("kvant_snapshot_tokens", c_void_p, c_int64, _Counts, c_int64, _Counts)
load = _function("kvant_load", c_void_p, POINTER(LoadOptions), POINTER(c_void_p), _Sequences, c_int64, _Counts)
load_into = _function("kvant_load_into", c_void_p, c_void_p, POINTER(LoadOptions), _Sequences, c_int64, _Counts)
copy_sequences = _function(
    "kvant_copy_sequences", c_void_p, _Sequences, c_int64, c_void_p, _Sequences, Progress, c_void_p
)
snapshot_verify = _function("kvant_snapshot_verify", c_void_p, Progress, c_void_p)
snapshot_copy = _function("kvant_snapshot_copy", c_void_p, c_char_p, Progress, c_void_p)
attention_options_init = _function("kvant_attention_options_init", POINTER(AttentionOptions), c_size_t, result=None)
plan_create = _function(
    "kvant_plan_create", c_void_p, _Sequences, c_int64, POINTER(AttentionOptions), POINTER(c_void_p)
)
plan_destroy = _function("kvant_plan_destroy", c_void_p, result=None)
plan_explain = _function("kvant_plan_explain", c_void_p, c_char_p, c_size_t, POINTER(c_size_t))
plan_describe = _function("kvant_plan_describe", c_void_p, POINTER(PlanFacts))
run_options_init = _function("kvant_run_options_init", POINTER(RunOptions), c_size_t, result=None)
run = _function(
    "kvant_run",
    c_void_p,
    c_int32,
    POINTER(Tensor),
    POINTER(MutableTensor),
    POINTER(RunOptions),
    POINTER(Tensor),
    POINTER(Tensor),
)
merge = _function("kvant_merge", POINTER(Partial), c_int64, c_int64, c_int32, c_void_p, c_void_p)
merge_on_device = _function(
    "kvant_merge_on_device",
    POINTER(Partial),
    c_int64,
    c_int64,
    c_int32,
    c_int64,
    c_int64,
    c_void_p,
    c_void_p,
    c_void_p,
)

_Pool = POINTER(BlockPool)
pages_config_init = _function("kvant_pages_config_init", POINTER(PagesConfig), c_size_t, result=None)
pages_create = _function("kvant_pages_create", POINTER(PagesConfig), POINTER(c_void_p))
pages_destroy = _function("kvant_pages_destroy", c_void_p, result=None)
pages_block_bytes = _function("kvant_pages_block_bytes", c_void_p, POINTER(c_int64))
pages_tail_bytes = _function("kvant_pages_tail_bytes", c_void_p, POINTER(c_int64))
pages_tail_copies = _function("kvant_pages_tail_copies", c_void_p, POINTER(c_int32))
pages_write = _function(
    "kvant_pages_write", c_void_p, _Pool, POINTER(Tensor), POINTER(Tensor), c_void_p, c_int64, c_void_p
)
pages_decode = _function(
    "kvant_pages_decode", c_void_p, _Pool, c_void_p, c_int64, POINTER(MutableTensor), POINTER(MutableTensor), c_void_p
)
pages_copy = _function("kvant_pages_copy", c_void_p, _Pool, c_void_p, c_void_p, c_int64, c_void_p)
pages_take_non_finite = _function("kvant_pages_take_non_finite", c_void_p, c_void_p, POINTER(c_int32))
pages_begin_step = _function("kvant_pages_begin_step", c_void_p, POINTER(StepTables), c_void_p)
pages_take_misses = _function("kvant_pages_take_misses", c_void_p, c_void_p, POINTER(c_int64))
pages_plan_create = _function(
    "kvant_pages_plan_create", c_void_p, POINTER(AttentionOptions), POINTER(PageLimits), POINTER(c_void_p)
)
pages_plan_destroy = _function("kvant_pages_plan_destroy", c_void_p, result=None)
pages_plan_explain = _function("kvant_pages_plan_explain", c_void_p, c_char_p, c_size_t, POINTER(c_size_t))
pages_plan_describe = _function("kvant_pages_plan_describe", c_void_p, POINTER(PagesPlanFacts))
pages_plan_set_tables = _function("kvant_pages_plan_set_tables", c_void_p, POINTER(StepTables), c_void_p)
pages_plan_run = _function(
    "kvant_pages_plan_run",
    c_void_p,
    _Pool,
    POINTER(Tensor),
    POINTER(MutableTensor),
    POINTER(RunOptions),
    POINTER(Tensor),
    POINTER(Tensor),
)
pages_plan_take_errors = _function("kvant_pages_plan_take_errors", c_void_p, c_void_p, POINTER(c_int32))


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


def plan_facts(plan: c_void_p) -> PlanFacts:
    """The decisions of a plan, as numbers."""
    facts = PlanFacts()
    facts.struct_size = ctypes.sizeof(facts)
    check(plan_describe(plan, byref(facts)))
    return facts


def sequences(ids) -> ctypes.Array:
    """Sequence ids as a C array."""
    ids = list(ids)
    return (c_uint64 * len(ids))(*ids)


def counts(numbers) -> ctypes.Array:
    """Token counts as a C array."""
    numbers = list(numbers)
    return (c_int64 * len(numbers))(*numbers)
