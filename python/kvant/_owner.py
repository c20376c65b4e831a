"""A cache, or pages, and their plans share this: the library's object, its lock and stream, and a workspace."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_void_p
from typing import Any

from . import _arguments, _c, _locks, _tensors
from ._errors import InvalidArgument


class Held:
    """A plan's object of the library, and memory that it uses. Both go when the owner is closed."""

    def __init__(self, pointer: c_void_p, closed: str):
        self.pointer: c_void_p | None = pointer
        self.memory: Any = None
        self._closed = closed

    @property
    def handle(self) -> c_void_p:
        if not self.pointer:
            raise InvalidArgument(self._closed)
        return self.pointer


class Member:
    """A sequence of a cache, to calls that take some of them."""

    cache: Any

    @property
    def number(self) -> int:
        """The library's number of the sequence."""
        raise NotImplementedError


class Owner:
    """device: ("cpu", 0) or ("cuda", number). name: "cache" or "pages", for messages."""

    def __init__(self, device: tuple[str, int], name: str):
        self.device, self.name = device, name
        self.lock = _locks.new()
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self.pointer: c_void_p | None = None  # the library's object
        self._stream = 0
        self._workspace: Any = None
        self._calls_back = 0  # the thread whose call has the object for itself and calls Python meanwhile
        self._late: list[int] = []

    @property
    def handle(self) -> c_void_p:
        if not self.pointer:
            raise InvalidArgument(f"{self._verb('this', 'these')} {self.name} {self._verb('was', 'were')} closed")
        return self.pointer

    def close(self) -> None:
        with self.lock:
            for plan in list(self._held):  # plans keep the owner's memory
                plan.pointer = plan.memory = None
            self.pointer = self._workspace = None

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """For a call of the library that keeps other calls waiting and calls Python meanwhile; under the lock. Python's
        collector may end sequences in that very thread: they are removed afterwards."""
        self._calls_back = threading.get_ident()
        try:
            yield
        finally:
            self._calls_back = 0
            while self._late:
                _c.remove(self.pointer, self._late.pop())

    def removes_late(self, number: int) -> bool:
        """Whether a sequence that is to be removed in this thread will be, when a call that goes on has returned."""
        late = self._calls_back == threading.get_ident()
        if late:
            self._late.append(number)
        return late

    def hold(self, plan: c_void_p) -> Held:
        held = Held(plan, f"the {self.name} of this plan {self._verb('was', 'were')} closed")
        self._held.add(held)
        return held

    def _verb(self, one: str, several: str) -> str:
        return several if self.name == "pages" else one

    def members(self, sequences: Any) -> list[Member]:
        """The sequences of a call, of which each is this cache's."""
        what = "sequences of this cache (cache.sequence())"
        found = [sequences] if isinstance(sequences, Member) else _arguments.items("sequences", sequences, what)
        for s in found:
            if not isinstance(s, Member) or s.cache.owner is not self:
                raise InvalidArgument(f"sequences has {_arguments.show(s)}: must be {what}")
        return found

    def place(self, stream: Any = None) -> _tensors.Place:
        """Where tensors of a call must be, and the given or the current stream."""
        return _tensors.place(self.device, stream, f"the {self.name} {self._verb('is', 'are')}")

    def use_stream(self, stream: Any) -> int:
        """Makes the stream that a cache's calls enqueue on the given or the current one; under the lock."""
        number = self.place(stream).stream
        if number != self._stream:
            _c.check(_c.set_stream(self.handle, number))
            self._stream = number
        return number

    def workspace(self, size: int) -> Any:
        """Device memory that all plans share, a torch tensor of `size` bytes or more; without torch an error."""
        torch = _tensors.torch_module()
        if torch is None:
            raise InvalidArgument(
                f"workspace is not given: without torch, pass device memory of {size} bytes "
                "(plan.facts.workspace_bytes)"
            )
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device[1]}")
        return self._workspace

    def share_workspace(self, other: Owner) -> None:
        """Uses the other's from now on. Work of both is in one stream."""
        self._workspace = other._workspace
