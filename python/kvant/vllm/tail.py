"""kvant.Pages of the layers that have a block table in common, and exact copies: kvant's own memory for the first and
the newest blocks of requests, beside vLLM's.

Pages with centres ask the step's tables which block is before another, so layers with other tables have other pages.
vLLM's blocks have one size, which leaves no room for exact pages. So pages may have a tail, and each layer a number in
them. The first builder of the layers makes the pages. vLLM has measured memory then, so layers take as much as their
copies while it measures, and give it back.
"""

from __future__ import annotations

import logging
import weakref
from functools import lru_cache
from typing import Any

import torch

from . import versions
from .layer import BLOCK_TOKENS, Capacity, Layer, LayerOfKvant, device_name

_given: weakref.WeakSet[Any] = weakref.WeakSet()  # this process's pages with copies


@lru_cache(maxsize=None)
def most_copies(layer: Layer, tail: int, requests: int) -> int:
    """Exact copies that so many requests can have, as the library counts them."""
    capacity = Capacity(requests=requests, blocks=1, decode_queries=1, tokens=1)
    return layer.own_pages("cpu", capacity, tail, 1, torch.bfloat16).tail_copies  # memory that is never touched


@lru_cache(maxsize=None)
def copy_bytes(layer: Layer, dtype: torch.dtype) -> int:
    """The bytes of an exact copy: a block in all kv heads of one layer."""
    one = Capacity(requests=1, blocks=1, decode_queries=1, tokens=1)
    exact = dtype if dtype != torch.float32 or not versions.is_cuda() else torch.bfloat16
    return layer.own_pages("cpu", one, 1, 1, exact, copies=1).tail_bytes


def _is_ours(layer) -> bool:
    return isinstance(getattr(layer, "impl", None), LayerOfKvant)


def _writers(layers) -> list[Any]:
    """Impls of kvant's layers that store keys and values in a format."""
    impls = [layer.impl for layer in layers if _is_ours(layer)]
    return [i for i in impls if not i.layer.pair.is_exact() and i.kv_sharing_target_layer_name is None]


def divide_memory(vllm_config, capacity: Capacity) -> None:
    """Sets `copies` of all layers, so that their memory is within the budget: all layers get the same share of what
    they could use. The log says once what was given."""
    impls = _writers(versions.layers(vllm_config, None))
    tails = [i.layer.tail(vllm_config) for i in impls]
    most = [most_copies(i.layer, tail, capacity.requests) if tail > 0 else 0 for i, tail in zip(impls, tails)]
    wanted = sum(n * copy_bytes(i.layer, i.dtype) for i, n in zip(impls, most))
    memory = _cache_bytes(vllm_config, impls)
    share = versions.option(vllm_config, "exact_memory")
    part = 1.0 if memory is None or wanted == 0 else min(1.0, share * memory / wanted)
    for impl, n in zip(impls, most):
        impl.copies = int(n * part)
    _say(vllm_config, impls, tails, capacity)


def _cache_bytes(vllm_config, impls) -> int | None:
    """The memory of the KV cache as far as is known now; None: nothing is."""
    # Torch does not count memory that kvant takes from the device itself, here for another server of the process.
    known = [versions.kv_memory(vllm_config, sum(p.tail_bytes for p in _given if p.device[0] != "cpu"))]
    blocks = versions.blocks(vllm_config, BLOCK_TOKENS)
    if blocks is not None:
        known.append(blocks * sum(i.layer.block_bytes() for i in impls))
    return min((n for n in known if n is not None), default=None)


def _say(vllm_config, impls, tails, capacity: Capacity) -> None:
    log, share = logging.getLogger("vllm.kvant"), versions.option(vllm_config, "exact_memory")
    needs = [(i.layer.sink_pages() + tail + 1, i.copies, tail) for i, tail in zip(impls, tails) if tail > 0]
    taken = sum(i.copies * copy_bytes(i.layer, i.dtype) for i in impls)
    if impls and versions.sleeps(vllm_config):
        log.warning(
            "sleep mode: kvant's own memory stays on the device while vLLM sleeps, %.1f MiB of exact copies and the "
            "workspace of plans; with --additional-config '{\"kvant\": {\"tail_pages\": 0}}' there are no copies",
            taken / 2**20,
        )
    if not needs:
        if impls and versions.moves_blocks(vllm_config) and versions.option(vllm_config, "tail_pages") > 0:
            log.warning(
                "no exact copies of first and newest tokens: a KV connector writes to blocks. All tokens are read as "
                "they are encoded; --additional-config '{\"kvant\": {\"tail_pages\": 0}}' says so, and ends this "
                "warning"
            )
        return
    enough = min(min(capacity.requests, copies // need) for need, copies, _ in needs)
    running = min(min(capacity.requests, copies) for _, copies, _ in needs)
    tail = needs[0][2]
    log.log(
        logging.INFO if enough > 0 else logging.WARNING,
        "exact copies of the first %d and the newest %d to %d tokens: %d to %d blocks in each of %d layers, %.1f MiB "
        "beside the KV cache, enough for %d of %d requests, and for the newest block of %d, whose tokens are copied "
        "before they are encoded; tokens without a copy are read encoded (up to %.2g of the "
        "cache's memory, as far as it is known before vLLM measures; more with --additional-config "
        "'{\"kvant\": {\"exact_memory\": %.2g}}', none with '{\"kvant\": {\"tail_pages\": 0}}')",
        BLOCK_TOKENS, BLOCK_TOKENS * tail, BLOCK_TOKENS * tail + BLOCK_TOKENS - 1, min(n for _, n, _ in needs),
        max(n for _, n, _ in needs), len(needs), taken / 2**20, enough, capacity.requests, running, share, 2 * share,
    )


def give_pages(vllm_config, layer_names: list[str], device: torch.device, capacity: Capacity) -> list[Any]:
    """Sets `pages` and `number` of the layers' impls that are not exact. Returns these pages, whose steps begin."""
    layers = versions.layers(vllm_config, layer_names)
    writers: dict[tuple, list[Any]] = {}
    for impl in _writers(layers):
        if impl.copies is None:
            divide_memory(vllm_config, capacity)
        impl.reserved = None  # what it took while memory was measured
        if impl.pages is None:
            tail = impl.layer.tail(vllm_config) if impl.copies else 0
            a = impl.layer
            kind = a.pair, *a.geometry().items(), a.sink_pages(), tail, impl.copies
            writers.setdefault(kind, []).append(impl)
    if any(tail > 0 for *_, tail, _ in writers) and device.type != "cpu":
        torch.cuda.empty_cache()
    at_once = versions.has_other_caches(vllm_config, _is_ours)
    for (*_, tail, copies), same in writers.items():
        layer, dtype = same[0].layer, same[0].dtype
        pages = layer.own_pages(device_name(device), capacity, tail, len(same), dtype, copies, at_once)
        _given.add(pages)
        pages.owner.share_workspace(same[0].layer.pages(device).owner)
        for number, impl in enumerate(same):
            impl.pages, impl.number = pages, number
    for layer in layers:
        if layer.impl.kv_sharing_target_layer_name is not None:
            (target,) = versions.layers(vllm_config, [layer.impl.kv_sharing_target_layer_name])
            layer.impl.pages, layer.impl.number = target.impl.pages, target.impl.number
    # Layers that share a cache may come with other queries than the step has: its steps are the target's.
    return list({id(impl.pages): impl.pages for impl in _writers(layers)}.values())
