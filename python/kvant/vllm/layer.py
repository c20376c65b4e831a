"""A layer as kvant sees it, and the pages that layers of one geometry share."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch

import kvant

from . import versions
from .dtypes import NAMES, Pair, latent_geometry, latent_token_bytes, token_bytes

BLOCK_TOKENS = 64  # of a kvant page
LEAST_WINDOW_WITH_TAIL = 1024  # memory for tails is taken for all requests that a server may have
# Plans choose kernels for their largest step, and fresh keys take prefill kernels, which do not share a request's keys
# among multiprocessors. So a device has one more plan of each size, of decode kernels: for up to so many queries,
# behind a prefix that makes requests at least so many times as long as the plan's chunks (docs/lab/borrowed-pages.md).
FEW_QUERIES, PREFIX_OF_FEW = 128, 8
# Shorter requests keep their fresh keys, which costs at most 50 us a layer.
MOST_TOKENS_OF_FEW_FRESH = 512


class Capacity(NamedTuple):
    """The largest step that a server's limits allow."""

    requests: int
    blocks: int  # of one request
    decode_queries: int  # of one request that is decoding: 1 and the drafts to verify
    tokens: int

    @staticmethod
    def of(vllm_config, decode_queries: int, block_table_width: int | None = None) -> Capacity:
        scheduler, drafts = vllm_config.scheduler_config, vllm_config.num_speculative_tokens
        longest = vllm_config.model_config.max_model_len + drafts
        ranks = vllm_config.parallel_config.decode_context_parallel_size  # each has an equal share of the tokens
        return Capacity(
            requests=scheduler.max_num_seqs,
            blocks=block_table_width or -(-longest // (ranks * BLOCK_TOKENS)),
            decode_queries=decode_queries,
            # Drafts run beside a full batch.
            tokens=scheduler.max_num_batched_tokens + scheduler.max_num_seqs * drafts,
        )

    def own(self) -> Capacity:
        """For a step's own tokens alone."""
        return self._replace(blocks=-(-self.tokens // BLOCK_TOKENS))

    def decodes(self) -> list[int]:
        """Requests of the decode plans: powers of two, and the limit."""
        return _sizes(self.requests)

    def extends(self) -> list[int]:
        """Queries of a request in the extend plans: powers of two above those that decode, and the limit."""
        return [n for n in _sizes(self.tokens) if n > self.decode_queries]

    def extend(self, queries: int) -> tuple[int, int]:
        """(queries, requests) of the extend plan for the longest request of a part. Launches and workspaces follow
        their product, which is twice a full step's: that holds a step whose requests are of one length."""
        size = next(n for n in self.extends() if n >= queries)
        return size, min(self.requests, max(1, 2 * self.tokens // size))


def _sizes(most: int) -> list[int]:
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class Few(NamedTuple):
    """A plan for the short chunks of few requests behind a long prefix."""

    plan: Any  # reads all tokens from pages
    requests: int
    tokens: int  # that the longest request has at least


class Extend(NamedTuple):
    """The plans of chunks of prompts up to one size; one of the first two."""

    stored: Any | None  # reads all tokens from pages
    fresh: Any | None  # is given the chunk's own
    few: Few | None = None

    def choose(self, requests: int, tokens: int):
        """For so many requests of up to so many tokens."""
        if self.few is not None and requests <= self.few.requests and tokens >= self.few.tokens:
            return self.few.plan
        return self.stored if self.fresh is None else self.fresh


class Plans(NamedTuple):
    """kvant.PagesPlan by size. Launches are made for a plan's limits, so small batches have small plans."""

    decode: dict[int, Any]  # by requests
    extend: dict[int, list[Extend]]  # by queries of a request; more than one where a step needs several tables


class LayerOfKvant:
    """The class of impls of kvant's layers, in models that have others, too."""


class Layer(NamedTuple):
    """The facts that a plan depends on. Layers that are equal share their plans."""

    pair: Pair
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # the last so many keys, the query's own included; 0: all
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None
    fresh_keys: bool = False  # prompts attend to their own keys and values as these are given
    k_centre: str = "automatic"
    # That plans read: "own" and "shared" with decode context parallel (context.py), "decoding" where plans are for
    # requests that decode, and vLLM attends to prompts itself (latent.py).
    keys: str = "all"
    options: tuple[tuple[str, Any], ...] = ()  # of plans, as --additional-config has them
    v_head_dim: int = 0  # of values; 0: head_dim
    is_latent: bool = False  # values are latents, which are a part of the keys, and keys are the rotary keys

    def own(self) -> Layer:
        """The queries of a step over its own keys, as they are given."""
        return self._replace(keys="own")

    def shared(self, ranks: int) -> Layer:
        """The queries of so many ranks over the keys in pages, all of which they see."""
        return self._replace(keys="shared", q_heads=self.q_heads * ranks, fresh_keys=False)

    def pages(self, device: torch.device):
        """Without a tail, for plans and for exact layers: writes of others need to know their tables (tail.py)."""
        return _pages(self.pair, device_name(device), self.k_centre, **self.geometry())

    def geometry(self) -> dict[str, Any]:
        """As kvant.Pages takes it."""
        if self.is_latent:
            return latent_geometry(self.v_head_dim, self.head_dim)
        return {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "v_head_dim": self.v_head_dim}

    def tail(self, vllm_config) -> int:
        """Newest whole blocks of a request that are read exactly."""
        if 0 < self.window < LEAST_WINDOW_WITH_TAIL or versions.moves_blocks(vllm_config):
            return 0
        return 0 if self.pair.is_exact() else versions.option(vllm_config, "tail_pages")

    def content_bytes(self) -> int | None:
        """The bytes of a token in one kv head, as a spec has them; None: an exact layer's, which vLLM knows itself."""
        return None if self.pair.is_exact() else self._token_bytes()

    def block_bytes(self) -> int:
        """The bytes of a block in all kv heads."""
        return BLOCK_TOKENS * self.kv_heads * self._token_bytes()

    def _token_bytes(self) -> int:
        count = latent_token_bytes if self.is_latent else token_bytes
        return count(self.pair, self.head_dim, self.k_centre, self.v_head_dim)

    def sink_pages(self) -> int:
        """First blocks of a request that are read exactly, beside a tail. A window leaves them behind."""
        return 0 if self.window > 0 else 1

    def own_pages(
        self,
        device: str,
        capacity: Capacity,
        tail: int,
        layers: int,
        dtype: torch.dtype,
        copies: int | None = None,
        encode_at_once: bool = False,
    ):
        """Pages of layers with common tables. Exact copies have the model's dtype; devices have none in float32.
        copies: of each layer; None: as many as requests can have. encode_at_once: as for kvant.Pages."""
        return kvant.Pages(
            **self.geometry(),
            k=self.pair.k,
            v=self.pair.v,
            device=device,
            tail_pages=tail,
            tail_sequences=capacity.requests if tail > 0 else 0,
            sink_pages=self.sink_pages() if tail > 0 else 0,
            exact_copies=copies if tail > 0 else None,
            layers=layers,
            k_centre=self.k_centre,
            exact=NAMES[dtype] if device == "cpu" or dtype != torch.float32 else None,
            encode_at_once=encode_at_once,
        )

    def plans(self, pages, capacity: Capacity) -> Plans:
        """Plans of their own tables. All plans of a geometry share one workspace, which its pages keep. On a device
        they are made twice: the first ones would otherwise keep workspaces that were too small for others."""
        if pages.device[0] != "cpu":
            self._plans(pages, capacity)
        return self._plans(pages, capacity)

    def _plans(self, pages, capacity: Capacity) -> Plans:
        extends = capacity.extends() if self.keys != "decoding" else []
        extend = {n: [self.extend_plan(pages, capacity, n)] for n in extends}
        decodes = capacity.decodes() if self.keys != "own" else []
        decode = {n: self._plan(pages, capacity, n, capacity.decode_queries) for n in decodes}
        return Plans(decode, extend)

    def extend_plan(self, pages, capacity: Capacity, queries: int) -> Extend:
        limits = capacity.extend(queries)[1], queries
        fresh = stored = few = None
        if self.fresh_keys:
            try:
                fresh = self._plan(pages, capacity, *limits, fresh_keys=True)
            except kvant.Unsupported as error:
                if self.keys == "own":
                    raise NotImplementedError(f"kvant: decode context parallel takes fresh keys: {error}") from error
                say_once(f"prompts attend to their own tokens as they are stored, not as they are given: {error}")
        if fresh is None:
            stored = self._plan(pages, capacity, *limits)
        if pages.device[0] != "cpu" and self.keys != "own":
            few = self._few_plan(pages, capacity, *limits)
        bits = (fresh or stored).facts.products
        if dict(self.options).get("products") or bits != 16:
            say_once(f"products of {bits} bits for many queries over {self.pair} pages")
        return Extend(stored, fresh, few)

    def _few_plan(self, pages, capacity: Capacity, requests: int, queries: int) -> Few | None:
        """None where prefill kernels serve few queries, too."""
        requests = min(requests, max(1, FEW_QUERIES // queries))
        tokens = max(MOST_TOKENS_OF_FEW_FRESH + 1, PREFIX_OF_FEW * queries)
        if tokens > capacity.blocks * BLOCK_TOKENS:
            return None
        plan = self._plan(pages, capacity, requests, queries)
        return None if plan.facts.kernel == "prefill" else Few(plan, requests, tokens)

    def _plan(self, pages, capacity: Capacity, requests: int, queries: int, fresh_keys: bool = False):
        return pages.plan(
            self.q_heads,
            max_batch=requests,
            max_blocks=(capacity.own() if self.keys == "own" else capacity).blocks,
            max_query_len=queries,
            max_tokens=capacity.tokens,
            scale=self.scale,
            is_causal=self.keys != "shared",
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            fresh_keys=fresh_keys,
            **dict(self.options),
        )


@lru_cache(maxsize=None)
def say_once(what: str) -> None:
    logging.getLogger("vllm.kvant").info(what)


@lru_cache(maxsize=None)
def _pages(pair: Pair, device: str, k_centre: str, **geometry: Any):
    return kvant.Pages(**geometry, k=pair.k, v=pair.v, device=device, k_centre=k_centre)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device.type}:{torch.cuda.current_device() if device.index is None else device.index}"


def pool(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's [blocks, kv_heads, tokens, bytes of a token] as kvant's [blocks, kv_heads, bytes of a block], a view.
    vLLM's caches of latents are without kv_heads.

    Its storage may hold other layers and be strided; one block of one head is contiguous in every layout that the
    backend supports.
    """
    data = kv_cache if kv_cache.dtype == torch.uint8 else kv_cache.view(torch.uint8)
    if data.dim() == 3:
        data = data.unsqueeze(1)
    blocks, heads, tokens, content = data.shape
    return data.view(blocks, heads, tokens * content)
