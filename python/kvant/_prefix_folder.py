"""Entries of a PrefixIndex in a folder, which processes share: a snapshot for each part, KEY.PofN.kvs.

No process waits for another. A file has all that it needs, is written beside and renamed, and its name is never used
again: whoever opened the file reads it to the end, and whoever comes too late looks for the next best entry.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from . import _prefix_table
from ._cache import Cache, Sequence
from ._errors import BadFile, FileError, Unsupported
from ._prefix_memory import Caches, Unusable, cut, remove
from ._prefix_table import BLOCK, Entry, Table, numbers, packed
from ._signals import attempt
from ._snapshot import Snapshot, save

_NAME = re.compile(r"([0-9a-f]{32}-[0-9a-f]{16})\.(\d{1,3})of(\d{1,3})\.kvs")
_LEFT_OVER = re.compile(_NAME.pattern + r"\.tmp-\d+-\d+")
_LEFT_OVER_SECONDS = 3600  # a writer that still writes is younger
_PART = "prefix.part"
_MOST_PROBLEMS = 100
# Time stamps of folders count seconds on some file systems: one this young may also be that of a change to come.
_COARSE_NS = 2_000_000_000
# Reading the names of more files than this is kept to a twentieth of the time.
_FEW_FILES = 256
_SHARE = 20
# These fields of a configuration depend on the process that had the cache.
_HERE = ("capacity_tokens", "max_sequences", "max_sequence_tokens")


class Folder:
    """table: of the index, whose lock `lock` is. name: of the index, for messages."""

    def __init__(self, directory: str, table: Table, lock: Any, name: str):
        self.directory, self._table, self._lock, self._name = directory, table, lock, name
        self.problems: list[str] = []
        self.refused = 0
        self._foreign: set[str] = set()  # keys of another version, which was said
        self._files = 0
        self._seen: int | None = None  # the folder's time stamp when its names were read; None: they must be
        self._ended, self._took = 0.0, 0.0  # of the last reading of names
        _, error = _ask(partial(os.makedirs, mode=0o700, exist_ok=True), directory)
        if error is not None:
            raise self._error(error)

    def _error(self, error: OSError) -> FileError:
        return FileError(f"{self.directory}: {error.strerror or error}")

    # --- what is there ---

    def refresh(self, now: bool = False) -> None:
        """Under the lock: makes the table what the folder is. now: also where names were read a moment ago."""
        if self._table.mend():
            self._seen = None
        folder, error = _ask(os.stat, self.directory)
        if error is not None:
            raise self._error(error)
        changed = folder.st_mtime_ns
        if changed == self._seen and not now:
            return
        began = time.monotonic()
        if self._seen is not None and not now:
            if self._files > _FEW_FILES and began - self._ended < _SHARE * self._took:
                return
        young = not 0 <= time.time_ns() - changed - _COARSE_NS
        self._seen = None
        self._read_names()
        self._seen = -1 if young else changed
        self._ended = time.monotonic()
        self._took = self._ended - began

    def _read_names(self) -> None:
        found: dict[str, dict[int, os.DirEntry]] = {}
        counts: dict[str, int] = {}
        entries, error = _ask(os.scandir, self.directory)
        if error is not None:
            raise self._error(error)
        with entries:
            files = list(entries)
        self._files = len(files)
        for file in files:
            name = _NAME.fullmatch(file.name)
            if name:
                found.setdefault(name[1], {})[int(name[2])] = file
                counts[name[1]] = int(name[3])
            elif _LEFT_OVER.fullmatch(file.name) and _age(file) > _LEFT_OVER_SECONDS:
                _ask(os.unlink, file.path)
        for key in self._table.entries.keys() - found.keys():
            self._table.remove(key)
        for key, parts in found.items():
            if key not in self._foreign:
                self._learn_again(key, counts[key], {place: file.path for place, file in parts.items()})
        for key, parts in found.items():
            if len(parts) < counts[key]:
                self._forget_half(key, parts)

    def _learn_again(self, key: str, count: int, paths: dict[int, str]) -> None:
        known = self._table.entries.get(key)
        if known is None or {i for i, path in enumerate(known.parts) if path is not None} != paths.keys():
            self.learn(key, count, paths)

    def _forget_half(self, key: str, files: dict[int, os.DirEntry]) -> None:
        """Some files of an entry are a checkpoint where a longer entry has the rest. Else they go: their writer ended.
        It may still write while they are young."""
        entry = self._table.entries.get(key)
        if entry is not None and self._table.completed(entry):
            return
        if all(_age(file) > _LEFT_OVER_SECONDS for file in files.values()):
            self._table.remove(key)
            _unlink(file.path for file in files.values())

    def learn(self, key: str, count: int, paths: dict[int, str]) -> Entry | None:
        """Under the lock: learns of an entry from its files. None: they are not what they should be, or went."""
        try:
            entry = _read(key, count, paths)
        except (BadFile, Unsupported) as error:
            self._refuse(key, paths.values(), error)
            return None
        except FileError:  # another process removed one
            return None
        self._table.add(entry)
        return entry

    def _refuse(self, key: str, paths: Iterable[str], error: Exception) -> None:
        self._table.remove(key)
        if isinstance(error, Unsupported):  # another version's, which may still need it
            self._foreign.add(key)
            what = "is not used"
        else:
            _unlink(paths)
            self.refused += 1
            what = "is damaged and was removed"
        self.problems = [*self.problems, str(error)][-_MOST_PROBLEMS:]
        warn(f"an entry of {self._name} {what}: {error}")

    def known(self, entry: Entry) -> bool:
        """Under the lock: whether an entry of the table can still be had."""
        if all(map(_exists, entry.parts)):
            return True
        self.lost(entry.key)
        return False

    def lost(self, key: str) -> bool:
        """Under the lock, after an entry was Unusable: forgets the entry where a file is gone. Returns whether that was
        so: then the folder is looked at again, where the entry may be a checkpoint now, or another is in its place."""
        entry = self._table.entries.get(key)
        if entry is None or all(part is None or _exists(part) for part in entry.parts):
            return False
        self._table.remove(key)
        self._seen = None
        return True

    # --- an entry ---

    def keep(self, entry: Entry, given: list[Sequence], most: int) -> Entry | None:
        """Returns the entry as it is kept. None: it takes more bytes than `most`, or another process removed it to keep
        within its own budget. Error: FileError."""
        key = f"{entry.chain[-1].hex()}-{secrets.token_hex(8)}"  # a name of its own: writers never mix
        count = len(given)
        paths = {place: os.path.join(self.directory, f"{key}.{place}of{count}.kvs") for place in range(count)}
        try:
            for place, s in enumerate(given):
                save(
                    s.cache,
                    paths[place],
                    sequences=[s],
                    model=entry.model,
                    tokens=[numbers(entry.ids)],
                    metadata={**entry.metadata, _PART: f"{place} of {count} of {key}"},
                )
            with self._lock:
                known = self.learn(key, count, paths)
                if known is not None and known.bytes > most:
                    self.drop(known)
                    return None
            return known
        except BaseException as error:
            with self._lock:
                self._table.remove(key)
            _unlink(paths.values())
            if isinstance(error, FileError):  # one text for all entries: Python shows it once
                said = FileError(_NAME.sub("a new entry", str(error)))
                said.errno = error.errno
                raise said from None
            raise

    def make(self, entry: Entry, other: Entry | None, tokens: int, caches: Caches) -> list[Sequence]:
        """Sequences of so many tokens of an entry, and of the one that completes it. Error: Unusable."""
        made: list[Sequence] = []
        wanted = caches(other or entry)
        try:
            for place, part in enumerate(entry.parts):
                owner = entry if part is not None else other
                made += self._load(owner, place, None if wanted is None else wanted[place])
                cut(made[-1], tokens, owner.key, wanted is not None)
        except BaseException:
            remove(made)
            raise
        return made

    def _load(self, entry: Entry, place: int, into: Cache | None) -> list[Sequence]:
        path = entry.parts[place]
        try:
            snapshot, ids, kind = _open(path, entry.key, place, len(entry.parts))
            if ids != entry.ids or snapshot.info.model != entry.model or kind != entry.kinds[place]:
                raise BadFile(f"{path}: is another file than it was")
            options: dict[str, Any] = {"capacity_tokens": 0} if into is None else {"into": into}
            return snapshot.load(**options).sequences
        except (BadFile, Unsupported) as error:
            with self._lock:
                self._refuse(entry.key, [p for p in entry.parts if p is not None], error)
            raise Unusable(entry.key) from None
        except FileError:
            raise Unusable(entry.key) from None

    def drop(self, entry: Entry) -> list[Cache]:
        """Under the lock: an entry goes. Returns caches to trim: none."""
        self._table.remove(entry.key)
        _unlink(path for path in entry.parts if path is not None)
        return []

    def bytes_left(self, entry: Entry, longer: Entry) -> int:
        """Bytes of an entry as a checkpoint of a longer one."""
        return sum(_size(path) for path, windowed in zip(entry.parts, longer.windows) if windowed and path is not None)

    def leave(self, entry: Entry, longer: Entry) -> None:
        """Under the lock: an entry becomes a checkpoint of a longer one, which has its pages of full attention."""
        parts = [part if windowed else None for part, windowed in zip(entry.parts, longer.windows)]
        kinds = [None if part is None else kind for part, kind in zip(parts, entry.kinds)]
        self._table.add(replace(entry, parts=parts, kinds=kinds, bytes=self.bytes_left(entry, longer)))
        _unlink(path for path in entry.parts if path is not None and path not in parts)

    def last_use(self, entry: Entry) -> int | None:
        """In nanoseconds, by any process. None: it is gone."""
        found, error = _ask(os.stat, _first(entry))
        return None if error is not None else found.st_mtime_ns

    def use(self, entry: Entry, time: int) -> None:
        """The time of the first file says to all processes what was used last."""
        entry.used = max(entry.used, time)
        _ask(partial(os.utime, ns=(time, time)), _first(entry))

    def could_hold(self, size: int) -> bool:
        """Whether so many bytes have room when all entries are gone."""
        disk, error = _ask(os.statvfs, self.directory)
        return error is None and disk.f_bavail * disk.f_frsize + self._table.bytes >= size


def _open(path: str, key: str, place: int, count: int) -> tuple[Snapshot, bytes, dict[str, Any]]:
    """A part of an entry, its token ids, and what its cache is. Errors: those of Snapshot."""
    snapshot = Snapshot(path)
    info = snapshot.info
    if place >= count or len(info.lengths) != 1 or info.metadata.get(_PART) != f"{place} of {count} of {key}":
        raise BadFile(f"{path}: is not this part of an entry")
    kind = {name: value for name, value in info.config.items() if name not in _HERE}
    return snapshot, packed(snapshot.tokens(0)), kind


def _read(key: str, count: int, paths: dict[int, str]) -> Entry:
    """An entry from its files, or from some of them. Errors: those of Snapshot."""
    parts: list[str | None] = [None] * max(count, 1)
    kinds: list[Any] = [None] * len(parts)
    windows, kept, size = [False] * len(parts), [], 0
    first: tuple | None = None
    for place, path in sorted(paths.items()):
        snapshot, ids, kind = _open(path, key, place, count)
        info = snapshot.info
        parts[place], kinds[place] = path, kind
        first = first or (ids, info.model, info.metadata, path)
        if (ids, info.model) != first[:2]:
            raise BadFile(f"{path}: its token ids or its model are not those of {first[3]}")
        size += info.file_bytes
        windows[place] = 0 < kind["window"] < info.lengths[0]
        if windows[place]:
            kept.append(max(kind["rollback_tokens"], BLOCK))
    ids, model, metadata, path = first
    hashes = _prefix_table.chain(model, ids)
    if not hashes or not key.startswith(hashes[-1].hex()):
        raise BadFile(f"{path}: its token ids are not those of its name")
    metadata = {name: value for name, value in metadata.items() if name != _PART}
    entry = Entry(key, ids, hashes, model, metadata, parts, kinds, windows, min(kept, default=BLOCK), bytes=size)
    found, error = _ask(os.stat, _first(entry))
    if error is not None:
        raise FileError(f"{path}: {error.strerror}")
    entry.used = found.st_mtime_ns
    return entry


def is_full(error: FileError) -> int:
    """The number of the system's error where a disk, a quota or a limit of files' sizes is used up; else 0."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if error.errno == number or os.strerror(number) in str(error):
            return number
    return 0


def warn(text: str) -> None:
    """A warning at the line that called kvant."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _first(entry: Entry) -> str:
    return next(path for path in entry.parts if path is not None)


def _ask(call: Any, argument: Any) -> tuple[Any, Exception | None]:
    """The system's answer, or its refusal: another process may have removed a file, or this one may not change it."""
    return attempt(call, argument, refusals=(OSError,))


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        _ask(os.unlink, path)


def _exists(path: str) -> bool:
    return _ask(os.stat, path)[1] is None


def _size(path: str) -> int:
    found, error = _ask(os.stat, path)
    return 0 if error is not None else found.st_size


def _age(file: os.DirEntry) -> float:
    found, error = _ask(os.stat, file.path)
    return 0.0 if error is not None else time.time() - found.st_mtime
