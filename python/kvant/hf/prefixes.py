"""generate() that begins with a known prefix: enable(model, prefix_cache=...).

Before the prompt is computed, the cache that generate() makes gets the longest known prefix; afterwards the index keeps
prompt and answer.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import threading
import warnings
import weakref
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import kvant

from . import versions
from .cache import KvantCache
from .saving import Adopted, describe, fingerprint, stored_options, why_not_whole
from .settings import Settings

# What generate() gives a model beside token ids, and what does not change what keys and values are.
_KNOWN = frozenset({"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"})
_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})  # zeros for text


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


class Request:
    """One call of generate()."""

    def __init__(self, ids: Any, rejected: bool):
        usable = isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[0] == 1 and not rejected
        self.ids: list[int] | None = ids[0].tolist() if usable else None
        self.cache: KvantCache | None = None  # that generate() uses


class Prefixes:
    """The index of an enabled model."""

    def __init__(self, index: kvant.PrefixIndex, model: Any, settings: Settings, untouched: KvantCache):
        reason = why_not_whole(untouched)
        if reason is not None:
            raise ValueError(f"{reason}: prefix_cache needs a cache that kvant stores whole")
        self.index = index
        options = json.dumps(stored_options(settings), sort_keys=True)
        bases = b""
        if settings.bases is not None:
            with open(os.fspath(settings.bases.path), "rb") as file:
                bases = file.read()
        digest = blake2b(options.encode() + b"\0" + bases, digest_size=16).hexdigest()
        self.key = f"{fingerprint(model)} {digest}"
        self._calls = threading.local()
        self._lock = threading.Lock()
        self._host: list[kvant.Cache] | None = None

    def __deepcopy__(self, memo: dict) -> Prefixes:
        other = copy.copy(self)  # the index is shared
        other._calls, other._lock = threading.local(), threading.Lock()
        return other

    def begin(self, request: Request) -> None:
        self._stack().append(request)

    def end(self) -> None:
        self._stack().pop()

    def request(self) -> Request | None:
        """That of this thread's innermost generate()."""
        return self._stack()[-1] if self._stack() else None

    def _stack(self) -> list[Request]:
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        return self._calls.stack

    # --- before a prompt ---

    def cache_for(
        self, request: Request, model: Any, settings: Settings, capacity: dict[str, int]
    ) -> KvantCache | None:
        """A cache with the longest known prefix of a prompt, or None."""
        if request.ids is None:
            return None
        try:
            return self._find(request.ids[:-1], model, settings, capacity)
        except (kvant.KvantError, ValueError, OSError) as error:  # the prompt can be computed all the same
            warnings.warn(f"no prefix is used for this prompt: {error}", RuntimeWarning, stacklevel=5)
            return None

    def _find(self, ids: list[int], model: Any, settings: Settings, capacity: dict) -> KvantCache | None:
        adopted: list[Adopted] = []

        def make(place: int, metadata: dict[str, str]) -> kvant.Cache:
            if place == 0:
                adopted.append(Adopted(model, settings, metadata, capacity))
            return adopted[-1].make_cache(place)

        in_place = self.index.directory is None and not self._keeps_copies(model.device.type != "cpu")
        found = self.index.find(ids, model=self.key, into=None if in_place else make)
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
        if request.ids is None or cache is None or cache.rows != 1 or cache.stored is not None:
            return
        if not isinstance(sequences, torch.Tensor) or sequences.shape[0] != 1:
            return
        tokens = sequences[0].tolist()
        length = min(len(tokens), cache.length)
        try:
            reason = why_not_whole(cache)  # on a device only tokens tell
            if reason is not None:
                raise ValueError(reason)
            if length < cache.length:  # more was computed than the answer has
                cache = copy.deepcopy(cache)
                cache.crop(length - cache.length)
            rows = [group.sequences[0] for group in cache.groups]
            if self._keeps_copies(cache.groups[0].on_device):
                rows = self._on_host(model, cache, rows)
            self.index.insert(tokens[:length], rows, model=self.key, metadata=describe(cache))
        except (kvant.KvantError, ValueError, OSError) as error:  # the answer is right all the same
            warnings.warn(f"the prefix of this answer is not kept: {error}", RuntimeWarning, stacklevel=4)


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
    for name, value in model_kwargs.items():
        if name in _KNOWN or name == versions.CACHE_NAME or value is None:
            continue
        if name in _TYPES and isinstance(value, torch.Tensor) and not bool(value.any()):
            continue
        if isinstance(value, (bool, str)):
            continue
        return False
    return True


class Generate:
    """In place of a model's generate()."""

    def __init__(self, model: Any):
        self._model = weakref.ref(model)
        parameters = list(inspect.signature(type(model).generate).parameters.values())
        self.__signature__ = inspect.Signature(parameters[1:])

    def __call__(self, *positional: Any, **named: Any) -> Any:
        model = self._model()
        original, prefixes = type(model).generate, model.__dict__["_kvant"].prefixes
        ids = positional[0] if positional else named.get("inputs")
        ids = named.get("input_ids") if ids is None else ids
        rejected = any(named.get(name) is not None for name in ("inputs_embeds", "position_ids"))
        request = Request(ids, rejected)
        prefixes.begin(request)
        try:
            output = original(model, *positional, **named)
        finally:
            prefixes.end()
        prefixes.keep(request, model, output)
        return output

    def __deepcopy__(self, memo: dict) -> Generate:
        return Generate(memo[id(self._model())])
