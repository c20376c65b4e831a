"""kvant.hf refuses or says aloud: models and arguments that torch's attention does not serve, caches that are not
kvant's, writing to the keys of a cache. Keys that are read are right."""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import models  # noqa: E402
import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvant.hf  # noqa: E402
from hf_support import EXACT, ON_DEVICE, close, forward, new_cache, reference, with_cache  # noqa: E402
from kvant.hf import attention, conversation, groups, layers, memo, versions  # noqa: E402

pytestmark = pytest.mark.skipif(ON_DEVICE, reason="the CPU shows it")


@pytest.fixture
def llama():
    return models.tiny_llama()


@pytest.fixture
def ids():
    return torch.randint(3, 250, (2, 150), generator=torch.Generator().manual_seed(1))


# --- models and arguments ---


def test_models_that_are_kept_from_sdpa_are_refused(llama, ids):
    class Kept(type(llama)):
        _supports_sdpa = False

    kept = Kept._from_config(llama.config, attn_implementation="eager").eval()
    before = kept.config._attn_implementation
    with pytest.raises(ValueError, match="_supports_sdpa = False"):
        kvant.hf.enable(kept)
    assert kept.config._attn_implementation == before
    with pytest.raises(kvant.Unsupported, match="_supports_sdpa = False"):
        kvant.hf.evaluate(kept, ids[:1], ["tq4"], positions=64, progress=False)


def plain_tensors():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, heads, 9, 32, generator=generator) for heads in (4, 4, 4)]


@pytest.mark.parametrize("name", ["sinks", "indices", "block_indices", "cu_seq_lens_q", "key_bias"])
def test_unknown_arguments_are_refused_over_plain_tensors(name):
    with pytest.raises(RuntimeError, match=f"attention argument {name} is set"):
        attention.attend(torch.nn.Module(), *plain_tensors(), None, **{name: torch.ones(4)})
    attention.attend(torch.nn.Module(), *plain_tensors(), None, **{name: None}, use_cache=True)


def test_arguments_that_kvant_and_torch_divide():
    """position_bias is torch's where softcap and sinks are kvant's: together nobody computes them."""
    if not versions.SDPA_ARGUMENTS:
        pytest.skip("this version of transformers has no position_bias")
    q, k, v = plain_tensors()
    bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(3))
    module = torch.nn.Module()
    got, _ = attention.attend(module, q, k, v, None, position_bias=bias)
    scores = (q @ k.transpose(2, 3) * 32**-0.5 + bias).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -1e30)
    torch.testing.assert_close(got, (scores.softmax(-1) @ v).transpose(1, 2))
    with pytest.raises(RuntimeError, match="attention argument position_bias is set"):
        attention.attend(module, q, k, v, None, position_bias=bias, softcap=5.0)


def test_sinks_of_another_shape_are_refused():
    with pytest.raises(RuntimeError, match=r"s_aux has shape \[1, 4, 9, 1\]"):
        attention.attend(torch.nn.Module(), *plain_tensors(), None, s_aux=torch.ones(1, 4, 9, 1))


def test_cross_attention_layers_stay_with_transformers():
    """Mllama's cross-attention layers hold as many keys as an image has patches; a text leaves them out."""
    transformers = pytest.importorskip("transformers.models.mllama")
    torch.manual_seed(0)
    config = transformers.configuration_mllama.MllamaTextConfig(
        **models.TINY | {"num_hidden_layers": 4, "head_dim": None}, cross_attention_layers=[1, 3], pad_token_id=0
    )
    model = transformers.MllamaForCausalLM(config).eval()
    ids = torch.randint(3, 250, (1, 43), generator=torch.Generator().manual_seed(1))
    image = torch.randn(1, 7, config.hidden_size)

    def run(model, cache, **first):
        steps = [(ids[:, :40], first), *((ids[:, i : i + 1], {}) for i in range(40, 43))]
        return torch.cat([forward(model, cache, tokens, **more) for tokens, more in steps], 1)

    for first in ({}, {"cross_attention_states": image}):
        expected = run(model, DynamicCache(config=config), **first)
        enabled = kvant.hf.enable(copy.deepcopy(model), **EXACT)
        cache = new_cache(enabled)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(run(enabled, cache, **first), expected)
        assert [row.stored for row in kvant.hf.report(cache).rows] == [True, False, True, False]
        assert "cross-attention" in kvant.hf.report(cache).rows[1].reason


