"""Known token ids: which entries begin as a prompt does, which of them is the longest, and which was used least.

One dict holds the entries. All else here is made from that dict, and a change that an exception interrupts is mended at
the next call: so an entry is known, or is not, and nothing is between.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from . import _arguments

BLOCK = 64  # tokens of a page: a longer common prefix shares whole pages


def packed(tokens: Any) -> bytes:
    """Token ids as int64, in the same bytes on every machine, since hashes of them are in names of files."""
    return _little_endian(array("q", _arguments.integers("tokens", tokens, -(1 << 63), (1 << 63) - 1))).tobytes()


def _little_endian(ids: array) -> array:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def numbers(ids: bytes) -> array:
    return _little_endian(array("q", ids))


def common(a: bytes, b: bytes) -> int:
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


def chain(model: str, ids: bytes) -> list[bytes]:
    """For each whole block a hash of the model and of all ids up to its end: 128 bits of a cryptographic hash, which
    Python's own library has."""
    found, last = [], blake2b(model.encode(), digest_size=16).digest()
    for begin in range(0, len(ids) - BLOCK * 8 + 1, BLOCK * 8):
        last = blake2b(last + ids[begin : begin + BLOCK * 8], digest_size=16).digest()
        found.append(last)
    return found


@dataclass(eq=False)
class Entry:
    """Sequences that were inserted together, one for each cache of a model.

    parts: a Sequence, or the path of a file. None: a checkpoint leaves this part to a longer entry, whose pages of full
        attention have all that the checkpoint's had.
    kinds: of each part what its cache is; parts of two entries go together where these are equal.
    windows: of each part whether pages have left its window, so that it can be truncated by `rollback` tokens alone.
    blocks: pages that entries share, as (owner, block, bytes). bytes: of all else.
    used: when it was used last, in nanoseconds.
    """

    key: str
    ids: bytes
    chain: list[bytes]
    model: str
    metadata: dict[str, str]
    parts: list[Any]
    kinds: list[Any]
    windows: list[bool]
    rollback: int = BLOCK
    blocks: list[tuple] = field(default_factory=list)
    bytes: int = 0
    used: int = 0

    @property
    def length(self) -> int:
        return len(self.ids) // 8

    @property
    def whole(self) -> bool:
        return None not in self.parts

    @property
    def first_cut(self) -> int:
        """The fewest tokens that the entry can be truncated to."""
        return max(self.length - self.rollback, 0) if any(self.windows) else 0

    def usable(self, ids: bytes) -> int:
        """How many tokens serve a prompt. The ids are compared: equal hashes alone say nothing."""
        same = common(self.ids, ids)
        if same < BLOCK:
            return 0
        if self.whole and same >= self.length - BLOCK:
            return same
        pages = same // BLOCK * BLOCK  # pages that are encoded already are not filled any further
        return pages if pages >= self.first_cut else 0

    def completes(self, other: Entry, tokens: int) -> bool:
        """Whether this entry has the parts that a checkpoint left to it, for so many tokens."""
        return (
            self.whole
            and self.model == other.model
            and len(self.parts) == len(other.parts)
            and self.ids[: tokens * 8] == other.ids[: tokens * 8]
            and self.length >= tokens
            and all(
                not windowed if part is None else mine == kind
                for part, kind, mine, windowed in zip(other.parts, other.kinds, self.kinds, self.windows)
            )
        )


