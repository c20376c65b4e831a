"""Locks that survive os.fork() and signals.

A fork waits until the calls that hold a lock have returned, so that the child finds every lock free, and what the locks
guard whole.
"""

from __future__ import annotations

import _thread
import itertools
import os
import threading
from typing import Any

from ._errors import InvalidArgument
from ._signals import Ref

_all: dict[Ref, None] = {}  # in the order in which the locks were made
_numbers = itertools.count()
_forking = threading.local()
_FIRST_PATIENCE = 0.1  # seconds

lent: dict[int, tuple[Lock, ...]] = {}  # the locks that a thread lent to its long call (_long_calls.py)


class Lock(_thread.RLock):
    """An RLock for `with`, which forks and long calls know. Made by new()."""

    number: int  # locks are taken by ascending numbers
    of: str

    def refuse_lender(self) -> None:
        """Raises where this thread waits for a long call that has the lock, and so would wait for itself."""
        if lent and self in lent.get(threading.get_ident(), ()):
            raise InvalidArgument(
                f"{self.of} cannot be used here: a call of this thread (save, load or copy) goes on, and this is "
                "called from its progress function or from a signal's handler; use it when that call has returned"
            )

    def __enter__(self) -> bool:
        # From CPython 3.14 on a handler may run between RLock's own __enter__ and the block.
        if lent:
            self.refuse_lender()
        taken: list[bool] = []
        try:
            taken.extend(map(self.acquire, (True,)))
        except BaseException:
            if taken:
                self.release()
            raise
        return True


def new(of: str = "this object") -> Lock:
    """A lock. of: what it guards, for messages, such as "this cache"."""
    lock = Lock()
    lock.number, lock.of = next(_numbers), of
    _all[Ref(lock, _all.pop)] = None
    return lock


def _existing() -> list[Lock]:
    return [lock for ref in list(_all) if (lock := ref()) is not None]


def _take(locks: list[Lock], patience: float, held: list[Lock]) -> Lock | None:
    """Takes locks, and waits for the first of all as long as needed. Returns one that was not free in time."""
    for lock in locks:
        if not lock.acquire(timeout=patience if held else -1):
            return lock
        held.append(lock)
    return None


def _before() -> None:
    """Takes all locks. Other threads take more than one, too, in orders of their own: this one gives all back where one
    is not free in time, and begins with that one."""
    held: list[Lock] = []
    _forking.held = held
    waited, patience = None, _FIRST_PATIENCE
    while missing := sorted(set(_existing()) - set(held), key=lambda lock: (lock is not waited, lock.number)):
        waited = _take(missing, patience, held)
        if waited is not None:
            patience *= 2  # so that a fork beside calls that take long comes to an end
            while held:
                held.pop().release()


def _after() -> None:
    held: list[Any] = getattr(_forking, "held", [])
    while held:
        held.pop().release()


def _after_in_child() -> None:
    held = set(getattr(_forking, "held", []))
    for lock in _existing():
        if lock not in held:  # made, and taken by another thread, while this one waited for others
            lock._at_fork_reinit()
    for thread in lent.keys() - {threading.get_ident()}:
        del lent[thread]
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
