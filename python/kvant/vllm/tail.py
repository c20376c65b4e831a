"""kvant.Pages of the layers that have a block table in common, and the exact tail: kvant's own memory for the newest
blocks of each request, beside vLLM's.

Pages with centres ask the step's tables which block is before another, so layers with other tables have other pages.
vLLM's blocks have one size, which leaves no room for exact pages. So pages may have a tail, and each layer a number in
them. The first builder of the layers makes the pages. vLLM has measured memory then, so layers take as much as the tail
while it measures, and give it back.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from . import versions
from .layer import Capacity, device_name


def give_pages(vllm_config, layer_names: list[str], device: torch.device, capacity: Capacity) -> list[Any]:
    """Sets `pages` and `number` of the layers' impls that are not exact. Returns these pages, whose steps begin."""
    impls = [layer.impl for layer in versions.layers(vllm_config, layer_names)]
    writers: dict[tuple, list[Any]] = {}
    for impl in impls:
        impl.reserved = None  # what it took while memory was measured
        tail = impl.layer.tail(vllm_config)
        if not impl.layer.pair.is_exact() and impl.pages is None and impl.kv_sharing_target_layer_name is None:
            writers.setdefault((impl.layer.pair, impl.layer.kv_heads, impl.layer.head_dim, tail), []).append(impl)
    if any(tail > 0 for *_, tail in writers) and device.type != "cpu":
        torch.cuda.empty_cache()
    for (*_, tail), same in writers.items():
        pages = same[0].layer.own_pages(device_name(device), capacity, tail, len(same), same[0].dtype)
        pages._workspace = same[0].layer.pages(device)._workspace
        for number, impl in enumerate(same):
            impl.pages, impl.number = pages, number
        if tail == 0:
            continue
        logging.getLogger("vllm.kvant").info(
            "exact tail of %d to %d tokens for %d requests in %d layers: %.1f MiB beside the KV cache (less with a "
            "lower --max-num-seqs; none with --additional-config '{\"kvant\": {\"tail\": 0}}')",
            64 * tail, 64 * tail + 63, capacity.requests, len(same), pages.tail_bytes / 2**20,
        )
    for impl in impls:
        if impl.kv_sharing_target_layer_name is not None:
            (target,) = versions.layers(vllm_config, [impl.kv_sharing_target_layer_name])
            impl.pages, impl.number = target.impl.pages, target.impl.number
    # Layers that share a cache may come with other queries than the step has: its steps are the target's.
    own = [impl.pages for impl in impls if impl.pages is not None and impl.kv_sharing_target_layer_name is None]
    return list({id(pages): pages for pages in own}.values())
