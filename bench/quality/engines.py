"""vLLM's engines in processes of their own, for the scripts here and in bench/vllm.

A cache is named by vLLM's --kv-cache-dtype, perhaps followed by kvant's options as JSON (docs/vllm.md); `kvant` is the
plugin with exact pages, and `auto` is vLLM's own attention. A script has parts, and runs itself for each of them with
`--one NAME`; a part writes a JSON file, and a log lies beside that file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRAPHS = {
    "mode": 0,  # no torch.compile, which takes minutes
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "custom_ops": ["all"],
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 168],
}


def arguments(doc: str | None, parallel: int, seconds: float | None = None) -> argparse.ArgumentParser:
    """The options of all scripts. seconds: the usual limit of a part, where a script has one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face model")
    parser.add_argument("caches", nargs="+", metavar="CACHE")
    parser.add_argument("--parallel", type=int, default=parallel, help="engines at a time")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="that an engine may take")
    options_of_parts(parser)
    return parser


def options_of_parts(parser: argparse.ArgumentParser, needs_out: bool = True) -> None:
    parser.add_argument("--out", type=Path, required=needs_out, help="a folder for results and logs")
    parser.add_argument("--one", help=argparse.SUPPRESS)


def settings(cache: str) -> dict[str, Any]:
    """LLM's options."""
    dtype, _, options = cache.partition(" ")
    if not dtype.startswith("kvant"):
        return {"kv_cache_dtype": dtype}
    return {
        "kv_cache_dtype": "auto" if dtype == "kvant" else dtype,
        "attention_backend": "CUSTOM",
        "additional_config": {"kvant": json.loads(options or "{}")},
    }


def start(folder: str | Path, cache: str, **limits: Any) -> Any:
    """An LLM that decodes in CUDA graphs, in bfloat16."""
    from vllm import LLM

    usual = {"dtype": "bfloat16", "seed": 0, "gpu_memory_utilization": 0.1, "compilation_config": GRAPHS}
    return LLM(str(folder), **(usual | settings(cache) | limits))


def greedy(tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **options)


def stem_of(out: Path, name: str) -> Path:
    return out / re.sub(r"\W+", "_", name).strip("_")


def load(out: Path, name: str) -> dict[str, Any] | None:
    file = stem_of(out, name).with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def save(out: Path, name: str, found: dict[str, Any]) -> None:
    """The result of a part so far, which stays when the part is ended from outside."""
    file = stem_of(out, name).with_suffix(".json")
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found), encoding="utf-8")
    new.replace(file)


def end_part(out: Path, name: str, found: dict[str, Any]) -> None:
    """The last call of a part."""
    save(out, name, found)
    sys.stdout.flush()
    os._exit(0)  # an engine's threads would keep the process


def run_parts(
    parts: dict[str, dict[str, str]],
    out: Path,
    parallel: int,
    seconds: float | None = None,
    total: float | None = None,
) -> list[str]:
    """Runs parts, given by name with additions to the environment, so many at a time; the names of those that failed
    or took longer than so many seconds. total: seconds for all parts; when a part begins, its limit is an equal share
    of what is left."""
    out.mkdir(parents=True, exist_ok=True)
    begin, waiting = time.monotonic(), len(parts)
    usual = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONUNBUFFERED="1")
    failed = []

    def limit() -> float | None:
        nonlocal waiting
        rounds = math.ceil(waiting / parallel)
        waiting -= 1
        shares = [] if total is None else [max(0.0, begin + total - time.monotonic()) / rounds]
        return min([*shares, *([] if seconds is None else [seconds])], default=None)

    def run(name: str) -> None:
        most = limit()
        stem = stem_of(out, name)
        stem.with_suffix(".json").unlink(missing_ok=True)
        command = [sys.executable, sys.argv[0], *sys.argv[1:], "--one", name]
        with open(stem.with_suffix(".log"), "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=usual | parts[name], start_new_session=True
            )
            try:
                code = process.wait(most)
            except subprocess.TimeoutExpired:
                code = f"{most:.0f} s were over"
            try:
                os.killpg(process.pid, signal.SIGKILL)  # an engine's workers
            except ProcessLookupError:
                pass
            process.wait()
        if code != 0:
            failed.append(name)
        print(f"{name}: {'done' if code == 0 else f'failed ({code}), see {log.name}'}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        list(pool.map(run, parts))
    return failed
