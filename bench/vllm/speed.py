#!/usr/bin/env python3
"""How fast vLLM decodes with kvant's caches, beside its own attention over bfloat16 and over its fp8.

    pip install 'kvant[vllm]'
    python3 bench/vllm/speed.py
    python3 bench/vllm/speed.py auto kvant_tq4 --rows 1x2048,16x8192+3 --kernels --seconds 200 --json speed.json

A cache is vLLM's --kv-cache-dtype, perhaps followed by kvant's options as JSON; `kvant` is the plugin with exact pages,
and `auto` vLLM's own attention. The first cache is what the others are compared with. The model has Llama-3.1-8B's
shape, or that of --shape; all weights are random, for only their number matters. A row is one of

    16x2048       16 requests with prompts of 2048 tokens decode together
    16x2048+3     the same with 3 drafts a step. Random weights soon repeat a token, and ngram drafts are all accepted
    128x4096:512  128 requests with prompts of 4096 tokens, to the end of 512 new tokens each

Each cache has an engine for each number of drafts, in a process of its own, one after another. A row is three times 64
steps (in 64 steps each request fills a block of 64 tokens, or several), and the median counts; `A:N` runs once.
--seconds limits all engines together: each one may take an equal share of what is left, and loses the rows that it did
not reach.

--kernels runs the rows once more and records 64 steps of each with torch's profiler, and the step of one prompt of 8192
tokens. Then the table has microseconds a layer: of write, attention and merge, and from the write's begin to the
merge's end. Kernels may overlap, so that their sum can be more than that.

The table has tokens a second and, in brackets, the ratio to the first cache's; then seconds to the last request's first
token, where a ratio above 1 is slower. With drafts that are not all accepted it has tokens a request and step, too.
--json has everything that was measured; --table FILE prints the table of such a file again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "quality")]

import kernels  # noqa: E402
from engines import GRAPHS, end_part, greedy, load, options_of_parts, run_parts, save, start  # noqa: E402

CACHES = ("auto", "fp8", "kvant_tq4", "kvant_tq6_tq4")
ROWS = (
    "1x2048,1x8192,16x2048,16x8192,4x32768,64x2048,128x4096:512,"
    "16x8192+3,4x32768+3,16x8192+7,4x32768+7"
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=131072,
    ),
    # DeepSeek V2 Lite's, with dense layers: latent attention
    "latent": dict(
        model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, first_k_dense_replace=27, topk_method="greedy",
        vocab_size=102400, max_position_embeddings=163840,
    ),
}  # fmt: skip
ARCHITECTURES = {"llama": "LlamaForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}
STEPS, TIMES = 64, 3
SETTLED = 20  # new tokens of each request before time is taken: from there on ngram finds drafts
PROMPT_STEP = 8192  # tokens: of the profiled prompt, and of a step at most


class Row(NamedTuple):
    requests: int
    prompt: int
    drafts: int = 0
    new: int = 0  # tokens of each request where it runs to its end

    @classmethod
    def of(cls, text: str) -> Row:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+([1-9]\d*)|:([1-9]\d*))?", text.strip())
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r}: a row is such as 16x2048, 16x2048+3 (drafts), 128x4096:512")
        return cls(*(int(x or 0) for x in found.groups()))

    def __str__(self) -> str:
        more = f"+{self.drafts}" if self.drafts else f":{self.new}" if self.new else ""
        return f"{self.requests}x{self.prompt}{more}"

    @property
    def words(self) -> str:
        if self.new:
            return f"{self.requests} requests of {self.prompt} + {self.new}"
        return f"{self.requests} x {self.prompt}" + (f", {self.drafts} drafts" if self.drafts else "")

    @property
    def most_new(self) -> int:
        """Tokens that a request may get: it decodes while others still read their prompts."""
        prompts = self.requests * -(-self.prompt // PROMPT_STEP)  # steps
        return self.new or (1 + self.drafts) * (prompts + SETTLED + STEPS * (TIMES + 1) + 16)


def rows_of(text: str) -> list[Row]:
    return list(dict.fromkeys(map(Row.of, text.split(","))))


# --- one engine, in a process of its own -----------------------------------------------------------------------------


def make_model(folder: Path, shape: str) -> None:
    """A configuration; vLLM makes the weights."""
    from transformers import AutoConfig

    usual = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16"}
    config = AutoConfig.for_model(**(usual | SHAPES[shape]))
    config.architectures = [ARCHITECTURES[config.model_type]]
    config.save_pretrained(folder)


class Batch:
    """Requests that came at once."""

    numbers = itertools.count()

    def __init__(self, llm: Any, prompts: list[list[int]], new: int) -> None:
        self.engine = llm.llm_engine
        self.tokens = {f"{next(self.numbers)}": 0 for _ in prompts}
        self.begin = time.perf_counter()
        self.first: dict[str, float] = {}  # seconds to a request's first token
        for name, prompt in zip(self.tokens, prompts):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy(new))

    def step(self) -> int:
        """The number of new tokens."""
        before = sum(self.tokens.values())
        for output in self.engine.step():
            name, tokens = output.request_id, len(output.outputs[0].token_ids)
            if tokens and name in self.tokens:  # a step of the batch before may still have been under way
                self.tokens[name] = tokens
                self.first.setdefault(name, time.perf_counter() - self.begin)
        return sum(self.tokens.values()) - before

    def until(self, each: int) -> None:
        """Until each request has so many new tokens."""
        while min(self.tokens.values()) < each:
            if not self.engine.has_unfinished_requests():
                raise RuntimeError(f"requests ended with {min(self.tokens.values())} of {each} tokens")
            self.step()

    def steps(self, count: int) -> tuple[float, int]:
        """Seconds, and new tokens, of so many steps that have some."""
        begin, tokens = time.perf_counter(), 0
        while count:
            new = self.step()
            tokens += new
            count -= new > 0
        return time.perf_counter() - begin, tokens

    def end(self) -> None:
        self.engine.abort_request(list(self.tokens))
        while self.engine.has_unfinished_requests():
            self.engine.step()


class Engine:
    def __init__(self, a: argparse.Namespace, cache: str, rows: list[Row]) -> None:
        drafts, most = rows[0].drafts, max(x.requests for x in rows)
        sizes = {min(most, 1 << i) for i in range(most.bit_length() + 1)} | {x.requests for x in rows}
        graphs = GRAPHS | {"cudagraph_capture_sizes": sorted(n * (1 + drafts) for n in sizes)}
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "compilation_config": graphs,
            "max_model_len": max(max(x.prompt + x.most_new for x in rows), PROMPT_STEP) + 16,
            "max_num_seqs": max(128, most),
            "max_num_batched_tokens": PROMPT_STEP,
            "kv_cache_memory_bytes": int(a.cache_gib * 2**30),
            "enable_prefix_caching": False,
            "tensor_parallel_size": a.tensor_parallel,
        }
        if drafts:
            ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
            options["speculative_config"] = ngram | {"num_speculative_tokens": drafts}
        self.traces = a.out / f"traces-{drafts}"
        if a.kernels:
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(self.traces.resolve()),
                "torch_profiler_activities": ["CUDA"],
                "torch_profiler_with_stack": False,
                "torch_profiler_use_gzip": False,
                "torch_profiler_dump_cuda_time_total": False,
                "ignore_frontend": True,
            }
        begin = time.perf_counter()
        self.llm = start(a.model or a.out / "model", cache, **(options | a.options))
        config = self.llm.llm_engine.vllm_config
        self.vocabulary = config.model_config.get_vocab_size()
        self.about = {
            "start, s": time.perf_counter() - begin,
            "tokens in the cache": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        }

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        rng = random.Random(f"{count} {tokens}")
        return [[rng.randrange(5, self.vocabulary) for _ in range(tokens)] for _ in range(count)]

    def kernels(self, run: Callable[[], Any]) -> dict[str, Any]:
        self.llm.start_profile()
        run()
        self.llm.stop_profile()
        return kernels.summary(kernels.of_trace(kernels.take_trace(self.traces)))

    def prompt(self, tokens: int) -> Batch:
        batch = Batch(self.llm, self.prompts(1, tokens), 1)
        while self.llm.llm_engine.has_unfinished_requests():
            batch.step()
        return batch

    def decoding(self, row: Row) -> Batch:
        batch = Batch(self.llm, self.prompts(row.requests, row.prompt), row.most_new)
        batch.until(SETTLED if row.drafts else 3)
        return batch

    def decode(self, row: Row) -> dict[str, Any]:
        if row.requests * (row.prompt + row.most_new) > self.about["tokens in the cache"]:
            return {"left out": f"the cache holds {self.about['tokens in the cache']} tokens"}
        batch = self.decoding(row)
        times = [batch.steps(STEPS) for _ in range(TIMES)]
        batch.end()
        return {
            "tokens/s": statistics.median(tokens / seconds for seconds, tokens in times),
            "ms a step": statistics.median(1000 * seconds / STEPS for seconds, _ in times),
            "tokens a step": sum(tokens for _, tokens in times) / (TIMES * STEPS * row.requests),
            "first token, s": min(batch.first.values()),
            "last first token, s": max(batch.first.values()),
            "times": times,
        }

    def decode_kernels(self, row: Row) -> dict[str, Any]:
        batch = self.decoding(row)
        found = self.kernels(lambda: batch.steps(STEPS))
        batch.end()
        return found

    def to_the_end(self, row: Row) -> dict[str, Any]:
        batch = Batch(self.llm, self.prompts(row.requests, row.prompt), row.new)
        batch.until(row.new)
        seconds = time.perf_counter() - batch.begin
        first = batch.first.values()
        return {"tokens/s": row.requests * row.new / seconds, "s": seconds, "last first token, s": max(first)}


def measure(a: argparse.Namespace, name: str) -> None:
    drafts, cache = split(name)
    rows = [x for x in a.rows if x.drafts == drafts]
    engine = Engine(a, cache, rows)
    found: dict[str, Any] = {"about": engine.about | versions(), "rows": {}}
    save(a.out, name, found)
    engine.prompt(min(PROMPT_STEP, max(x.prompt for x in rows)))  # what is loaded and chosen at the first use
    for row in rows:
        found["rows"][str(row)] = engine.to_the_end(row) if row.new else engine.decode(row)
        save(a.out, name, found)
    if a.kernels:  # last: a profiler that ran once may slow launches down
        if not drafts:
            found["prompt"] = engine.kernels(lambda: engine.prompt(PROMPT_STEP))
        for row in rows:
            of_row = found["rows"][str(row)]
            if not row.new and "left out" not in of_row:
                of_row["kernels"] = engine.decode_kernels(row)
                save(a.out, name, found)
    end_part(a.out, name, found)


def versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"GPU": gpu, **{x: metadata.version(x) for x in ("vllm", "torch")}}


# --- all of them -----------------------------------------------------------------------------------------------------


def name_of(drafts: int, cache: str) -> str:
    return f"{drafts} drafts: {cache}"


def split(name: str) -> tuple[int, str]:
    drafts, cache = name.split(" drafts: ", 1)
    return int(drafts), cache


def gather(a: argparse.Namespace) -> dict[str, Any]:
    """The contents of --json: what the engines found, by cache."""
    found: dict[str, Any] = {"shape": a.shape if a.model is None else a.model.name, "GPUs": a.tensor_parallel}
    found["cache, GiB"] = a.cache_gib
    found["caches"] = {cache: {"rows": {}} for cache in a.caches}
    for cache, of_cache in found["caches"].items():
        for drafts in drafts_of(a.rows):
            part = load(a.out, name_of(drafts, cache)) or {"rows": {}}
            of_cache["rows"] |= part.pop("rows")
            of_cache |= {key: x for key, x in part.items() if key not in of_cache}
    return found


def drafts_of(rows: list[Row]) -> list[int]:
    return sorted({x.drafts for x in rows})


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 1000 else f"{x:.1f}" if x >= 20 else f"{x:.2f}"


def with_ratio(x: float | None, base: float | None, is_base: bool) -> str:
    if x is None:
        return "-"
    return number(x) if base is None or is_base else f"{number(x)} ({x / base:.2f})"


def parts_text(found: dict[str, Any] | None) -> str:
    if not found:
        return "-"
    return ", ".join(f"{found[part]:.1f}" for part in kernels.PARTS) + f"; {found['all']:.1f}"


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    caches = found["caches"]
    first = next(iter(caches))
    names = list(dict.fromkeys(name for x in caches.values() for name in x["rows"]))
    rows = sorted(map(Row.of, names), key=lambda row: (row.drafts, row.new > 0))
    lines: list[list[str]] = [["", *caches], ["---"] * (len(caches) + 1)]

    def of(cache: str, row: Row) -> dict[str, Any]:
        return caches[cache]["rows"].get(str(row), {})

    def add(title: str, row: Row, what: str, more: Callable[[dict[str, Any]], str] = lambda _: "") -> None:
        base = of(first, row).get(what)
        cells = [with_ratio(of(c, row).get(what), base, c == first) + more(of(c, row)) for c in caches]
        if any(cell != "-" for cell in cells):
            lines.append([title, *cells])

    for row in rows:

        def rejected(x: dict[str, Any], all_tokens: int = row.drafts + 1) -> str:
            tokens = x.get("tokens a step", all_tokens)
            return f", {tokens:.2f} of {all_tokens} a step" if tokens < all_tokens - 0.05 else ""

        add(f"{row.words}, tokens/s", row, "tokens/s", rejected)
    for row in rows:
        if not row.drafts and not row.new and row.requests > 1:
            add(f"{row.words}, s to the last first token", row, "last first token, s")
    profiled = {row.words: {c: of(c, row).get("kernels") for c in caches} for row in rows}
    profiled[f"prompt of {PROMPT_STEP}"] = {c: x.get("prompt") for c, x in caches.items()}
    for title, by_cache in profiled.items():
        if any(by_cache.values()):
            lines.append([f"{title}, us a layer", *map(parts_text, by_cache.values())])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("| " + " | ".join(f"{x:{n}}" for x, n in zip(line, widths)) + " |" for line in lines)


def report(found: dict[str, Any]) -> None:
    begun = {c: x["about"] for c, x in found["caches"].items() if "about" in x}
    about = next(iter(begun.values()), {"GPU": "?", "vllm": "?"})
    print(
        f"\n{found['shape']}, {found['GPUs']} x {about['GPU']}, vLLM {about['vllm']}, {found['cache, GiB']:g} GiB of "
        "cache a GPU; tokens in it: " + ", ".join(f"{c} {x['tokens in the cache']}" for c, x in begun.items())
    )
    rows = [(f"{cache}, {name}", x) for cache, y in found["caches"].items() for name, x in y["rows"].items()]
    for name, x in rows:
        if "left out" in x:
            print(f"left out: {name}: {x['left out']}; raise --cache-gib")
    if any("kernels" in x for _, x in rows):
        print("us a layer: write, attention, merge; from the write's begin to the merge's end")
    print(table(found), flush=True)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="*", metavar="CACHE", help=f"as: {' '.join(CACHES)}")
    parser.add_argument("--rows", type=rows_of, default=rows_of(ROWS), help=f"as: {ROWS}")
    parser.add_argument("--kernels", action="store_true", help="microseconds a layer of write, attention and merge")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all that was measured")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing: the table of such a file")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b", help="of the model")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="its config.json in place of --shape")
    parser.add_argument("--cache-gib", type=float, default=24.0, help="of each GPU's key/value cache")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, LLM's, of all engines")
    parser.add_argument("--seconds", type=float, help="that all engines may take together")
    options_of_parts(parser, needs_out=False)
    a = parser.parse_args(words)
    a.caches = list(dict.fromkeys(a.caches or CACHES))
    return a


def main() -> None:
    a = parse()
    if a.table:
        report(json.loads(a.table.read_text(encoding="utf-8")))
        return
    if a.one:
        measure(a, a.one)
    if a.out is None:
        a.out = Path(tempfile.mkdtemp(prefix="kvant-speed-"))
        sys.argv += ["--out", str(a.out)]
    a.out.mkdir(parents=True, exist_ok=True)
    if a.model is None:
        make_model(a.out / "model", a.shape)
    parts: dict[str, dict[str, str]] = {name_of(n, cache): {} for n in drafts_of(a.rows) for cache in a.caches}
    failed = run_parts(parts, a.out, 1, total=a.seconds)
    found = gather(a)
    if a.json:
        a.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    report(found)
    if failed:
        sys.exit(f"failed, or out of time: {', '.join(failed)}")


if __name__ == "__main__":
    main()
