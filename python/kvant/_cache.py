"""Caches and their sequences, as Python objects over the C interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence as SequenceOf
from ctypes import byref, c_int32, c_int64, c_uint64, c_void_p, sizeof
from functools import partial
from pathlib import Path
from typing import Any

from . import _arguments, _c, _overlap, _tensors
from ._errors import InvalidArgument
from ._facts import Facts
from ._options import CACHE, PLAN, complete_store
from ._owner import Member, Owner, Ticket
from ._plan import Plan, prepare
from ._signals import CALL, make_anchor
from ._step import Reservation, Step

__all__ = ["Bases", "Cache", "ExactEnds", "Memory", "Sequence"]

_NO_STEP: tuple[Any, set[int]] = (None, set())


class Memory(Facts):
    """The contents of a cache, in bytes (tokens: a count). The fields are those of kvant_memory in kvant.h."""

    _struct = _c.Memory

    tokens: int
    encoded_bytes: int
    scale_bytes: int
    exact_bytes: int
    table_bytes: int
    total_bytes: int
    reserved_bytes: int


class ExactEnds(Facts):
    """The pages that a cache keeps exact, as kvant_exact_ends in kvant.h: first and newest full ones. dtype: None where
    there are none, and where the first write will decide."""

    _struct = _c.ExactEnds

    sink_pages: int
    tail_pages: int
    dtype: str | None

    @staticmethod
    def _read(name: str, value: Any) -> Any:
        return next((n for n, number in _c.DTYPE.items() if number == value), None) if name == "dtype" else value


class Bases(_arguments.NotCopied):
    """Calibrated bases from a file that `kvant calibrate` wrote. Errors: FileError, BadFile."""

    _instead = "load the file again"
    _made_of = ("path", "_handle")

    def __init__(self, path: str | Path):
        self.path = _arguments.path("path", path)
        self._handle = _c.BasesHandle()
        _c.check(_c.bases_load(os.fsencode(self.path), byref(self._handle)))

    def __repr__(self) -> str:
        return f"kvant.Bases({self.path!r})"


@CACHE.described
class Cache(_arguments.NotCopied):
    """Keys and values of the layers of one geometry, compressed, in pages of 64 tokens.

    {options}

    Errors: InvalidArgument, Unsupported, OutOfMemory.
    Any thread may make any call at any time. Sequences do not disturb each other, also where they share pages; the
    calls for one sequence are the caller's to order. Plans run at the same time, on a device one after another; calls
    that change something wait for them.
    """

    _instead = "fork its sequences, or make another cache"
    _made_of = (
        "device", "owner", "k", "v", "layers", "kv_heads", "head_dim", "v_head_dim", "q_head_dim", "latent", "rope",
        "window", "rollback_tokens"
    )  # fmt: skip

    def __init__(self, **options: Any):
        values = complete_store(CACHE, options)
        self.device = _arguments.device(values["device"])
        self.owner = Owner(self.device, "cache")  # of kvant's own modules
        c = _c.CacheConfig()
        _c.cache_config_init(byref(c), sizeof(c))
        CACHE.fill(c, values)
        self.k, self.v = c.k.decode(), c.v.decode()
        for name, value in (("k", self.k), ("v", self.v)):
            if value.startswith("lut"):
                raise InvalidArgument(
                    f'{name} = "{value}": this format is for imported caches, whose tables of levels it needs; '
                    "import them in C++ or C (import_legacy), or use a tq format"
                )
        bases = values["bases"]
        if bases is not None and not isinstance(bases, Bases):
            bases = Bases(_arguments.path("bases", bases))
        if bases is not None:
            c.bases = bases._handle
        if values["basis_layers"] is not None:
            numbers = _arguments.integers(
                "basis_layers", values["basis_layers"], 0, (1 << 31) - 1, c.layers, "layer"
            )
            c.basis_layers = (c_int32 * len(numbers))(*numbers)
        kind, number = self.device
        c.device = b"cpu" if kind == "cpu" else f"{kind}:{number}".encode()
        handle = _c.CacheHandle()
        _c.check(_c.cache_create(byref(c), byref(handle)))
        self.owner.pointer = handle
        self.layers, self.kv_heads = c.layers, c.kv_heads
        _arguments.set_dims(self, c.head_dim, c.v_head_dim, c.latent, c.rope)
        self.window, self.rollback_tokens = c.window, c.rollback_tokens

    @classmethod
    def _of(cls, handle: c_void_p, device: tuple[str, int], config: dict[str, Any]) -> Cache:
        """A cache that the library has made already, of this configuration."""
        self = cls.__new__(cls)
        self.device, self.owner = device, Owner(device, "cache")
        self.owner.pointer = handle
        for name in ("k", "v", "layers", "kv_heads", "window", "rollback_tokens"):
            setattr(self, name, config[name])
        optional = (config.get(name, 0) for name in ("v_head_dim", "latent", "rope"))
        _arguments.set_dims(self, config["head_dim"], *optional)
        return self

    # --- life ---

    def close(self) -> None:
        """Frees the cache's memory now instead of when the object goes. Its sequences and plans cannot be used any
        more."""
        self.owner.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "" if self.device[0] == "cpu" else f", device={self.device[0]}:{self.device[1]}"
        return (
            f"kvant.Cache(layers={self.layers}, {_arguments.geometry(self)}, k={self.k!r}, v={self.v!r}{where})"
        )

    @property
    def handle(self) -> c_void_p:
        """The kvant_cache* of kvant.h."""
        return self.owner.handle

    def _ids(self, sequences: Iterable[Sequence] | Sequence) -> list[int]:
        return [s.number for s in self.owner.members(sequences)]

    @staticmethod
    def _each(name: str, numbers: int | SequenceOf[int], count: int) -> list[int]:
        """One number for each of `count` sequences. numbers: one for all, or a list."""
        return _arguments.one_or_each(name, numbers, count, -(1 << 63), (1 << 63) - 1)

    # --- sequences ---

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return self._make(1, lambda ids: _c.cache_add_sequence(self.handle, ids))[0]

    def _make(self, count: int, fill: Callable[[Any], int]) -> list[Sequence]:
        """Sequences whose numbers fill(ids) writes, a call of the library under the lock. They exist before it, so
        that none is left over whenever an exception comes."""
        made, ids, tickets = self._unfilled(count)
        try:
            with self.owner.lock:
                _c.check(fill(ids))
            return made
        except BaseException:
            self.owner.gone.extend(tickets)
            raise

    def _unfilled(self, count: int) -> tuple[list[Sequence], Any, list[Ticket]]:
        """Sequences that the library has not made yet, the array that it writes their numbers to, and what gives them
        back."""
        ids = (c_uint64 * count)()
        made = [Sequence(self, ids, place) for place in range(count)]
        return made, ids, [s._ticket for s in made]

    def reorder(self, sequences: SequenceOf[Sequence], parents: SequenceOf[int]) -> None:
        """Beams: sequences[i] becomes what sequences[parents[i]] was, for all at once. Pages are shared until one side
        writes."""
        ids = self._ids(sequences)
        parents = _arguments.integers("parents", parents, -(1 << 63), (1 << 63) - 1, len(ids), "sequence")
        with self.owner.lock:
            _c.check(_c.cache_reorder(self.handle, _c.sequences(ids), _c.counts(parents), len(ids)))

    # --- a step ---

    def reserve(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1, *, stream: Any = None) -> None:
        """Takes room for `tokens` new tokens of each sequence (one number, or one a sequence) in every layer, all or
        nothing.

        Errors: OutOfCapacity, InvalidArgument.
        """
        ids = self._ids(sequences)
        tokens = self._each("tokens", tokens, len(ids))
        with self.owner.lock:
            self.owner.use_stream(stream)
            _c.check(_c.cache_reserve(self.handle, _c.sequences(ids), _c.counts(tokens), len(ids)))

    def write(self, sequences: Iterable[Sequence], layer: int, keys: Any, values: Any, *, stream: Any = None) -> None:
        """Stores keys and values of the tokens just reserved, once for each layer.

        keys, values: [tokens of all sequences, kv_heads, head_dim], the sequences' rows one after another, or
        [batch, tokens, kv_heads, head_dim]; f32, f16 or bf16; any strides whose last is 1.
        Errors: NonFinite (on the CPU), InvalidArgument.
        """
        self._write([], self._ids(sequences), _arguments.int32("layer", layer), keys, values, stream)

    def _write(self, status: list[int], ids: list[int], layer: int, keys: Any, values: Any, stream: Any) -> None:
        """status: gets the library's answer in the very call that writes."""
        where = self.owner.place(stream)
        k, _k = _tensors.tensor(keys, "keys", where, len(ids))
        v, _v = _tensors.tensor(values, "values", where, len(ids))
        with self.owner.lock:
            self.owner.use_stream(stream)
            call = partial(_c.cache_write, self.handle, _c.sequences(ids), len(ids), layer, byref(k), byref(v))
            status.extend(map(CALL, (call,)))
            _c.check(status[0])

    def step(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1, *, stream: Any = None) -> Step:
        """Reserves tokens and returns the step, which writes and attends layer after layer.

        As a context manager the step drops its tokens again if the block raises.
        """
        sequences = self.owner.members(sequences)
        tokens = self._each("tokens", tokens, len(sequences))
        reservation = Reservation(self, sequences, tokens)
        try:
            reservation.take(stream)
            return Step(self, sequences, tokens, stream, reservation)
        except BaseException:
            if reservation.taken == [0]:
                list(reservation.undo)
            raise

    def reserve_ahead(
        self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int], *, stream: Any = None
    ) -> None:
        """Device only: takes pages for steps to come, so that these take none and can be replayed from a CUDA graph."""
        ids = self._ids(sequences)
        tokens = self._each("tokens", tokens, len(ids))
        with self.owner.lock:
            self.owner.use_stream(stream)
            _c.check(_c.cache_reserve_ahead(self.handle, _c.sequences(ids), _c.counts(tokens), len(ids)))

    def advance(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1) -> None:
        """Device only: tells of a step that the launch of a CUDA graph took, so that lengths here follow the
        device's."""
        ids = self._ids(sequences)
        tokens = self._each("tokens", tokens, len(ids))
        with self.owner.lock:
            _c.check(_c.cache_advance(self.handle, _c.sequences(ids), _c.counts(tokens), len(ids)))

    def take_non_finite(self) -> bool:
        """Device only: True if keys or values that are not finite were stored since the last call. Waits for the
        stream."""
        found = c_int32()
        with self.owner.lock:
            _c.check(_c.cache_take_non_finite(self.handle, byref(found)))
        return bool(found.value)

    # --- attention ---

    @PLAN.shown
    def plan(self, sequences: Iterable[Sequence], *, q_heads: int, **options: Any) -> Plan:
        """Plans attention of the newest queries of `sequences`; does all validation. See Plan for the options."""
        return Plan(self, sequences, q_heads=q_heads, **options)

    @PLAN.without("q_heads").shown
    def attend(
        self,
        sequences: Iterable[Sequence] | Sequence,
        layer: int,
        q: Any,
        keys: Any = None,
        values: Any = None,
        *,
        out: Any = None,
        lse: Any = None,
        sink_logits: Any = None,
        stream: Any = None,
        **options: Any,
    ) -> Any:
        """Attention of the newest queries; with keys and values these are appended first.

        q: [tokens, q_heads, head_dim], the sequences' rows one after another, or [batch, tokens, q_heads, head_dim].
        keys, values: as for write, with one row for each row of q. The first layer of a step reserves, the others fill
            in.
        out: a tensor of q's shape, f32, f16 or bf16; None: a new one of q's dtype. options: see Plan (window, scale,
            ...). With fresh_keys=True keys and values are attended to as given, and only older tokens are read from the
            cache. Returns out; with lse=True (out, lse), lse [tokens, q_heads] f32.
        """
        sequences, layer = self.owner.members(sequences), _arguments.int32("layer", layer)
        if (keys is None) != (values is None):
            raise InvalidArgument(f"{'keys' if keys is None else 'values'} is None: keys and values go together")
        shape = _tensors.describe(q, "q", self.owner.place(stream)).shape
        if not 3 <= len(shape) <= 4:
            raise InvalidArgument(
                f"q has shape {list(shape)}: must be [tokens, q_heads, head_dim] or [batch, tokens, q_heads, head_dim]"
            )
        if options.get("q_lens") is not None:
            options["q_lens"] = self._each("q_lens", options["q_lens"], len(sequences))
        elif "q_len" not in options:
            rows = shape[0] * shape[1] if len(shape) == 4 else shape[0]
            if not sequences or rows % len(sequences):
                raise InvalidArgument(
                    f"q has {rows} rows for {len(sequences)} sequences: give q_lens, one count a sequence"
                )
            options["q_len"] = rows // len(sequences)
        is_fresh = _arguments.flag("fresh_keys", options.get("fresh_keys", False))
        own = {"keys": keys, "values": values} if is_fresh else {}
        run = dict(out=out, **own, lse=lse, sink_logits=sink_logits, stream=stream)
        if keys is None:
            return self.plan(sequences, q_heads=shape[-2], **options).run(layer, q, **run)
        if not sequences:
            raise InvalidArgument("sequences is empty: give keys and values at least one sequence to go to")
        tokens = options.get("q_lens") or self._each("q_len", options["q_len"], len(sequences))
        reservation, first, written = Reservation(self, sequences, tokens), sequences[0], []
        try:  # all checks, then the write
            if not self._goes_on(reservation, layer):
                reservation.take(stream)
                first._step = (reservation.numbers, reservation.after, tokens), set()
            ready = prepare(self.plan(sequences, q_heads=shape[-2], **options), layer, q, **run)
            self._write(written, reservation.numbers, layer, keys, values, stream)
            first._step[1].add(layer)
            return ready()
        except BaseException:
            if reservation.taken == [0]:
                list(reservation.undo)
                first._step = _NO_STEP
            elif written == [0]:
                first._step[1].add(layer)
            raise

    def _goes_on(self, reservation: Reservation, layer: int) -> bool:
        """Whether attend opened this step for another layer: the same sequences, as long as they were left then."""
        opened, written = reservation.sequences[0]._step
        return (
            opened == (reservation.numbers, reservation.lengths, reservation.tokens)
            and layer not in written
            and len(written) < self.layers
        )

    # --- looking inside ---

    def decode(
        self,
        sequences: Iterable[Sequence] | Sequence,
        layer: int,
        begin: int | SequenceOf[int] = 0,
        end: int | SequenceOf[int] | None = None,
        *,
        keys: Any = None,
        values: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Stored tokens [begin, end) as attention computes with them, in the original coordinates.

        begin, end: one number, or one a sequence; end None: the length.
        keys, values: tensors [sum of end - begin, kv_heads, head_dim] to write to, f32, f16 or bf16, where the cache
            lives. Without them new ones are made: numpy f32 on the CPU, torch f32 on a device. Returns (keys, values).
        """
        ids, where = self._ids(sequences), self.owner.place(stream)
        layer = _arguments.int32("layer", layer)
        begins = self._each("begin", begin, len(ids))
        ends = [self._length(i) for i in ids] if end is None else self._each("end", end, len(ids))
        ranges = _c.sequences(ids), _c.counts(begins), _c.counts(ends), len(ids), layer
        if keys is None and values is None:
            with self.owner.lock:  # without tensors: checks the ranges, which memory is taken for
                _c.check(_c.cache_decode(self.handle, *ranges, None, None))
            rows = sum(e - b for b, e in zip(begins, ends)), self.kv_heads
            keys, values = self._new((*rows, self.head_dim)), self._new((*rows, self.v_head_dim))
        outputs = [
            (name, None, None) if x is None else (name, *_tensors.tensor(x, name, where, len(ids), mutable=True))
            for name, x in (("keys", keys), ("values", values))
        ]
        _overlap.check_apart([(name, d) for name, _, d in outputs if d is not None], [])
        with self.owner.lock:
            self.owner.use_stream(stream)
            _c.check(
                _c.cache_decode(self.handle, *ranges, *(None if t is None else byref(t) for _, t, _ in outputs))
            )
        return keys, values

    def _new(self, shape: tuple[int, ...]) -> Any:
        if self.device[0] == "cpu":
            import numpy as np

            return np.empty(shape, np.float32)
        import torch

        return torch.empty(shape, dtype=torch.float32, device=f"cuda:{self.device[1]}")

    def _length(self, number: int) -> int:
        tokens = c_int64()
        _c.check(_c.cache_length(self.handle, number, byref(tokens)))
        return tokens.value

    def memory(self) -> Memory:
        """Bytes by kind: codes, scales, exact pages, tables, and what was taken from the system."""
        with self.owner.lock:
            return Memory.of(_c.cache_memory, self.handle)

    def exact_ends(self) -> ExactEnds:
        """How many first and newest pages stay exact, and in which dtype."""
        with self.owner.lock:
            return ExactEnds.of(_c.cache_exact_ends, self.handle)

    def trim(self) -> int:
        """Gives memory that no page uses back to the system, after sequences went; returns how many bytes. 0 on a
        device."""
        given = c_int64()
        with self.owner.lock:
            _c.check(_c.cache_trim(self.handle, byref(given)))
        return given.value

    def describe(self) -> str:
        """Geometry, formats, page bytes, exact ends, basis, capacity, and what is held; one line a fact."""
        with self.owner.lock:
            return _c.text(_c.cache_describe, self.handle)


class Sequence(_arguments.NotCopied, Member):
    """One sequence of a cache. `len()` counts its tokens. Its pages are free again when the object goes, or by
    remove()."""

    _instead = "fork() makes a sequence that shares its pages"
    _made_of = ("cache", "_anchor", "_ticket", "_removed", "_step")

    def __init__(self, cache: Cache, ids: Any, place: int):
        self.cache, self._anchor = cache, make_anchor()
        self._ticket, self._removed = cache.owner.ticket(self._anchor, ids, place), False
        self._step = _NO_STEP  # that attend opened, this sequence its first: what it reserved, and layers written

    @property
    def id(self) -> int:
        """The library's number of the sequence; 0 after remove()."""
        return 0 if self._removed else self._ticket.ids[self._ticket.place]

    @property
    def number(self) -> int:
        """The library's number of the sequence. Error: InvalidArgument after remove()."""
        number = self.id
        if not number:
            raise InvalidArgument("this sequence was removed: cache.sequence() makes a new one")
        return number

    def append(self, layer: int, keys: Any, values: Any, *, stream: Any = None) -> None:
        """Appends tokens to one layer: the first layer of a step reserves room in all, the others fill in.

        keys, values: [tokens, kv_heads, head_dim] or [1, tokens, kv_heads, head_dim], f32, f16 or bf16.
        Errors: NonFinite, OutOfCapacity, InvalidArgument.
        """
        cache = self.cache
        layer, where = _arguments.int32("layer", layer), cache.owner.place(stream)
        k, _k = _tensors.tensor(keys, "keys", where, 1)
        v, _v = _tensors.tensor(values, "values", where, 1)
        with cache.owner.lock:
            cache.owner.use_stream(stream)
            _c.check(_c.cache_append(cache.handle, self.number, layer, byref(k), byref(v)))

    def fork(self) -> Sequence:
        """A new sequence with the same tokens. Pages are shared until one side writes to them."""
        return self.cache._make(1, lambda ids: _c.cache_fork(self.cache.handle, self.number, ids))[0]

    def truncate(self, tokens: int) -> None:
        """Forgets all tokens from position `tokens` on."""
        tokens = _arguments.int64("tokens", tokens)
        with self.cache.owner.lock:
            _c.check(_c.cache_truncate(self.cache.handle, self.number, tokens))

    def __len__(self) -> int:
        with self.cache.owner.lock:
            return self.cache._length(self.number)

    def remove(self) -> None:
        """Frees the pages that no other sequence shares. The sequence cannot be used any more."""
        self.cache.owner.lock.refuse_lender()
        self._removed = True
        self.cache.owner.gone.append(self._ticket)
        if self.cache.owner.pointer:
            self.cache.handle  # which removes

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error) -> None:
        self.remove()

    def __bool__(self) -> bool:
        return True  # an empty sequence is a sequence

    def __repr__(self) -> str:
        return f"<kvant.Sequence {self.id} of {self.cache!r}>"
