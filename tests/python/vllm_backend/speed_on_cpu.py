"""bench/vllm/speed.py with vLLM's engine on the CPU: generate.py replaces what vLLM's wheel for GPUs has none of."""

from __future__ import annotations

import sys
from pathlib import Path

import generate  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench" / "vllm"))

import speed  # noqa: E402

if __name__ == "__main__":
    speed.main()
