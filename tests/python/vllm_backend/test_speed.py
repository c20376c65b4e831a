"""bench/vllm/speed.py from end to end: a small model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
    "attention_backend": "CUSTOM",
    "max_num_batched_tokens": 256,
}


@pytest.mark.slow
def test_every_kind_of_row(tmp_path):
    """Drafts are left out: vLLM needs numba for them."""
    words = ["auto", "kvant_tq4", "--shape", "tiny", "--rows", "2x70,4x64:8,256x8192", "--cache-gib", "0.25"]
    words += ["--options", json.dumps(OPTIONS), "--out", str(tmp_path), "--json", str(tmp_path / "all.json")]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("speed_on_cpu.py"), *words],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    logs = "\n".join(x.read_text(encoding="utf-8")[-1500:] for x in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))["caches"]
    assert list(found) == ["auto", "kvant_tq4"]
    for x in found.values():
        assert list(x["rows"]) == ["2x70", "4x64:8", "256x8192"]
        assert x["rows"]["2x70"]["tokens a step"] == 1 and x["rows"]["2x70"]["tokens/s"] > 0
        assert x["rows"]["4x64:8"]["tokens/s"] == pytest.approx(32 / x["rows"]["4x64:8"]["s"])
    # More tokens fit in tq4's pages than in those of float32.
    sizes = [x["about"]["tokens in the cache"] for x in found.values()]
    assert sizes[1] > 7 * sizes[0]
    assert "left out" in found["auto"]["rows"]["256x8192"]
    assert "| 2 x 70, tokens/s" in done.stdout
