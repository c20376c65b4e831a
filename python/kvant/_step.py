"""A step's tokens: what Cache.step reserves and returns."""

from __future__ import annotations

from typing import Any

from . import _arguments, _tensors
from ._errors import InvalidArgument, KvantError
from ._plan import comparable

__all__ = ["Step"]


def drop_tokens(sequences: list[Any], tokens: list[int]) -> None:
    """Takes the tokens of a step that failed away again."""
    for s, n in zip(sequences, tokens):
        try:
            s.truncate(len(s) - n)
        except KvantError:  # why the step failed is what the caller must see
            pass


class Step(_arguments.NotCopied):
    """The tokens that Cache.step reserved: write and attend, layer after layer.

    As a context manager: if the block raises, the step's tokens are dropped again.
    """

    _instead = "cache.step() makes another"

    def __init__(self, cache: Any, sequences: list[Any], tokens: list[int], stream: Any):
        self.cache, self.sequences, self.tokens, self.stream = cache, sequences, tokens, stream
        self._plans: dict = {}

    def write(self, layer: int, keys: Any, values: Any) -> None:
        """Stores this step's keys and values of one layer; see Cache.write."""
        self.cache.write(self.sequences, layer, keys, values, stream=self.stream)

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
        keys, values: this step's own, to be attended to as given (the option fresh); write them before or after."""
        if keys is not None or values is not None:
            options["fresh"] = True
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

    def __enter__(self) -> Step:
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        self._plans.clear()
        if error_type is not None:
            drop_tokens(self.sequences, self.tokens)
