"""A decoding step recorded in a CUDA graph: one launch instead of some hundred, for loops that feed a model its own
tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvant import InvalidArgument

AHEAD = 256  # tokens of each row that pages are taken for at a time


class StepGraph:
    """One token for each row: the model's forward pass over its kvant cache, recorded once and replayed.

        graph = kvant.hf.StepGraph(model, cache, tokens)    # tokens [batch, 1]: the next ones to feed
        for _ in range(200):
            logits = graph.replay()                         # [batch, vocabulary]; overwritten by the next replay
            graph.tokens.copy_(logits.argmax(-1, keepdim=True))

    model: enabled (kvant.hf.enable), on one CUDA device. cache: kvant.hf.cache(model, ...), already holding the prompt,
        every layer of it stored by kvant, and no row padded. choose: if given, called in the recording with the logits;
        it returns the tokens [batch, 1] to feed next, so that a replay is a whole step of a loop and `tokens` needs no
        copy. The cache grows with each replay, up to the max_length that it was made with. Between replays it can be
        read, cropped and used as ever: lengths on the host and on the device stay the same. Errors: InvalidArgument for
        caches that cannot be recorded; kvant.OutOfCapacity from replay() when the cache is full.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokens: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self._check(cache, tokens)
        self.model, self.cache = model, cache
        self.tokens = tokens.clone()
        self.positions = torch.full_like(self.tokens, cache.get_seq_length())
        self._kept: list[tuple[Any, dict, Any]] = []
        # A step as ever makes plans and workspaces and warms up what the model calls; then its tokens are taken back.
        side = torch.cuda.Stream(self.tokens.device)
        side.wait_stream(torch.cuda.current_stream(self.tokens.device))
        with torch.cuda.stream(side), torch.no_grad():
            self._forward()
            cache.crop(-1)
        torch.cuda.current_stream(self.tokens.device).wait_stream(side)
        self._reserve_ahead()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.logits = self._forward()
            self.positions += 1
            if choose is not None:
                self.tokens.copy_(choose(self.logits))
        self._pending = True  # the recorded step counts as taken: the first replay is the launch that it waits for
        self._kept = [(group, *group.hand_over()) for group in cache.groups]  # what the recording reads

    @staticmethod
    def _check(cache: Any, tokens: torch.Tensor) -> None:
        if not getattr(cache, "groups", None) or cache.get_seq_length() == 0:
            raise InvalidArgument("cache is empty, or not of kvant.hf.cache: run the prompt through the model first")
        if not all(group.on_device for group in cache.groups):
            raise InvalidArgument("cache is in host memory: a CUDA graph takes one on a device")
        if cache._other_layers():
            raise InvalidArgument(
                "some layers are left to transformers, whose caches grow by allocation and cannot be recorded: "
                + str(cache.reasons)
            )
        if cache.stored is not None:
            raise InvalidArgument("some row of the cache was padded: record a graph for rows without padding")
        if tuple(tokens.shape) != (cache.rows, 1) or tokens.device.type != "cuda":
            raise InvalidArgument(
                f"tokens is {list(tokens.shape)} on {tokens.device}: "
                f"must be [{cache.rows}, 1], one for each row, on the cache's device"
            )

    def _forward(self) -> torch.Tensor:
        return self.model(
            input_ids=self.tokens,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _reserve_ahead(self) -> None:
        """Pages for steps to come: as many as the cache has room for, at most AHEAD; one too many is refused by the
        cache."""
        cache = self.cache
        self._length = cache.length
        room = AHEAD if cache.max_length is None else max(1, min(AHEAD, cache.max_length - cache.length))
        self._reserved = self._length + room
        for group in cache.groups:
            group.reserve_ahead(room)

    def replay(self) -> torch.Tensor:
        """Takes a step with the tokens in `tokens`; returns the logits [batch, vocabulary] in a tensor that replays
        share."""
        cache = self.cache
        if self._pending:
            self._pending = False
        else:
            if cache.length != self._length:  # by a crop, or a step without this graph
                self.positions.fill_(cache.length)
                self._reserve_ahead()
            elif cache.length == self._reserved:
                self._reserve_ahead()
            cache.advance()
        self._length = cache.length
        self.graph.replay()
        return self.logits

    def close(self) -> None:
        """Frees the recording and its plans."""
        self.graph = None
        kept, self._kept = self._kept, []
        if kept:
            torch.cuda.synchronize(self.tokens.device)
        kept.clear()

    def __del__(self):
        if getattr(self, "_kept", None):
            self.close()
