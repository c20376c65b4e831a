"""generate() that begins with a known prefix: enable(model, prefix_cache=...).

Before the prompt is computed, the cache that generate() makes gets the longest known prefix; afterwards the index keeps
prompt and answer.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
import weakref
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import kvant
from kvant import _locks
from kvant._signals import is_of_handler

from . import identity, versions
from .cache import KvantCache
from .conversation import only_text
from .identity import State
from .saving import Adopted, describe, stored_options, why_not_whole
from .settings import Settings


def make_index(given: Any) -> kvant.PrefixIndex:
    """The index that prefix_cache= stands for."""
    if isinstance(given, kvant.PrefixIndex):
        return given
    if isinstance(given, (str, Path)):
        return kvant.PrefixIndex(given)
    if isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0:
        return kvant.PrefixIndex(max_bytes=given * 1e6)
    raise kvant.InvalidArgument(
        f"prefix_cache = {given!r}: must be a directory, megabytes above 0, or a kvant.PrefixIndex"
    )


@dataclass
class Request:
    """A prompt on its way through a decoding method."""

    ids: list[int]
    cache: KvantCache
    key: str
    number: int  # of the model's state


class Prefixes:
    """The index of an enabled model."""

    def __init__(self, index: kvant.PrefixIndex, settings: Settings, untouched: KvantCache, salt: str):
        reason = why_not_whole(untouched)
        if reason is not None:
            raise ValueError(f"{reason}: prefix_cache needs a cache that kvant stores whole")
        self.index = index
        options = json.dumps(stored_options(settings), sort_keys=True)
        bases = b""
        if settings.bases is not None:
            with open(os.fspath(settings.bases.path), "rb") as file:
                bases = file.read()
        self._digest = blake2b(f"{salt}\0{options}\0".encode() + bases, digest_size=16).hexdigest()
        self._lock = _locks.new("the known prefixes of a model")
        self._host: list[kvant.Cache] | None = None
        self._said: set[str] = set()

    def __deepcopy__(self, memo: dict) -> Prefixes:
        other = copy.copy(self)  # the index is shared
        other._lock, other._said = _locks.new("the known prefixes of a model"), set()
        return other

    def offer(self, cache: KvantCache) -> None:
        """Notes a cache that generate() made for a plain text: it may begin with a known prefix, and be kept."""
        cache.offered_to = self

    def key(self, model: Any, state: State) -> str:
        """All that stored keys and values depend on besides the token ids."""
        kind = versions.compute_device(model).type
        cast = f" {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else ""
        return f"{state.text} {self._digest}{cast}"

    def _say(self, text: str, level: int) -> None:
        """A warning, once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=level)

    # --- before a prompt ---

    def begin(self, model: Any, settings: Settings, input_ids: Any, arguments: dict, continues: bool) -> Request | None:
        """The prompt that a decoding method gets, if it can be kept; None: it cannot. With a known prefix, the cache in
        `arguments` becomes one that begins with it.

        continues: whether the method gives the model only what a cache lacks.
        """
        cache = arguments.get(versions.CACHE_NAME)
        if not isinstance(cache, KvantCache) or cache.offered_to is not self:
            return None
        rows = _rows_of_one_text(input_ids, arguments.get("position_ids"))
        if not rows:
            return None
        try:
            state = identity.state(model)
            reason = _why_not_by_ids(model) or state.random
            if reason:
                raise ValueError(reason)
            request = Request(rows[0], cache, self.key(model, state), state.number)
            found = self._find(request, model, settings) if continues else None
        except (kvant.KvantError, ValueError, OSError) as error:  # the prompt can be computed all the same
            if is_of_handler(error):
                raise
            self._say(f"no prefix is used for this prompt: {error}", 6)
            return None
        if found is not None:
            ids = input_ids[:1, : found.length]
            found.model, found.conversation = weakref.ref(model), found.conversation.of_prefix(ids, cache.conversation)
            found.conversation.computed_by(model, found.length)
            request.cache = found
            if len(rows) > 1:
                found.batch_repeat_interleave(len(rows))
            if getattr(arguments.get("generation_config"), "is_assistant", False):
                found.activate_past_recording()
            arguments[versions.CACHE_NAME] = found
        return request

    def _find(self, request: Request, model: Any, settings: Settings) -> KvantCache | None:
        adopted: list[Adopted] = []
        capacity = {"max_length": request.cache.max_length, "batch": request.cache.capacity_rows}

        def make(place: int, metadata: dict[str, str]) -> kvant.Cache:
            if place == 0:
                adopted.append(Adopted(model, settings, metadata, capacity))
            return adopted[-1].make_cache(place)

        on_device = versions.compute_device(model).type != "cpu"
        in_place = self.index.directory is None and not self._keeps_copies(on_device)
        found = self.index.find(request.ids[:-1], model=request.key, into=None if in_place else make)
        if found is None:
            return None
        if in_place:
            adopted.append(Adopted(model, settings, found.metadata, capacity))
        return adopted[-1].finish([[s] for s in found.sequences], found.length)

    # --- after an answer ---

    def keep(self, request: Request, model: Any, output: Any) -> None:
        """Keeps what a cache holds of prompt and answer."""
        cache = request.cache
        sequences = getattr(output, "sequences", output)
        if cache.rows != 1 or cache.stored is not None:
            return
        if not isinstance(sequences, torch.Tensor) or sequences.shape[0] != 1:
            return
        tokens = sequences[0].tolist()
        length = min(len(tokens), cache.length)
        try:
            reason = why_not_whole(cache)  # on a device only tokens tell
            if cache.conversation.ahead:
                reason = "tokens of a prompt see later ones, so that no other prompt can begin as it does"
            held = cache.conversation.ids(cache.length)
            if reason is None and (held is None or held[0, :length].tolist() != tokens[:length]):
                reason = "its cache holds other tokens than prompt and answer (a soft prompt, or embeddings)"
            if reason is not None:
                raise ValueError(reason)
            state = identity.state(model)
            if (self.key(model, state), state.number) != (request.key, request.number):
                raise ValueError("weights or adapters of the model changed while the answer was computed")
            if state.random:
                raise ValueError(state.random)
            if length < cache.length:  # more was computed than the answer has
                cache = copy.deepcopy(cache)
                cache.crop(length - cache.length)
            rows = [group.sequences[0] for group in cache.groups]
            if self._keeps_copies(cache.groups[0].on_device):
                rows = self._on_host(model, cache, rows)
            self.index.insert(tokens[:length], rows, model=request.key, metadata=describe(cache))
        except (kvant.KvantError, ValueError, OSError) as error:  # the answer is right all the same
            if is_of_handler(error):
                raise
            self._say(f"the prefix of this answer is not kept: {error}", 5)

    def _keeps_copies(self, on_device: bool) -> bool:
        """Whether entries are in other caches than the model's: on the CPU forks share their pages."""
        return self.index.directory is None and on_device

    def _on_host(self, model: Any, cache: KvantCache, rows: list[kvant.Sequence]) -> list[kvant.Sequence]:
        """Copies of a device's sequences, in caches that all entries share: the device keeps its memory for itself."""
        with self._lock:
            if self._host is None:
                made = Adopted(model, cache.settings, describe(cache), {"max_length": None, "batch": None})
                self._host = [made.make_cache(place, "cpu") for place in range(len(rows))]
        return [kvant.copy_sequences(row, host)[0] for row, host in zip(rows, self._host, strict=True)]


