#!/usr/bin/env python3
"""What kvant's formats cost a real model: KL divergence from the exact model, by kvant.hf.evaluate on a CPU.

    python bench/quality/kl.py FOLDER tq6/tq4 tq4/tq4 fp8/fp8 --settings default,tail,encoded --positions 768

FOLDER is a Hugging Face model; fetch_models.py makes those of the documents' tables. kvant's wheel is installed.
Everything is computed in float32: a model of 1.5 billion weights needs 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

SETTINGS = {
    "default": {},  # kvant.hf's own: the first page and the newest 64 to 127 tokens are exact
    "tail": {"sink_pages": 0, "tail_pages": 1},  # the newest alone
    "encoded": {"sink_pages": 0, "tail_pages": 0},
}
CODE = ("tarfile", "statistics", "difflib")  # modules of Python's library


def read(text: str) -> str:
    """English that every Python has (its language reference), Python code, or a file of your own."""
    if text == "topics":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    if text == "code":
        library = Path(sysconfig.get_path("stdlib"))
        return "\n\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in CODE)
    return Path(text).read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("formats", nargs="+", metavar="KEYS/VALUES")
    parser.add_argument("--settings", default="default", help=f"some of {','.join(SETTINGS)}")
    parser.add_argument("--k-centre", choices=("page", "none"), help="kvant.hf chooses if this is not given")
    parser.add_argument("--text", default="topics", help="topics (English), code, or a file")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--step", type=int, default=32, help="tokens that are fed at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    a = parser.parse_args()
    settings = a.settings.split(",")
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))}: must be some of {', '.join(SETTINGS)}")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvant.hf

    torch.set_num_threads(a.threads)
    tokenizer = AutoTokenizer.from_pretrained(a.folder)
    model = AutoModelForCausalLM.from_pretrained(a.folder, dtype=torch.float32).eval()
    text = read(a.text)[: 8 * a.positions]
    centre = {"k_centre": a.k_centre} if a.k_centre else {}
    found = {}
    for setting in settings:
        result = kvant.hf.evaluate(
            model,
            text,
            a.formats,
            tokenizer=tokenizer,
            positions=a.positions,
            step=a.step,
            progress=False,
            **SETTINGS[setting],
            **centre,
        )
        print(f"\n{setting} {centre or ''} {a.text}\n{result}", flush=True)
        found[setting] = json.loads(result.to_json())
        if a.json:
            a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
