"""Hugging Face models over kvant caches.

    import kvant.hf
    kvant.hf.enable(model)                       # generate() as before, with keys at 6 bits and values at 4
    print(kvant.hf.report(model))                # which layers, why not, megabytes
    kvant.hf.disable(model)

    cache = kvant.hf.cache(model)                # or a cache of one's own: several turns, prefixes (copy.deepcopy)
    model.generate(**inputs, cache=cache)        # past_key_values=cache before transformers 5.24
    kvant.hf.save(cache, "chat.kvs")             # and kvant.hf.load(model, "chat.kvs"), in another process

    kvant.hf.enable(model, prefix_cache="DIR")   # prompts that begin as earlier ones are not computed again

Needs torch and transformers 5.16 or newer.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from dataclasses import replace
from typing import Any

import kvant

from . import attention, classes, generation, masks, positions, saving, versions
from ._capture import capture
from ._evaluate import evaluate
from .cache import KvantCache
from .graphs import StepGraph
from .prefixes import Prefixes, make_index
from .report import Report, make_report, report_of_another
from .saving import save
from .settings import OPTIONS, Settings

__all__ = [
    "KvantCache",
    "Report",
    "Settings",
    "StepGraph",
    "cache",
    "capture",
    "disable",
    "enable",
    "evaluate",
    "load",
    "report",
    "save",
]

versions.register(attention.attend, masks.make)


def __dir__() -> list[str]:
    """The names that users call, without the modules that define them."""
    return sorted(__all__) + [name for name in globals() if name.startswith("__")]


class _Enabled:
    """The object that enable() attaches to a model."""

    def __init__(self, settings: Settings, state: list):
        self.settings, self.state = settings, state
        self.prefixes: Prefixes | None = None
        self.last: Any = None  # a weak reference to the cache that was made last
        self.last_report: Report | None = None  # of that cache, at the end of its answer
        self.answers = 0  # that generate() computes now
        self.held: Any = None  # the cache that was made last, until there is its report
        self.warned: set[str] = set()
        self.bound: int | None = None  # of tokens: see versions.frequencies_change
        self.room: dict[str, int] = {}  # that the last generate() needs: see _Prepare
        self.hook: Any = None  # in the model's forward passes

    def __deepcopy__(self, memo: dict) -> _Enabled:
        other = _Enabled(self.settings, copy.deepcopy(self.state, memo))  # of the copied model's configurations
        other.bound = self.bound
        other.hook, other.prefixes = copy.deepcopy(self.hook, memo), copy.deepcopy(self.prefixes, memo)
        return other

    def used_another(self, model: Any, used: Any, origin: str) -> None:
        """The model's tokens go to a cache that is not kvant's, or to none: an error if strict, else a warning."""
        kind = "no cache" if used is None else f"a {type(used).__name__}"
        text = (
            f"{kind} holds the keys and values ({origin}): kvant, which is enabled for this model, stores nothing. "
            "Leave out what chooses it"
        )
        if used is not None:
            text += f", or pass {versions.CACHE_NAME}=kvant.hf.cache(model)"
        if self.settings.strict:
            raise kvant.Unsupported(f"{text} (strict=True)")
        layers = len(versions.hf_layers(model.config))
        self.last, self.last_report = None, report_of_another(kind, layers)
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(text, stacklevel=4)

    def say(self, text: str) -> None:
        """A warning, once for a model."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=6)

    def __reduce__(self):
        raise TypeError("a model with kvant enabled cannot be pickled: call kvant.hf.disable(model) before")

    def watch(self, made: KvantCache) -> None:
        self.last, self.last_report, made.said = weakref.ref(made), None, self.warned
        if self.answers:
            self.held = made

    def note_report(self) -> None:
        """At the end of an answer, whose cache may go: a finaliser that made the report would lose what a signal's
        handler raises within it."""
        made = None if self.last is None else self.last()
        if made is not None:
            self.last_report = make_report(made)


