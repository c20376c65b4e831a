"""Locks that survive os.fork(): the fork waits until the calls that hold one have returned, so that the child finds
every lock free, and what the locks guard whole."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_all: dict[int, weakref.ref] = {}
_forking = threading.local()


def new() -> Any:
    """A threading.RLock() of which forks know."""
    lock = threading.RLock()
    key = id(lock)
    _all[key] = weakref.ref(lock, lambda _: _all.pop(key, None))
    return lock


def _existing() -> list[Any]:
    return [lock for found in list(_all.values()) if (lock := found()) is not None]


def _before() -> None:
    held = _forking.held = []
    for lock in _existing():
        lock.acquire()
        held.append(lock)


def _after() -> None:
    held, _forking.held = getattr(_forking, "held", []), []
    for lock in held:
        lock.release()


def _after_in_child() -> None:
    held = {id(lock) for lock in getattr(_forking, "held", [])}
    for lock in _existing():
        if id(lock) not in held:  # made, and taken by another thread, while this one waited for others
            lock._at_fork_reinit()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
