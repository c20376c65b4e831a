#!/usr/bin/env python3
"""Memory and speed of a Hugging Face model's cache against the length of the context, on the CPU: docs/hf-decode.svg.

    python3 scripts/hf_figures.py --json hf.json --svg docs/hf-decode.svg       # ten minutes
    python3 scripts/hf_figures.py --from hf.json --svg docs/hf-decode.svg       # draws what was measured before
    python3 scripts/hf_figures.py --quick                                       # one length, to see that it runs

The model has SmolLM2-135M's shape and random weights in float32: what is timed does not depend on them. Caches are
filled with random keys and values. A step is one token through the whole model; figures are the medians of rounds in
which all caches take turns. Needs the package kvant (PYTHONPATH=python), torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path

EXACT, HALF = "transformers, f32", "transformers, bf16"
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64


def make_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def fill(cache, keys: int) -> None:
    """The same random keys and values for every cache."""
    import torch

    generator = torch.Generator().manual_seed(keys)
    for layer in range(LAYERS):
        k, v = (torch.randn(1, KV_HEADS, keys, HEAD_DIM, generator=generator) for _ in range(2))
        cache.update(k, v, layer)


def measure(lengths: list[int], formats: list[str], rounds: int, threads: int, clock: str) -> dict:
    import torch
    import transformers

    import kvant.hf
    from kvant.hf import versions

    torch.set_num_threads(threads)
    now = time.process_time if clock == "cpu" else time.perf_counter
    model = make_model()
    exact = model.config._attn_implementation
    rows = []
    for keys in lengths:
        caches = {EXACT: transformers.DynamicCache(config=model.config)}
        for name in formats:
            k, _, v = name.partition("/")
            caches[name] = kvant.hf.cache(model, k=k, v=v or k)
        times: dict[str, list[float]] = {name: [] for name in caches}
        with torch.no_grad():
            for cache in caches.values():
                fill(cache, keys)
            for _ in range(rounds):
                for name, cache in caches.items():
                    model.set_attn_implementation(exact if name == EXACT else versions.IMPLEMENTATION)
                    begin = now()
                    model(torch.tensor([[7]]), use_cache=True, logits_to_keep=1, **{versions.CACHE_NAME: cache})
                    times[name].append(now() - begin)
        for name, cache in caches.items():
            tokens = keys + rounds
            held = kvant.hf.report(cache).bytes if name != EXACT else 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * tokens
            milliseconds = 1e3 * statistics.median(times[name])
            rows.append({"cache": name, "keys": keys, "ms": milliseconds, "bytes": held})
            if name == EXACT:  # a model in bf16 holds half of it; its speed on a CPU is another matter
                rows.append({"cache": HALF, "keys": keys, "ms": None, "bytes": held // 2})
            print(f"{keys:>7} keys  {name:<18} {milliseconds:8.1f} ms a token  {held / 1e6:8.1f} MB", flush=True)
        del caches, cache
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}",
        "clock": clock,
        "isa": next(i["name"] for i in kvant.info()["isas"] if i["available"]),
        "versions": {"kvant": kvant.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }


# --- the picture ------------------------------------------------------------------------------------------------------

COLORS = {EXACT: "#777777", HALF: "#bbbbbb"}
MORE_COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 400, 250, 60, 40, 90


def steps(low: float, high: float) -> list[float]:
    """Round numbers of a linear axis from 0."""
    unit = 10 ** math.floor(math.log10(high))
    unit = next(unit * f for f in (0.1, 0.2, 0.5, 1, 2) if high / (unit * f) <= 6)
    return [unit * i for i in range(int(high / unit) + 1)]


def panel(x0: int, title: str, series: dict[str, list[tuple[float, float]]], colors: dict[str, str]) -> list[str]:
    """One chart as SVG elements: lines over a logarithmic axis of context lengths."""
    xs = sorted({x for points in series.values() for x, _ in points})
    most = 1.08 * max(y for points in series.values() for _, y in points)
    span = math.log(xs[-1] / xs[0]) or 1.0
    px = lambda x: x0 + WIDTH * math.log(x / xs[0]) / span  # noqa: E731
    py = lambda y: TOP + HEIGHT * (1 - y / most)  # noqa: E731
    out = [f'<text x="{x0}" y="{TOP - 16}" class="title">{title}</text>']
    for y in steps(0, most):
        out.append(f'<path d="M{x0} {py(y):.1f}h{WIDTH}" class="grid"/>')
        out.append(f'<text x="{x0 - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        label = f"{x / 1024:g} k" if x >= 1024 else f"{x:g}"
        out.append(f'<text x="{px(x):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{label}</text>')
    for name, points in series.items():
        color = colors[name]
        line = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{color}"/>' for x, y in points]
    return out


def draw(result: dict) -> str:
    """The whole picture as SVG."""
    names = list(dict.fromkeys(row["cache"] for row in result["rows"]))
    colors = COLORS | dict(zip((n for n in names if n not in COLORS), MORE_COLORS))

    def pick(key: str, f) -> dict[str, list[tuple[float, float]]]:
        rows = {
            n: [(r["keys"], f(r[key])) for r in result["rows"] if r["cache"] == n and r[key] is not None] for n in names
        }
        return {n: points for n, points in rows.items() if points}

    second = LEFT + WIDTH + BETWEEN
    total, bottom = second + WIDTH + 30, TOP + HEIGHT + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{bottom + 60}" '
        f'viewBox="0 0 {total} {bottom + 60}">',
        "<style>text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.grid{stroke:#ddd}</style>",
        f'<rect width="{total}" height="{bottom + 60}" fill="#fff"/>',
        *panel(LEFT, "cache, MB", pick("bytes", lambda b: b / 1e6), colors),
        *panel(second, "tokens a second", pick("ms", lambda ms: 1e3 / ms), colors),
    ]
    x = LEFT
    for name in names:
        label = name if name in COLORS else f"kvant {name}"
        out.append(f'<rect x="{x}" y="{bottom - 6}" width="18" height="4" fill="{colors[name]}"/>')
        out.append(f'<text x="{x + 24}" y="{bottom}">{label}</text>')
        x += 60 + 8 * len(label)
    v = result["versions"]
    about = (
        f"Below: tokens in the context. SmolLM2-135M's shape in f32, "
        f"{result['machine']}, {result['isa']}, {result['clock']} time.",
        f"torch {v['torch']}, transformers {v['transformers']}, kvant {v['kvant']}.",
    )
    out += [f'<text x="{LEFT}" y="{bottom + 28 + 20 * i}">{line}</text>' for i, line in enumerate(about)]
    out += ["</svg>", ""]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384", help="tokens in the context")
    parser.add_argument("--formats", default="tq6/tq4,tq4/tq4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for machines that do other things, too"
    )
    parser.add_argument("--quick", action="store_true", help="512 tokens, 2 rounds")
    parser.add_argument("--from", dest="source", help="a JSON file of an earlier run")
    parser.add_argument("--json", help="where to write what was measured")
    parser.add_argument("--svg", help="where to draw it")
    arguments = parser.parse_args()
    if arguments.source:
        result = json.loads(Path(arguments.source).read_text())
    else:
        lengths = [512] if arguments.quick else [int(n) for n in arguments.lengths.split(",")]
        rounds = 2 if arguments.quick else arguments.rounds
        if arguments.clock == "cpu" and arguments.threads != 1:
            parser.error("--clock cpu adds the times of all threads: it goes with --threads 1")
        result = measure(lengths, arguments.formats.split(","), rounds, arguments.threads, arguments.clock)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.svg:
        Path(arguments.svg).write_text(draw(result))


if __name__ == "__main__":
    main()
