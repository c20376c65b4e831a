"""Caches in files, as Python objects over the C interface."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf
from ctypes import byref, c_char_p, c_int64, c_uint64, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _arguments, _c, _long_calls
from ._cache import Cache, Sequence
from ._errors import InvalidArgument

__all__ = ["Loaded", "Snapshot", "SnapshotInfo", "copy_sequences", "load", "save"]


@dataclass(frozen=True)
class SnapshotInfo:
    """The facts of a snapshot.

    written_by: the version of kvant. name, model, metadata: as they were given to save. config: fields of the cache's
        configuration and their values. lengths: tokens of each sequence. has_tokens: of each sequence, whether its
        token ids were saved. encoded_pages, exact_pages: distinct pages of 64 tokens, for all layers and kv heads.
    page_bytes: bytes of all pages. file_bytes: bytes of this file. bases: files in the same folder that have some of
        the pages.
    """

    path: str
    written_by: str
    name: str
    model: str
    metadata: dict[str, str]
    config: dict[str, Any]
    lengths: tuple[int, ...]
    has_tokens: tuple[bool, ...]
    encoded_pages: int
    exact_pages: int
    page_bytes: int
    file_bytes: int
    bases: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """A cache that was loaded, and its sequences in the order of the file, or of the places that were given."""

    cache: Cache
    sequences: list[Sequence]


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(f"{name} = {_arguments.show(value)}: must be a str without zeros")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} = {_arguments.show(value)}: must be text that UTF-8 has") from None


def _set_metadata(options: Any, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata = {_arguments.show(metadata)}: must be a dict of str")
    pairs = [_text(f"metadata[{_arguments.show(k)}]", part) for k, v in metadata.items() for part in (k, v)]
    options.metadata, options.metadata_count = (c_char_p * len(pairs))(*pairs), len(pairs) // 2


def _set_tokens(options: Any, tokens: Any, count: int) -> None:
    if tokens is None:
        return
    what = "lists of token ids (None: a sequence without)"
    each = [
        [] if ids is None else _arguments.integers(f"tokens[{i}]", ids, -(1 << 63), (1 << 63) - 1)
        for i, ids in enumerate(_arguments.items("tokens", tokens, what, count, "sequence"))
    ]
    options.tokens = _c.counts(n for ids in each for n in ids)
    options.token_counts, options.token_lists = _c.counts(len(ids) for ids in each), len(each)


def save(
    cache: Cache,
    path: str | Path,
    *,
    sequences: Iterable[Sequence] | Sequence | None = None,
    name: str = "",
    model: str = "",
    metadata: Mapping[str, str] | None = None,
    tokens: SequenceOf[SequenceOf[int] | None] | None = None,
    base: str | Path | None = None,
    progress: Callable[[int, int], Any] | None = None,
    stream: Any = None,
) -> None:
    """Writes sequences of a cache to a file. Loaded sequences go on bit for bit as these do.

    The file is a safetensors file that only its owner may read. It is written beside `path`, synced and renamed: if
    anything fails, an older file of that name stays as it is. Calls that change the cache wait meanwhile.

    sequences: None: all, in the order in which they were made.
    name: for people. model: the model that the cache belongs to, which load can require. metadata: the caller's own, a
        dict of str; keys do not begin with "kvant.".
    tokens: for each sequence a list of its token ids, ints [length], or None; load can require them.
    base: an earlier snapshot in the same folder. Pages that it has are not written again, and the new file needs it.
        With a base that needs 32 files already, all pages are written.
    progress: called in this thread with (done, total) bytes of pages; an exception that it raises stops the call. The
        caches of the call refuse every call that it makes, those that only read, too; use them when the call has
        returned. Other threads' calls wait for the work's end, and never for the function's return.
    stream: as for Cache.write.

    Ctrl-C, or an exception of another signal's handler, stops the call and arrives as itself: the file is the older one
    or whole.

    Errors: InvalidArgument (also a step that is not written in every layer, and a path to a file that a snapshot
    needs), FileError (also a path to a folder, pipe or device), BadFile (base).
    """
    if not isinstance(cache, Cache):
        raise InvalidArgument(f"cache = {_arguments.show(cache)}: must be a kvant.Cache")
    options = _c.SaveOptions(struct_size=sizeof(_c.SaveOptions))
    options.name, options.model = _text("name", name), _text("model", model)
    owner = cache.owner
    if sequences is not None:
        ids = [s.number for s in owner.members(sequences)]
        options.sequences, options.sequence_count = _c.sequences(ids), len(ids)
    _set_metadata(options, metadata)
    if tokens is not None:
        _set_tokens(options, tokens, owner.count() if sequences is None else len(ids))
    if base is not None:
        options.base = os.fsencode(_arguments.path("base", base))
    where, number = os.fsencode(_arguments.path("path", path)), owner.place(stream).stream

    def work(report: Any) -> None:
        options.progress = report
        owner.use_number(number)
        _c.check(_c.save(cache.handle, where, byref(options)))

    _long_calls.run(work, progress, owner.lock)


class Snapshot(_arguments.NotCopied):
    """A snapshot that is open. Its header and tables, and those of its bases, are read and checked.

    path: a file that kvant.save wrote. Errors: FileError, BadFile (what is wrong, and where), Unsupported (written by
    another version of the layout).
    """

    _instead = "open the file again"
    _made_of = ("info", "_handle")

    def __init__(self, path: str | Path):
        where = _arguments.path("path", path)
        self._handle = _c.SnapshotHandle()
        _c.check(_c.snapshot_open(os.fsencode(where), byref(self._handle)))
        facts = json.loads(_c.text(_c.snapshot_info, self._handle))
        facts["path"] = where
        sequences = facts.pop("sequences")
        self.info = SnapshotInfo(
            lengths=tuple(s["length"] for s in sequences),
            has_tokens=tuple(s["token_ids"] > 0 for s in sequences),
            bases=tuple(facts.pop("bases")),
            **facts,
        )

    def __repr__(self) -> str:
        return f"kvant.Snapshot({self.info.path!r})"

    def tokens(self, place: int) -> list[int]:
        """Token ids of the sequence at a place of the file; empty: none were saved."""
        place, count = _arguments.int64("place", place), c_int64()
        _c.check(_c.snapshot_tokens(self._handle, place, None, 0, byref(count)))
        ids = (c_int64 * count.value)()
        _c.check(_c.snapshot_tokens(self._handle, place, ids, count.value, byref(count)))
        return list(ids)

    def load(
        self,
        *,
        sequences: SequenceOf[int] | None = None,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
        tokens: SequenceOf[SequenceOf[int] | None] | None = None,
        into: Cache | None = None,
        device: Any = "cpu",
        capacity_tokens: int | None = None,
        max_sequences: int = 0,
        max_sequence_tokens: int = 0,
        threads: int = 0,
        isa: str | None = None,
        progress: Callable[[int, int], Any] | None = None,
        stream: Any = None,
    ) -> Loaded:
        """Makes a cache of the snapshot's configuration with its sequences, or adds them to a cache.

        sequences: places in the file; None: all. model, metadata, tokens: the load is refused where the file has
            others; tokens: a list for each sequence that is loaded.
        into: a cache of the same configuration; after any error it has the sequences that it had. None: a new one, for
            which the next five are, as for Cache. capacity_tokens: None: as it was; 0: no limit.
        progress, stream: as for save; stream only with into.

        Errors: InvalidArgument (another configuration, or other than is required), OutOfCapacity, BadFile (names the
        first page that is not as it was saved), FileError, Unsupported.
        """
        options = _c.LoadOptions(struct_size=sizeof(_c.LoadOptions))
        count = len(self.info.lengths)
        if sequences is not None:
            places = _arguments.integers("sequences", sequences, 0, (1 << 63) - 1)
            options.sequences, options.sequence_count, count = _c.counts(places), len(places), len(places)
        if model is not None:
            options.model = _text("model", model)
        _set_metadata(options, metadata)
        _set_tokens(options, tokens, count)
        options.threads = _arguments.int32("threads", threads)
        options.isa = _arguments.name_or_none("isa", isa)
        options.max_sequences = _arguments.int64("max_sequences", max_sequences, 0)
        options.max_sequence_tokens = _arguments.int64("max_sequence_tokens", max_sequence_tokens, 0)
        if capacity_tokens is not None:
            options.capacity_tokens = _arguments.int64("capacity_tokens", capacity_tokens, 0) or -1
        kind, number = _arguments.device(device)
        if into is not None:
            return self._load_into(into, options, count, progress, stream)
        if stream is not None:
            raise InvalidArgument("stream is given, but into is not: a new cache is whole at the return; leave it out")
        options.device = b"cpu" if kind == "cpu" else f"{kind}:{number}".encode()
        handle, ids = _c.CacheHandle(), (c_uint64 * count)()

        def work(report: Any) -> None:
            options.progress = report
            _c.check(_c.load(self._handle, byref(options), byref(handle), ids, count, None))

        _long_calls.run(work, progress)
        cache = Cache._of(handle, (kind, number), self.info.config)
        return Loaded(cache, [Sequence(cache, ids, place) for place in range(count)])

    def _load_into(self, into: Cache, options: Any, count: int, progress: Any, stream: Any) -> Loaded:
        if not isinstance(into, Cache):
            raise InvalidArgument(f"into = {_arguments.show(into)}: must be a kvant.Cache")
        number = into.owner.place(stream).stream
        made, ids, tickets = into._unfilled(count)
        loaded = Loaded(into, made)

        def work(report: Any) -> None:
            options.progress = report
            into.owner.use_number(number)
            _c.check(_c.load_into(into.handle, self._handle, byref(options), ids, count, None))

        try:
            _long_calls.run(work, progress, into.owner.lock)
            return loaded
        except BaseException:
            into.owner.gone.extend(tickets)
            raise

    def verify(self, *, progress: Callable[[int, int], Any] | None = None) -> None:
        """Reads all of the file and its bases, and compares every checksum.

        progress: as for save. Errors: BadFile (names the first bad part), FileError.
        """
        _long_calls.run(lambda report: _c.check(_c.snapshot_verify(self._handle, report, None)), progress)

    def copy(self, path: str | Path, *, progress: Callable[[int, int], Any] | None = None) -> None:
        """Writes the snapshot to another file, which needs no base.

        progress: as for save. Errors: InvalidArgument (a file that a snapshot needs), FileError, BadFile.
        """
        where = os.fsencode(_arguments.path("path", path))
        _long_calls.run(lambda report: _c.check(_c.snapshot_copy(self._handle, where, report, None)), progress)


def copy_sequences(
    sequences: Iterable[Sequence] | Sequence,
    to: Cache,
    *,
    progress: Callable[[int, int], Any] | None = None,
    stream: Any = None,
) -> list[Sequence]:
    """Copies sequences of a cache to another one, on the CPU or on a device, wherever the first is.

    The copies go on bit for bit, and pages that the sequences share are shared. The sequences stay: remove() frees
    their pages, and so a device's sequence waits in host memory.
    to: a cache whose configuration is that of the first in all that bytes and visibility depend on; after any error it
        has the sequences that it had. progress: as for save. stream: as for Cache.write, of those that are on a device.

    Errors: InvalidArgument (one cache twice, another configuration, a step that is not written in every layer),
    OutOfCapacity.
    """
    if not isinstance(to, Cache):
        raise InvalidArgument(f"to = {_arguments.show(to)}: must be a kvant.Cache")
    given = [sequences] if isinstance(sequences, Sequence) else _arguments.items("sequences", sequences, "sequences")
    if not given:
        return []
    if not isinstance(given[0], Sequence):
        raise InvalidArgument(f"sequences has {_arguments.show(given[0])}: must be sequences of one cache")
    source = given[0].cache
    numbers = _c.sequences(s.number for s in source.owner.members(given))
    on_host = [owner for owner in (source.owner, to.owner) if owner.device[0] == "cpu"]
    if len(on_host) == 2:
        to.owner.place(stream)  # which refuses a stream
    streams = [0 if owner in on_host else owner.place(stream).stream for owner in (source.owner, to.owner)]
    made, copies, tickets = to._unfilled(len(numbers))

    def work(report: Any) -> None:
        for owner, number in zip((source.owner, to.owner), streams):
            owner.use_number(number)
        _c.check(_c.copy_sequences(source.handle, numbers, len(numbers), to.handle, copies, report, None))

    try:
        _long_calls.run(work, progress, source.owner.lock, to.owner.lock)
        return made
    except BaseException:
        to.owner.gone.extend(tickets)
        raise


def load(path: str | Path, **options: Any) -> Loaded:
    """Loads a snapshot: Snapshot(path).load(...), whose options and errors it has."""
    return Snapshot(path).load(**options)
