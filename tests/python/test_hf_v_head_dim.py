"""Models whose values have a size of their own (MiMo V2), and latents (DeepSeek), under kvant.hf: answers, prefixes,
saved caches, beams, captures. That their logits are right is in test_hf_models."""

from __future__ import annotations

import copy
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402
import zoo  # noqa: E402

import kvant  # noqa: E402
import kvant.hf  # noqa: E402
from hf_support import ISA, ON_DEVICE, forward, new_cache  # noqa: E402
from kvant.hf import versions  # noqa: E402

pytestmark = pytest.mark.skipif(ON_DEVICE, reason="devices have no kernels for two sizes")
OPTIONS = dict(k="f32", v="f32", short_windows=True, isa=ISA)
NAMES = ["MiMoV2Flash", "DeepseekV3", "DeepseekV2"]


@pytest.fixture(params=NAMES)
def model(request):
    torch.set_num_threads(1)
    built = zoo.build(next(entry for entry in zoo.ZOO if entry.prefix == request.param))
    if built is None:
        pytest.skip("not in this version of transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # latents are decoded in each step
        yield built.eval()


def ids_of(tokens, seed=1):
    return torch.randint(5, 115, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model, ids, **options):
    return model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def test_answers_and_beams_are_the_models_own(model):
    plain = copy.deepcopy(model)
    kvant.hf.enable(model, **OPTIONS)
    for options in ({}, {"num_beams": 3}):
        assert torch.equal(answer(model, ids_of(90), **options), answer(plain, ids_of(90), **options))


def test_reports_are_true_before_the_first_token(model):
    kvant.hf.enable(model, short_windows=True, isa=ISA)
    before = kvant.hf.report(model)
    answer(model, ids_of(90))
    after = kvant.hf.report(model)

    def facts(report):
        return [(r.stored, r.k, r.v, r.kv_heads, r.head_dim, r.v_head_dim, r.window, r.reason) for r in report.rows]

    groups = kvant.hf.cache(model, short_windows=True, isa=ISA)
    forward(model, groups, ids_of(70))
    assert [(g.cache.k, g.cache.v) for g in groups.groups] == [
        (before.rows[g.members[0]].k, before.rows[g.members[0]].v) for g in groups.groups
    ]
    assert facts(before) == facts(after) and before.tokens == 0 and after.tokens == 101
    assert all(row.stored for row in before.rows)
    kind = model.config.model_type
    if kind == "mimo_v2_flash":
        assert [(r.kv_heads, r.head_dim, r.v_head_dim) for r in before.rows] == [(4, 48, 40), (2, 48, 40)]
        assert "4 x 48/40" in str(before) and not any(r.reason for r in before.rows)
    else:
        lora = model.config.kv_lora_rank
        assert {(r.kv_heads, r.head_dim, r.v_head_dim, r.k, r.v) for r in before.rows} == {(1, lora, 16, "tq6", "tq8")}
        assert all("the model expands" in r.reason for r in before.rows)
        assert "prompts by torch over expanded latents" in str(after)
    row = after.rows[1]
    assert row.bf16_bytes == 101 * row.kv_heads * (row.head_dim + row.v_head_dim) * 2


def test_layers_that_a_device_leaves_are_said_before_the_first_token(model, monkeypatch):
    monkeypatch.setattr(versions, "compute_device", lambda model: torch.device("cuda", 0))
    build = kvant.build_info() | {"device": {"head_dims": [64, 128, 192], "widths": [[192, 128]]}}
    monkeypatch.setattr(kvant._tools, "build_info", lambda: build)
    latent = model.config.model_type != "mimo_v2_flash"
    of_sizes = "devices have kernels for .* or of 192/128, and not of"
    why = "kvant.hf stores latents on the CPU alone" if latent else of_sizes
    with pytest.warns(UserWarning, match=f"kvant stores no layer of .*: {why}"):
        kvant.hf.enable(model, short_windows=True)
    assert not any(row.stored for row in kvant.hf.report(model).rows)
    with pytest.raises(kvant.Unsupported, match=f"{why}.*strict=True"):
        kvant.hf.enable(model, short_windows=True, strict=True)


def test_strict(model):
    if model.config.model_type == "mimo_v2_flash":
        answer(kvant.hf.enable(model, strict=True, **OPTIONS), ids_of(40))
    else:
        with pytest.raises(kvant.Unsupported, match="expands its latents.*strict=True"):
            kvant.hf.enable(model, strict=True, **OPTIONS)


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_prompts_begin_with_known_prefixes(model, where, tmp_path):
    plain = copy.deepcopy(model)
    index = kvant.PrefixIndex(tmp_path / "prefixes" if where == "directory" else None)
    kvant.hf.enable(model, prefix_cache=index, **OPTIONS)
    first = answer(model, ids_of(130))
    ids = torch.cat([first, ids_of(20, 2)], 1)
    assert torch.equal(answer(model, ids), answer(plain, ids))
    assert kvant.hf.report(model).prefixes.hits == 1 and kvant.hf.report(model).prefixes.tokens >= 130


@pytest.mark.parametrize("options", [OPTIONS, dict(short_windows=True, isa=ISA)], ids=["f32", "default"])
def test_saved_caches_go_on_bit_for_bit(model, options, tmp_path):
    kvant.hf.enable(model, **options)
    cache = new_cache(model)
    forward(model, cache, ids_of(210))
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    loaded = kvant.hf.load(model, tmp_path / "chat.kvs")
    assert str(kvant.hf.report(loaded)) == str(kvant.hf.report(cache))
    twin = copy.deepcopy(cache)
    for n in (1, 40):
        expected = forward(model, cache, ids_of(n, n))
        assert torch.equal(forward(model, loaded, ids_of(n, n)), expected)
        assert torch.equal(forward(model, twin, ids_of(n, n)), expected)


def test_keys_and_values_that_are_read_have_their_shapes(model):
    plain = versions.DynamicCache(config=model.config)
    exact = copy.deepcopy(model)
    cache = kvant.hf.cache(model, **OPTIONS)
    for one, to in ((exact, plain), (kvant.hf.enable(model, **OPTIONS), cache)):
        forward(one, to, ids_of(50))
    for ours, theirs in zip(cache.layers, plain.layers):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert a.shape == b.shape and torch.allclose(a + 0, b, atol=1e-4)


def test_captures_are_evaluated(model, tmp_path):
    path = tmp_path / "qkv.safetensors"
    ids = ids_of(150)
    kvant.hf.capture(model, ids, path, queries=150, approximate=True)
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        k, v = (file.get_slice(f"layer0.{part}").get_shape() for part in "kv")
    assert k[:2] == v[:2] and k[2] != v[2]
    found = kvant.eval(path, formats=["f32", "tq8/tq6"])
    errors = {row["k_format"]: row["rel_l2"] for row in found["rows"] if row["layer"] == 0}
    assert errors["f32"] < 1e-5 < errors["tq8"] < 0.1


def test_widths_that_a_device_stores(monkeypatch):
    from kvant.hf.cache import why_not_on_a_device

    build = {"device": {"head_dims": [64, 128, 192], "widths": [[192, 128]]}}
    monkeypatch.setattr(kvant._tools, "build_info", lambda: build)
    for head_dim, v_head_dim in ((128, 128), (100, 100), (192, 128)):
        assert why_not_on_a_device(versions.Geometry(4, head_dim, v_head_dim)) is None
    for head_dim, v_head_dim in ((128, 192), (192, 64), (512, 64)):
        reason = why_not_on_a_device(versions.Geometry(4, head_dim, v_head_dim))
        assert f"of one size or of 192/128, and not of {head_dim}/{v_head_dim}" in reason
    assert why_not_on_a_device(versions.Geometry(1, 192, 128, True)) == "kvant.hf stores latents on the CPU alone"
    build["device"]["widths"] = []
    assert "of one size, and not of 192/128" in why_not_on_a_device(versions.Geometry(4, 192, 128))
    build["device"] = None  # what has no CUDA says so itself
    assert why_not_on_a_device(versions.Geometry(4, 192, 64)) is None
