#!/usr/bin/env python3
"""The cost of a latent cache's formats (MLA) to a model: KL divergence from the exact model, on a CPU.

    python bench/quality/train_latents.py FOLDER      # a GPU's two minutes; or any model of DeepSeek V2's kind
    python bench/quality/latents.py FOLDER --positions 2000

All caches read the same text, --step tokens at a time. A kvant.Cache(latent=, rope=) stores each layer's latents and
rotary keys, and the model attends to what the cache decodes: what attention over the codes computes, but for rounding.
`e4m3, scale 1.0` is the fp8 cache of vLLM. Bytes a token and layer are those of encoded tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peers import Once, Peer, e4m3, exact_cache, model_and_ids, run
from transformers.cache_utils import DynamicLayer

import kvant

FORMATS = "bf16/bf16,tq8/bf16,tq8/tq8,fp8/fp8,tq6/bf16,tq6/tq8,tq5/bf16,tq5/tq8,tq4/bf16,tq4/tq8,tq4/tq6,tq4/tq4"
BF16 = (lambda x: x.bfloat16().float(),) * 2


class Latents(DynamicLayer):
    """A layer of a latent cache. transformers passes latents as keys, and rotary keys as values."""

    def __init__(self, latent: str, rotary: str, sizes: tuple[int, int], **options: Any) -> None:
        super().__init__()
        cache = kvant.Cache(latent=sizes[0], rope=sizes[1], v=latent, k=rotary, layers=1, **options)
        self.sequence = cache.sequence()

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        rows = [x[0].transpose(0, 1).contiguous().numpy() for x in (values, keys)]
        self.sequence.append(0, *rows)
        rotary, latents = self.sequence.cache.decode(self.sequence, 0)
        return tuple(torch.from_numpy(x).transpose(0, 1)[None].to(keys.dtype) for x in (latents, rotary))


def caches(count: int, sizes: tuple[int, int], formats: list[str], centre: str) -> list[tuple[Peer, float]]:
    """Each with its bytes a token and layer."""
    numbers = sum(sizes)
    found = [
        (Peer("vLLM", "bf16", "none", 16, [Once(*BF16) for _ in range(count)]), 2.0 * numbers),
        (Peer("vLLM", "e4m3, scale 1.0", "none", 8, [Once(e4m3(1.0), e4m3(1.0)) for _ in range(count)]), 1.0 * numbers),
    ]
    for pair in formats:
        latent, rotary = pair.split("/")
        page = kvant.Pages(latent=sizes[0], rope=sizes[1], v=latent, k=rotary, v_centre=centre)
        for words, ends in (("first 64, newest 64 to 127", {}), ("none", {"sink_pages": 0, "tail_pages": 0})):
            layers = [Latents(latent, rotary, sizes, v_centre=centre, **ends) for _ in range(count)]
            found.append((Peer("kvant", f"{latent} + {rotary}", words, 0, layers), page.block_bytes / 64))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--formats", default=FORMATS, help=f"of latents/rotary keys, as {FORMATS}")
    parser.add_argument("--v-centre", default="automatic", help="none: latents without centres")
    parser.add_argument("--text", default="code", help="code, topics (English), or a file")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--step", type=int, default=32, help="tokens that are fed at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(quick=False)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    model, ids = model_and_ids(a)
    with torch.no_grad():
        first = exact_cache(model, ids[:, :32]).layers[0]
    sizes = first.keys.shape[-1], first.values.shape[-1]
    if (sizes, first.keys.shape[1]) != ((model.config.kv_lora_rank, model.config.qk_rope_head_dim), 1):
        raise SystemExit(f"transformers passes {sizes} numbers and no latents: 5.16 and newer do")
    chosen = caches(model.config.num_hidden_layers, sizes, a.formats.split(","), a.v_centre)
    rows = run(model, ids, [peer.layers for peer, _ in chosen], a.step)
    print(f"{a.positions} positions of {a.text}, latents of {sizes[0]} and rotary keys of {sizes[1]}\n")
    print("| latents + rotary keys | exact tokens | bytes | KL divergence | 99th percentile | top-1 |")
    print("|---|---|---|---|---|---|")
    for (peer, size), row in zip(chosen, rows):
        figures = f"{size:.0f} | {row.kl:.1e} | {row.kl_p99:.1e} | {100 * row.top1:.2f} %"
        print(f"| {peer.cache} | {peer.exact} | {figures} |")


if __name__ == "__main__":
    main()
