"""Rules that keep every call whole whenever a signal's handler raises.

Python runs the handlers of signals in the main thread, between two instructions, and a handler may raise anything:
KeyboardInterrupt, a time limit's TimeoutError, an exception of its own. CPython (3.10 to 3.14) looks for signals after
a call, at the end of a loop's round, and where a function of Python begins. So no handler runs within a call of C, nor
between an exception and the first call in its `except` or `finally` block. These rules rest on that:

1. An object exists before the library's call that fills it (Handle in _c.py, Sequence in _cache.py). Where the call's
   result is not handed out, the object goes, and what the library made goes with it.
2. A call of C gives memory back, as the callback of a weak reference (Ref). A `__del__` is a function of Python: an
   exception of a handler that runs in it would be printed and dropped.
3. A call prepares beforehand how it is undone, as one call of C that stands first in the `except` block.
4. A lock says with the same call of C that it was taken (_locks.py).
5. A long call, and every call that reports its progress, is made in a thread of its own, where no handlers run. The
   caller's thread waits, runs handlers, and stops the call (_long_calls.py).
6. Where an error of the caller's object is expected, nothing else is called in the `try` block (attempt).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from ._errors import KvantError

# The collector tells weak references to its trash before it calls the trash's finalisers, which may still use a cache.
# It does not track code objects, so a weak reference to one that the trash holds is told when the trash is cleared.
make_anchor: Callable[[], Any] = compile("", "", "exec").replace

CALL = operator.methodcaller("__call__")  # in C

# Raised by methods of an object that is of another kind. Not OSError and not Exception: a handler's TimeoutError, or
# its own exception, is no answer of the object.
REFUSALS = (
    TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError, AssertionError, BufferError
)  # fmt: skip


class Ref(weakref.ref):
    """A weak reference that equals itself alone, so that a dict or a set can hold it when its object is gone."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def attempt(
    function: Callable[..., Any], *arguments: Any, refusals: tuple[type[Exception], ...] = REFUSALS
) -> tuple[Any, Exception | None]:
    """(function(*arguments), None), or (None, the error) of an object that refuses. Exceptions of handlers pass, if the
    function is C's, as are repr, iter, os.unlink; in a function of Python those that are no refusals pass."""
    call = map(function, *((x,) for x in arguments)) if arguments else map(CALL, (function,))
    try:
        (found,) = call  # this instruction calls, and no handler runs after it
    except refusals as error:
        if is_of_handler(error):
            raise
        return None, error
    return found, None


def is_of_handler(error: BaseException) -> bool:
    """Whether an OSError, as is TimeoutError, is of a handler that ran within: systems give a number, and the library's
    errors are FileError."""
    return isinstance(error, OSError) and error.errno is None and not isinstance(error, KvantError)
