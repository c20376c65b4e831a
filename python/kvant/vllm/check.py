"""The self-check: during the first prompts each layer compares keys as its pages hold them with those that it was
given.

The check compares the scores of the prompt's queries, since attention reads keys through scores alone. Softmax does not
see an error that all keys share. So the error of a score and the spread of scores are both taken about their means over
the keys. A format cannot tell keys apart if its error is half as large as the spread.
"""

from __future__ import annotations

import logging
import re

import torch

from . import versions
from .layer import BLOCK_TOKENS, pool

BOUND = 0.5  # error of scores, relative to their spread
TOKENS = 512  # of each layer, before it judges
STEPS = 64  # with prompts, at most: where all prompts are short, it judges by what it has seen

_far: set[int] = set()  # numbers of this process's layers that are beyond the bound


class Check:
    """A layer's. `done`: it has judged, or cannot."""

    def __init__(self) -> None:
        self.done = False
        self.steps = self.tokens = 0
        self.error = self.spread = 0.0

    def look(self, impl, layer_name: str, query, key, kv_cache, slots) -> None:
        """After a step's keys were written, outside of graphs. Waits for the device."""
        self.steps += 1
        self._compare(impl, query, key, kv_cache, slots)
        if self.tokens >= TOKENS or self.steps == STEPS:
            self.done = True
            self._judge(impl, layer_name)

    def _compare(self, impl, query, key, kv_cache, slots) -> None:
        places = slots.tolist()
        begins = [
            row
            for row in range(0, min(len(places), key.shape[0]) - BLOCK_TOKENS + 1)
            if places[row] >= 0
            and places[row] % BLOCK_TOKENS == 0
            and places[row + BLOCK_TOKENS - 1] == places[row] + BLOCK_TOKENS - 1
        ][: TOKENS // BLOCK_TOKENS]
        if not begins:
            return
        blocks = [places[row] // BLOCK_TOKENS for row in begins]
        stored = torch.empty(
            len(blocks) * BLOCK_TOKENS, impl.num_kv_heads, impl.head_size, dtype=torch.float32, device=key.device
        )
        ids = torch.tensor(blocks, dtype=torch.int32, device=key.device)
        impl.pages.decode(pool(kv_cache), ids, stored, None)
        rows = torch.tensor(begins, device=key.device)[:, None] + torch.arange(BLOCK_TOKENS, device=key.device)
        given, queries = key[rows.flatten()].float(), query[rows.flatten()].float()
        group = impl.num_heads // impl.num_kv_heads
        queries = queries.view(len(queries), impl.num_kv_heads, group, impl.head_size)
        for keys, add in ((given - stored, "error"), (given, "spread")):
            scores = torch.einsum("qhgd,khd->hgqk", queries, keys - keys.mean(dim=0))
            setattr(self, add, getattr(self, add) + float(scores.square().sum(dtype=torch.float64)))
        self.tokens += len(blocks) * BLOCK_TOKENS

    def _judge(self, impl, layer_name: str) -> None:
        ratio = (self.error / self.spread) ** 0.5 if self.spread > 0 else 0.0
        if ratio <= BOUND:
            return
        number = re.search(r"\.(\d+)\.", f".{layer_name}.")
        if number:
            _far.add(int(number[1]))
        skipped = versions.skipped_layers(impl._config)
        all_numbers = _far | {int(x) for x in skipped if x.isdigit()}
        numbers = [*(x for x in skipped if not x.isdigit()), *map(str, sorted(all_numbers))]
        centre = ', or leave out {"k_centre": "none"}' if impl.layer.k_centre == "none" else ""
        logging.getLogger("vllm.kvant").warning(
            "%s: with keys as they are stored in %s scores have an error of %.2f of their spread (at most %.1f is "
            "good). What the model generates may be wrong. Keep such layers exact with "
            "--kv-cache-dtype-skip-layers %s, or choose another --kv-cache-dtype, such as kvant_tq8%s",
            layer_name, impl.layer.pair.k, ratio, BOUND, ",".join(numbers), centre,
        )
