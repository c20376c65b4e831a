"""kvant: attention over compressed key/value caches.

A cache stores keys and values at 2 to 8 bits a value and computes attention straight over the packed bytes, on the CPU
and on CUDA devices. Tensors may come from numpy, torch, or anything with DLPack; nothing is copied.

    import kvant, numpy as np
    cache = kvant.Cache(kv_heads=8, head_dim=128, k="tq6", v="tq4")
    seq = cache.sequence()
    seq.append(0, keys, values)                 # [tokens, 8, 128]
    out = cache.attend(seq, layer=0, q=q)       # [1, 32, 128], the newest token's queries

`kvant.hf` runs Hugging Face models over such caches; it needs torch and transformers, and is imported by name.
"""

try:
    from . import _c  # finds and loads the library
except ImportError as _error:
    from ._installation import say_without_library

    say_without_library(_error)
    raise

from ._cache import Bases, Cache, ExactEnds, Memory, Sequence
from ._errors import (
    BadFile,
    FileError,
    InternalError,
    InvalidArgument,
    KvantError,
    NonFinite,
    OutOfCapacity,
    OutOfMemory,
    Stale,
    Unsupported,
)
from ._pages import PageFacts, Pages, PagesPlan
from ._plan import Plan, PlanFacts
from ._prefix import Prefix, PrefixIndex, PrefixStats
from ._snapshot import Loaded, Snapshot, SnapshotInfo, copy_sequences, load, save
from ._step import Step
from ._tools import bf16, build_info, calibrate, eval, formats, info, merge, version

__version__ = version()

for _name in ("BadFile", "FileError", "InternalError", "InvalidArgument", "KvantError", "NonFinite", "OutOfCapacity",
              "OutOfMemory", "Stale", "Unsupported"):  # tracebacks name them as users do
    globals()[_name].__module__ = "kvant"


def __dir__() -> list[str]:
    """The names that users call, without the modules that define them; `hf` where it was imported."""
    return sorted(__all__) + [name for name in globals() if name == "hf" or name.startswith("__")]


__all__ = [
    "BadFile",
    "Bases",
    "Cache",
    "ExactEnds",
    "FileError",
    "InternalError",
    "InvalidArgument",
    "KvantError",
    "Loaded",
    "Memory",
    "NonFinite",
    "OutOfCapacity",
    "OutOfMemory",
    "PageFacts",
    "Pages",
    "PagesPlan",
    "Plan",
    "PlanFacts",
    "Prefix",
    "PrefixIndex",
    "PrefixStats",
    "Sequence",
    "Snapshot",
    "SnapshotInfo",
    "Stale",
    "Step",
    "Unsupported",
    "bf16",
    "build_info",
    "calibrate",
    "copy_sequences",
    "eval",
    "formats",
    "info",
    "load",
    "merge",
    "save",
    "version",
]
