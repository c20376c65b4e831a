#!/usr/bin/env python3
"""A decoding step of a Hugging Face model: kvant.hf beside DynamicCache with PyTorch's sdpa, in turns, in one process.

    python3 bench/hf_decode.py            # SmolLM2's and Llama 3 8B's attention, 2 k to 128 k keys, batch 1 and 16
    python3 bench/hf_decode.py --models llama3 --keys 2048,32768 --batches 1 --formats tq4/tq4

The models have random weights: what is timed does not depend on them. Caches are filled with random keys and values
instead of a prompt, which takes memory for a whole prompt's activations. For each case: the median milliseconds of a
step of the whole model (the median of rounds that alternate), tokens a second, and the memory that the cache takes.
"graph" replays the step from a CUDA graph, which is how a serving loop runs it. Before timing, logits of the kvant
cache in bf16 are compared with sdpa's.

sdpa is timed twice: as torch chooses ("sdpa"), and without cuDNN ("no cuDNN"). On Hopper torch 2.11 prefers cuDNN's
attention, which plans anew for each length, so for each token.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import kvant.hf  # noqa: E402

MODELS = {
    # SmolLM2-135M: 30 layers, 9 query and 3 kv heads, head_dim 64.
    "smollm2": dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    # Llama 3 8B's attention and MLP in 4 of its 32 layers.
    "llama3": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}


def make_model(name, device):
    config = LlamaConfig(vocab_size=8192, max_position_embeddings=1 << 18, rope_theta=500000.0, **MODELS[name])
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    return model.eval().requires_grad_(False)


PIECE = 8192  # tokens that are made at a time


def random_rows(model, layer, begin, tokens, batch, device):
    """Keys and values [batch, heads, tokens, head_dim] of a layer from token `begin` on, the same for every cache."""
    c = model.config
    generator = torch.Generator(device).manual_seed(layer * 1000003 + begin)
    shape = (batch, c.num_key_value_heads, tokens, c.hidden_size // c.num_attention_heads)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2)]


def fill(model, cache, batch, keys, device):
    """Puts `keys` tokens into every layer of a kvant cache, piece by piece."""
    for begin in range(0, keys, PIECE):
        for layer in range(model.config.num_hidden_layers):
            cache.update(*random_rows(model, layer, begin, min(PIECE, keys - begin), batch, device), layer)


def fill_dynamic(model, cache, batch, keys, device):
    """The same for a DynamicCache, which copies all that it holds at each update: one update a layer."""
    for layer in range(model.config.num_hidden_layers):
        pieces = [
            random_rows(model, layer, begin, min(PIECE, keys - begin), batch, device) for begin in range(0, keys, PIECE)
        ]
        cache.update(*(torch.cat(x, 2) for x in zip(*pieces)), layer)


def step(model, cache, token, position):
    return model(
        input_ids=token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
    ).logits[:, -1]


def wait(device):
    if device != "cpu":
        torch.cuda.synchronize()


class Contestant:
    """A model with a cache that takes steps."""

    def __init__(self, name, model, cache, batch, keys, device, graph=False):
        self.name, self.model, self.cache, self.batch, self.device = name, model, cache, batch, device
        self.token = torch.full((batch, 1), 7, device=device)
        self.position = torch.full((batch, 1), keys, device=device)
        self.graph = kvant.hf.StepGraph(model, cache, self.token) if graph else None
        self.times = []

    def take(self):
        if self.graph is not None:
            return self.graph.replay()
        out = step(self.model, self.cache, self.token, self.position)
        self.position += 1
        return out

    def round(self, steps):
        wait(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.take()
        wait(self.device)
        self.times.append((time.perf_counter() - begin) / steps * 1e3)


def used(device):
    gc.collect()
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def case(name, model, batch, keys, formats, args, device):
    """One row of the table for sdpa and each format, sdpa's rounds in turns with each."""
    rows = []
    room = keys + 2 * (args.steps + 1) * (args.rounds + 1) + 64
    before = used(device)
    base_cache = DynamicCache(config=model.config)
    fill_dynamic(model, base_cache, batch, keys, device)
    base_bytes = used(device) - before
    base = Contestant("sdpa", model, base_cache, batch, keys, device)
    no_cudnn_times = []

    def base_rounds():
        """A round of sdpa as torch chooses, and one without cuDNN, over the same cache."""
        base.round(args.steps)
        torch.backends.cuda.enable_cudnn_sdp(False)
        base.round(args.steps)
        torch.backends.cuda.enable_cudnn_sdp(True)
        no_cudnn_times.append(base.times.pop())

    first = None
    # Beside sdpa's, a bf16 cache of the longest batches would not fit.
    exact = ["bf16/bf16"] if batch * keys <= 16 * 32768 else []
    for label in [*exact, *formats]:
        k, v = label.split("/")
        before = used(device)
        cache = kvant.hf.cache(model, k=k, v=v, max_length=room, batch=batch)
        fill(model, cache, batch, keys, device)
        bytes_taken = used(device) - before
        plain = Contestant(label, model, cache, batch, keys, device)
        kvant.hf.enable(model)
        out = plain.take()
        kvant.hf.disable(model)
        if first is None:
            first = base.take()
        if label == "bf16/bf16":  # what other formats do to random keys says nothing
            error = ((out - first).float().norm() / first.float().norm()).item()
            if error > 0.1:
                raise SystemExit(f"{name}: logits of the bf16 cache differ from sdpa's by {error:.3f}")
        base.times = []
        no_cudnn_times.clear()
        for _ in range(args.rounds):
            base_rounds()
            kvant.hf.enable(model)
            plain.round(args.steps)
            kvant.hf.disable(model)
        row = dict(
            model=name, batch=batch, keys=keys, format=label, mb=bytes_taken / 1e6, sdpa_mb=base_bytes / 1e6,
            ms=statistics.median(plain.times), sdpa_ms=statistics.median(base.times),
            no_cudnn_ms=statistics.median(no_cudnn_times),
        )
        if device != "cpu" and not args.no_graph:
            kvant.hf.enable(model)
            graph = Contestant(label, model, cache, batch, keys, device, graph=True)
            graph.take()
            for _ in range(args.rounds):
                graph.round(args.steps)
            row["graph_ms"] = statistics.median(graph.times)
            graph.graph.close()
            del graph
            kvant.hf.disable(model)
        rows.append(row)
        del cache, plain
        used(device)
    del base, base_cache
    used(device)
    return rows


