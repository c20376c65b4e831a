"""Entries of a PrefixIndex in memory: forks, which share pages with the sequences that were inserted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ._cache import Cache, Sequence
from ._errors import InvalidArgument
from ._prefix_table import BLOCK, Entry, Table
from ._snapshot import copy_sequences
from ._tools import formats

_EXACT_PAGES = 4  # of an entry: a sink, and the tail with the copies behind it. For counting bytes


class Unusable(Exception):
    """An entry that cannot be had at this call, or not any more. key: the entry's."""

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


Caches = Callable[[Entry], "list[Cache] | None"]  # where the sequences of an entry are to be made; None: anywhere


class Memory:
    """table: of the index, whose lock `lock` is."""

    def __init__(self, table: Table, lock: Any):
        self._table, self._lock, self._number = table, lock, 0
        self.problems: list[str] = []
        self.refused = 0

    def refresh(self, now: bool = False) -> None:
        """Under the lock. now: also what only a look at all entries tells."""
        self._table.mend()
        if now:
            self.forget_closed()

    def forget_closed(self) -> None:
        """Under the lock: entries in caches that were closed go."""
        for entry in [e for e in self._table.entries.values() if any(_closed(s) for s in e.parts)]:
            self._table.remove(entry.key)

    def known(self, entry: Entry) -> bool:
        """Under the lock: whether an entry of the table can still be had."""
        if any(_closed(s) for s in entry.parts):
            self.forget_closed()
            return False
        return True

    def keep(self, entry: Entry, given: list[Sequence], most: int) -> Entry | None:
        """Returns the entry as it is kept. None: it takes more bytes than `most`."""
        for place, s in enumerate(given):
            c = s.cache
            dims = (c.kv_heads, c.head_dim, c.v_head_dim, c.latent)
            entry.kinds.append((c.layers, dims, c.k, c.v, c.window, c.rollback_tokens))
            entry.windows.append(0 < c.window < entry.length)
            released = max(entry.length - c.window - 2 * BLOCK, 0) // BLOCK if c.window else 0
            entry.blocks += [(id(c), place, one, _page_bytes(s)) for one in entry.chain[released:]]
            entry.bytes += _exact_bytes(s)
        kept = [max(s.cache.rollback_tokens, BLOCK) for s, windowed in zip(given, entry.windows) if windowed]
        entry.rollback = min(kept, default=BLOCK)
        if entry.bytes + sum(size for *_, size in entry.blocks) > most:
            return None
        try:
            for s in given:
                entry.parts.append(s.fork())
            with self._lock:
                self._number += 1
                entry.key = str(self._number)
                self._table.add(entry)
            return entry
        except BaseException:
            with self._lock:
                self._table.remove(entry.key)
            remove(entry.parts)
            raise

    def make(self, entry: Entry, other: Entry | None, tokens: int, caches: Caches) -> list[Sequence]:
        """Sequences of so many tokens of an entry. Error: Unusable."""
        made: list[Sequence] = []
        wanted = caches(entry)
        try:
            for place, part in enumerate(entry.parts):
                here = wanted is None or wanted[place] is part.cache
                try:
                    made += [part.fork()] if here else copy_sequences(part, wanted[place])
                except InvalidArgument:
                    if _closed(part):
                        raise Unusable(entry.key) from None
                    raise
                cut(made[-1], tokens, entry.key, wanted is not None)
        except BaseException:
            remove(made)
            raise
        return made

    def lost(self, key: str) -> bool:
        """Under the lock, after an entry was Unusable. Returns whether the entry is forgotten."""
        self.forget_closed()
        return key not in self._table.entries

    def drop(self, entry: Entry) -> list[Cache]:
        """Under the lock: an entry goes. Returns caches to trim without the lock, since that waits for their work."""
        self._table.remove(entry.key)
        return [s.cache for s in entry.parts]

    def bytes_left(self, entry: Entry, longer: Entry) -> int:
        """Bytes of an entry as a checkpoint of a longer one, which has its pages but for the exact ones."""
        return entry.bytes

    def leave(self, entry: Entry, longer: Entry) -> None:
        """Under the lock: an entry becomes a checkpoint of a longer one. Forks share what both have already."""

    def last_use(self, entry: Entry) -> int | None:
        return entry.used

    def use(self, entry: Entry, time: int) -> None:
        entry.used = max(entry.used, time)


def cut(sequence: Sequence, tokens: int, key: str, given: bool) -> None:
    """Truncates a sequence of an entry. given: it is in a cache of the caller's."""
    try:
        if len(sequence) > tokens:
            sequence.truncate(tokens)
    except InvalidArgument:  # its cache was closed, or a file says less of its window than is true
        if given and _closed(sequence):
            raise
        raise Unusable(key) from None


def remove(sequences: list[Sequence]) -> None:
    for s in sequences:
        s.remove()


def estimated_bytes(sequence: Sequence, tokens: int) -> int:
    """About the bytes of a sequence alone."""
    window = sequence.cache.window
    pages = (min(tokens, window + 2 * BLOCK) if window else tokens) // BLOCK
    return pages * _page_bytes(sequence) + _exact_bytes(sequence)


def trim(caches: list[Cache]) -> None:
    for cache in {id(c): c for c in caches}.values():
        try:
            cache.trim()
        except InvalidArgument:  # it was closed
            pass


def _closed(sequence: Sequence) -> bool:
    return not sequence.cache.owner.pointer


@lru_cache(maxsize=1)
def _bits() -> dict[str, float]:
    return {f["name"]: f["bits"] for f in formats()}


def _page_bytes(sequence: Sequence) -> int:
    c = sequence.cache
    return int(BLOCK * c.layers * c.kv_heads * (c.head_dim * _bits()[c.k] + c.v_head_dim * _bits()[c.v]) / 8)


def _exact_bytes(sequence: Sequence) -> int:
    c = sequence.cache
    return _EXACT_PAGES * BLOCK * c.layers * c.kv_heads * (c.head_dim + c.v_head_dim) * 2
