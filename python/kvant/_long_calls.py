"""Calls of the library that take long, or report their progress: in a thread of their own (_signals.py says why).

The caller's thread calls the progress function. The work waits for the function's return, so that its exception stops
the work there, but no longer than _PATIENCE: a function that waits for another thread, which waits for this cache,
would else wait for ever. The locks of the caches are the work's, and are free when the work is done.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any

from . import _c, _locks
from ._arguments import show
from ._errors import InvalidArgument

_PATIENCE = 1.0  # seconds

Work = Callable[[Any], None]  # is given the C callback that reports


def _locked(locks: list[_locks.Lock], work: Work, report: Any) -> None:
    """work(report) under locks, which are taken in one order by all threads, or two would wait for each other."""
    if not locks:
        work(report)
        return
    with locks[0]:
        _locked(locks[1:], work, report)


class _Thread:
    """The work in its thread."""

    def __init__(self, work: Work, locks: list[_locks.Lock], has_progress: bool):
        self._work: Work | None = work
        self._locks, self._has_progress = locks, has_progress
        self._guard = _locks.new("a call that goes on")  # forks wait for the work's end
        self.news: queue.SimpleQueue = queue.SimpleQueue()  # (done, total) for the progress function; None: the end
        self.answers: queue.SimpleQueue = queue.SimpleQueue()  # True: stop
        self.skipped: tuple[int, int] | None = None  # the newest report, where the function had not returned yet
        self._unanswered = False
        self.error: BaseException | None = None
        self.ended = False
        self.end = threading.Lock()
        self.end.acquire()

    def run(self) -> None:
        with self._guard:
            try:
                report = _c.Progress(self._report if self._has_progress else self._stopped)
                _locked(self._locks, self._work, report)
            except BaseException as error:
                self.error = error
            self._work = None  # keeps the callback, which keeps this
            self.ended = True
            self.news.put(None)
            self.end.release()

    def _stopped(self, _context: Any, _done: int, _total: int) -> int:
        return 0 if self.answers.empty() else 1

    def _report(self, _context: Any, done: int, total: int) -> int:
        if self._unanswered:
            if self.answers.empty():
                self.skipped = (done, total)
                return 0
            self._unanswered = False
            if self.answers.get():
                return 1
        self.skipped = None
        self.news.put((done, total))
        try:
            return 1 if self.answers.get(timeout=_PATIENCE) else 0
        except queue.Empty:
            self._unanswered = True
            return 0


def run(work: Work, progress: Any, *locks: _locks.Lock) -> None:
    """Calls work(report) under the locks, and progress(done, total) meanwhile. An exception that comes in this thread,
    from the progress function or a signal's handler, stops the work at its next report and is raised when the work has
    ended."""
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress = {show(progress)}: must be a function of (done, total)")
    ordered = sorted(set(locks), key=lambda lock: lock.number)
    for lock in ordered:
        lock.refuse_lender()
    free = [lock for lock in ordered if not lock._is_owned()]  # others this thread has, and keeps for the work
    me = threading.get_ident()
    if progress is None and me != threading.main_thread().ident:  # no handlers run here
        _locked(free, work, _c.Progress())
        return
    thread = _Thread(work, free, progress is not None)
    lent_before = _locks.lent.get(me)
    lent = (*(lent_before or ()), *(ordered if progress is not None else ()))
    started: list[int] = []
    _locks.lent[me] = lent
    try:
        try:
            started.extend(map(_thread.start_new_thread, (thread.run,), ((),)))
        except RuntimeError:
            if started:
                raise
        if started:
            _follow(thread, progress)
        else:  # as in an atexit function, where Python starts no threads
            _locks.lent[me] = lent_before or ()
            _run_here(work, progress, free, lent)
    except BaseException:
        if started:
            try:
                thread.answers.put(True)
            finally:
                caught = None
                while not thread.ended:  # whatever other handlers raise meanwhile
                    try:
                        while not thread.ended:
                            try:
                                thread.end.acquire()
                            except BaseException as error:
                                caught = error
                    except BaseException as error:
                        caught = error
            thread.error = None  # its traceback keeps the thread
            if caught is not None:
                try:
                    raise caught
                finally:
                    del caught  # or the exception would hold this frame, and the frame the exception
        raise
    finally:
        if lent_before is None:
            del _locks.lent[me]
        else:
            _locks.lent[me] = lent_before


def _follow(thread: _Thread, progress: Any) -> None:
    for done, total in iter(thread.news.get, None):
        progress(done, total)
        thread.answers.put(False)
    thread.end.acquire()
    if thread.skipped is not None:
        progress(*thread.skipped)
    error, thread.error = thread.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error


def _run_here(work: Work, progress: Any, locks: list[_locks.Lock], lent: tuple[_locks.Lock, ...]) -> None:
    me, raised = threading.get_ident(), []

    def report(_context: Any, done: int, total: int) -> int:
        try:
            # Not earlier: the work itself takes locks in this thread.
            before, _locks.lent[me] = _locks.lent[me], lent
            try:
                progress(done, total)
            finally:
                _locks.lent[me] = before
        except BaseException as error:
            raised.append(error)
        return len(raised)

    try:
        _locked(locks, work, _c.Progress() if progress is None else _c.Progress(report))
    except _c._errors.KvantError as error:
        if not raised:
            raise
        raise raised[0] from error
