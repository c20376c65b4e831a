"""A step's tokens: what Cache.step reserves and returns."""

from __future__ import annotations

import operator
import weakref
from functools import partial
from itertools import chain, repeat
from typing import Any

from . import _arguments, _c, _tensors
from ._errors import InvalidArgument
from ._options import PLAN
from ._plan import comparable
from ._signals import CALL

__all__ = ["Step"]


class Reservation:
    """A step's tokens. `if taken == [0]: list(undo)` in an `except` block drops them again, and what came after."""

    def __init__(self, cache: Any, sequences: list[Any], tokens: list[int]):
        self.sequences, self.tokens = sequences, tokens
        self.numbers = [s.number for s in sequences]
        self._cache, lock = cache, cache.owner.lock
        with lock:
            self.lengths = [cache._length(number) for number in self.numbers]
            handle = cache.handle
        self.after = [before + n for before, n in zip(self.lengths, tokens)]
        self.taken: list[int] = []  # the library's answer, which the very call writes that reserves
        truncates = map(partial, repeat(_c.cache_truncate), repeat(handle), self.numbers, self.lengths)
        self.undo = map(CALL, chain((lock.acquire,), truncates, (lock.release,)))

    def take(self, stream: Any) -> None:
        cache, count = self._cache, len(self.numbers)
        with cache.owner.lock:
            cache.owner.use_stream(stream)
            ids, counts = _c.sequences(self.numbers), _c.counts(self.tokens)
            self.taken.extend(map(CALL, (partial(_c.cache_reserve, cache.handle, ids, counts, count),)))
            _c.check(self.taken[0])


class Step(_arguments.NotCopied):
    """The tokens that Cache.step reserved: write and attend, layer after layer.

    As a context manager: if the block raises, the step's tokens are dropped again.
    """

    _instead = "cache.step() makes another"
    _made_of = ("cache", "sequences", "tokens", "stream", "_reservation", "_me", "_plans")

    def __init__(self, cache: Any, sequences: list[Any], tokens: list[int], stream: Any, reservation: Reservation):
        self.cache, self.sequences, self.tokens, self.stream = cache, sequences, tokens, stream
        self._reservation, self._me = reservation, weakref.ref(self)
        self._plans: dict = {}

    def write(self, layer: int, keys: Any, values: Any) -> None:
        """Stores this step's keys and values of one layer; see Cache.write."""
        self.cache.write(self.sequences, layer, keys, values, stream=self.stream)

    @PLAN.without("q_heads", "q_len", "q_lens").shown
    def attend(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        *,
        keys: Any = None,
        values: Any = None,
        lse: Any = None,
        sink_logits: Any = None,
        **options: Any,
    ) -> Any:
        """Attention of this step's queries; see Plan for the options. Layers with the same options share a plan.
        keys, values: this step's own, to be attended to as given (fresh_keys); write them before or after."""
        if keys is not None or values is not None:
            options["fresh_keys"] = True
        q_heads = _tensors.describe(q, "q", self.cache.owner.place(self.stream)).shape[-2:][:1]
        if not q_heads:
            raise InvalidArgument("q has no dimensions: must be [tokens, q_heads, head_dim]")
        options, key = comparable(options, q_heads[0])
        plan = self._plans.get(key)
        if plan is None:
            plan = self.cache.plan(self.sequences, q_heads=q_heads[0], q_lens=self.tokens, **options)
            self._plans[key] = plan
        return plan.run(
            layer, q, out, keys=keys, values=values, lse=lse, sink_logits=sink_logits, stream=self.stream
        )

    # `with` calls the weak reference, which returns this object. A handler may run where a function of Python begins,
    # and its exception would come before the block, whose end drops the tokens.
    __enter__ = property(operator.attrgetter("_me"))

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            list(self._reservation.undo)
        self._plans.clear()
