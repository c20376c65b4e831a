#!/usr/bin/env python3
"""touched.py: which checks a change can fail. Prints a line for each: its name, or "left NAME". --files: prints the
paths that the change touches instead.

The change is everything that differs from the commit KVANT_BASE; where that is not set, from the commit that HEAD and
its upstream branch have in common; where this is HEAD itself or there is no upstream, from the newest commit that is a
day older than HEAD. Outside a git checkout, and with --all, every check and every file is named.

The choice depends on the change alone, so a check never turns red for a fault that an earlier change brought.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A check's name, and the paths that it looks at. What is not listed here runs on every change.
BUILD = r"CMakeLists\.txt|CMakePresets\.json|cmake/|dev$|scripts/touched\.py"
LIBRARY = rf"{BUILD}|include/|src/(?!cuda/)"
CHECKS = {
    "tidy": rf"{LIBRARY}|\.clang-tidy",
    "install": rf"{LIBRARY}|src/cuda/.*CMake|examples/|pyproject\.toml|scripts/(check_install|third_party)",
    "python": rf"{LIBRARY}|python/|tests/python/|bench/|README\.md|docs/|data/|examples/|scripts/",
    "vllm": rf"{LIBRARY}|python/|tests/python/",
    "wheel": rf"{LIBRARY}|python/|pyproject\.toml|tests/python/test_wheel|scripts/third_party",
    "sanitizers": rf"{LIBRARY}|tests/(?!python/|gpu/)|data/",
    "arm": rf"{BUILD}|include/|src/(base|codec|core|cpu)/|tests/(?!python/|gpu/|fuzz/)|data/|scripts/check_aarch64",
    "cuda": rf"{BUILD}|src/(base|codec|core|cuda)/|scripts/(check_cuda_ledger|nvcc_logged)|docs/lab/cuda-ledger",
}


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def base() -> str | None:
    """The commit that the change begins from. None: unknown."""
    if given := os.environ.get("KVANT_BASE"):
        if not (found := git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")):
            sys.exit(f"KVANT_BASE={given}: must be a commit of this checkout")
        return found
    head, shared = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "@{upstream}")
    if shared and shared != head:
        return shared
    date = git("log", "-1", "--format=%ct")
    return date and git("rev-list", "-1", f"--before={int(date) - 24 * 60 * 60}", "HEAD") or None


def changed(since: str) -> list[str]:
    """Paths that differ from the commit: committed, not committed yet, and new."""
    names = git("diff", "--name-only", since), git("ls-files", "--others", "--exclude-standard", "--full-name", ROOT)
    return [name for text in names for name in (text or "").splitlines()]


def touched(paths: list[str]) -> list[str]:
    return [name for name, pattern in CHECKS.items() if any(re.match(pattern, path) for path in paths)]


def main() -> None:
    since = None if "--all" in sys.argv[1:] else base()
    if "--files" in sys.argv[1:]:
        paths = changed(since) if since else [str(p.relative_to(ROOT)) for p in ROOT.glob("src/**/*.cpp")]
        print("\n".join(paths))
        return
    found = touched(changed(since)) if since else list(CHECKS)
    for name in CHECKS:
        print(name if name in found else f"left {name}")


if __name__ == "__main__":
    main()
