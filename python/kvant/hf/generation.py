"""The steps of kvant inside generate() and forward passes of an enabled model."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from kvant import _arguments

from . import versions
from .cache import KvantCache
from .conversation import Conversation, back, go_back
from .prefixes import is_plain_text
from .settings import Settings


def make_cache(model: Any, max_length: int | None, batch: int | None, **options: Any) -> KvantCache:
    enabled = model.__dict__.get("_kvant")
    settings = Settings.make(None if enabled is None else enabled.settings, **options)
    devices, on_device = versions.layer_devices(model), versions.compute_device(model).type != "cpu"
    made = KvantCache(model.config, settings, **room(max_length, batch), devices=devices, on_device=on_device)
    made.model = weakref.ref(model)
    return made


def room(max_length: Any, batch: Any) -> dict[str, int | None]:
    """Both, checked where they are given, also on the CPU, which does not read them."""
    given = {"max_length": max_length, "batch": batch}
    return {name: x if x is None else _arguments.int32(name, x, 1) for name, x in given.items()}


def look_at_cache(model: Any, positional: tuple, named: dict) -> tuple[tuple, dict] | None:
    """Before each forward pass of an enabled model: whether its cache is one of kvant. Where a call asks for a cache
    and has none, it gets one: a second run for guidance, and models that begin a new cache within an answer."""
    enabled = model.__dict__.get("_kvant")
    if enabled is None:
        return None
    arguments = {**versions.by_name(model, positional), **named}
    given = versions.given_cache(arguments)
    if isinstance(given, KvantCache):
        if enabled.last is None:
            enabled.watch(given)
        length, ids = given.get_seq_length(), arguments.get("input_ids")
        given.conversation.expect(model, arguments, length, given.length)
        counts = arguments.get("position_ids") is None
        given.conversation.put_back(model, length, None if ids is None else len(ids), counts)
        return None
    if versions.decoder_config(model.config)._attn_implementation != versions.IMPLEMENTATION:  # in evaluate()
        return None
    if isinstance(given, versions.Cache):
        enabled.used_another(model, given, "an argument of the model")
        return None
    made = _make_for(model, enabled, arguments)
    if made is None:
        return None
    made.conversation.expect(model, arguments, 0, 0)
    kept = {name: x for name, x in named.items() if name != "past_key_values"}
    return positional, {**kept, versions.CACHE_NAME: made}


def _make_for(model: Any, enabled: Any, arguments: dict) -> KvantCache | None:
    """A cache for a call that asks for one by use_cache=True; None: it does not, or is to be trained, or a device does
    not know how much room it needs."""
    ids = arguments.get("input_ids")
    ids = arguments.get("inputs_embeds") if ids is None else ids
    if not versions.makes_no_cache(arguments) or ids is None or torch.is_grad_enabled():
        return None
    needs: dict[str, int] = {}
    if versions.compute_device(model).type != "cpu":
        if not enabled.room:
            return None
        needs = {"max_length": ids.shape[1] + enabled.room.get("new", 0), "batch": len(ids)}
    made = make_cache(model, needs.get("max_length"), needs.get("batch"))
    before = None if enabled.last is None else enabled.last()
    if before is None or before.get_seq_length() <= ids.shape[1]:  # else that holds the answer
        enabled.watch(made)
    return made


def _prepare_inputs(original: Any, model: Any, inputs: Any, bos_token_id: Any, model_kwargs: dict) -> tuple:
    """In place of a model's _prepare_model_inputs, which generate() calls before it looks at its cache: a cache goes
    back to what the prompt has, and the model gets what it kept of the conversation."""
    found, name, named = original(model, inputs, bos_token_id, model_kwargs)
    enabled = model.__dict__.get("_kvant")
    if enabled is None:
        return found, name, named
    ids = found if name == "input_ids" else named.get("input_ids")
    ids = ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] else None
    enabled.room = {"prompt": found.shape[1] if found.ndim > 1 else 1}
    given = versions.given_cache(named)
    if isinstance(given, KvantCache):
        embedded = found.shape[1] if name == "inputs_embeds" else 0
        go_back(given, model, ids, embedded, named.get("attention_mask"), named, enabled.bound)
        given.conversation.put_back(model, given.get_seq_length(), found.shape[0])
    elif given is None:  # a new conversation, which an older one leaves nothing to
        Conversation().put_back(model, 0, None)
    return found, name, named


def _why_no_prefix(enabled: Any, generation_config: Any, max_length: int) -> str | None:
    """Why an answer is not to begin with a known prefix; None: it may."""
    if generation_config.return_dict_in_generate:
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(generation_config, name, None):
                return f"{name}=True asks for all tokens of the prompt"
    if enabled.bound is not None and max_length > enabled.bound:
        return f"rotary frequencies of texts above {enabled.bound} tokens depend on their length"
    return None


def _prepare_cache(
    original: Any,
    model: Any,
    generation_config: Any,
    model_kwargs: dict,
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """In place of a model's _prepare_cache_for_generation: where that makes a plain dynamic cache, a kvant cache."""
    enabled, name = model.__dict__.get("_kvant"), versions.CACHE_NAME
    given = model_kwargs.get(name)
    result = original(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    if enabled is None:
        return result
    got, chosen = model_kwargs.get(name), generation_config.cache_implementation
    if isinstance(got, versions.Cache) and not isinstance(got, KvantCache) and (given is not None or chosen):
        origin = f'cache_implementation="{chosen}"' if given is None else f"{name}= of generate()"
        enabled.used_another(model, got, origin)
    if given is None and versions.is_default_cache(got, generation_config):
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        made = make_cache(model, max_cache_length + 1, rows)
        enabled.watch(made)
        if enabled.prefixes is not None and is_plain_text(model_kwargs):
            reason = _why_no_prefix(enabled, generation_config, max_cache_length + 1)
            if reason is None:
                enabled.prefixes.offer(made)
            else:
                enabled.say(f"known prefixes are not used here: {reason}")
        if generation_config.is_assistant:
            made.activate_past_recording()
        model_kwargs[name] = made
    if got is None and generation_config.use_cache is False:
        enabled.used_another(model, None, "use_cache=False")
    enabled.room = {"new": max(max_cache_length + 1 - enabled.room.get("prompt", 0), 1)}
    used = model_kwargs.get(name)
    if isinstance(used, KvantCache):
        if versions.drafts(generation_mode) and used.get_seq_length() and used.conversation.whole_prompt:
            used.conversation.refuse_without_images(model_kwargs)
            back(used, 0, "assisted generation begins with the whole prompt")
        used.conversation.prepared(model)
    return result


# By the names of a model's methods.
STEPS = {"_prepare_cache_for_generation": _prepare_cache, "_prepare_model_inputs": _prepare_inputs}
