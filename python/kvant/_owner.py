"""A cache, or pages, and their plans share this: the library's object, its lock and stream, and a workspace."""

from __future__ import annotations

from collections import deque
from ctypes import c_void_p
from typing import Any

from . import _arguments, _c, _locks, _tensors
from ._errors import InvalidArgument
from ._signals import Ref


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


class Ticket(Ref):
    """Leads from an anchor, which a Member holds, to the library's sequence, to remove the one when the other goes.
    ids[place]: the library's number; 0: none, or removed."""

    __slots__ = ("ids", "place")


class Owner:
    """device: ("cpu", 0) or ("cuda", number). name: "cache" or "pages", for messages."""

    def __init__(self, device: tuple[str, int], name: str):
        self.device, self.name = device, name
        self.lock = _locks.new(f"{self._verb('this', 'these')} {name}")
        self._plans: dict[Ref, None] = {}
        self._tickets: set[Ticket] = set()  # of all sequences that Python has
        self.gone: deque[Ticket] = deque()  # of those that go, before the next call that uses the handle
        self.pointer: c_void_p | None = None  # the library's object
        self._stream = 0
        self._workspace: Any = None

    @property
    def handle(self) -> c_void_p:
        if self.gone:
            self._remove_gone()
        if not self.pointer:
            raise InvalidArgument(f"{self._verb('this', 'these')} {self.name} {self._verb('was', 'were')} closed")
        return self.pointer

    def close(self) -> None:
        with self.lock:
            for ref in list(self._plans):  # plans keep the owner's memory
                plan = ref()
                if plan is not None:
                    plan.pointer = plan.memory = None
            self.pointer = self._workspace = None

    # --- sequences that come and go ---

    def ticket(self, anchor: Any, ids: Any, place: int) -> Ticket:
        """Remembers that the sequence ids[place], which the library may not have made yet, goes with the anchor."""
        ticket = Ticket(anchor, self.gone.append)
        ticket.ids, ticket.place = ids, place
        self._tickets.add(ticket)
        return ticket

    def count(self) -> int:
        """How many sequences there are."""
        with self.lock:
            self.handle  # which removes those that are gone
            return len(self._tickets)

    def _remove_gone(self) -> None:
        """The next call repeats what an exception interrupts: the library never gives a number twice."""
        with self.lock:
            while self.gone:
                ticket = self.gone[0]
                number = ticket.ids[ticket.place]
                if number and self.pointer:
                    _c.cache_remove(self.pointer, number)
                ticket.ids[ticket.place] = 0
                self._tickets.discard(ticket)
                self.gone.popleft()

    def hold(self, plan: c_void_p) -> Held:
        held = Held(plan, f"the {self.name} of this plan {self._verb('was', 'were')} closed")
        self._plans[Ref(held, self._plans.pop)] = None
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
        return self.use_number(self.place(stream).stream)

    def use_number(self, number: int) -> int:
        """The same with the number that place() found."""
        if number != self._stream:
            _c.check(_c.cache_set_stream(self.handle, number))
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
