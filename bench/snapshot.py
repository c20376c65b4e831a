#!/usr/bin/env python3
"""Saves and loads a cache in turns with dd of as many bytes in the same folder, and measures the memory that they take.

usage: snapshot.py [--folder DIR] [--mb 1024] [--rounds 3] [--k bf16 --v bf16] [--layers 32] [--device cuda]

dd writes with conv=fsync, as a save ends with a sync. Before each read the file leaves the system's cache. "into": a
load into a cache that has its memory; "new": one that takes memory from the system, which may cost a virtual machine
more than the load. The memory is the growth of the process's peak in a save and in a load into. With --device the
caches are on that device; CopiesGpu.Speed of the GPU tests measures copies that no file is in. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

import kvant

HEADS, DIM, STEP = 8, 128, 64 * 16


def filled(args: argparse.Namespace) -> tuple[kvant.Cache, kvant.Sequence]:
    cache = kvant.Cache(layers=args.layers, kv_heads=HEADS, head_dim=DIM, k=args.k, v=args.v)
    sequence = cache.sequence()
    rows = np.random.default_rng(1).standard_normal((STEP, HEADS, DIM)).astype(np.float32)
    while cache.memory().total_bytes < args.mb << 20:
        cache.reserve([sequence], STEP)
        for layer in range(args.layers):
            cache.write([sequence], layer, rows, rows[::-1])
    return cache, sequence


def on_device(sequence: kvant.Sequence, args: argparse.Namespace) -> tuple[kvant.Cache, list[kvant.Sequence]]:
    """A cache on the device, large enough for the sequence and another, and the sequence in it."""
    cache = kvant.Cache(
        layers=args.layers, kv_heads=HEADS, head_dim=DIM, k=args.k, v=args.v, device=args.device,
        capacity_tokens=2 * (len(sequence) + 64), max_sequences=2,
    )  # fmt: skip
    return cache, kvant.copy_sequences(sequence, cache)


def status(field: str) -> int:
    """VmHWM or VmRSS of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def peak_growth(call) -> tuple[float, int]:
    """Seconds of a call, and by how much the resident memory was above what it was before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin, status("VmHWM") - before


def dd(*operands: str) -> float:
    begin = time.perf_counter()
    subprocess.run(["dd", "bs=1M", *operands], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def forget(path: Path) -> None:
    """The file leaves the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--k", default="bf16")
    parser.add_argument("--v", default="bf16")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    cache, sequence = filled(args)
    if args.device != "cpu":
        host = sequence
        cache, (sequence,) = on_device(host, args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, plain = Path(folder) / "cache.kvs", Path(folder) / "plain"
        what = f"{args.device}, {len(sequence)} tokens, {args.layers} layers, {args.k}/{args.v}"
        print(f"{what}; MB/s, and shares of dd's")
        print("round   save    dd  share  memory   | load into  new    dd  shares        memory")
        kvant.save(cache, path)
        # Without sequences, but with their memory.
        warm = kvant.load(path).cache if args.device == "cpu" else on_device(host, args)[0]
        for i in range(args.rounds):
            for file in (path, plain):
                file.unlink(missing_ok=True)
            save, memory = peak_growth(lambda: kvant.save(cache, path))
            size = path.stat().st_size
            write = dd("if=/dev/zero", f"of={plain}", f"count={size >> 20}", "conv=fsync")
            forget(path)
            into, into_memory = peak_growth(lambda: kvant.load(path, into=warm))
            forget(plain)
            read = dd(f"if={plain}", "of=/dev/null")
            forget(path)
            new, _ = peak_growth(lambda: kvant.load(path, device=args.device, capacity_tokens=len(sequence) + 64))
            mb = size / 1e6
            print(
                f"{i + 1:5d} {mb / save:6.0f} {mb / write:5.0f} {write / save:6.0%} {memory / 2**20:5.1f} MiB"
                f" | {mb / into:9.0f} {mb / new:4.0f} {mb / read:5.0f} {read / into:6.0%} {read / new:5.0%}"
                f" {into_memory / 2**20:5.1f} MiB"
            )
        print(f"{mb:.0f} MB each")


if __name__ == "__main__":
    main()
