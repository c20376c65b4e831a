"""Known prefixes: sequences are found again by their token ids, in memory or in a folder of snapshots.

This is Python over fork, truncate, save and load: a lookup happens once for a prompt, and those who need it have their
token ids in Python. C and C++ have the same parts.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from . import _arguments, _locks
from ._cache import Cache, Sequence
from ._errors import BadFile, FileError, InvalidArgument, Unsupported
from ._owner import Member
from ._signals import attempt
from ._snapshot import Snapshot, copy_sequences, save
from ._tools import formats

__all__ = ["Prefix", "PrefixIndex", "PrefixStats"]

BLOCK = 64  # tokens of a page: a longer common prefix shares whole pages
_NAME = re.compile(r"([0-9a-f]{32}-[0-9a-f]{16})\.(\d+)of(\d+)\.kvs")
_LEFT_OVER = re.compile(_NAME.pattern + r"\.tmp-\d+-\d+")
_LEFT_OVER_SECONDS = 3600  # a writer that still writes is younger
_PART = "prefix.part"
_MOST_PROBLEMS = 100
_EXACT_PAGES = 4  # of an entry: a sink, and the tail with the copies behind it. For counting bytes


@dataclass(frozen=True)
class Prefix:
    """A known prefix.

    length: its tokens. sequences: one for each that was inserted, of this length; they are the caller's.
    truncated: tokens that were cut off the stored sequences. 0: the sequences go on bit for bit as the inserted ones
        do. Up to 64: the same bytes are stored as if these tokens had never been. More: the newest pages, which a
        sequence of this length reads exactly, stay encoded.
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


@dataclass(eq=False)
class _Entry:
    key: str
    ids: bytes  # int64
    chain: list[bytes]
    sequences: list[Sequence] = field(default_factory=list)  # in memory
    metadata: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)  # in a folder
    model: str = ""
    rollback: int | None = None  # with a window: tokens that can be cut off. None: all, or it is tried
    blocks: list[tuple] = field(default_factory=list)  # in memory: what shared bytes are counted by
    bytes: int = 0

    @property
    def length(self) -> int:
        return len(self.ids) // 8

    def usable(self, ids: bytes) -> int:
        """How many tokens serve a prompt. The ids are compared: equal hashes alone say nothing."""
        common = _common(self.ids, ids)
        if common < BLOCK:
            return 0
        if common >= self.length - BLOCK:
            return common
        if self.rollback is not None and common // BLOCK * BLOCK < self.length - self.rollback:
            return 0
        return common // BLOCK * BLOCK  # pages that are encoded already are not filled any further


def _little_endian(ids: array) -> array:
    """The same bytes on every machine, since hashes of them are in names of files."""
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _numbers(ids: bytes) -> array:
    return _little_endian(array("q", ids))


def _common(a: bytes, b: bytes) -> int:
    """Ids that two lists have in common at their beginning."""
    low, high = 0, min(len(a), len(b)) // 8
    if a[: high * 8] == b[: high * 8]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low * 8 : middle * 8] == b[low * 8 : middle * 8]:
            low = middle
        else:
            high = middle
    return low if a[low * 8 : low * 8 + 8] != b[low * 8 : low * 8 + 8] else low + 1


def _chain(model: str, ids: bytes) -> list[bytes]:
    """For each whole block a hash of the model and of all ids up to its end: 128 bits of a cryptographic hash, which
    Python's own library has."""
    found, last = [], blake2b(model.encode(), digest_size=16).digest()
    for begin in range(0, len(ids) - BLOCK * 8 + 1, BLOCK * 8):
        last = blake2b(last + ids[begin : begin + BLOCK * 8], digest_size=16).digest()
        found.append(last)
    return found


