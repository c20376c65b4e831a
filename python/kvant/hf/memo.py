"""Values of objects, kept while the objects live."""

from __future__ import annotations

import weakref
from typing import Any


class Memo:
    """Values of objects, by identity.

    No callback tells that an object went: a callback in Python would lose what a signal's handler raises within it
    (kvant/_signals.py). The values of objects that went go when others come.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, Any]] = {}

    def get(self, of: Any) -> Any:
        """The object's value; None: there is none."""
        known = self._known.get(id(of))
        return known[1] if known is not None and known[0]() is of else None

    def put(self, of: Any, value: Any) -> Any:
        """Remembers a value, and returns it."""
        for key in [key for key, (ref, _) in list(self._known.items()) if ref() is None]:
            self._known.pop(key, None)
        self._known[id(of)] = weakref.ref(of), value
        return value
