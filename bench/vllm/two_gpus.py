#!/usr/bin/env python3
"""Whether vLLM on two GPUs computes with kvant's caches what it computes on one.

    pip install 'kvant[vllm]'
    python bench/vllm/two_gpus.py FOLDER auto kvant kvant_tq8 kvant_tq4 --out results

FOLDER is a Hugging Face model. A cache is vLLM's --kv-cache-dtype, perhaps followed by kvant's options as JSON; `kvant`
is the plugin with exact pages. The first is what the others are compared with: `auto`, vLLM's own attention.

    tensor     tensor parallel
    pipeline   pipeline parallel
    context    decode context parallel
    draft      a draft model, the model itself, on one GPU

Two GPUs need an even number of key/value heads, and context parallel needs one such head. Where FOLDER has other heads,
models are made from it in the results' folder, of Llama's names of weights: `even` computes what FOLDER computes, with
its first group of heads twice and half of each one's output; `pooled` has the mean of all key/value heads, which makes
another model, whose texts mean nothing.

Each engine runs in a process of its own, --parallel of them at a time, on GPUs 0 and 1. It continues 16 prompts of 64
to 3000 tokens greedily, and reads a text of 2000 tokens in steps of 512. Not even vLLM's own attention gives the same
bits on two GPUs, since partial sums are rounded before they are added. So the table has, for the same cache on two GPUs
and on one, and for each cache and the first cache: requests whose tokens are all equal, tokens before the first
difference, the mean difference of log p up to there, and that of the text. A difference of log p between two GPUs and
one is a fault if it is more than three times what two GPUs cost the first cache and what the cache costs on one GPU.
Exit code 1: a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quality"))

from engines import arguments, end_part, greedy, load, run_parts, start  # noqa: E402
from kl import read  # noqa: E402

LENGTHS = (200, 333, 512, 640, 64, 1000, 1500, 3000)  # of prompts, in each of two texts
NEW_TOKENS, TEXT_TOKENS = 128, 2000
BOUND = 3.0


class Mode(NamedTuple):
    cards: int
    model: str
    options: dict[str, Any]
    against: str = ""  # the mode that it must agree with


MODES = {
    "one": Mode(1, "even", {}),
    "tensor": Mode(2, "even", {"tensor_parallel_size": 2}, "one"),
    "pipeline": Mode(2, "even", {"pipeline_parallel_size": 2}, "one"),
    "draft": Mode(1, "even", {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}, "one"),
    "one pooled": Mode(1, "pooled", {}),
    "context": Mode(2, "pooled", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "one pooled"),
}


# --- models ----------------------------------------------------------------------------------------------------------


def change_heads(weights: dict[str, Any], heads: int, groups: int, dim: int, twice: bool, pooled: bool) -> None:
    """The first group of query heads twice, with half its output each; one key/value head, the mean of all."""
    import torch

    group = heads // groups
    for name, x in weights.items():
        found = re.search(r"\.self_attn\.([qkvo])_proj\.(weight|bias)$", name)
        if found is None or found.groups() == ("o", "bias"):
            continue
        if found[1] == "o":
            by_head = x.view(x.shape[0], heads, dim)
            if twice:
                half = by_head[:, :group] / 2
                by_head = torch.cat([half, by_head[:, group:], half], 1)
            weights[name] = by_head.flatten(1).contiguous()
            continue
        count = heads if found[1] == "q" else groups
        by_head = x.view(count, dim, *x.shape[1:])
        if twice:
            by_head = torch.cat([by_head, by_head[: group if found[1] == "q" else 1]])
        if pooled and found[1] != "q":
            by_head = by_head.float().mean(0, keepdim=True).to(x.dtype)
        weights[name] = by_head.flatten(0, 1).contiguous()


def model_of(a: argparse.Namespace, kind: str) -> Path:
    made = a.out / f"model-{kind}"
    return made if made.exists() else a.folder


def make_model(folder: Path, kind: str, to: Path) -> None:
    """The model with other heads; nothing where it has such heads."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(to, ignore_errors=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    twice, pooled = groups > 1 and groups % 2 == 1, kind == "pooled" and groups > 1
    if not twice and not pooled:
        return
    to.mkdir(parents=True)
    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    change_heads(weights, heads, groups, dim, twice, pooled)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, to)
    config["head_dim"] = dim
    config["num_attention_heads"] = heads + (heads // groups if twice else 0)
    config["num_key_value_heads"] = 1 if pooled else groups + 1
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


# --- one engine, in a process of its own -----------------------------------------------------------------------------


def prompts_of(texts: list[list[int]]) -> list[list[int]]:
    """Pieces of the texts, which begin anew where they end."""
    begins = [i * max(LENGTHS) for i in range(len(LENGTHS))]
    return [[ids[(at + j) % len(ids)] for j in range(n)] for ids in texts for at, n in zip(begins, LENGTHS)]


def measure(a: argparse.Namespace, name: str) -> None:
    mode, cache = split(name)
    folder = str(model_of(a, MODES[mode].model))
    options = MODES[mode].options | (a.options if MODES[mode].cards == 2 else {})
    has_drafts = "speculative_config" in options
    if has_drafts:
        options["speculative_config"] = options["speculative_config"] | {"model": folder}
    llm = start(
        folder,
        cache,
        max_model_len=max(LENGTHS) + NEW_TOKENS + 8,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,
        disable_log_stats=False,
        **options,
    )
    texts = [llm.get_tokenizer()(read(x), add_special_tokens=False).input_ids for x in ("topics", "code")]
    found: dict[str, Any] = {}
    prompts = [{"prompt_token_ids": x} for x in prompts_of(texts)]
    done = [one.outputs[0] for one in llm.generate(prompts, greedy(NEW_TOKENS, logprobs=1), use_tqdm=False)]
    found["tokens"] = [list(one.token_ids) for one in done]
    found["logprobs"] = [[x[t].logprob for t, x in zip(one.token_ids, one.logprobs)] for one in done]
    again = llm.generate(prompts, greedy(NEW_TOKENS), use_tqdm=False)  # now with prefix hits
    found["again"] = sum(list(one.outputs[0].token_ids) == x for one, x in zip(again, found["tokens"]))
    if has_drafts:
        counts = {m.name.split("spec_decode_")[-1]: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        found["drafts"] = [counts.get(f"num_{x}_tokens", 0) for x in ("accepted", "draft")]
    else:
        llm.reset_prefix_cache()
        ids = texts[0][:TEXT_TOKENS]
        (one,) = llm.generate([{"prompt_token_ids": ids}], greedy(1, prompt_logprobs=1), use_tqdm=False)
        found["text"] = [x[t].logprob for t, x in zip(ids[1:], one.prompt_logprobs[1:])]
    end_part(a.out, name, found)


# --- all of them -----------------------------------------------------------------------------------------------------


def split(name: str) -> tuple[str, str]:
    mode = max((m for m in MODES if name.startswith(f"{m}: ")), key=len)
    return mode, name.removeprefix(f"{mode}: ")


class Distance(NamedTuple):
    equal: int  # requests
    of: int
    tokens: float  # before the first difference
    logprob: float  # mean difference up to there
    text: float | None

    def __str__(self) -> str:
        text = "-" if self.text is None else f"{self.text:.4f}"
        return f"{self.equal:2} of {self.of:2} {self.tokens:6.1f} {self.logprob:7.4f} {text:>7}"


def compare(x: dict[str, Any], y: dict[str, Any]) -> Distance:
    before, apart = [], []
    for s, t, p, q in zip(x["tokens"], y["tokens"], x["logprobs"], y["logprobs"]):
        n = next((i for i, (u, v) in enumerate(zip(s, t)) if u != v), len(s))
        before.append(n)
        apart += [abs(u - v) for u, v in zip(p[:n], q[:n])]
    mean = sum(apart) / len(apart) if apart else 0.0
    texts = x.get("text"), y.get("text")
    text = sum(abs(u - v) for u, v in zip(*texts)) / len(texts[0]) if all(texts) else None
    equal = sum(n == len(s) for n, s in zip(before, x["tokens"]))
    return Distance(equal, len(before), sum(before) / len(before), mean, text)


def is_far(here: Distance, of_cards: Distance | None, of_cache: Distance | None) -> bool:
    """here: the same cache on two GPUs and one. The others: the first cache on these, and this cache on one GPU from
    the first."""
    known = [x for x in (of_cards, of_cache) if x is not None]
    for number in ("logprob", "text"):
        x = getattr(here, number)
        bounds = [getattr(y, number) for y in known if getattr(y, number) is not None]
        if x is not None and bounds and not x <= BOUND * max(bounds):
            return True
    return False


def report(a: argparse.Namespace, found: dict[str, dict[str, Any]]) -> list[str]:
    """Prints the table; the parts that are at fault."""
    first, faults = a.caches[0], []
    columns = f"{'equal':>8} {'tokens':>6} {'d log p':>7} {'text':>7}"
    print(f"{'':34} {'to the same cache on one GPU':34} {f'to {first} on one GPU':34}\n{'':34} {columns}   {columns}")
    for name, x in found.items():
        mode, cache = split(name)
        one = MODES[mode].against or mode

        def distance(to_mode: str, to_cache: str, of: str = name) -> Distance | None:
            other = f"{to_mode}: {to_cache}"
            return compare(found[of], found[other]) if {of, other} <= set(found) and other != of else None

        here, there = distance(one, cache), distance(one, first)
        line = f"{name:34} {here or '-'!s:34} {there or '-'!s:34} again {x['again']}"
        if "drafts" in x:
            line += ", drafts {:.0f} of {:.0f}".format(*x["drafts"])
        if here is not None:
            of_cards = distance(one, first, f"{mode}: {first}") if cache != first else None
            if is_far(here, of_cards, distance(one, first, f"{one}: {cache}")):
                faults.append(name)
                line += "  FAR"
        print(line, flush=True)
    return faults


def main() -> None:
    parser = arguments(__doc__, parallel=4, seconds=600)
    parser.add_argument("--modes", default="tensor,pipeline,draft,context", help="some of these")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, LLM's, of the engines on two GPUs")
    a = parser.parse_args()
    modes = a.modes.split(",")
    if unknown := [m for m in modes if m not in MODES or not MODES[m].against]:
        parser.error(f"--modes: {', '.join(unknown)}: must be some of tensor, pipeline, draft, context")
    if a.one:
        measure(a, a.one)
    wanted = [m for m in MODES if m in modes or any(MODES[x].against == m for x in modes)]
    for kind in sorted({MODES[m].model for m in wanted}):
        make_model(a.folder, kind, a.out / f"model-{kind}")
    parts, card = {}, 0
    for mode in sorted(wanted, key=lambda m: -MODES[m].cards):
        for cache in a.caches:
            parts[f"{mode}: {cache}"] = {"CUDA_VISIBLE_DEVICES": "0,1" if MODES[mode].cards == 2 else str(card)}
            card = (card + (MODES[mode].cards == 1)) % 2
    failed = run_parts(parts, a.out, a.parallel, a.seconds)
    found = {name: x for name in sorted(parts) if (x := load(a.out, name)) is not None}
    faults = report(a, found)
    if failed or faults:
        sys.exit(f"failed: {', '.join(failed) or 'none'}; too far from one GPU: {', '.join(faults) or 'none'}")


if __name__ == "__main__":
    main()
