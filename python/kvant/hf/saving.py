"""Caches of models in files: one snapshot for each group of layers, and what a KvantCache knows beyond them."""

from __future__ import annotations

import base64
import json
import os
import secrets
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch

import kvant
from kvant import _arguments, _options
from kvant._signals import attempt

from . import versions
from .cache import KvantCache
from .groups import Group
from .identity import fingerprint
from .layers import Family, KvantLayer
from .settings import Settings

# Metadata of a damaged or forged file may raise these when read. json raises RecursionError for thousands of brackets.
_DAMAGED = (AttributeError, KeyError, RecursionError, TypeError, ValueError)

# Options that depend on the process and not on the bytes.
_HERE = frozenset({"threads", "isa", "strict", "bases", *_options.HF_ATTENTION.by_name})


def stored_options(settings: Settings) -> dict[str, Any]:
    """The options that stored bytes depend on, but for calibrated bases."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _HERE}


# --- what a cache is, beside its pages ---


@dataclass(frozen=True)
class _Part:
    """A group of layers."""

    members: list[int]
    heads: int
    dim: int
    dtype: str
    v_dim: int = 0  # of values, where files have it: where it is another

    def __post_init__(self) -> None:
        """Errors: those of _DAMAGED, where a file has something else."""
        whole = all(type(x) is int for x in (*self.members, self.heads, self.dim, self.v_dim))
        dtype = getattr(torch, self.dtype)
        if not (whole and isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"layers {self.members} with {self.heads} heads of {self.dim} in {self.dtype}")

    @property
    def geometry(self) -> versions.Geometry:
        return versions.Geometry(self.heads, self.dim, self.v_dim or self.dim)


def why_not_whole(cache: KvantCache) -> str | None:
    """Why the pages of kvant are not all that a cache holds; None if they are."""
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, KvantLayer) and versions.kind_of_layer(layer)[0] != "none":
            return f"layer {i} is left to transformers ({cache.reasons.get(i, 'transformers keeps its cache')})"
    return None


def describe(cache: KvantCache) -> dict[str, str]:
    """The metadata that Adopted reads.

    Errors: ValueError: what the model keeps of the conversation is not known.
    """
    parts = []
    for group in cache.groups:
        dtype = str(cache.layers[group.members[0]].dtype).removeprefix("torch.")
        head_dim, v_head_dim = group.cache.head_dim, group.cache.v_head_dim
        parts.append([group.members, group.cache.kv_heads, head_dim, dtype, *([v_head_dim] * (v_head_dim != head_dim))])
    stored = ""
    if cache.stored is not None:
        bits = torch.nn.functional.pad(cache.stored.cpu().flatten().to(torch.uint8), (0, -cache.stored.numel() % 8))
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
        stored = base64.b64encode((bits.reshape(-1, 8) * weights).sum(1).to(torch.uint8).numpy().tobytes()).decode()
    return {
        "hf.kept": cache.conversation.encode(cache.length),
        "hf.groups": json.dumps(parts),
        "hf.rows": str(cache.rows),
        "hf.length": str(cache.length),
        "hf.stored": stored,
        "hf.options": json.dumps(stored_options(cache.settings)),
    }


class Adopted:
    """A cache in the making, whose sequences come from elsewhere. metadata: as describe() had it.

    Errors: ValueError: the metadata are of another model, or none of kvant.hf.
    """

    def __init__(self, model: Any, settings: Settings, metadata: dict[str, str], capacity: dict[str, int | None]):
        try:
            self.parts = [_Part(*part) for part in json.loads(metadata["hf.groups"])]
            self.rows, self.length = int(metadata["hf.rows"]), int(metadata["hf.length"])
            self.padding = metadata["hf.stored"]
            if not (self.rows > 0 and 0 < self.length < 1 << 31 and self.rows < 1 << 20):
                raise ValueError(f"{self.rows} rows of {self.length} tokens")
            packed = base64.b64decode(self.padding, validate=True)
            if packed and len(packed) != (self.rows * self.length + 7) // 8:
                raise ValueError(f"{len(packed)} bytes of padding for {self.rows} rows of {self.length} tokens")
            kept = metadata.get("hf.kept", '{"kept": {}, "media": [], "ahead": []}')  # new in 0.10
        except _DAMAGED as error:
            raise ValueError(f"this is no cache of kvant.hf: {error}") from None
        self.devices = versions.layer_devices(model)
        device = versions.compute_device(model)
        self.default_device, on_device = str(device), device.type != "cpu"
        self.cache = KvantCache(model.config, settings, devices=self.devices, on_device=on_device, **capacity)
        self.cache.conversation.decode(kept, model, self.rows, self.length)
        self._packed = packed
        self.families = [self._family(part) for part in self.parts]
        members = sorted(i for part in self.parts for i in part.members)
        ours = [layer.index for layer in self.cache.layers if isinstance(layer, KvantLayer)]
        if members != ours:
            raise ValueError(f"it has the layers {members}, and this model's cache would store {ours}")

    def _family(self, part: _Part) -> Family:
        layers = [self.cache.layers[i] for i in part.members if 0 <= i < len(self.cache.layers)]
        if len(layers) != len(part.members) or not all(isinstance(layer, KvantLayer) for layer in layers) or not layers:
            raise ValueError(f"it stores the layers {part.members}, which this model's cache does not")
        family = layers[0].family
        if family.geometry is None:  # one that only tensors tell
            family = layers[0].family = Family([layers[0].index], part.geometry, family.window)
        if family.members != part.members or family.geometry[:3] != part.geometry[:3]:
            raise ValueError(
                f"its layers {part.members} have {part.geometry} (heads x head_dim), and those of this model's cache "
                f"({family.members}) have {family.geometry}"
            )
        return family

    def device(self, place: int) -> str:
        return self.devices.get(self.parts[place].members[0], self.default_device)

    def make_cache(self, place: int, device: str | None = None) -> kvant.Cache:
        """An empty kvant cache for a group."""
        part, family = self.parts[place], self.families[place]
        device = device or self.device(place)
        group, reason = self.cache._new_group(part.members, family.geometry, family.window, device)
        if reason is not None:
            raise kvant.Unsupported(f"layers {part.members}: {reason}")
        return group.cache

    def finish(self, sequences: list[list[kvant.Sequence]], length: int | None = None) -> KvantCache:
        """The cache over sequences: of each group those of all rows. length: less than it was, of one unpadded row."""
        cache = self.cache
        length = self.length if length is None else length
        for part, family, rows, place in zip(self.parts, self.families, sequences, range(len(sequences))):
            group = Group(rows[0].cache, part.members, cache.settings)
            group._use(rows, [len(row) for row in rows])
            group.length = length
            family.group = group
            cache.groups.append(group)
            for slot, i in enumerate(part.members):
                layer = cache.layers[i]
                layer.group, layer.slot, layer.length, layer.family = group, slot, length, family
                layer.dtype, layer.device = getattr(torch, part.dtype), torch.device(self.device(place))
        cache.rows, cache.length = self.rows, length
        counts = [length] * self.rows
        if self._packed:
            bits = torch.frombuffer(bytearray(self._packed), dtype=torch.uint8)[:, None]
            bits = (bits >> torch.arange(8, dtype=torch.uint8)) & 1
            stored = bits.flatten()[: self.rows * self.length].reshape(self.rows, self.length).bool()
            cache.stored = stored.to(self.device(0))
            counts = stored.sum(1).tolist()
        for group in cache.groups:
            if group.rows != counts:
                raise ValueError(f"its sequences have {group.rows} tokens, and its rows {counts}")
        cache.conversation.crop(length)
        return cache


# --- files ---


def _model_of(cache: KvantCache, model: Any) -> Any:
    if model is None:
        model = None if cache.model is None else cache.model()
    if model is None:
        raise ValueError("the model of this cache is gone or was never known: pass model=, which load compares")
    return versions.checked(model)


def _known_tokens(cache: KvantCache) -> list[list[int]] | None:
    """The ids of each row without padding, as forward passes had them."""
    ids = cache.conversation.ids(cache.length)
    if ids is None:
        return None
    if cache.stored is None:
        return ids.tolist()
    return [row[real.to(row.device)].tolist() for row, real in zip(ids, cache.stored)]


def _know_tokens(cache: KvantCache, snapshot: kvant.Snapshot) -> None:
    """Ids that a file has are those of the cache."""
    rows = [snapshot.tokens(place) for place in range(cache.rows)]
    real = torch.ones((cache.rows, cache.length), dtype=torch.bool) if cache.stored is None else cache.stored.cpu()
    if [len(row) for row in rows] == real.sum(1).tolist():
        ids = torch.zeros(real.shape, dtype=torch.long)
        ids[real] = torch.tensor([x for row in rows for x in row], dtype=torch.long)
        cache.conversation.know(ids.to(cache.layers[cache.groups[0].members[0]].device))


def _old_parts(path: str) -> list[str]:
    """The files that an older snapshot of that name needs beside it."""
    try:
        return _parts(kvant.Snapshot(path).info, path)
    except (kvant.KvantError, ValueError):
        return []


def _parts(info: kvant.SnapshotInfo, path: str) -> list[str]:
    try:
        names = json.loads(info.metadata["hf.parts"])
        folder, base = os.path.split(path)
        if type(names) is not list:
            raise ValueError("no list")
        if not all(isinstance(n, str) and n == os.path.basename(n) and n.startswith(f"{base}.") for n in names):
            raise ValueError("names of other folders")
    except _DAMAGED:
        raise ValueError(f"{path}: this is no cache of kvant.hf (kvant.load reads snapshots of kvant.Cache)") from None
    return [os.path.join(folder, name) for name in names]


def _parts_of(info: kvant.SnapshotInfo, path: str) -> list[str]:
    """The parts of a snapshot that may be named by a link: beside the file itself, or links beside that link."""
    if os.path.islink(path):
        try:
            found = _parts(info, os.path.realpath(path))
            if all(os.path.exists(part) for part in found):
                return found
        except ValueError:
            pass
    return _parts(info, path)


def save(
    cache: KvantCache,
    path: Any,
    *,
    model: Any = None,
    tokens: Any = None,
    name: str = "",
) -> None:
    """Writes a cache of a model to a file. A cache that is loaded goes on bit for bit as this one does.

    path: of a snapshot (docs/snapshots.md). Where layers differ in geometry there is one for each; the others stand
        beside it as PATH.ID.N and are moved with it. An older cache of that path stays whole until the new one is.
    model: whose cache it is. None: the model that it was made for.
    tokens: token ids of each row without padding, which load can require and generate() compares prompts with. None:
        those that the cache has seen in forward passes; a warning says where it has not seen all. name: for people.

    Errors: ValueError where the cache has no tokens, or layers that kvant does not store, or positions that are not
    known (cropped into a step with images), or where weights or active adapters of the model have changed since the
    keys were computed; those of kvant.save.
    """
    if not isinstance(cache, KvantCache):
        raise TypeError(f"cache is a {type(cache).__name__}: must be a cache of kvant.hf")
    reason = why_not_whole(cache)
    if reason is not None:
        raise ValueError(f"{reason}: kvant.hf.save writes caches that kvant stores whole")
    if not cache.length:
        raise ValueError("the cache holds no tokens: there is nothing to save")
    cache._refuse_interrupted()
    where, of = _arguments.path("path", path), _model_of(cache, model)
    if os.path.islink(where):  # the parts stand beside the file that is written
        where = os.path.realpath(where)
    if cache.conversation.lacks(of, cache.length):
        raise ValueError(
            f"{type(of).__name__} keeps positions of the conversation in itself, and this cache has not recorded them: "
            "make it by kvant.hf.cache(model)"
        )
    if cache.conversation.is_of_another(of):
        raise ValueError(
            f"weights or adapters of this {type(of).__name__} are not those that computed the keys of the cache: save "
            "the cache before they change, or set the adapter that was active (set_adapter)"
        )
    model_name = fingerprint(of)
    if tokens is None:
        tokens = _known_tokens(cache)
        if tokens is None:
            _warn_of_no_ids(cache, where)
    made = secrets.token_hex(8)
    parts = [f"{where}.{made}.{i}" for i in range(1, len(cache.groups))]
    metadata = {**describe(cache), "hf.embedded": str(int(tokens is None and cache.conversation.by_embeddings))}
    metadata |= {"hf.set": made, "hf.parts": json.dumps([os.path.basename(p) for p in parts])}
    old = _old_parts(where) if os.path.exists(where) else []
    try:
        for group, each in reversed(list(zip(cache.groups, [where, *parts]))):  # the file that names the others last
            group._enqueue_here()
            kvant.save(
                group.cache,
                each,
                sequences=group.sequences,
                name=name,
                model=model_name,
                metadata=metadata,
                tokens=tokens,
            )
    except BaseException:
        _remove(parts)
        raise
    _remove(old)


def _warn_of_no_ids(cache: KvantCache, path: str) -> None:
    """The file will have no token ids. `kvant snapshot info` says "none" then."""
    why = "the model was given embeddings"
    if not cache.conversation.by_embeddings:
        why = "this cache has not seen all of them in forward passes of an enabled model"
    warnings.warn(
        f"{path} is saved without token ids, because {why}: load cannot require them, and generate() cannot compare "
        "prompts with them. Pass tokens=, a list of ids for each row",
        stacklevel=3,
    )


def _remove(paths: list[str]) -> None:
    for path in paths:
        attempt(os.unlink, path, refusals=(OSError,))


def load(
    model: Any,
    path: Any,
    enabled: Settings | None,
    *,
    max_length: int | None = None,
    batch: int | None = None,
    tokens: Any = None,
) -> KvantCache:
    """See kvant.hf.load. enabled: the settings of enable(model)."""
    where, model = _arguments.path("path", path), versions.checked(model)
    first = kvant.Snapshot(where)
    snapshots = [first, *(kvant.Snapshot(part) for part in _parts_of(first.info, where))]
    try:
        options = json.loads(first.info.metadata["hf.options"])
        if not _HERE.isdisjoint(options):
            raise ValueError(f"its options name {sorted(_HERE.intersection(options))}, which no file decides")
        settings = Settings.make(**options)
    except _DAMAGED as error:
        raise ValueError(f"{where}: this is no cache of kvant.hf: {error}") from None
    here = {} if enabled is None else {name: getattr(enabled, name) for name in _HERE}
    calibrated = first.info.config["k_basis"] == "calibrated" or first.info.config["v_basis"] == "calibrated"
    if not calibrated:
        here.pop("bases", None)
    elif here.get("bases") is None:
        raise ValueError(f"{where} has calibrated bases: call kvant.hf.enable(model, bases=...) with the same ones")
    settings = Settings.make(settings, **here)
    try:
        adopted = Adopted(model, settings, first.info.metadata, {"max_length": max_length, "batch": batch})
        if len(adopted.parts) != len(snapshots):
            raise ValueError(f"it has {len(adopted.parts)} groups of layers in {len(snapshots)} files")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    required = {"hf.set": first.info.metadata.get("hf.set", "")}
    name = fingerprint(model)
    loaded = [
        snapshot.load(into=adopted.make_cache(place), model=name, metadata=required, tokens=tokens).sequences
        for place, snapshot in enumerate(snapshots)
    ]
    try:
        cache = adopted.finish(loaded)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _know_tokens(cache, first)
    cache.conversation.restored = True
    cache.conversation.computed_by(model, cache.length)
    cache.conversation.by_embeddings = first.info.metadata.get("hf.embedded") == "1"
    if enabled is None and cache.conversation.shifts():
        raise ValueError(
            f"{where}: images shift the positions of this conversation, and {type(model).__name__} keeps them in "
            "itself: call kvant.hf.enable(model) before, which gives them back to the model"
        )
    return cache