class _Table:
    """Entries by the hashes of their blocks."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}  # the oldest first
        self._by_hash: dict[bytes, dict[str, _Entry]] = {}

    def add(self, entry: _Entry) -> None:
        self.entries[entry.key] = entry
        for one in entry.chain:
            self._by_hash.setdefault(one, {})[entry.key] = entry

    def remove(self, entry: _Entry) -> bool:
        if self.entries.pop(entry.key, None) is None:
            return False
        for one in entry.chain:
            named = self._by_hash[one]
            del named[entry.key]
            if not named:
                del self._by_hash[one]
        return True

    def touch(self, entry: _Entry) -> None:
        if self.entries.pop(entry.key, None) is not None:
            self.entries[entry.key] = entry

    def same(self, chain: list[bytes], ids: bytes) -> _Entry | None:
        """The entry of exactly these ids."""
        named = self._by_hash.get(chain[-1], {}) if chain else {}
        return next((entry for entry in named.values() if entry.ids == ids), None)

    def candidates(self, chain: list[bytes], ids: bytes) -> Iterator[tuple[int, _Entry]]:
        """(tokens, entry) of all that serve a prompt, the longest first, and the one with the fewest tokens to cut off
        of those."""
        seen: set[str] = set()
        waiting: list[tuple[int, int, str]] = []
        for level in range(len(chain), 0, -1):
            for key, entry in self._by_hash.get(chain[level - 1], {}).items():
                if key not in seen:
                    seen.add(key)
                    waiting.append((entry.usable(ids), -entry.length, key))
            waiting.sort()
            while waiting and waiting[-1][0] >= level * BLOCK:  # all others have less than `level` blocks in common
                usable, _, key = waiting.pop()
                if key in self.entries:
                    yield usable, self.entries[key]
        while waiting:
            usable, _, key = waiting.pop()
            if usable and key in self.entries:
                yield usable, self.entries[key]


class PrefixIndex(_arguments.NotCopied):
    """Sequences by their token ids, so that a prompt that begins as an earlier one need not be computed again.

    directory: a folder of snapshots, which is made if it is missing, and which processes may share: files are written
        beside and renamed, and an entry is known when all of its files are complete. A damaged entry is reported by a
        warning and in `problems`, and its files are removed. None: in memory.
    max_bytes: the entries that were used least recently go when all take more. None: 1e9, in a directory 1e10.

    An entry is one sequence or several: one for each cache of a model whose layers differ in geometry. Any thread may
    make any call at any time.
    """

    _instead = "make another index; a directory may have several"

    def __init__(self, directory: str | Path | None = None, *, max_bytes: int | float | None = None):
        self.directory = None if directory is None else os.path.abspath(_arguments.path("directory", directory))
        if max_bytes is None:
            max_bytes = int(1e9) if self.directory is None else int(1e10)
        limit = _arguments.real("max_bytes", max_bytes)
        if not 0 < limit < float(1 << 63):
            raise InvalidArgument(f"max_bytes = {_arguments.show(max_bytes)}: must be above 0")
        self.max_bytes = int(limit)
        self.problems: list[str] = []  # the last damaged entries, a sentence each
        self._lock = _locks.new("this index")
        self._table = _Table()
        self._blocks: dict[tuple, int] = {}  # in memory: how many entries have a block
        self._counts = dict.fromkeys(("lookups", "hits", "tokens", "evicted", "refused"), 0)
        self._number = 0
        self._ignored: set[str] = set()  # files of another version, which was said
        if self.directory is not None:
            try:
                os.makedirs(self.directory, mode=0o700, exist_ok=True)
            except OSError as error:
                raise FileError(f"{self.directory}: {error.strerror or error}") from None
            self._scan()

    def __repr__(self) -> str:
        where = "" if self.directory is None else f"{self.directory!r}, "
        return f"kvant.PrefixIndex({where}max_bytes={self.max_bytes})"

    @property
    def stats(self) -> PrefixStats:
        """Counts of this object; entries and bytes are those of the directory."""
        with self._lock:
            self._scan()
            return PrefixStats(len(self._table.entries), self._total(), **self._counts)

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

        Errors: those of Snapshot.load, but for a damaged file.
        """
        ids, model = self._ids(tokens), _text("model", model)
        with self._lock:
            self._counts["lookups"] += 1
            self._scan()
            ranked = list(self._table.candidates(_chain(model, ids), ids))
        for usable, entry in ranked:
            made = self._make(entry, usable, into)
            if made is not None:
                with self._lock:
                    self._counts["hits"] += 1
                    self._counts["tokens"] += usable
                    self._table.touch(entry)
                _used_now(entry)
                return Prefix(usable, made, entry.length - usable, dict(entry.metadata))
        return None

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
        metadata: the caller's own, a dict of str, which find returns; keys do not begin with "prefix.".

        Returns whether they are kept: False where these tokens are known already, or alone exceed the budget.
        """
        ids, model = self._ids(tokens), _text("model", model)
        given = [sequences] if isinstance(sequences, Member) else _arguments.items("sequences", sequences, "sequences")
        for s in given:
            if not isinstance(s, Sequence):
                raise InvalidArgument(f"sequences has {_arguments.show(s)}: must be sequences (cache.sequence())")
            if len(s) != len(ids) // 8:
                raise InvalidArgument(f"tokens has {len(ids) // 8} ids for a sequence of {len(s)} tokens")
        if not given:
            raise InvalidArgument("sequences is empty: give one, or one for each cache of the model")
        kept = {} if metadata is None else dict(metadata)
        for name, value in kept.items():
            if _text("a key of metadata", name).startswith("prefix."):
                raise InvalidArgument(f"metadata has {_arguments.show(name)}: keys do not begin with \"prefix.\"")
            _text(f"metadata[{_arguments.show(name)}]", value)
        chain = _chain(model, ids)
        if not chain:
            return False
        with self._lock:
            self._scan()
            known = self._table.same(chain, ids)
            if known is not None:
                self._table.touch(known)
                _used_now(known)
                return False
        entry = _Entry("", ids, chain, metadata=kept, model=model)
        return self._keep_in_memory(entry, given) if self.directory is None else self._keep_in_files(entry, given)

    def clear(self) -> None:
        """Removes all entries, in a directory the files, too."""
        with self._lock:
            self._scan()
            caches = [c for entry in list(self._table.entries.values()) for c in self._drop(entry)]
        _trim(caches)

    # --- both kinds ---

    @staticmethod
    def _ids(tokens: Any) -> bytes:
        return _little_endian(array("q", _arguments.integers("tokens", tokens, -(1 << 63), (1 << 63) - 1))).tobytes()

    def _make(self, entry: _Entry, usable: int, into: Any) -> list[Sequence] | None:
        """The sequences of an entry, cut to `usable` tokens. None: they cannot be had."""
        made = self._forks(entry, into) if self.directory is None else self._loaded(entry, into)
        if made is not None and usable < entry.length:
            try:
                for s in made:
                    s.truncate(usable)
            except InvalidArgument:  # a window has released pages before it
                return None
        return made

    def _drop(self, entry: _Entry) -> list[Cache]:
        """Under the lock. Returns caches to trim without it, since that waits for work of the caches."""
        if not self._table.remove(entry):
            return []
        for block in entry.blocks:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
        caches = [s.cache for s in entry.sequences]
        entry.sequences = []
        for path in entry.paths:
            _ignoring(os.unlink, path)
        return caches

    def _evict(self, newest: _Entry) -> list[Cache]:
        """Under the lock: the oldest entries go until the others keep within the budget. Returns as _drop."""
        caches: list[Cache] = []
        for entry in list(self._table.entries.values()):
            if self._total() <= self.max_bytes:
                break
            if entry is not newest:
                caches += self._drop(entry)
                self._counts["evicted"] += 1
        return caches

    def _total(self) -> int:
        entries = self._table.entries.values()
        if self.directory is not None:
            return sum(entry.bytes for entry in entries)
        return sum(entry.bytes for entry in entries) + sum(size for *_, size in self._blocks)

    # --- in memory ---

    def _keep_in_memory(self, entry: _Entry, given: list[Sequence]) -> bool:
        bits = {f["name"]: f["bits"] for f in formats()}
        for place, s in enumerate(given):
            c = s.cache
            values = BLOCK * c.layers * c.kv_heads * c.head_dim
            block = int(values * (bits[c.k] + bits[c.v]) / 8)
            released = max(entry.length - c.window - 2 * BLOCK, 0) // BLOCK if c.window else 0
            entry.blocks += [(id(c), place, one, block) for one in entry.chain[released:]]
            entry.bytes += _EXACT_PAGES * values * 4
        if entry.bytes + sum(size for *_, size in entry.blocks) > self.max_bytes:
            return False
        forks = [s.fork() for s in given]
        with self._lock:
            self._number += 1
            entry.key, entry.sequences = str(self._number), forks
            for block in entry.blocks:
                self._blocks[block] = self._blocks.get(block, 0) + 1
            self._table.add(entry)
            caches = self._evict(entry)
        _trim(caches)
        return True

    def _forks(self, entry: _Entry, into: Any) -> list[Sequence] | None:
        with self._lock:  # else another thread's eviction takes them meanwhile
            forks = [s.fork() for s in entry.sequences]
        if not forks or into is None:
            return forks or None
        caches = self._caches(entry, into, len(forks))
        return [s if s.cache is c else copy_sequences(s, c)[0] for s, c in zip(forks, caches)]

    @staticmethod
    def _caches(entry: _Entry, into: Any, count: int) -> list[Cache]:
        if callable(into):
            found = [into(place, dict(entry.metadata)) for place in range(count)]
        else:
            found = _arguments.items("into", into, "caches", count, "sequence")
        for cache in found:
            if not isinstance(cache, Cache):
                raise InvalidArgument(f"into has {_arguments.show(cache)}: must be a kvant.Cache")
        return found

    # --- in a directory ---

    def _scan(self) -> None:
        """Under the lock: makes the table what the directory is now."""
        if self.directory is None:
            return
        found: dict[str, dict[int, os.DirEntry]] = {}
        counts: dict[str, int] = {}
        entries, error = attempt(os.scandir, self.directory, refusals=(OSError,))
        if error is not None:
            raise FileError(f"{self.directory}: {error.strerror or error}") from None
        with entries:
            files = list(entries)
        for file in files:
            name = _NAME.fullmatch(file.name)
            if name:
                found.setdefault(name[1], {})[int(name[2])] = file
                counts[name[1]] = int(name[3])
            elif _LEFT_OVER.fullmatch(file.name) and _age(file) > _LEFT_OVER_SECONDS:
                _ignoring(os.unlink, file.path)
        whole = {key: parts for key, parts in found.items() if sorted(parts) == list(range(counts[key]))}
        for key in found.keys() - whole.keys():  # being written, or their writer ended
            for file in found[key].values():
                if _age(file) > _LEFT_OVER_SECONDS:
                    _ignoring(os.unlink, file.path)
        for key in self._table.entries.keys() - whole.keys():
            self._table.remove(self._table.entries[key])
        for key, parts in whole.items():
            if key not in self._table.entries and key not in self._ignored:
                self._read(key, [parts[i] for i in range(len(parts))])
        times = {key: _time(parts[0]) for key, parts in whole.items() if key in self._table.entries}
        for key in sorted(times, key=times.__getitem__):
            self._table.touch(self._table.entries[key])

    def _read(self, key: str, parts: list[os.DirEntry]) -> None:
        """Learns of an entry from its files."""
        paths, size = [file.path for file in parts], 0
        try:
            rollback: int | None = None
            for place, path in enumerate(paths):
                snapshot = Snapshot(path)
                info = snapshot.info
                if len(info.lengths) != 1 or info.metadata.get(_PART) != f"{place} of {len(paths)} of {key}":
                    raise BadFile(f"{path}: is not this part of an entry")
                ids = self._ids(snapshot.tokens(0))
                if place == 0:
                    first, model, metadata = ids, info.model, dict(info.metadata)
                elif ids != first or info.model != model:
                    raise BadFile(f"{path}: its token ids or its model are not those of {paths[0]}")
                size += info.file_bytes
                if info.config["window"] and info.lengths[0] > info.config["window"]:
                    kept = max(info.config["rollback_tokens"], BLOCK)
                    rollback = kept if rollback is None else min(rollback, kept)
            chain = _chain(model, first)
            if not chain or not key.startswith(chain[-1].hex()):
                raise BadFile(f"{paths[0]}: its token ids are not those of its name")
        except (BadFile, Unsupported) as error:
            self._refuse(paths, key, error)
            return
        except FileError:  # another process removed it
            return
        del metadata[_PART]
        self._table.add(
            _Entry(key, first, chain, metadata=metadata, paths=paths, model=model, rollback=rollback, bytes=size)
        )

    def _refuse(self, paths: list[str], key: str, error: Exception) -> None:
        if isinstance(error, Unsupported):  # another version's, which may still need it
            self._ignored.add(key)
            what = "is not used"
        else:
            for path in paths:
                _ignoring(os.unlink, path)
            self._counts["refused"] += 1
            what = "is damaged and was removed"
        self.problems = [*self.problems, str(error)][-_MOST_PROBLEMS:]
        warnings.warn(f"an entry of {self!r} {what}: {error}", RuntimeWarning, stacklevel=4)

    def _loaded(self, entry: _Entry, into: Any) -> list[Sequence] | None:
        caches = None if into is None else self._caches(entry, into, len(entry.paths))
        made = []
        try:
            for place, path in enumerate(entry.paths):
                options: dict[str, Any] = {"model": entry.model, "tokens": [_numbers(entry.ids)]}
                if caches is not None:
                    options["into"] = caches[place]
                else:
                    options["capacity_tokens"] = 0
                made += Snapshot(path).load(**options).sequences
        except (BadFile, Unsupported) as error:
            with self._lock:
                self._table.remove(entry)
                self._refuse(entry.paths, entry.key, error)
            return None
        except FileError:
            return None
        return made

    def _keep_in_files(self, entry: _Entry, given: list[Sequence]) -> bool:
        key = entry.key = f"{entry.chain[-1].hex()}-{secrets.token_hex(8)}"  # a name of its own: writers never mix
        names = [f"{key}.{place}of{len(given)}.kvs" for place in range(len(given))]
        entry.paths = [os.path.join(self.directory, name) for name in names]
        try:
            for place, s in enumerate(given):
                metadata = {**entry.metadata, _PART: f"{place} of {len(given)} of {key}"}
                save(
                    s.cache,
                    entry.paths[place],
                    sequences=[s],
                    model=entry.model,
                    tokens=[_numbers(entry.ids)],
                    metadata=metadata,
                )
        except BaseException:
            for path in entry.paths:
                _ignoring(os.unlink, path)
            raise
        with self._lock:
            self._scan()
            known = self._table.entries.get(key)
            if known is None:  # another process removed it, to keep within the budget
                return False
            if known.bytes > self.max_bytes:
                self._drop(known)
                return False
            self._evict(known)
        return True


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(f"{name} = {_arguments.show(value)}: must be a str without zeros")
    return value


def _trim(caches: list[Cache]) -> None:
    for cache in {id(c): c for c in caches}.values():
        try:
            cache.trim()
        except InvalidArgument:  # it was closed
            pass


def _ignoring(call: Callable[[str], Any], path: str) -> None:
    """A call on a file that another process may have removed, or that this one may not change."""
    attempt(call, path, refusals=(OSError,))


def _used_now(entry: _Entry) -> None:
    """In a directory, the time of its first file, which says to all processes what was used last."""
    for path in entry.paths[:1]:
        _ignoring(os.utime, path)


def _time(file: os.DirEntry) -> int:
    found, error = attempt(file.stat, refusals=(OSError,))
    return 0 if error is not None else found.st_mtime_ns


def _age(file: os.DirEntry) -> float:
    return time.time() - _time(file) / 1e9 if _time(file) else 0.0