def test_a_causal_mask_over_a_layer_with_a_window(ids):
    """Moshi's window is one of its cache alone: a prompt sees all of itself, later steps the kept keys."""
    model = models.tiny_mistral(64)
    ids, window = ids[:1], model.config.sliding_window
    model.config.sliding_window = None  # of the masks
    kept = copy.deepcopy(model.config)
    kept.sliding_window = window  # of the cache

    def run(model, cache):
        return torch.cat([forward(model, cache, part) for part in ids.split([90, 1, 20, 39], 1)], 1)

    expected = run(model, DynamicCache(config=kept))
    kvant.hf.enable(model, **EXACT)
    got = run(model, kvant.hf.KvantCache(kept, kvant.hf.Settings.make(**EXACT)))
    close(got, expected)


# --- keys and values of a layer ---


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("padding", [0, 7])
def test_keys_and_values_of_a_layer(ids, window, padding):
    model = models.tiny_mistral(window) if window else models.tiny_llama()
    real = torch.ones_like(ids)
    real[1, :padding] = 0
    theirs, ours = DynamicCache(config=model.config), None
    forward(model, theirs, ids, attention_mask=real)
    kvant.hf.enable(model, **EXACT)
    ours = new_cache(model)
    layer = ours.layers[1]
    assert layer.keys is None and layer.values is None and not layer.is_initialized and not ours.is_initialized
    forward(model, ours, ids, attention_mask=real)
    assert layer.is_initialized and ours.is_initialized
    with pytest.warns(UserWarning, match=r"cache\.layers\[1\]\.keys"):
        keys = layer.keys + 0.0
    mask = real[:, -keys.shape[2] :].bool()[:, None, :, None]
    torch.testing.assert_close(keys * mask, theirs.layers[1].keys * mask)
    torch.testing.assert_close((layer.values + 0.0) * mask, theirs.layers[1].values * mask)
    old = layer.keys
    ours.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match="after the step they belong to"):
        old.sum()
    torch.testing.assert_close(layer.keys + 0.0, keys.flip(0))
    ours.reset()
    assert layer.keys is None and not layer.is_initialized and not ours.is_initialized


def test_strict_keys_are_not_decoded(llama, ids):
    cache = new_cache(kvant.hf.enable(llama, strict=True, **EXACT))
    forward(llama, cache, ids)
    assert cache.layers[0].keys.shape == (2, 2, 150, 32)  # known without decoding
    with pytest.raises(RuntimeError, match="strict=True"):
        cache.layers[0].keys.sum()


def test_keys_that_are_written_to(llama, ids):
    """Code that evicts tokens assigns keys or changes them in place; what kvant stores cannot change that way."""
    cache = new_cache(kvant.hf.enable(llama, **EXACT))
    forward(llama, cache, ids)
    layer = cache.layers[0]
    with pytest.raises(RuntimeError, match=r"cache\.layers\[0\]\.keys cannot be assigned"):
        layer.keys = torch.zeros(2, 2, 20, 32)
    with pytest.raises(RuntimeError, match=r"cache\.layers\[0\]\.values cannot be assigned"):
        layer.values = None
    for write in (
        lambda x: x.zero_(),
        lambda x: x.mul_(2.0),
        lambda x: x.__setitem__((slice(None), 0), 0.0),
        lambda x: torch.add(x.sum(), 1.0, out=x),
    ):
        with pytest.raises(RuntimeError, match="would change a decoded copy, not the cache: keys of layer 0"):
            write(layer.keys)
    for call in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(RuntimeError, match="not offloaded"):
            call()


# --- caches of others ---


def generate(model, ids, **options):
    return model.generate(ids, do_sample=False, max_new_tokens=3, pad_token_id=0, eos_token_id=None, **options)


ANOTHER = {
    "dynamic": lambda model: {"cache_implementation": "dynamic"},
    "static": lambda model: {"cache_implementation": "static"},
    "given": lambda model: with_cache(DynamicCache(config=model.config)),
}


