"""kvant._options: what every door takes, checks and tells stands there once."""
import inspect

import pytest

import kvant
from kvant import _c, _options

DOORS = {kvant.Plan: _options.PLAN, kvant.PagesPlan: _options.PAGES_PLAN, kvant.Cache: _options.CACHE,
         kvant.Pages: _options.PAGES}  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_signatures_and_docstrings_have_all_options(door):
    """As inspect.signature, help() and the stub show them: with types, defaults and sentences."""
    shown = inspect.signature(door).parameters
    for option in DOORS[door]:
        assert shown[option.name].annotation in (option.kind, "int")
        assert shown[option.name].default == option.default
        assert option.name in door.__doc__ and f"{option.name}: {option.kind}" in _stub(door.__name__)
    assert "{options}" not in door.__doc__ and max(map(len, door.__doc__.splitlines())) <= 120
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())


def _stub(name):
    with open(kvant.__file__ + "i") as file:
        return file.read().partition(f"\nclass {name}:\n")[2].partition("\nclass ")[0]


def test_calls_show_the_options_of_what_they_make():
    for call, taken in ((kvant.Cache.plan, ()), (kvant.Cache.attend, ("q_heads",)),
                        (kvant.Step.attend, ("q_heads", "q_len", "q_lens"))):  # fmt: skip
        assert {o.name for o in _options.PLAN} - set(taken) <= set(inspect.signature(call).parameters)
    assert {o.name for o in _options.PAGES_PLAN} <= set(inspect.signature(kvant.Pages.plan).parameters)


@pytest.mark.parametrize(
    "door, struct, others",
    [
        # Not an option of the door, or set by its code: the device, tables of imported formats, masks, arrays.
        ("CACHE", _c.CacheConfig, "device bases basis_layers k_levels v_levels k_level_count v_level_count lut_scales"),
        ("PAGES", _c.PagesConfig, "device"),
        ("PLAN", _c.AttentionOptions, "q_len q_lens alibi_slopes mask backend"),
        ("PAGES_ATTENTION", _c.AttentionOptions, "q_len q_lens alibi_slopes mask backend"),
        ("LIMITS", _c.PageLimits, ""),
    ],
)
def test_every_field_of_c_has_an_option(door, struct, others):
    fields = {name for name, _ in struct._fields_} - {"struct_size", *others.split()}
    assert {o.field or o.name for o in getattr(_options, door) if o.field is not None} == fields


def test_doors_that_an_option_names_exist():
    doors = {"plan", "pages_plan", "cache", "pages", "hf", "vllm"}
    for option in (*_options._ATTENTION, *_options._CACHE, *_options._PAGES):
        assert option.doors and set(option.doors.split()) <= doors


def test_defaults_are_allowed():
    for options in (*DOORS.values(), _options.HF_CACHE, _options.HF_ATTENTION, _options.VLLM):
        for option in options:
            if option.default not in (None, _options.REQUIRED):
                option.read(option.name, option.default)


@pytest.mark.parametrize("former, name", _options.FORMER.items())
def test_former_names_are_refused_with_the_new_one(former, name):
    cache = kvant.Cache(kv_heads=2, head_dim=64)
    pages = kvant.Pages(kv_heads=2, head_dim=64)
    calls = {
        _options.CACHE: lambda: kvant.Cache(kv_heads=2, head_dim=64, **{former: 1}),
        _options.PAGES: lambda: kvant.Pages(kv_heads=2, head_dim=64, **{former: 1}),
        _options.PLAN: lambda: cache.plan([], q_heads=2, **{former: 1}),
        _options.PAGES_PLAN: lambda: pages.plan(2, max_batch=1, max_blocks=1, **{former: 1}),
    }
    for options, call in calls.items():
        hint = f": it is called {name}$" if name in options.by_name else "; the options are "
        with pytest.raises(TypeError, match=f"^{former}: no such option of {options.owner}.*{hint}"):
            call()


def test_a_former_name_in_a_step_appends_nothing():
    import numpy as np

    cache, x = kvant.Cache(kv_heads=2, head_dim=64), np.ones((1, 2, 64), np.float32)
    sequence = cache.sequence()
    with pytest.raises(TypeError, match="^fresh: no such option of kvant.Plan: it is called fresh_keys$"):
        cache.attend(sequence, 0, x, x, x, fresh=True)
    assert len(sequence) == 0


def test_facts_do_not_change_and_are_what_c_tells():
    cache = kvant.Cache(kv_heads=2, head_dim=64, sink_pages=3, tail_pages=2, exact="f16")
    ends = cache.exact_ends()
    assert (ends.sink_pages, ends.tail_pages, ends.dtype) == (3, 2, "f16")
    assert repr(ends) == "ExactEnds(sink_pages=3, tail_pages=2, dtype='f16')"
    assert ends == cache.exact_ends() and hash(ends) == hash(cache.exact_ends()) and ends != cache.memory()
    for change in (lambda: setattr(ends, "dtype", "f32"), lambda: delattr(ends, "dtype")):
        with pytest.raises(AttributeError, match="dtype is a fact"):
            change()
    with pytest.raises(TypeError, match="made by the library alone"):
        kvant.ExactEnds()
    undecided, none = kvant.Cache(kv_heads=2, head_dim=64), kvant.Cache(kv_heads=2, head_dim=64, k="f32", v="f32")
    assert (undecided.exact_ends().sink_pages, undecided.exact_ends().dtype) == (1, None)
    assert (none.exact_ends().sink_pages, none.exact_ends().tail_pages, none.exact_ends().dtype) == (0, 0, None)


@pytest.mark.parametrize("facts", [kvant.ExactEnds, kvant.Memory, kvant.PageFacts, kvant.PlanFacts])
def test_facts_have_every_field_of_c(facts):
    assert list(facts.__annotations__) == [name for name, _ in facts._struct._fields_ if name != "struct_size"]


def test_what_is_missing_and_what_is_near():
    with pytest.raises(TypeError, match="^kvant.Cache needs kv_heads and head_dim$"):
        kvant.Cache()
    with pytest.raises(TypeError, match=r"^k_center: no such option of kvant.Cache \(did you mean k_centre\?\); the"):
        kvant.Cache(kv_heads=1, head_dim=64, k_center="none")
    options = "kv_heads, head_dim, v_head_dim, latent, rope, k, "
    with pytest.raises(TypeError, match=f"^zzz: no such option of kvant.Pages; the options are {options}"):
        kvant.Pages(kv_heads=1, head_dim=64, zzz=1)
