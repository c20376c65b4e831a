"""A Hugging Face cache whose layers keep their keys and values in kvant caches.

Padding is never stored. transformers counts `length` tokens, the same number for all rows. A row of the batch holds its
real tokens one after another, so that a padded batch gives what each prompt gives alone. `stored` tells them apart.
"""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from typing import Any

import torch

import kvant
from kvant._tools import sizes_without_kernels

from . import masks, versions
from .conversation import Conversation
from .groups import PAGE_TOKENS, Group, Step
from .layers import Family, KvantLayer
from .settings import SHORT_WINDOW, Settings


def why_not_on_a_device(geometry: versions.Geometry) -> str | None:
    """Why a device does not store such a layer; None: it does, or says so itself."""
    if geometry.latent:
        return "kvant.hf stores latents on the CPU alone"
    return sizes_without_kernels(geometry.head_dim, geometry.v_head_dim)


class KvantCache(versions.Cache):
    """The cache that kvant.hf.cache makes. Any model that transformers can run with a DynamicCache runs with it.

    config: the model's. max_length, batch: tokens of the longest row, and rows alive at once (beams and copies
        included); they set the capacity on a device and are not read on the CPU. devices: see versions.layer_devices.
    on_device: the model computes on a device.
    """

    def __init__(
        self,
        config: Any,
        settings: Settings,
        *,
        max_length: int | None = None,
        batch: int | None = None,
        devices: dict[int, str] | None = None,
        on_device: bool = False,
    ):
        self.settings, self.max_length, self.capacity_rows = settings, max_length, batch
        self.groups: list[Group] = []
        self.rows: int | None = None  # of the batch, None while the cache is empty
        self.length = 0
        self.stored: torch.Tensor | None = None  # [rows, length] bool; None: all are
        self.reasons: dict[int, str] = {}  # why a layer is not stored by kvant
        self.offered_to: Any = None  # the known prefixes of a model, one of which this cache may begin with
        self.model: weakref.ref | None = None  # that it was made for
        self.conversation = Conversation()
        self.said: set[str] = set()  # warnings; those of its model, where kvant is enabled
        self._note: tuple | None = None  # padding of the step to come: (offset, tokens, real, counts)
        self._step: Step | None = None
        self._warned = False
        families: dict[tuple, Family] = {}
        layers = versions.hf_layers(config)
        skipped, cross = settings.skipped(len(layers)), versions.cross_attention_layers(config)
        made = []
        for i, layer in enumerate(layers):
            kind, window = versions.kind_of_layer(layer)
            reason = (
                "its keys are an image's (cross-attention)"
                if i in cross
                else self._why_not(i, kind, window, layer, skipped)
            )
            geometry = versions.predicted_geometry(config, i)
            if reason is None and geometry is not None:
                reason = self._too_large(geometry)
                if reason is None and on_device:
                    reason = why_not_on_a_device(geometry)
            if reason is not None:
                if kind != "none" and i not in skipped:
                    self._refuse_if_strict(i, reason)
                self.reasons[i] = reason
                made.append(layer)
                continue
            if geometry is not None and geometry.latent:
                self._refuse_if_strict(
                    i, "the model expands its latents in each step, for which kvant decodes them all"
                )
            if geometry is None:
                family = Family([], None, window)
            else:
                family = families.setdefault((geometry, window, (devices or {}).get(i)), Family([], geometry, window))
            family.members.append(i)
            made.append(KvantLayer(self, i, family, layer))
        super().__init__(layers=made)

    # --- which layers ---

    def could_store(self, index: int) -> bool:
        """Whether a layer has keys and values of tokens, and skip_layers leaves it to kvant."""
        kind = versions.kind_of_layer(self.layers[index])[0]
        return kind in ("full", "sliding") and index not in self.settings.skipped(len(self.layers))

    def try_out(self) -> None:
        """Before the first tokens, on the CPU: makes the caches that the configuration asks for, so that settings which
        cannot be are refused here and not in the middle of a prompt."""
        families = {id(layer.family): layer.family for layer in self._kvant_layers()}
        for family in families.values():
            reason = None
            if family.geometry is not None:
                _, reason = self._new_group(family.members, family.geometry, family.window, "cpu")
            if reason is not None:
                for i in family.members:
                    self._refuse_if_strict(i, reason)
                    self.reasons[i], self.layers[i] = reason, self.layers[i].original

    def _refuse_if_strict(self, index: int, reason: str) -> None:
        if self.settings.strict:
            raise kvant.Unsupported(
                f"layer {index}: {reason} (strict=True; skip_layers=[{index}] leaves it to transformers)"
            )

    def _why_not(self, index: int, kind: str, window: int, layer: Any, skipped: set[int]) -> str | None:
        if kind == "none":
            return "has no cache of its own"
        if index in skipped:
            return "in skip_layers"
        if kind == "other":
            return f"{type(layer).__name__} is not keys and values alone"
        if kind == "sliding" and window <= SHORT_WINDOW and not self.settings.short_windows:
            return (
                f"a window of {window} takes as much in pages of 64 tokens; short_windows=True stores it all the same"
            )
        return None

    def attach(self, layer: KvantLayer, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Gives a layer its group at its first update. Returns transformers' layer if it must be left to that."""
        if self.rows is not None and keys.shape[0] != self.rows:
            self._refuse_batch(keys.shape[0])
        family, geometry = layer.family, versions.Geometry(keys.shape[1], keys.shape[3], values.shape[3])
        if family.geometry is not None and family.geometry[:3] == geometry[:3]:
            geometry = family.geometry
        reason = family.reason or self._why_not_these(keys, values)
        if reason is not None or family.geometry not in (None, geometry):
            if family.group is not None:
                raise RuntimeError(
                    f"layer {layer.index} has keys {list(keys.shape)} and values {list(values.shape)}, "
                    f"where its configuration and layers {family.members} say "
                    f"{family.geometry} (heads x head_dim): pass skip_layers=[{layer.index}]"
                )
            family.members.remove(layer.index)
            family = layer.family = Family([layer.index], None, layer.window)
        if reason is None and family.group is None:
            device = "cpu" if keys.device.type == "cpu" else f"{keys.device.type}:{keys.device.index or 0}"
            family.group, reason = self._new_group(family.members, geometry, layer.window, device)
            if reason is None:
                self.groups.append(family.group)
            family.reason = reason
        if reason is None:
            layer.group, layer.slot = family.group, family.members.index(layer.index)
            layer.dtype, layer.device = keys.dtype, keys.device
            return None
        self._refuse_if_strict(layer.index, reason)
        self.reasons[layer.index] = reason
        self.layers[layer.index] = layer.original
        self.say(
            f"layer {layer.index}, and others like it, are left to transformers: {reason}. kvant.hf.report() has them"
        )
        return layer.original

    def say(self, text: str) -> None:
        """A warning, once for all layers and all caches of a model that are alike in it."""
        kind = re.sub(r"\d+", "", text)
        if kind not in self.said:
            self.said.add(kind)
            warnings.warn(text, stacklevel=3)

    def _why_not_these(self, keys: torch.Tensor, values: torch.Tensor) -> str | None:
        if keys.shape[:3] != values.shape[:3]:
            return f"its keys {list(keys.shape)} and values {list(values.shape)} differ in heads or tokens"
        if keys.device.type not in ("cpu", "cuda"):
            return f"kvant has no backend for {keys.device.type}"
        return self._too_large(versions.Geometry(keys.shape[1], keys.shape[3], values.shape[3]))

    @staticmethod
    def _too_large(geometry: versions.Geometry) -> str | None:
        largest = kvant.info()["largest_head_dim"]  # which sizes a device takes, a cache there says itself
        widest = max(geometry.head_dim, geometry.v_head_dim)
        return f"head_dim {widest} is above {largest}" if widest > largest else None

    def _new_group(self, members: list[int], geometry: versions.Geometry, window: int, device: str):
        """(group, None), or (None, why there is none)."""
        s = self.settings
        options = {**s.of_cache(device != "cpu", window), "window": window}
        if device != "cpu":
            capacity = self._capacity()
            reason = self._why_not_this_window(window, capacity["max_sequence_tokens"])
            if reason is not None:
                return None, reason
            options.update(capacity)
        if geometry.latent:
            options["v"] = s.rotary
        if s.bases is not None:
            options.update(bases=s.bases, basis_layers=members, k_basis="calibrated", v_basis="calibrated")
        try:
            cache = kvant.Cache(
                layers=len(members),
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                v_head_dim=geometry.v_head_dim,
                device=device,
                **options,
            )
            if device != "cpu":  # for which geometries and formats there are kernels, only a plan tells
                with cache.sequence() as probe:
                    cache.reserve([probe], 1)
                    cache.plan([probe], q_heads=geometry.kv_heads)
        except kvant.Unsupported as error:
            return None, str(error)
        return Group(cache, members, s), None

    def _why_not_this_window(self, window: int, tokens: int) -> str | None:
        """A device's capacity holds whole prompts, of which transformers keeps a window; and exact ends."""
        s, bits = self.settings, {f["name"]: f["bits"] for f in kvant.formats()}
        tail = 1 if s.tail_pages is None else s.tail_pages
        ends = (1 if s.sink_pages is None else s.sink_pages) + (2 * (tail + 2) if tail else 0)  # of DeviceStore
        exact = min(tokens, ends * PAGE_TOKENS)
        if not window or s.short_windows or tokens * (bits[s.k] + bits[s.v]) + exact * 32 <= window * 32:
            return None
        return (
            f"a window of {window} takes less in bf16 than {tokens} tokens, "
            "which kvant takes on a device for the prompt; short_windows=True stores it all the same"
        )

    def _capacity(self) -> dict[str, int]:
        """The capacity of a cache on a device, which takes all its memory when it is made."""
        if self.max_length is None or self.capacity_rows is None:
            raise kvant.InvalidArgument(
                "a kvant cache on a device takes its memory at once: "
                "pass max_length= (tokens of the longest row) and batch= (rows, beams and copies included) "
                "to kvant.hf.cache, or let generate() make the cache"
            )
        # A page that is partly filled, one more while beams part, and the exact ends' copies.
        tokens = (self.max_length + 63) // 64 * 64 + 3 * 64
        rows = self.capacity_rows
        return {"capacity_tokens": rows * tokens, "max_sequences": rows + 1, "max_sequence_tokens": tokens}

    # --- steps ---

    def _refuse_batch(self, batch: int) -> None:
        raise RuntimeError(
            f"this cache holds a batch of {self.rows} rows and gets one of {batch}: use a new cache, cache.reset(), "
            "cache.batch_select_indices(...) or cache.batch_repeat_interleave(...)"
        )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes = super().get_mask_sizes(query_length, layer_idx)
        masks.ask(self)
        return sizes

    def note_padding(self, mask: torch.Tensor | None, offset: Any, tokens: int) -> bool:
        """Remembers which tokens of the step to come are padding. False if the mask hides tokens that are stored."""
        self._note = None
        offset = int(offset)
        if mask is None or mask.ndim != 2 or offset != self.length:
            return True
        if mask.shape[1] < offset + tokens:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns, "
                f"where the cache holds {offset} tokens and {tokens} are new: pass all {offset + tokens} columns"
            )
        mask = mask[:, : offset + tokens]
        if self.stored is None and bool(mask.all()):
            return True
        # One transfer from a device: tokens of each row, and whether the past is what was stored.
        past, real = mask[:, :offset], mask[:, offset:]
        stored = self.stored if self.stored is not None else torch.ones_like(past)
        if stored.shape != past.shape:
            return True  # another batch: update() refuses
        numbers = torch.stack([real.sum(1), (past & ~stored).sum(1), (stored & ~past).sum(1)]).tolist()
        if any(numbers[1]):
            raise ValueError(
                "attention_mask makes tokens visible that were padding when they were given: kvant stores no padding; "
                "give the tokens again in a new cache"
            )
        if any(n != tokens for n in numbers[0]):
            self._note = (offset, tokens, real, numbers[0])
        return not any(numbers[2])

    def begin(self, group: Group, batch: int, tokens: int) -> None:
        """Begins a step at a group's first layer: for all groups at once, so that nothing has changed if one has no
        room."""
        if group.length == self.length:
            if self.rows is not None and batch != self.rows:
                self._refuse_batch(batch)
            self._refuse_interrupted()
            note, self._note = self._note, None
            if note is not None and note[:2] == (self.length, tokens) and note[2].shape[0] == batch:
                step = Step(batch, tokens, note[2], note[3])
            else:
                step = Step(batch, tokens, None, None)
            begun: list[Group] = []
            try:
                for g in self.groups:
                    g.begin(step)
                    begun.append(g)
            except kvant.KvantError:
                for g in begun:
                    g.truncate(step.counts or [tokens] * batch, tokens)
                raise
            self.rows = batch
            model = None if self.model is None else self.model()
            self.conversation.step(self.length, batch, tokens, model)
            self._remember(step)
            self._step = step
        elif group.length + tokens == self.length and batch == self._step.batch:  # a group that is new in this step
            group.begin(self._step)
        else:
            raise RuntimeError(
                f"a layer of {group.members} gets {tokens} tokens of {batch} rows after {group.length}, "
                f"where the cache has {self.length}: a forward pass ended before its last layer; call cache.reset()"
            )

    def _refuse_interrupted(self) -> None:
        for layer in self._kvant_layers():
            group = layer.family.group
            if group is not None and layer.length != group.length:
                raise RuntimeError(
                    f"layer {layer.index} has {layer.length} tokens, where others have {group.length}: a forward pass "
                    f"ended before its last layer; call cache.crop({layer.length - group.length}) to take its tokens "
                    "back (cache.reset() would forget all others, too)"
                )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores a step's keys and values of one layer; returns what stands for all of its tokens."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} of a cache that was made for a model of {len(self.layers)} layers: each model "
                "needs a cache of its own, by kvant.hf.cache(model)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reads_codes(self, queries: int) -> bool:
        """Whether the newest queries, of the step that was last, read tokens in the formats of k and v."""
        return any(group.tokens_read(queries)[1] for group in self.groups)

    def advance(self) -> None:
        """A recorded step of one token for each row was launched (StepGraph): lengths here follow those on the
        device."""
        for group in self.groups:
            group.advance()
        self.conversation.step(self.length, self.rows, 1, None)  # of ids that only the device has
        self.length += 1
        self._set_lengths()

    def _remember(self, step: Step) -> None:
        """Extends `stored` by a step."""
        if step.real is not None or self.stored is not None:
            if self.stored is None:
                self.stored = torch.ones((step.batch, self.length), dtype=torch.bool, device=step.real.device)
            new = step.real
            if new is None:
                new = torch.ones((step.batch, step.tokens), dtype=torch.bool, device=self.stored.device)
            self.stored = torch.cat([self.stored, new], 1)
        self.length += step.tokens

    def prefills_exactly(self, group: Group) -> bool:
        exact = self.settings.fresh_keys
        return group.on_device if exact is None else exact

    # --- what transformers asks for ---

    def _kvant_layers(self) -> list[KvantLayer]:
        return [layer for layer in self.layers if isinstance(layer, KvantLayer)]

    def _other_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, KvantLayer)]

    def _set_lengths(self) -> None:
        for layer in self._kvant_layers():
            layer.length = 0 if layer.group is None else layer.group.length

    def crop(self, tokens_to_remove: Any) -> None:
        """Takes back the newest tokens: -n removes n, as in transformers; a positive n keeps n."""
        n, length = int(tokens_to_remove), self.get_seq_length()
        tokens = max(length - n, 0) if n > 0 else -n
        if tokens > max(self.length, length):
            held = max(self.length, length)
            raise ValueError(f"crop({n}) takes back more than the {held} tokens that the cache holds")
        removed = self._removed(tokens) if tokens else []
        for layer in self._other_layers():
            layer.crop(-tokens)
        if tokens == 0:
            return
        self.conversation.crop(max(self.length, length) - tokens)
        if not self.groups:
            return
        for group, rows, ahead in removed:
            group.truncate(rows, ahead)
        self.length -= tokens
        if self.stored is not None:
            self.stored = self.stored[:, : self.length]
        self._step = self._note = None
        self._set_lengths()

    def _removed(self, tokens: int) -> list[tuple[Group, list[int], int]]:
        """Returns what a crop takes from each group: tokens of each row, and as transformers counts them.

        Errors: where one layer cannot go back, before any has changed.
        """
        for i, layer in enumerate(self.layers):
            if isinstance(layer, KvantLayer) or getattr(layer, "record_past", True):
                continue
            window = getattr(layer, "sliding_window", None)  # without: a state of linear attention
            if window is None or layer.get_seq_length() >= window:
                raise RuntimeError(
                    f"layer {i} of transformers ({type(layer).__name__}) has let go of earlier tokens, and cannot take "
                    f"back {tokens}: call cache.activate_past_recording() before the tokens"
                )
        found = []
        for group in self.groups:
            ahead = group.length - (self.length - tokens)  # less than tokens where a forward pass did not come
            if ahead <= 0:
                continue
            if self.stored is None:
                rows = [ahead] * len(group.sequences)
            else:
                rows = self.stored[:, self.length - tokens : group.length].sum(1).tolist()
            if group.window and max(rows, default=0) > self.settings.rollback_tokens:
                group.try_truncate(rows)
            found.append((group, rows, ahead))
        return found

    def reset(self) -> None:
        for group in self.groups:
            group.forget()
        for layer in self._other_layers():
            layer.reset()
        self.rows, self.length, self.stored, self._step, self._note = None, 0, None, None, None
        self.conversation.clear()
        self._set_lengths()

    def _rearrange(self, parents: list[int]) -> None:
        for group in self.groups:
            if len(parents) == len(group.sequences):
                group.reorder(parents)
            elif group.sequences:
                group.rearrange(parents)
        if self.rows is not None:
            self.conversation.rearrange(parents, self.rows)
            self.rows = len(parents)
        if self.stored is not None:
            self.stored = self.stored[torch.tensor(parents, device=self.stored.device)]
        self._step = self._note = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)
        parents = beam_idx.tolist()
        if self.rows is not None and parents != list(range(self.rows)):
            self._rearrange(parents)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self._other_layers():
            layer.batch_repeat_interleave(repeats)
        if self.rows is not None:
            self._rearrange([i for i in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for layer in self._other_layers():
            layer.batch_select_indices(indices)
        if self.rows is not None:
            self._rearrange(torch.arange(self.rows, device="cpu")[indices.cpu()].tolist())

    @property
    def is_initialized(self) -> bool:
        """Whether the cache holds tokens: transformers does not count layers that it cannot make in advance."""
        return self.length > 0 or super().is_initialized

    @property
    def batch_size(self) -> int:
        return -1 if self.rows is None else self.rows

    def __deepcopy__(self, memo: dict) -> KvantCache:
        """A prefix cache: sequences are forked, so that pages are shared and each copy goes on by itself."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        twins = {id(group): group.copy() for group in self.groups}
        other.groups = list(twins.values())
        other.reasons, other._step, other._note, other.offered_to = dict(self.reasons), None, None, None
        other.conversation = self.conversation.copy()
        other.layers, families = [], {}
        for layer in self.layers:
            if not isinstance(layer, KvantLayer):
                other.layers.append(copy.deepcopy(layer, memo))
                continue
            twin, old = copy.copy(layer), layer.family
            if id(old) not in families:
                family = families[id(old)] = copy.copy(old)
                family.members = list(old.members)
                family.group = None if old.group is None else twins[id(old.group)]
            twin._owner, twin.family, twin.original = (
                weakref.ref(other),
                families[id(old)],
                copy.deepcopy(layer.original),
            )
            twin.group = None if layer.group is None else twins[id(layer.group)]
            other.layers.append(twin)
        return other

    def __reduce_ex__(self, protocol: Any):
        raise TypeError(
            "a kvant cache cannot be pickled: its pages live in memory of the library; kvant.hf.save() writes them to "
            "a file, and copy.deepcopy() works"
        )

    # --- for code that reads keys and values itself ---

    def warn_decoding(self, operation: str) -> None:
        if self.settings.strict:
            raise RuntimeError(
                f"{operation} needs the keys or values themselves, which are packed (strict=True): "
                "the model does not compute its attention through kvant; "
                "call kvant.hf.enable(model), or pass strict=False to decode them in each step"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{operation} needs the keys or values themselves: "
                "kvant decodes the whole cache of a layer, in each step. The result is right, but slow. "
                "Either the model computes attention itself, or kvant.hf.enable(model) is missing",
                stacklevel=4,
            )