def table(rows):
    numbers = ["sdpa ms", "no cuDNN", "kvant ms", "graph ms", "tok/s", "sdpa MB", "kvant MB"]
    print(f"{'model':<8} {'batch':>5} {'keys':>7}  {'format':<9} " + " ".join(f"{name:>8}" for name in numbers))
    for r in rows:
        graph = r.get("graph_ms", float("nan"))
        best = min(r["ms"], r.get("graph_ms", r["ms"]))
        times = " ".join(f"{x:8.2f}" for x in (r["sdpa_ms"], r["no_cudnn_ms"], r["ms"], graph))
        rest = " ".join(f"{x:8.0f}" for x in (r["batch"] / best * 1e3, r["sdpa_mb"], r["mb"]))
        print(f"{r['model']:<8} {r['batch']:>5} {r['keys']:>7}  {r['format']:<9} {times} {rest}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,llama3")
    parser.add_argument("--keys", default="2048,32768,131072")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--formats", default="tq6/tq4,tq4/tq4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name in args.models.split(","):
            model = make_model(name, args.device)
            for keys in map(int, args.keys.split(",")):
                for batch in map(int, args.batches.split(",")):
                    try:
                        rows += case(name, model, batch, keys, args.formats.split(","), args, args.device)
                    except torch.cuda.OutOfMemoryError as error:
                        print(f"{name} {batch} x {keys}: left out, {str(error).splitlines()[0]}")
                    table(rows[-3:])
                    sys.stdout.flush()
            del model
    print()
    table(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
