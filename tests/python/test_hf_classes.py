"""disable() gives back what enable() took: wrappers of generate(), class, hooks, attention. No part keeps a model."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import types
import weakref

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from kvant.hf.versions import CACHE_NAME  # noqa: E402
from models import tiny_llama  # noqa: E402

ANSWER = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
IDS = torch.arange(3, 153)[None]
OPTIONS = [{}, {"prefix_cache": 100}]


def parts(model):
    """All that enable() might touch on a model."""
    kept = {name: value for name, value in vars(model).items() if not name.startswith("_forward")}
    hooks = [list(getattr(model, name)) for name in ("_forward_hooks", "_forward_pre_hooks")]
    return type(model), kept, hooks, model.config._attn_implementation


def hits(model):
    return model._kvant.prefixes.index.stats.hits


@pytest.mark.parametrize("options", OPTIONS)
def test_a_model_is_as_it_was(options):
    model = tiny_llama()
    before = parts(model)
    kvant.hf.enable(model, **options)
    assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, before[0]) and model.can_generate()
    assert "generate" not in vars(model)
    kvant.hf.enable(model, k="tq4", **options)  # again
    model.generate(IDS, **ANSWER)
    kvant.hf.disable(model)
    assert parts(model) == before and type(model) is before[0]
    kvant.hf.disable(model)
    assert parts(model) == before


def bound(model, calls):
    inner = model.generate

    def generate(self, *positional, **named):
        calls.append(1)
        return inner(*positional, **named)

    return types.MethodType(generate, model)


def closed(model, calls):
    inner = model.generate
    return lambda *positional, **named: (calls.append(1), inner(*positional, **named))[1]


def partial(model, calls):
    return functools.partial(bound(model, calls), use_cache=True)


def compiled(model, calls):
    return torch.compile(closed(model, calls), backend="eager", disable=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [bound, closed, partial, compiled])
def test_a_wrapper_of_generate_is_called_and_stays(make, options):
    """From before enable(), and from between two of them, one around the other; known prefixes are found inside."""
    model, calls = tiny_llama(), []
    expected = model.generate(IDS, **ANSWER)
    model.generate = first = make(model, calls)
    kvant.hf.enable(model, **options)
    assert model.generate == first
    model.generate = second = make(model, calls)
    kvant.hf.enable(model, k="f32", v="f32", **options)
    for number in range(2):
        calls.clear()
        assert torch.equal(model.generate(IDS, **ANSWER), expected) and len(calls) == 2
        assert not options or hits(model) == number
    kvant.hf.disable(model)
    calls.clear()
    assert model.generate is second and torch.equal(model.generate(IDS, **ANSWER), expected) and len(calls) == 2


def test_what_a_wrapper_does_to_ids_and_answers_is_no_part_of_a_prefix():
    model = tiny_llama()
    inner = model.generate
    model.generate = lambda ids, **named: inner(ids + 1, **named)[:, 150:] * 0
    kvant.hf.enable(model, k="f32", v="f32", prefix_cache=100)
    model.generate(IDS, **ANSWER)
    del model.generate
    kept = next(iter(model._kvant.prefixes.index._table.entries.values()))
    assert list(memoryview(kept.ids).cast("q"))[:150] == (IDS + 1)[0].tolist()
    model.generate(IDS, **ANSWER)
    assert hits(model) == 0
    model.generate(IDS + 1, **ANSWER)
    assert hits(model) == 1


def test_the_report_has_the_prefixes():
    model = kvant.hf.enable(tiny_llama())
    assert kvant.hf.report(model).prefixes is None and "known prefix" not in str(kvant.hf.report(model))
    kvant.hf.enable(model, prefix_cache=100)
    assert "0 of 0 prompts that were looked up" in str(kvant.hf.report(model))
    for _ in range(2):
        model.generate(IDS, **ANSWER)
    report = kvant.hf.report(model)
    assert (report.prefixes.hits, report.prefixes.lookups, report.prefixes.entries) == (1, 2, 1)
    said = "\n1 of 2 prompts that were looked up began with a known prefix, 149 tokens in all; the index has 1 entries"
    assert said in str(report)


def test_a_generate_that_was_taken_from_an_enabled_model_goes_on():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    taken = model.generate
    expected = taken(IDS, **ANSWER)
    kvant.hf.disable(model)
    assert torch.equal(taken(IDS, **ANSWER), model.generate(IDS, **ANSWER))
    kvant.hf.enable(model, prefix_cache=100)
    del model  # it keeps the model, as every method does
    assert torch.equal(taken(IDS, **ANSWER), expected)
    assert kvant.hf.enable(tiny_llama(), prefix_cache=100).generate(IDS, **ANSWER).shape == (1, 153)
    assert inspect.signature(taken) == inspect.signature(tiny_llama().generate)


@pytest.mark.parametrize("options", OPTIONS)
def test_no_part_keeps_a_model(options):
    model = kvant.hf.enable(tiny_llama(), **options)
    model.generate(IDS, **ANSWER)
    cache = kvant.hf.cache(model)
    with torch.no_grad():
        model(IDS, **{CACHE_NAME: cache})
    gc.collect()
    gc.disable()  # weights of a model that is gone do not wait for the collector
    try:
        weak = [weakref.ref(model), weakref.ref(model.model.embed_tokens.weight)]
        del model
        assert [one() for one in weak] == [None, None]
    finally:
        gc.enable()
    assert cache.get_seq_length() == 150


def test_weights_that_were_replaced_go():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    model.generate(IDS, **ANSWER)
    gc.collect()
    gc.disable()
    try:
        weak = weakref.ref(model.model.layers[1].mlp)
        del model.model.layers[1]
        assert weak() is None
    finally:
        gc.enable()


def test_copies_and_pickles():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, k="f32", v="f32")
    model.generate = types.MethodType(lambda self, *a, **named: type(self).generate(self, *a, **named), model)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and twin.generate.__self__ is twin and model.generate.__self__ is model
    twin.generate(IDS, **ANSWER)
    assert kvant.hf.report(twin).tokens and hits(twin) == 0
    with pytest.raises(TypeError, match="cannot be pickled: call kvant.hf.disable"):
        pickle.dumps(model)
    kvant.hf.disable(twin)
    assert type(twin) is not type(model) and "_kvant" in vars(model)
    del model.generate
    model.generate(IDS, **ANSWER)
    assert hits(model) == 1  # they share the index
    kvant.hf.disable(model)
    del twin.generate
    assert type(pickle.loads(pickle.dumps(twin))) is type(twin)


def test_a_class_that_others_put_above():
    """As fully_shard of torch does."""
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    above = type("Above", (type(model),), {})
    model.__class__ = above
    model.generate(IDS, **ANSWER)
    model.generate(IDS, **ANSWER)
    assert hits(model) == 1
    kvant.hf.disable(model)
    assert type(model) is above
    output = model.generate(IDS, return_dict_in_generate=True, **ANSWER)
    assert not isinstance(output[CACHE_NAME], kvant.hf.KvantCache)
    kvant.hf.enable(model, prefix_cache=100)
    model.generate(IDS, **ANSWER)
    assert model._kvant.prefixes.index.stats.lookups == 1  # not twice for one prompt


def test_an_attention_that_was_chosen_since_stays():
    model = tiny_llama()
    before = model.config._attn_implementation
    kvant.hf.disable(kvant.hf.enable(model))
    assert model.config._attn_implementation == before == "sdpa"
    kvant.hf.enable(model)
    model.set_attn_implementation("eager")
    kvant.hf.disable(model)
    assert model.config._attn_implementation == "eager"


def test_hooks_of_others_stay():
    model, seen = tiny_llama(), []
    model.register_forward_pre_hook(lambda module, arguments: seen.append("before"))
    kvant.hf.enable(model)
    model.register_forward_hook(lambda module, arguments, output: seen.append("after"))
    kvant.hf.disable(model)
    model(IDS)
    assert seen == ["before", "after"] and len(model._forward_pre_hooks) == 1