def is_plain_text(model_kwargs: dict) -> bool:
    """Whether the token ids alone say what keys and values are: no padding, no images, no positions of one's own."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not (mask.ndim == 2 and bool((mask == 1).all())):
        return False
    return only_text(model_kwargs)


def _rows_of_one_text(ids: torch.Tensor, positions: torch.Tensor | None) -> list[list[int]]:
    """The equal rows of token ids; none where rows differ, or where their positions are not those that a text has by
    itself: generate() always gives them to decoding methods. One transfer from a device."""
    count, tokens = ids.shape
    if positions is not None and positions.shape[-1] != tokens:
        return []
    both = ids if positions is None else torch.cat([ids, positions.to(ids).reshape(-1, tokens)])
    rows = both.tolist()
    right = all(row == rows[0] for row in rows[:count]) and all(row == list(range(tokens)) for row in rows[count:])
    return rows[:count] if right else []


def _why_not_by_ids(model: Any) -> str:
    """Why token ids do not say all that a model gets: virtual tokens of peft's soft prompts come before the prompt, by
    a method that peft puts on the model during generate()."""
    owner = versions.wrapper(model)
    if owner is None:
        return ""
    return (
        f"prepare_inputs_for_generation was replaced by that of {type(owner).__name__}, which may put virtual tokens "
        "(a soft prompt) before the text"
    )


def decode(original: Any, continues: bool, model: Any, input_ids: Any, arguments: dict) -> Any:
    """A decoding method of generate(), with known prefixes. original: that of the model's class."""
    enabled = model.__dict__.get("_kvant")
    if enabled is None:
        return original(model, input_ids, **arguments)
    request, prefixes = None, enabled.prefixes
    enabled.answers += 1
    try:
        if prefixes is not None:
            request = prefixes.begin(model, enabled.settings, input_ids, arguments, continues)
        if request is not None:
            enabled.watch(request.cache)
        output = original(model, input_ids, **arguments)
        if request is not None:
            prefixes.keep(request, model, output)
        enabled.note_report()
        return output
    finally:
        enabled.answers -= 1
        if not enabled.answers:
            enabled.held = None