@OPTIONS.shown
def enable(model: Any, *, prefix_cache: Any = None, prefix_salt: str = "", **options: Any) -> Any:
    """Makes generate() of a model use kvant, with nothing else changed. Returns the model.

    prefix_cache: a directory, megabytes of memory, or a kvant.PrefixIndex: a prompt that begins as an earlier prompt
        and its answer did is not computed again, in generate() of one text. Prefixes of other weights, adapters and
        options are never used, also when these change later.
    prefix_salt: prefixes of another salt are never used: one for each tenant, whose prompts others must not notice.
    options: see Settings (k="tq6", v="tq4", skip_layers=(), strict=False, ...). May be called again with others.
        Errors: TypeError, kvant.InvalidArgument for options; kvant.Unsupported with strict=True where a layer would be
        left to transformers; ValueError for encoders, and for models that compute attention in ways of their own.
    """
    versions.checked(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder, whose two caches kvant.hf does not replace")
    _check_that_caches_are_taken(model)
    settings = Settings.make(**options)
    if not isinstance(prefix_salt, str):
        raise TypeError(f"prefix_salt is a {type(prefix_salt).__name__}: must be a str")
    if prefix_salt and prefix_cache is None:
        raise kvant.InvalidArgument(
            f'prefix_salt = "{prefix_salt}": keeps known prefixes apart, and there are none without prefix_cache='
        )
    untouched, prefixes = _untouched(model, settings), None
    kind = versions.decoder_config(model.config).model_type
    if prefix_cache is not None and kind in versions.DIVIDED:
        raise ValueError(
            f"{type(model).__name__}'s answers depend on how a prompt is divided into forward passes "
            f"({versions.DIVIDED[kind]}): prefix_cache would change them"
        )
    _warn_of_nothing(model, untouched)
    if prefix_cache is not None:
        prefixes = Prefixes(make_index(prefix_cache), settings, untouched, prefix_salt)
    enabled = model.__dict__.get("_kvant")
    if enabled is not None:
        enabled.settings, enabled.prefixes = settings, prefixes
        return model
    state = versions.attention_state(model)
    try:
        versions.set_attention(model)
    except ValueError:
        versions.restore_attention(state)
        raise
    enabled = model.__dict__["_kvant"] = _Enabled(settings, state)
    enabled.prefixes, enabled.bound = prefixes, positions.frequencies_change(model)
    enabled.hook = model.register_forward_pre_hook(generation.look_at_cache, with_kwargs=True)
    classes.put_on(model, generation.STEPS)
    return model


def _warn_of_nothing(model: Any, untouched: KvantCache) -> None:
    """A word where all layers that have a cache are left to transformers, and nobody asked for that."""
    left = {i: reason for i, reason in untouched.reasons.items() if untouched.could_store(i)}
    if left and len(untouched.reasons) == len(untouched.layers):
        warnings.warn(
            f"kvant stores no layer of {type(model).__name__}: {'; '.join(dict.fromkeys(left.values()))}. generate() "
            "works as before, in transformers' caches",
            stacklevel=3,
        )


def disable(model: Any) -> Any:
    """Undoes enable(): the model is as it was before, with what others changed since. Returns the model."""
    enabled = model.__dict__.pop("_kvant", None)
    if enabled is not None:
        classes.take_off(model)
        enabled.hook.remove()
        versions.restore_attention(enabled.state, versions.IMPLEMENTATION)
    return model


@OPTIONS.shown
def cache(model: Any, *, max_length: int | None = None, batch: int | None = None, **options: Any) -> KvantCache:
    """An empty cache for a model, to be passed as past_key_values. Options not given are those of enable(model).

    max_length, batch: needed on a device, where a cache takes its memory at once: tokens of the longest row, and rows
        alive at the same time, beams and copies included.
    """
    _check_that_caches_are_taken(versions.checked(model))
    made = generation.make_cache(model, max_length, batch, **options)
    enabled = model.__dict__.get("_kvant")
    if enabled is not None:
        enabled.watch(made)
    return made


def load(
    model: Any, path: Any, *, max_length: int | None = None, batch: int | None = None, tokens: Any = None
) -> KvantCache:
    """A cache that save() wrote, to be passed as past_key_values. It goes on bit for bit.

    model: the one that the cache was made for; others, and other weights, are refused. Formats are those of the file.
    max_length, batch: as for cache(). tokens: token ids of each row without padding; a file with others is refused.

    generate() compares prompts with the ids that the file has: an equal prompt computes its last token anew, a shorter
    or another one goes back to what both have in common, where the cache can, or is refused with a ValueError.

    Errors: ValueError (the file is none of kvant.hf, or of other layers); those of kvant.load.
    """
    enabled = versions.checked(model).__dict__.get("_kvant")
    settings = None if enabled is None else enabled.settings
    made = saving.load(model, path, settings, **generation.room(max_length, batch), tokens=tokens)
    made.model = weakref.ref(model)
    if enabled is not None:
        enabled.watch(made)
    return made


def report(of: Any) -> Report:
    """Where each layer is stored: a table by print(), and its `rows`.

    of: a cache, or a model that enable() was called for.
    For a model: the report of the cache that was made last. generate() drops its cache: the report of that one is as it
    was at the end of the answer. A cache of a loop of your own leaves no report when it is gone. With prefix_cache= the
    report says how many prompts began with a known prefix.
    """
    if isinstance(of, KvantCache):
        return make_report(of)
    if not isinstance(of, versions.PreTrainedModel):
        raise TypeError(f"of is a {type(of).__name__}: must be a cache of kvant.hf or a transformers model")
    enabled = of.__dict__.get("_kvant")
    if enabled is None:
        raise ValueError(f"kvant is not enabled for this {type(of).__name__}: call kvant.hf.enable(model) first")
    last = None if enabled.last is None else enabled.last()
    if last is not None:
        found = make_report(last)
    else:
        found = enabled.last_report or make_report(_untouched(of, enabled.settings))
    return found if enabled.prefixes is None else replace(found, prefixes=enabled.prefixes.index.stats)


def _untouched(model: Any, settings: Settings) -> KvantCache:
    """A cache without tokens, which says how the layers would be stored. On a device only tokens tell all."""
    on_device = versions.compute_device(model).type != "cpu"
    made = KvantCache(model.config, settings, devices=versions.layer_devices(model), on_device=on_device)
    if not on_device:
        made.try_out()
    return made


def _check_that_caches_are_taken(model: Any) -> None:
    if not versions.takes_cache(model):
        raise ValueError(
            f"{type(model).__name__} keeps no keys and values of earlier tokens in transformers' caches "
            "(an encoder, or states of its own): there is nothing to store"
        )