class Table:
    """Entries by the hashes of their blocks, and by the time of their last use. Its caller has a lock."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._made()

    def _made(self) -> None:
        """Makes all that follows from the entries."""
        self._changing = True
        self._by_block: dict[bytes, dict[str, Entry]] = {}  # of all blocks
        self._by_end: dict[bytes, dict[str, Entry]] = {}  # of an entry's last whole block
        self._shared: dict[tuple, int] = {}  # how many entries have a block
        self._ages: list[tuple[int, bool, str]] = []  # a heap; what it says of an entry may be older than the entry
        self._bytes = 0
        for entry in self.entries.values():
            self._enter(entry)
        self._changing = False

    def mend(self) -> bool:
        """After a change that was interrupted. Returns whether there was one."""
        interrupted = self._changing
        if interrupted:
            self._made()
        return interrupted

    def _enter(self, entry: Entry) -> None:
        for one in entry.chain:
            self._by_block.setdefault(one, {})[entry.key] = entry
        self._by_end.setdefault(entry.chain[-1], {})[entry.key] = entry
        for block in entry.blocks:
            count = self._shared.get(block, 0)
            self._shared[block] = count + 1
            self._bytes += 0 if count else block[-1]
        self._bytes += entry.bytes
        heapq.heappush(self._ages, (entry.used, entry.whole, entry.key))

    def add(self, entry: Entry) -> None:
        self.remove(entry.key)
        self._changing = True
        self.entries[entry.key] = entry
        self._enter(entry)
        self._changing = False

    def remove(self, key: str) -> Entry | None:
        """Returns the entry, if there was one."""
        self.mend()
        if key not in self.entries:
            return None
        self._changing = True
        entry = self.entries.pop(key)
        for one in entry.chain:
            _forget(self._by_block, one, key)
        _forget(self._by_end, entry.chain[-1], key)
        for block in entry.blocks:
            self._shared[block] -= 1
            if not self._shared[block]:
                del self._shared[block]
                self._bytes -= block[-1]
        self._bytes -= entry.bytes
        if len(self._ages) > 2 * len(self.entries) + BLOCK:
            self._ages = [(e.used, e.whole, e.key) for e in self.entries.values()]
            heapq.heapify(self._ages)
        self._changing = False
        return entry

    @property
    def bytes(self) -> int:
        """Bytes of all entries; blocks that they share count once."""
        return self._bytes

    # --- by tokens ---

    def same(self, hashes: list[bytes], model: str, ids: bytes) -> Entry | None:
        """The whole entry of exactly these ids."""
        named = self._by_end.get(hashes[-1], {}).values()
        return next((e for e in named if e.ids == ids and e.model == model and e.whole), None)

    def beginnings(self, entry: Entry) -> list[Entry]:
        """The entries that an entry continues, the shortest first."""
        found = [
            other
            for one in entry.chain
            for other in self._by_end.get(one, {}).values()
            if other is not entry and other.model == entry.model and entry.ids.startswith(other.ids)
        ]
        return sorted(found, key=lambda other: other.length)

    def branches(self, entry: Entry, text: Entry) -> bool:
        """Whether another text than `text` continues an entry, too."""
        return any(
            other.length > entry.length
            and other.model == entry.model
            and other.ids.startswith(entry.ids)
            and not other.ids.startswith(text.ids)
            and not text.ids.startswith(other.ids)
            for other in self._by_block[entry.chain[-1]].values()
        )

    def best(
        self, hashes: list[bytes], model: str, ids: bytes, without: set[str]
    ) -> tuple[int, Entry, Entry | None] | None:
        """(tokens, entry, the entry that completes it where it is a checkpoint) of those that serve most of a prompt,
        and of these the one with the fewest tokens to cut off. without: keys of entries that cannot be had."""
        for usable, entry in self._candidates(hashes, ids):
            if entry.key in without or entry.model != model:
                continue
            if entry.whole:
                return usable, entry, None
            others = self._by_block[hashes[usable // BLOCK - 1]].values()
            fit = [other for other in others if other.key not in without and other.completes(entry, usable)]
            if fit:
                return usable, entry, min(fit, key=lambda other: other.length)
        return None

    def completed(self, entry: Entry) -> bool:
        """Whether some entry completes a checkpoint, for the fewest tokens that it serves."""
        pages = max(-(-entry.first_cut // BLOCK), 1)
        others = self._by_block[entry.chain[pages - 1]].values() if pages <= len(entry.chain) else ()
        return any(other.completes(entry, pages * BLOCK) for other in others)

    def _candidates(self, hashes: list[bytes], ids: bytes) -> Iterator[tuple[int, Entry]]:
        seen: set[str] = set()
        waiting: list[tuple[int, bool, int, str]] = []  # a heap, the most tokens first
        for level in range(len(hashes), -1, -1):
            for key, entry in self._by_block.get(hashes[level - 1], {}).items() if level else ():
                if key not in seen:
                    seen.add(key)
                    # Longer by two blocks it has `level` blocks in common and no more, which saves comparing the ids
                    # of thousands that share a system prompt.
                    most = level * BLOCK if len(entry.chain) > level + 1 else entry.usable(ids)
                    heapq.heappush(waiting, (-most, not entry.whole, entry.length, key))
            while waiting and -waiting[0][0] >= max(level * BLOCK, 1):  # all others have less than `level` in common
                most, longer, length, key = heapq.heappop(waiting)
                usable = self.entries[key].usable(ids)
                if usable == -most:
                    yield usable, self.entries[key]
                elif usable:
                    heapq.heappush(waiting, (-usable, longer, length, key))

    # --- by time ---

    def oldest(self, but: Entry | None) -> Entry | None:
        """The entry that was used least recently, and a checkpoint before the entry that completes it."""
        self.mend()
        aside: list[tuple[int, bool, str]] = []
        found = None
        self._changing = True
        while self._ages and found is None:
            age = self._ages[0]
            entry = self.entries.get(age[-1])
            now = None if entry is None else (entry.used, entry.whole, entry.key)
            if entry is None or now != age:
                heapq.heappop(self._ages)
                if entry is not None:
                    heapq.heappush(self._ages, now)
            elif entry is but:
                aside.append(heapq.heappop(self._ages))
            else:
                found = entry
        for age in aside:
            heapq.heappush(self._ages, age)
        self._changing = False
        return found


def _forget(table: dict[bytes, dict[str, Entry]], one: bytes, key: str) -> None:
    named = table.get(one)
    if named is not None:
        named.pop(key, None)
        if not named:
            del table[one]
