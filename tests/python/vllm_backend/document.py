"""document.py MODEL: runs the Python of docs/vllm.md as it stands, with vLLM on the CPU and MODEL for its model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from generate import SMALL

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"


def main():
    import vllm

    made = vllm.LLM
    vllm.LLM = lambda name, **options: made(sys.argv[1], **SMALL, **options)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks, f"{PAGE} has no Python"
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
        print(f"RAN {PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
