"""The exceptions of kvant. Each carries the library's own sentence: the argument, its value, what is allowed, the way
out."""

from __future__ import annotations


class KvantError(Exception):
    """Any failure that the library reports. `status` is the number of the C interface (kvant.h)."""

    status = -1


class InvalidArgument(KvantError, ValueError):
    """A value outside what is allowed."""

    status = 1


class Unsupported(KvantError):
    """A legal request that this build or this machine cannot serve. kvant never takes a slower substitute instead."""

    status = 2


class OutOfCapacity(KvantError):
    """The capacity that the cache was created with is used up."""

    status = 3


class NonFinite(KvantError, ValueError):
    """Keys or values hold NaN, an infinity, or a magnitude above 65504."""

    status = 4


class Stale(KvantError):
    """A plan was made for an earlier state of one of its sequences."""

    status = 5


class BadFile(KvantError):
    """A file is not what it claims to be."""

    status = 6


class FileError(KvantError, OSError):
    """The operating system refused to open, read or write a file."""

    status = 7


class OutOfMemory(KvantError, MemoryError):
    """An allocation failed."""

    status = 8


class InternalError(KvantError):
    """A defect in kvant."""

    status = 9


BY_STATUS = {
    e.status: e
    for e in (
        InvalidArgument,
        Unsupported,
        OutOfCapacity,
        NonFinite,
        Stale,
        BadFile,
        FileError,
        OutOfMemory,
        InternalError,
    )
}
