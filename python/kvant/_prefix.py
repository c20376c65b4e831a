"""Known prefixes: sequences are found again by their token ids, in memory or in a folder of snapshots.

This is Python over fork, truncate, save and load: a lookup happens once for a prompt, and those who need it have their
token ids in Python. C and C++ have the same parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from errno import EFBIG
from pathlib import Path
from typing import Any

from . import _arguments, _locks, _prefix_table
from ._cache import Cache, Sequence
from ._errors import FileError, InvalidArgument
from ._owner import Member
from ._prefix_folder import Folder, is_full, warn
from ._prefix_memory import Memory, Unusable, estimated_bytes, remove, trim
from ._prefix_table import BLOCK, Entry, Table, packed

__all__ = ["Prefix", "PrefixIndex", "PrefixStats"]

_ATTEMPTS = 3  # to write an entry again after others made room on a full disk
_MOST_BYTES = 9e18  # a budget fits 64 bits
_OWN = ("prefix.", "kvant.")  # keys of metadata


@dataclass(frozen=True)
class Prefix:
    """A known prefix.

    length: its tokens. sequences: one for each that was inserted, of this length; they are the caller's.
    truncated: tokens that were cut off the longest of the stored sequences. 0: the sequences go on bit for bit as the
        inserted ones do. Up to 64: the same bytes are stored as if these tokens had never been. More: the newest pages,
        which a sequence of this length reads exactly, stay encoded.
    metadata: as it was given to insert.
    """

    length: int
    sequences: list[Sequence]
    truncated: int
    metadata: dict[str, str]


@dataclass(frozen=True)
class PrefixStats:
    """entries, bytes: what is kept; in memory an estimate, in which pages that entries share count once. lookups, hits:
    calls of find, and those that found something. tokens: of all hits. evicted: entries that went to keep within the
    budget. refused: entries that were damaged."""

    entries: int
    bytes: int
    lookups: int
    hits: int
    tokens: int
    evicted: int
    refused: int


class PrefixIndex(_arguments.NotCopied):
    """Sequences by their token ids, so that a prompt that begins as an earlier one need not be computed again.

    directory: a folder of snapshots, which is made if it is missing, and which processes may share: files are written
        beside and renamed, and an entry is known when all of its files are complete. A damaged entry is reported by a
        warning and in `problems`, and its files are removed. None: in memory.
    max_bytes: the entries that were used least recently go when all take more. None: 1e9, in a directory 1e10. On a
        full disk they go, too; a warning, once, says where that does not help. A limit of a file's size (ulimit -f)
        makes none of them go: a warning says once that larger prefixes are not kept.

    An entry is one sequence or several: one for each cache of a model whose layers differ in geometry. An entry that
    continues others takes their place, unless two texts continue the other. Where a window has released pages, a
    checkpoint of the turn before stays; what the newest entry has, too, is not kept twice.

    Any thread may make any call at any time. A call that an exception interrupts has been made, or has not.
    """

    _instead = "make another index; a directory may have several"
    _made_of = ("directory", "max_bytes", "_lock", "_table", "_counts", "_clock", "_said_full", "_kept")

    def __init__(self, directory: str | Path | None = None, *, max_bytes: int | float | None = None):
        self.directory = None if directory is None else os.path.abspath(_arguments.path("directory", directory))
        if max_bytes is None:
            max_bytes = int(1e9) if self.directory is None else int(1e10)
        limit = _arguments.real("max_bytes", max_bytes)
        if not 1 <= limit <= _MOST_BYTES:
            raise InvalidArgument(f"max_bytes = {_arguments.show(max_bytes)}: must be 1 to {_MOST_BYTES:g}")
        self.max_bytes = int(limit)
        self._lock = _locks.new("this index")
        self._table = Table()
        self._counts = dict.fromkeys(("lookups", "hits", "tokens", "evicted"), 0)
        self._clock = 0  # of the last use, in nanoseconds
        self._said_full: set[int] = set()  # numbers of the system's errors
        self._kept: Memory | Folder
        if self.directory is None:
            self._kept = Memory(self._table, self._lock)
        else:
            self._kept = Folder(self.directory, self._table, self._lock, repr(self))
            self._kept.refresh()

    def __repr__(self) -> str:
        where = "" if self.directory is None else f"{self.directory!r}, "
        return f"kvant.PrefixIndex({where}max_bytes={self.max_bytes})"

    @property
    def stats(self) -> PrefixStats:
        """Counts of this object; entries and bytes are those of the directory."""
        with self._lock:
            self._kept.refresh(now=True)
            return PrefixStats(
                len(self._table.entries), self._table.bytes, **self._counts, refused=self._kept.refused
            )

    @property
    def problems(self) -> list[str]:
        """The last damaged entries, a sentence each."""
        return self._kept.problems

    # --- what callers do ---

    def find(
        self,
        tokens: SequenceOf[int],
        *,
        model: str = "",
        into: SequenceOf[Cache] | Callable[[int, dict[str, str]], Cache] | None = None,
    ) -> Prefix | None:
        """The longest known prefix of token ids, of 64 tokens or more; None if there is none.

        tokens: a model that must compute one token at least gives all but the last.
        model: as it was given to insert; entries of another are never found.
        into: where the sequences are made: a list of caches, one for each sequence, or a function of (place in the
            entry, metadata) that makes such a cache, on the CPU or on a device. None: in memory they are forks in the
            caches that were inserted, whose pages are shared; from a directory they have new caches on the CPU.

        An entry that cannot be had (a damaged file, a cache that was closed) goes, and the next best one serves.

        Errors: those of Snapshot.load that are of `into` or of its caches.
        """
        ids, model = packed(tokens), _text("model", model)
        hashes, gone = _prefix_table.chain(model, ids), set()
        with self._lock:
            self._counts["lookups"] += 1
        while True:
            with self._lock:
                self._kept.refresh()
                found = self._table.best(hashes, model, ids, gone)
            if found is None:
                return None
            length, entry, other = found
            try:
                made = self._kept.make(entry, other, length, lambda of: _caches(of, into))
            except Unusable as unusable:
                with self._lock:
                    if not self._kept.lost(unusable.key):
                        gone.add(unusable.key)
                continue
            longest = entry if other is None or other.length < entry.length else other
            try:
                with self._lock:
                    self._counts["hits"] += 1
                    self._counts["tokens"] += length
                    self._use(entry)
                    if other is not None:  # later: it stays longer than the entry that needs it
                        self._use(other)
                return Prefix(length, made, longest.length - length, dict((other or entry).metadata))
            except BaseException:
                remove(made)
                raise

    def insert(
        self,
        tokens: SequenceOf[int],
        sequences: Iterable[Sequence] | Sequence,
        *,
        model: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Keeps sequences by their token ids. In memory forks are kept, which share pages with them.

        tokens: as many as the sequences have. Fewer than 64 are never kept.
        sequences: one, or one for each cache of a model.
        model: names all that the sequences depend on besides the ids: the model, its weights, how they are stored.
        metadata: the caller's own, a dict of str, which find returns; keys do not begin with "prefix." or "kvant.".

        Returns whether they are kept: False where these tokens are known already, alone exceed the budget, or find no
        room on a full disk. Errors: InvalidArgument, FileError, those of Sequence.fork.
        """
        ids, model = packed(tokens), _text("model", model)
        given = [sequences] if isinstance(sequences, Member) else _arguments.items("sequences", sequences, "sequences")
        for s in given:
            if not isinstance(s, Sequence):
                raise InvalidArgument(f"sequences has {_arguments.show(s)}: must be sequences (cache.sequence())")
            if len(s) != len(ids) // 8:
                raise InvalidArgument(f"tokens has {len(ids) // 8} ids for a sequence of {len(s)} tokens")
        if not given:
            raise InvalidArgument("sequences is empty: give one, or one for each cache of the model")
        own = _metadata(metadata)
        hashes = _prefix_table.chain(model, ids)
        if not hashes:
            return False
        with self._lock:
            self._kept.refresh()
            known = self._table.same(hashes, model, ids)
            if known is not None and self._kept.known(known):
                self._use(known)
                return False
        kept = self._keep(Entry("", ids, hashes, model, own, [], [], []), given)
        if kept is None:
            return False
        with self._lock:
            self._use(kept)
            caches = self._take_places(kept) + self._evict(kept)
        trim(caches)
        return True

    def clear(self) -> None:
        """Removes all entries, in a directory the files, too."""
        with self._lock:
            self._kept.refresh(now=True)
            caches = [c for entry in list(self._table.entries.values()) for c in self._kept.drop(entry)]
        trim(caches)

    # --- under the lock ---

    def _use(self, entry: Entry) -> None:
        self._clock = max(time.time_ns(), self._clock + 1)
        self._kept.use(entry, self._clock)

    def _take_places(self, newest: Entry) -> list[Cache]:
        """Entries that the newest one only continues go, since it serves what they served. Where two texts continue
        an entry, the entry stays: both are cut off behind it. Returns caches to trim."""
        found = [
            entry
            for entry in self._table.beginnings(newest)
            if len(entry.kinds) == len(newest.kinds)
            and all(kind is None or kind == own for kind, own in zip(entry.kinds, newest.kinds))
            and not self._table.branches(entry, newest)
        ]
        checkpoints = self._checkpoints(found, newest)
        caches: list[Cache] = []
        for entry in found:
            if entry.key not in checkpoints:
                caches += self._kept.drop(entry)
            elif entry.whole:
                self._kept.leave(entry, newest)
        return caches

    def _checkpoints(self, entries: list[Entry], newest: Entry) -> set[str]:
        """The entries, of those that the newest continues, that stay where pages have left a window: the newest cannot
        be cut off there. The longest stays, so that a conversation can go back a turn; others while all of them take at
        most half the bytes of the newest. A checkpoint is a page longer than the one before, or serves no more."""
        if not any(newest.windows):
            return set()
        apart: list[Entry] = []
        for entry in entries:
            if entry.length < newest.length and (not apart or entry.length - apart[-1].length >= BLOCK):
                apart.append(entry)
        kept, room = set(), newest.bytes // 2
        for entry in reversed(apart):
            room -= self._kept.bytes_left(entry, newest)
            if kept and room < 0:
                break
            kept.add(entry.key)
        return kept

    def _evict(self, newest: Entry) -> list[Cache]:
        """The entries that were used least recently go until the others keep within the budget. Returns caches to
        trim."""
        caches: list[Cache] = []
        while self._table.bytes > self.max_bytes:
            gone = self._evict_one(newest)
            if gone is None:
                break
            caches += gone
        return caches

    def _evict_one(self, but: Entry | None) -> list[Cache] | None:
        """None: there is none to evict."""
        while True:
            entry = self._table.oldest(but)
            if entry is None:
                return None
            last = self._kept.last_use(entry)
            if last is None:  # another process removed it
                self._table.remove(entry.key)
                return []
            if last > entry.used:  # another process used it
                entry.used = last
                continue
            self._counts["evicted"] += 1
            return self._kept.drop(entry)

    # --- a full disk ---

    def _keep(self, entry: Entry, given: list[Sequence]) -> Entry | None:
        """Keeps an entry; on a full disk older ones make room. None: it is not kept."""
        for attempt in range(_ATTEMPTS + 1):
            try:
                return self._kept.keep(entry, given, self.max_bytes)
            except FileError as error:
                number = is_full(error)
                if not number:
                    raise
                # A limit of a file's size is no smaller when other files go.
                if number == EFBIG or attempt == _ATTEMPTS or not self._make_room(entry, given):
                    self._say_full(number)
                    return None
        return None

    def _make_room(self, entry: Entry, given: list[Sequence]) -> bool:
        """Evicts about the bytes of an entry. Returns whether that can help."""
        needed = sum(estimated_bytes(s, entry.length) for s in given)
        with self._lock:
            before = self._table.bytes
            if not self._kept.could_hold(needed):
                return False
            while before - self._table.bytes < needed and self._evict_one(None) is not None:
                pass
            return self._table.bytes < before

    def _say_full(self, number: int) -> None:
        with self._lock:
            said = number in self._said_full
            self._said_full.add(number)
        if said:
            return
        if number == EFBIG:
            warn(
                f"{self!r} does not keep a prefix whose file would be larger than this process may write "
                f"({os.strerror(number)}): raise the limit (ulimit -f); this is said once"
            )
        else:
            warn(
                f"{self!r} has no room: {os.strerror(number)}. New prefixes are not kept until there is some; this is "
                "said once"
            )


def _caches(entry: Entry, into: Any) -> list[Cache] | None:
    """The caller's caches for the sequences of an entry."""
    if into is None:
        return None
    count = len(entry.parts)
    if callable(into):
        found = [into(place, dict(entry.metadata)) for place in range(count)]
    else:
        found = _arguments.items("into", into, "caches", count, "sequence")
    for cache in found:
        if not isinstance(cache, Cache):
            raise InvalidArgument(f"into has {_arguments.show(cache)}: must be a kvant.Cache")
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(f"{name} = {_arguments.show(value)}: must be a str without zeros")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} = {_arguments.show(value)}: must be text that UTF-8 has") from None
    return value


def _metadata(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"metadata = {_arguments.show(given)}: must be a dict of str")
    kept = dict(given)
    for name, value in kept.items():
        if _text("a key of metadata", name).startswith(_OWN):
            allowed = " or ".join(map(_arguments.show, _OWN))
            raise InvalidArgument(f"metadata has {_arguments.show(name)}: keys do not begin with {allowed}")
        _text(f"metadata[{_arguments.show(name)}]", value)
    return kept
