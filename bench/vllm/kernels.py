"""Kernels of attention in a trace of torch's profiler: what a layer's write, attention and merge take.

vLLM's own attention and kvant's have other kernels for the same parts:

    write      of a step's keys and values into the cache
    attention  and what prepares keys for it in each layer
    merge      of parts of a sequence that were attended to side by side
    step       once a step, for all layers

All other kernels are the model's. A layer's attention lies between two of its matrix products.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, Iterable, NamedTuple

# The first pattern that is found decides. What is kvant's and has no pattern is a write.
KINDS = {
    "step": (
        r"kvant::.*\b(begin_step|list_unencoded|clear_tail|set_tables|list_items|check_blocks|list_blocks|copy_blocks"
        r"|set_entries|advance|copy_slots|classify|read_back)_kernel\b"
        r"|prepare_varlen_num_blocks"
    ),
    "merge": r"kvant::.*\bmerge(_partials)?_kernel\b|FlashAttnFwdCombine|flash_fwd_splitkv_combine|\breduce_segments\b",
    "attention": (
        r"kvant::.*(\w*attend|\blatent|\bcolumn|\bprefill|\bdense|\bsplit_columns|\bunpack|\brounds|\bleft)_kernel\b"
        r"|FlashAttnFwd|\bflash_fwd_(splitkv_)?kernel\b|\bkernel_unified_attention|\bBatch(Decode|Prefill)With|\bfmha"
    ),
    "write": r"kvant::|\breshape_and_cache",
    "product": r"nvjet|gemm|gemv|splitk|cutlass|cublas|_scaled_mm",
}
PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}
PARTS = ("write", "attention", "merge")


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), "other")


class Kernel(NamedTuple):
    name: str
    kind: str
    begin: float  # microseconds
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


def of_trace(trace: dict[str, Any]) -> list[Kernel]:
    """In the order in which they began."""
    events = (x for x in trace["traceEvents"] if x.get("cat") == "kernel")
    found = [Kernel(x["name"], kind_of(x["name"]), x["ts"], x["ts"] + x["dur"]) for x in events]
    return sorted(found, key=lambda x: x.begin)


def take_trace(folder: Path) -> dict[str, Any]:
    """The trace of the first rank. All traces are removed: the next must not be taken for this one."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise RuntimeError(f"torch's profiler wrote no trace in {folder}")
    trace = json.loads(files[0].read_text(encoding="utf-8"))
    for file in files:
        file.unlink()
    return trace


def layers_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels between two products, attention among them, of each layer and step."""
    layers, layer = [], []
    for kernel in kernels:
        if kernel.kind != "product":
            layer.append(kernel)
            continue
        layers.append(layer)
        layer = []
    return [x for x in [*layers, layer] if any(kernel.kind == "attention" for kernel in x)]


def span_of(layer: list[Kernel]) -> float:
    """From the write's begin to the merge's end: to attention's end where nothing is merged. A write behind the merge,
    which the next layer does not wait for, is outside."""
    begin = min(x.begin for x in layer if x.kind in PARTS)
    return max(x.end for x in layer if x.kind in ("attention", "merge")) - begin


def summary(kernels: list[Kernel], most: int = 12) -> dict[str, Any]:
    """Microseconds a layer: means of write, attention and merge over all launches, wherever they are; the median from
    the write's begin to the merge's end; the kernels that take most: name, launches a layer, microseconds of one."""
    layers = layers_of(kernels)
    if not layers:
        raise RuntimeError(f"no attention among {len(kernels)} kernels of the trace")
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.time)
    found: dict[str, Any] = {
        part: sum(x.time for x in kernels if x.kind == part) / len(layers) for part in (*PARTS, "step")
    }
    found["all"] = statistics.median(map(span_of, layers))
    found["layers"] = len(layers)
    found["kernels"] = [
        (name, len(times) / len(layers), sum(times) / len(times))
        for name, times in sorted(by_name.items(), key=lambda x: -sum(x[1]))[:most]
    ]
    return found
