"""The self-check of the first prompts: layers whose stored keys are far from the given ones are named."""

from __future__ import annotations

import pytest

from .engine import Engine


@pytest.fixture(autouse=True)
def no_layers(monkeypatch):
    from kvant.vllm import check

    monkeypatch.setattr(check, "_far", set())


def prompts(e, count=3, tokens=200):
    for seed in range(count):
        e.step([(e.request(seed + 1), tokens)], tolerance=10.0)


def warnings(caplog):
    return [m for m in caplog.messages if "scores have an error" in m]


def engine(vllm, **options):
    return Engine(vllm, [{}, {}, {}, {}], key_offsets={1: 60.0, 3: 60.0}, **options)


@pytest.mark.parametrize("cache_dtype", ["kvant_tq4", "kvant_fp8", "kvant_tq6_tq4"])
def test_layers_that_lose_their_keys(vllm, caplog, cache_dtype):
    """Keys with a large constant part, which pages without centres cannot store: the warning names the layers, the
    error and the option that keeps all of them exact."""
    e = engine(vllm, cache_dtype=cache_dtype, k_centre="none")
    prompts(e)
    found = warnings(caplog)
    assert len(found) == 2
    assert "model.layers.1.attn" in found[0] and "--kv-cache-dtype-skip-layers 1," in found[0]
    assert "model.layers.3.attn" in found[1] and "--kv-cache-dtype-skip-layers 1,3," in found[1]
    assert all("k_centre" in text and cache_dtype.split("_")[1] in text for text in found)
    prompts(e)
    assert len(warnings(caplog)) == 2
    for layer in e.layers:
        layer.made.process_weights_after_loading(e.dtype)  # the keys of other weights are judged anew
    prompts(e)
    assert len(warnings(caplog)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dtype": "kvant_tq4"},
        {"cache_dtype": "kvant_fp8"},
        {"cache_dtype": "kvant_tq4", "k_centre": "none", "skip_layers": ["1", "3"]},
        {"cache_dtype": "auto"},
    ],
    ids=str,
)
def test_layers_that_keep_them(vllm, caplog, options):
    """Centres take the constant part, and exact layers lose nothing."""
    e = engine(vllm, **options)
    prompts(e)
    assert all(layer.made.impl.check.done for layer in e.layers)
    assert "scores have an error" not in caplog.text


def test_layers_that_were_skipped_already(vllm, caplog):
    e = engine(vllm, cache_dtype="kvant_tq4", k_centre="none", skip_layers=["0", "3"])
    prompts(e)
    assert "--kv-cache-dtype-skip-layers 0,1,3," in caplog.text


def test_it_ends(vllm, monkeypatch, caplog):
    """It looks at prompts only, and no more once it has seen enough, or where prompts have no whole block."""
    from kvant.vllm import check

    e = engine(vllm, cache_dtype="kvant_tq4", k_centre="none")
    impl = e.layers[1].made.impl
    for seed in range(check.STEPS):
        assert not impl.check.done
        r = e.request(seed + 1)
        e.step([(r, 5)], tolerance=10.0)
        e.preempt(r)
    assert impl.check.done and impl.check.tokens == 0 and "scores have an error" not in caplog.text
    monkeypatch.setattr(check.Check, "look", lambda *_: pytest.fail("looked again"))
    prompts(e, 1)