@pytest.mark.parametrize("way", [*ANOTHER, "checkpoint"])
def test_a_cache_chosen_otherwise_is_said_aloud(llama, ids, way):
    if way == "checkpoint":
        llama.generation_config.cache_implementation = "static"
    options = ANOTHER.get(way, lambda model: {})
    expected = generate(llama, ids, **options(llama))
    kvant.hf.enable(llama)
    with pytest.warns(UserWarning, match="kvant, which is enabled for this model, stores nothing"):
        assert torch.equal(generate(llama, ids, **options(llama)), expected)
    report = kvant.hf.report(llama)
    assert not any(row.stored for row in report.rows) and len(report.rows) == 2
    assert "Cache: kvant stored none of them" in str(report) and " kvant " not in str(report).split("\n", 1)[1]
    kvant.hf.enable(llama, strict=True)
    with pytest.raises(kvant.Unsupported, match="strict=True"):
        generate(llama, ids, **options(llama))


def test_a_loop_over_the_models_own_cache(llama, ids):
    """A model makes a DynamicCache where it gets none: a loop that goes on with it stores nothing in kvant."""
    kvant.hf.enable(llama)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        out = llama(ids)
    past = out[versions.CACHE_NAME]
    with pytest.warns(UserWarning, match="DynamicCache"):
        forward(llama, past, ids[:, :1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(llama, past, ids[:, :1])  # said once
        forward(reference(llama), past, ids[:, :1])
        cache = new_cache(llama, **EXACT)
        forward(llama, cache, ids)
    assert all(row.stored for row in kvant.hf.report(llama).rows)


def test_copies_of_an_enabled_model_watch_for_themselves(llama, ids):
    twin = copy.deepcopy(kvant.hf.enable(llama))
    kvant.hf.disable(llama)
    with pytest.warns(UserWarning, match="DynamicCache"):
        forward(twin, DynamicCache(config=twin.config), ids)
    kvant.hf.disable(twin)
    assert not twin._forward_pre_hooks and not llama._forward_pre_hooks


def test_the_report_of_an_answer_stays_when_its_cache_is_gone(llama, ids):
    kvant.hf.enable(llama)
    assert not kvant.hf.report(llama).tokens
    generate(llama, ids)
    assert llama._kvant.last() is None and llama._kvant.held is None and not llama._kvant.answers
    report = kvant.hf.report(llama)
    assert report.tokens == ids.shape[1] + 2 and all(row.stored and row.bytes for row in report.rows)
    cache = new_cache(llama)
    assert not kvant.hf.report(llama).tokens  # of that cache
    forward(llama, cache, ids)
    assert kvant.hf.report(llama).tokens == ids.shape[1]


def test_an_answer_that_is_interrupted_leaves_no_cache(llama, ids):
    kvant.hf.enable(llama)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = llama.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(llama, ids)
    assert llama._kvant.held is None and not llama._kvant.answers
    hook.remove()
    generate(llama, ids)
    assert kvant.hf.report(llama).tokens == ids.shape[1] + 2


def test_no_finaliser_of_generate_is_a_function_of_python():
    """Python prints and drops what a signal's handler raises within one (kvant/_signals.py)."""
    for of in (kvant.hf.KvantCache, groups.Group, layers.KvantLayer, layers.Family, conversation.Conversation):
        assert not hasattr(of, "__del__"), of
    memo_of = memo.Memo()
    kept = conversation.Conversation()
    memo_of.put(kept, "known")
    (ref,) = weakref.getweakrefs(kept)
    assert ref.__callback__ is None and memo_of.get(kept) == "known"
    number = id(kept)
    del kept
    assert ref() is None and list(memo_of._known) == [number]
    other = conversation.Conversation()
    memo_of._known[id(other)] = memo_of._known.pop(number)  # in the same place of memory
    assert memo_of.get(other) is None
    memo_of.put(other, "new")
    assert list(memo_of._known) == [id(other)] and memo_of.get(other) == "new"


@pytest.mark.parametrize("where", ["before the prompt", "after the answer"])
def test_a_time_limit_is_no_reason_to_go_on_without_prefixes(llama, ids, monkeypatch, where):
    """A handler's TimeoutError is an OSError, and none of the system's."""
    index = kvant.PrefixIndex(max_bytes=1e8)
    kvant.hf.enable(llama, prefix_cache=index)

    def out_of_time(*_, **__):
        raise TimeoutError("of a handler")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as patch:
            patch.setattr(index, "find" if where == "before the prompt" else "insert", out_of_time)
            with pytest.raises(TimeoutError, match="of a handler"):
                generate(llama, ids[:1])
        generate(llama, ids[:1])
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="prefix"):
        patch.setattr(index, "find", lambda *_, **__: open("/none/such"))
        generate(llama, ids[:1])
