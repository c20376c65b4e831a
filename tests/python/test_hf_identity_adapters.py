"""Which model it is: active adapters count, and how they are applied."""

from __future__ import annotations

import contextlib
import copy

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from identity_support import ANSWER, F32, entries, hits, ids, quiet  # noqa: E402, F401
from kvant.hf import identity  # noqa: E402
from kvant.hf.versions import CACHE_NAME  # noqa: E402
from models import tiny_llama  # noqa: E402


def lora(**options):
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4, **options)


def draw(model, part, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if part in name:
            weight.data.normal_(0, 0.3, generator=generator)


@pytest.fixture
def adapted():
    """A model of peft with the adapters "one" and "two"."""
    config = lora()
    import peft

    model = peft.get_peft_model(tiny_llama(), config, adapter_name="one")
    model.add_adapter("two", lora())
    draw(model, ".one.", 1)
    draw(model, ".two.", 2)
    return model.eval()


def of(model):
    return identity.fingerprint(model.get_base_model())


def test_active_adapters_count_and_others_do_not(adapted):
    base = identity.fingerprint(tiny_llama())
    one = of(adapted)
    adapted.set_adapter("two")
    two = of(adapted)
    with adapted.disable_adapter():
        assert of(adapted) == base
    adapted.base_model.set_adapter(["one", "two"])
    both = of(adapted)
    adapted.base_model.set_adapter(["two", "one"])
    assert len({base, one, two, both, of(adapted)}) == 5
    adapted.set_adapter("one")
    assert of(adapted) == one
    draw(adapted, ".two.", 9)  # is not active
    adapted.add_adapter("three", lora())
    adapted.set_adapter("one")
    assert of(adapted.eval()) == one
    draw(adapted, ".one.", 9)
    assert of(adapted) != one


def test_names_of_adapters_do_not_count(adapted):
    draw(adapted, ".two.", 1)
    one = of(adapted)
    adapted.set_adapter("two")
    assert of(adapted) == one


@pytest.mark.parametrize("options", [dict(lora_alpha=32), dict(use_rslora=True), dict(use_dora=True)])
def test_how_an_adapter_is_applied_counts(adapted, options):
    adapted.add_adapter("other", lora(**options))
    draw(adapted, ".one.lora", 1)
    found = [of(adapted)]
    adapted.set_adapter("other")
    adapted.eval()
    for (_, one), (_, other) in zip(
        ((n, p) for n, p in adapted.named_parameters() if ".one." in n and "magnitude" not in n),
        ((n, p) for n, p in adapted.named_parameters() if ".other." in n and "magnitude" not in n), strict=True,
    ):
        other.data.copy_(one.data)
    assert of(adapted) not in found


def test_scales_of_adapters_count(adapted):
    before = of(adapted)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_scale("one", 2)
    assert of(adapted) != before
    layer.set_scale("one", 1)
    assert of(adapted) == before
    layer.set_scale("two", 2)
    assert of(adapted) == before


@pytest.mark.parametrize("name", ["fan_in_fan_out", "cast_input_dtype_enabled"])
def test_attributes_of_adapters_layers_are_looked_at(adapted, name):
    layer = adapted.get_base_model().model.layers[1].self_attn.k_proj
    before, found = of(adapted), getattr(layer, name)
    setattr(layer, name, not found)
    assert of(adapted) != before
    setattr(layer, name, found)
    assert of(adapted) == before


def test_merged_adapters_are_the_weights(adapted):
    base = identity.fingerprint(tiny_llama())
    one = of(adapted)
    adapted.merge_adapter()
    merged = of(adapted)
    draw(adapted, ".one.", 5)  # its weights are read no more
    assert merged == of(adapted) not in (base, one)
    assert identity.fingerprint(copy.deepcopy(adapted.get_base_model())) == merged  # which is looked at anew
    assert identity.fingerprint(adapted.merge_and_unload()) == merged


def test_modules_that_an_adapter_trains_whole():
    config = lora(modules_to_save=["embed_tokens"])
    import peft

    model = peft.get_peft_model(tiny_llama(), config).eval()
    base, first = identity.fingerprint(tiny_llama()), of(model)
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.modules_to_save["default"].weight[7] += 1
    assert len({base, first, of(model)}) == 3
    with model.disable_adapter():
        assert of(model) == base


def test_adapters_without_a_model_of_peft():
    """As transformers puts them into its own models: add_adapter(), load_adapter()."""
    config, model = lora(), tiny_llama()
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = identity.fingerprint(model)
    for number, name in enumerate(("one", "two")):
        peft.inject_adapter_in_model(config, model, name)
        draw(model, f".{name}.", number)
    layers, found = [x for x in model.eval().modules() if isinstance(x, BaseTunerLayer)], []
    for name in ("one", "two"):
        for layer in layers:
            layer.set_adapter(name)
        found.append(identity.fingerprint(model))
    for layer in layers:
        layer.enable_adapters(False)
    assert len({*found, base}) == 3 and identity.fingerprint(model) == base
    for layer in layers:
        layer.enable_adapters(True)
        layer.set_adapter("one")
    assert identity.fingerprint(model) == found[0]


def test_each_adapter_gets_its_own_answer(adapted, tmp_path):
    inner = kvant.hf.enable(adapted.get_base_model(), prefix_cache=tmp_path / "prefixes", **F32)
    twin = copy.deepcopy(adapted)
    kvant.hf.enable(twin.get_base_model(), **F32)
    for known in (0, 1):
        for number, name in enumerate(("one", "two", None), 1):
            with contextlib.ExitStack() as stack:
                for each in (adapted, twin):
                    each.set_adapter(name or "one")
                    if name is None:
                        stack.enter_context(each.disable_adapter())
                got, right = (each.generate(input_ids=ids(), **ANSWER) for each in (adapted, twin))
            assert torch.equal(got, right) and hits(inner) == known * number


def test_a_snapshot_is_of_an_adapter(adapted, tmp_path):
    inner = kvant.hf.enable(adapted.get_base_model())
    cache = kvant.hf.cache(inner)
    with torch.no_grad():
        adapted(input_ids=ids(), **{CACHE_NAME: cache})
    kvant.hf.save(cache, tmp_path / "one.kvs")
    adapted.set_adapter("two")
    with pytest.raises(kvant.InvalidArgument, match="is required"):
        kvant.hf.load(inner, tmp_path / "one.kvs")
    adapted.set_adapter("one")
    assert kvant.hf.load(inner, tmp_path / "one.kvs").get_seq_length() == 200


def passed(model, cache, tokens, adapter=None):
    """A forward pass of tokens over a cache, under an adapter."""
    if adapter is not None:
        model.set_adapter(adapter)
    with torch.no_grad():
        model(input_ids=ids()[:, :tokens], **{CACHE_NAME: cache})
    return cache


def refused(cache, path):
    with pytest.raises(ValueError, match="not those that computed the keys of the cache"):
        kvant.hf.save(cache, path)
    assert not path.exists()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cache_is_saved_under_the_adapter_that_computed_it(adapted, tmp_path, enabled):
    path, inner = tmp_path / "a.kvs", adapted.get_base_model()
    if enabled:
        kvant.hf.enable(inner)
    one, two = (passed(adapted, kvant.hf.cache(inner), 100, name) for name in ("one", "two"))
    for _ in range(3):  # conversations of both at the same time
        passed(adapted, one, 1, "one"), passed(adapted, two, 1, "two")
    refused(one, path)
    refused(copy.deepcopy(one), path)
    kvant.hf.save(two, tmp_path / "two.kvs")
    adapted.set_adapter("one")
    refused(two, path)
    kvant.hf.save(one, path)
    loaded = kvant.hf.load(inner, path)
    path.unlink()
    adapted.set_adapter("two")
    refused(loaded, path)
    passed(adapted, loaded, 1, "two")
    adapted.set_adapter("one")
    refused(loaded, path)  # for a single token
    passed(adapted, one, 20, "two")
    adapted.set_adapter("one")
    refused(one, path)
    one.reset()
    kvant.hf.save(passed(adapted, one, 20), path)


@pytest.mark.parametrize("way", ["off", "merged", "trained", "a scale", "behind autograd"])
def test_what_else_makes_a_cache_another_ones(adapted, tmp_path, way):
    path, inner = tmp_path / "a.kvs", adapted.get_base_model()
    cache = passed(adapted, kvant.hf.cache(inner), 100, "one")
    layer = inner.model.layers[0].self_attn.q_proj
    with contextlib.ExitStack() as stack:
        if way == "off":
            stack.enter_context(adapted.disable_adapter())
        elif way == "merged":
            adapted.merge_adapter()
        elif way == "trained":
            with torch.no_grad():
                layer.lora_A["one"].weight.add_(1)
        elif way == "a scale":
            layer.scaling["one"] *= 2
        else:
            layer.lora_A["one"].weight.data.add_(1)
        refused(cache, path)


def test_a_cache_is_saved_with_another_object_of_the_same_model(tmp_path):
    model = tiny_llama()
    twin = copy.deepcopy(model)
    cache = passed(model, kvant.hf.cache(model), 100)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    refused(cache, tmp_path / "a.kvs")
    kvant.hf.save(cache, tmp_path / "a.kvs", model=twin)
    assert kvant.hf.load(twin, tmp_path / "a.kvs").get_seq_length() == 100


def test_adapters_of_one_request_are_not_known(adapted):
    inner = kvant.hf.enable(adapted.get_base_model(), prefix_cache=100, **F32)
    adapted.generate(input_ids=ids(), **ANSWER)
    with pytest.warns(RuntimeWarning, match="forward hook peft"):
        adapted.generate(input_ids=ids(), adapter_names=["two"], **ANSWER)
    assert (hits(inner), entries(inner)) == (0, 1)


def test_soft_prompts_are_not_known():
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = peft.get_peft_model(tiny_llama(), config).eval()
    inner = kvant.hf.enable(model.get_base_model(), prefix_cache=100, **F32)
    inner.generate(ids(), **ANSWER)
    twin = copy.deepcopy(model)
    kvant.hf.enable(twin.get_base_model(), **F32)
    with pytest.warns(RuntimeWarning, match="soft prompt"):
        got = model.generate(input_ids=ids(), **ANSWER)
    assert torch.equal(got, twin.generate(input_ids=ids(), **ANSWER)) and (hits(inner), entries(inner)) == (0, 1)
    inner.generate(ids(), **ANSWER)
    assert hits(inner) == 1
