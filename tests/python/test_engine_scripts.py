"""bench/vllm: the requests of a load, the comparison of two runs, tables and faults, models with other heads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDERS = [Path(__file__).resolve().parents[2] / "bench" / name for name in ("quality", "vllm")]


@pytest.fixture
def script(monkeypatch):
    import importlib

    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_caches_and_files(script, tmp_path):
    engines = script("engines")
    assert engines.settings("auto") == {"kv_cache_dtype": "auto"}
    assert engines.settings("kvant")["kv_cache_dtype"] == "auto"
    options = engines.settings('kvant_tq4 {"tail_pages": 0}')
    assert options["kv_cache_dtype"] == "kvant_tq4" and options["additional_config"] == {"kvant": {"tail_pages": 0}}
    assert options["attention_backend"] == "CUSTOM"
    assert engines.stem_of(tmp_path, 'load: kvant_tq4 {"tail_pages": 0}').name == "load_kvant_tq4_tail_pages_0"
    assert engines.load(tmp_path, "nothing") is None


def test_parts_are_processes(script, tmp_path, monkeypatch, capsys):
    """A part that fails or takes too long is named, and its workers end."""
    engines = script("engines")
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys, time; sys.path.append({str(FOLDERS[0])!r}); from engines import *\n"
        "name = sys.argv[-1]\n"
        "if name == 'wrong': sys.exit(3)\n"
        "if name == 'slow': time.sleep(60)\n"
        f"end_part(Path({str(tmp_path)!r}), name, {{'word': os.environ['WORD'], 'words': sys.argv[1:]}})\n"
    )
    monkeypatch.setattr(sys, "argv", [str(program), "a", "b"])
    parts = {name: {"WORD": name} for name in ("right", "wrong", "slow")}
    assert sorted(engines.run_parts(parts, tmp_path, 3, seconds=3)) == ["slow", "wrong"]
    assert engines.load(tmp_path, "right") == {"word": "right", "words": ["a", "b", "--one", "right"]}
    printed = capsys.readouterr().out
    assert "right: done" in printed and "wrong: failed (3)" in printed and "slow: failed (3 s were over)" in printed


def test_the_requests_of_a_load(script):
    soak = script("soak")
    texts = [[7 * i % 250 for i in range(9000)], [11 * i % 251 for i in range(9000)]]
    made = soak.requests(1, 400, texts, 3000)
    assert made == soak.requests(1, 400, texts, 3000) != soak.requests(2, 400, texts, 3000)
    lengths = [len(x.prompt) for x in made]
    assert min(lengths) >= 1 and max(lengths) <= 3000 and max(lengths) > 2000
    assert {n % 64 for n in lengths if n > 64} >= {0, 1, 63}  # cut at a block's boundary, and one token beside
    prompts = [tuple(x.prompt) for x in made]
    assert len(set(prompts)) < len(prompts) and any(x.options.get("n") == 4 for x in made)
    kinds = {x.abort[0] for x in made if x.abort}
    assert kinds == {"waiting", "prompt", "tokens"} and 0.25 < sum(x.abort is not None for x in made) / 400 < 0.42
    assert all(1 <= x.options["max_tokens"] <= 256 for x in made)
    assert sorted(x.arrives for x in made) == [x.arrives for x in made]
    short = soak.requests(1, 50, [[1, 2, 3] * 30] * 2, 100)  # texts that are shorter than a prompt may be
    assert all(1 <= len(x.prompt) <= 100 for x in short)


def test_two_runs_of_a_request(script):
    soak = script("soak")
    x = [(5, {5: -0.1, 6: -2.5}), (7, {7: -0.3, 9: -1.5}), (1, {1: -0.2})]
    assert soak.compare(x, x) == (True, 0.0, 0.0)
    y = [(5, {5: -0.2, 6: -2.5}), (9, {9: -0.4, 7: -1.0}), (2, {2: -0.2})]
    equal, apart, at_it = soak.compare(x, y)
    assert not equal and apart == pytest.approx(0.1) and at_it == pytest.approx(1.1)
    assert soak.compare(x, x[:2]) == (False, 0.0, 0.0)  # one ended earlier
    assert soak.name_of("0_q3x12-a1b2") == "q3x12" and soak.name_of("other") == "other"


def test_a_report_of_loads(script, tmp_path, monkeypatch, capsys):
    soak = script("soak")
    row = {
        "requests": 240, "ended": 160, "aborted": {"waiting": 10, "prompt": 20, "decoding": 50}, "cached": 6400,
        "preemptions": 90, "alone": [60, 41], "logprob": 0.014, "at difference": 1.25, "drafts": [0, 0], "faults": [],
        "kvant": {"copies": 7, "misses": 31, "errors": 0},
    }  # fmt: skip
    wrong = row | {"drafts": [30, 90], "faults": ["round 2: 58 of 59 blocks are free"]}
    assert soak.report(60, {"load: kvant_tq4": row}) == []
    printed = capsys.readouterr().out
    assert "160 of 240" in printed and "41 of 60" in printed and "7 of  60" in printed
    results = {"load: auto": row, "drafts: auto": wrong}

    def run_parts(parts, out, parallel, seconds):
        assert list(parts) == ["load: auto", "load: kvant_tq8", "drafts: auto", "drafts: kvant_tq8"]
        for name in set(parts) & set(results):
            soak.load.__globals__["stem_of"](out, name).with_suffix(".json").write_text(json.dumps(results[name]))
        return ["load: kvant_tq8", "drafts: kvant_tq8"]

    monkeypatch.setattr(soak, "run_parts", run_parts)
    monkeypatch.setattr(sys, "argv", ["soak.py", "model", "auto", "kvant_tq8", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        soak.main()
    for fault in ("drafts: auto: round 2: 58 of 59 blocks are free", "load: kvant_tq8: failed"):
        assert fault in end.value.code
    assert "30 of 90" in capsys.readouterr().out
    for words, reason in ((["--loads", "chat"], "must be some of load, drafts"), (["--blocks", "20"], "must fit")):
        monkeypatch.setattr(sys, "argv", ["soak.py", "model", "auto", "--out", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            soak.main()
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("heads, groups", [(6, 3), (9, 3), (8, 2), (4, 1)])
def test_models_with_other_heads(script, tmp_path, heads, groups):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models
    from transformers import AutoModelForCausalLM

    two_gpus = script("two_gpus")
    bias = {"attention_bias": True, "hidden_size": 288, "num_attention_heads": heads, "num_key_value_heads": groups}
    model = models.sharpen(models.tiny_llama(**bias))
    for name, x in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(x, std=0.1) if "o_proj" not in name else torch.nn.init.zeros_(x)
    model.save_pretrained(tmp_path / "model")
    ids = models.topics_bytes(60)
    with torch.no_grad():
        wanted = model(ids).logits
    two_gpus.make_model(tmp_path / "model", "even", tmp_path / "even")
    assert (tmp_path / "even").exists() == (groups == 3)  # two GPUs share the heads of the others
    if groups == 3:
        even = AutoModelForCausalLM.from_pretrained(tmp_path / "even", dtype=torch.float32)
        assert even.config.num_key_value_heads == 4 and even.config.num_attention_heads == heads * 4 // 3
        with torch.no_grad():
            assert (even(ids).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()
    two_gpus.make_model(tmp_path / "model", "pooled", tmp_path / "pooled")
    assert (tmp_path / "pooled").exists() == (groups > 1)
    if groups > 1:
        pooled = AutoModelForCausalLM.from_pretrained(tmp_path / "pooled", dtype=torch.float32)
        assert pooled.config.num_key_value_heads == 1 and pooled.config.num_attention_heads % 2 == 0
        keys = model.model.layers[1].self_attn.k_proj.weight.view(groups, 32, 288)
        keys = torch.cat([keys, keys[:1]]) if groups == 3 else keys
        assert torch.allclose(pooled.model.layers[1].self_attn.k_proj.weight, keys.mean(0), atol=1e-6)


def test_a_report_of_two_gpus(script, tmp_path, monkeypatch, capsys):
    two_gpus = script("two_gpus")
    assert [len(x) for x in two_gpus.prompts_of([[1, 2, 3], [4] * 50000])] == 2 * list(two_gpus.LENGTHS)

    def run(tokens, logprob, text):
        return {"tokens": [[1, 2, 3], tokens], "logprobs": [[-0.1] * 3, [logprob] * 3], "text": [text] * 5, "again": 2}

    found = {
        "one: auto": run([4, 5, 6], -0.5, -1.0),
        "one: kvant_tq4": run([4, 5, 7], -0.52, -1.02),
        "tensor: auto": run([4, 5, 6], -0.51, -1.01),
        "tensor: kvant_tq4": run([4, 5, 6], -0.53, -1.03),
        "one pooled: auto": run([4, 5, 6], -0.5, -1.0),
        "one pooled: kvant_tq4": run([4, 5, 6], -0.52, -1.02),
        "context: kvant_tq4": run([8, 5, 6], -0.5, -1.5),
        "draft: kvant_tq4": {k: x for k, x in run([4, 5, 7], -0.52, 0).items() if k != "text"} | {"drafts": [9, 12]},
    }
    here = two_gpus.compare(found["tensor: kvant_tq4"], found["one: kvant_tq4"])
    assert (here.equal, here.of, here.tokens) == (1, 2, 2.5) and here.text == pytest.approx(0.01)

    def run_parts(parts, out, parallel, seconds):
        assert parts["tensor: auto"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
        alone = [x["CUDA_VISIBLE_DEVICES"] for name, x in parts.items() if name.startswith(("one", "draft"))]
        assert alone == ["0", "1"] * (len(alone) // 2)
        for name in set(parts) & set(found):
            two_gpus.load.__globals__["stem_of"](out, name).with_suffix(".json").write_text(json.dumps(found[name]))
        return ["context: auto"]

    monkeypatch.setattr(two_gpus, "run_parts", run_parts)
    monkeypatch.setattr(two_gpus, "make_model", lambda *a: None)
    words = ["two_gpus.py", "model", "auto", "kvant_tq4", "--out", str(tmp_path), "--modes", "tensor,draft,context"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="failed: context: auto; too far from one GPU: context: kvant_tq4"):
        two_gpus.main()
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["context: kvant_tq4"].endswith("FAR") and not lines["tensor: kvant_tq4"].endswith("FAR")
    assert "drafts 9 of 12" in lines["draft: kvant_tq4"]
    monkeypatch.setattr(sys, "argv", [*words[:-1], "tensor,many"])
    with pytest.raises(SystemExit):
        two_gpus.main()
