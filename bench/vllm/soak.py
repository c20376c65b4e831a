#!/usr/bin/env python3
"""vLLM's engine with kvant's caches under a load that a pool is too small for, and what must hold afterwards.

    pip install 'kvant[vllm]'
    python bench/vllm/soak.py FOLDER auto kvant_tq4 'kvant_tq4 {"exact_memory": 0.01}' --out results --parallel 3

FOLDER is a Hugging Face model. A cache is vLLM's --kv-cache-dtype, perhaps followed by kvant's options as JSON, such as
a budget for exact copies that is too small; `kvant` is the plugin with exact pages, `auto` vLLM's own attention.

Each cache has two loads, `load` and `drafts` (ngram, 4 tokens), in processes and engines of their own. All have the
same requests: texts of 1 to --longest tokens, some with a prefix in common, cut at a block's boundary or one token
beside; repeated prompts; greedy, sampled, n = 4; 1 to 256 new tokens; a third is aborted, while it waits, in its
prompt, or while it decodes. The pool is so small that requests are preempted.

Then every request that was not aborted has ended, no log probability is NaN or infinite, all blocks are free, kvant
counted no error (a plan that does not fit, a value that is not finite), and probes, prompts that run one at a time
before the load and after each round, have the same tokens and log probabilities to the last bit. Greedy requests run
once more, alone. Their first differences are near ties, or the format's own error: at a difference, log p of the two
tokens differs by less than 4 between the runs. Otherwise it is a fault, and the exit code is 1.

The table has, for each part: requests that ended, aborted ones (waiting, in the prompt, decoding), preemptions, prompt
tokens from the prefix cache; of those that ran again alone the equal ones, the mean difference of log p before the
first difference, and the largest at one; exact copies that a layer holds, of the blocks in the pool; pages that had no
copy when they should have been exact; drafts that were accepted.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quality"))

from engines import arguments, end_part, load, run_parts, start  # noqa: E402
from kl import read  # noqa: E402

BLOCK = 64
MOST_NEW = 256
PROBES, PROBE_TOKENS = 8, 24
MOST_APART = 4.0  # nats
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
LOADS: dict[str, dict[str, Any]] = {"load": {}, "drafts": {"speculative_config": NGRAM}}


# --- requests --------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    prompt: list[int]
    options: dict[str, Any]  # of SamplingParams
    arrives: int  # step
    abort: tuple[str, int] | None  # ("waiting" or "prompt": steps since it came or began; "tokens": new ones, so many)

    @property
    def is_greedy(self) -> bool:
        return self.options["temperature"] == 0.0


def requests(seed: int, count: int, texts: list[list[int]], longest: int) -> list[Request]:
    """The same for the same seed. Prefixes are the same for all seeds."""
    rng = random.Random(seed)
    made: list[Request] = []
    step = 0
    begins = [i * 700 % max(1, len(texts[i % 2]) - longest) for i in range(8)]
    prefixes = [texts[i % 2][at : at + longest] for i, at in enumerate(begins)]

    def spread(low: int, high: int) -> int:
        return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))

    def own(tokens: int) -> list[int]:
        text = rng.choice(texts)
        at = rng.randrange(max(1, len(text) - tokens))
        return text[at : at + tokens]

    def prompt() -> list[int]:
        kind = rng.random()
        if kind < 0.25:
            return own(spread(1, 140))
        if kind < 0.4 or not made:
            return own(spread(1, longest))
        prefix = rng.choice(prefixes)
        cut = BLOCK * spread(1, max(1, len(prefix) // BLOCK - 1))
        if kind < 0.65:
            return prefix[:cut] + own(spread(1, 200))
        if kind < 0.85:
            return prefix[: cut + rng.choice((-1, 0, 1))]
        return rng.choice(made).prompt

    for _ in range(count):
        tokens = prompt()[:longest]
        new = 1 if rng.random() < 0.1 else spread(20, MOST_NEW)
        options: dict[str, Any] = {"max_tokens": new, "temperature": 0.0, "logprobs": 5, "ignore_eos": True}
        if rng.random() < 0.35:
            options |= {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(1 << 30), "logprobs": 1}
            options["n"] = rng.choice((1, 4))
        if len(tokens) < 1500 and rng.random() < 0.1:
            options["prompt_logprobs"] = 1
        abort = None
        if rng.random() < 1 / 3:
            kind = rng.choice(("waiting", "prompt", "tokens", "tokens"))
            abort = kind, rng.randrange(1, new + 1) if kind == "tokens" else rng.randrange(9)
        made.append(Request(tokens, options, step, abort))
        step += 0 if rng.random() < 0.4 else int(rng.expovariate(1 / 5))
    return made


# --- two runs of a request -------------------------------------------------------------------------------------------


class Apart(NamedTuple):
    equal: bool
    logprob: float  # mean difference before the first difference
    at_it: float  # the largest difference of log p of the two tokens that were chosen there; 0 where there is none


Chosen = list[tuple[int, dict[int, float]]]  # of each new token: what was chosen, log p of this and the likeliest


def compare(x: Chosen, y: Chosen) -> Apart:
    n = next((i for i, (s, t) in enumerate(zip(x, y)) if s[0] != t[0]), min(len(x), len(y)))
    before = [abs(s[1][s[0]] - t[1][t[0]]) for s, t in zip(x[:n], y[:n])]
    at_it = 0.0
    if n < min(len(x), len(y)):
        p, q = x[n][1], y[n][1]  # a token that is not among the likeliest is less likely than all of these
        tokens = x[n][0], y[n][0]
        at_it = max(abs(p.get(t, min(p.values())) - q.get(t, min(q.values()))) for t in tokens)
    return Apart(n == len(x) == len(y), sum(before) / n if n else 0.0, at_it)


def chosen(output: Any) -> Chosen:
    found = output.outputs[0]
    return [(t, {k: v.logprob for k, v in x.items()}) for t, x in zip(found.token_ids, found.logprobs)]


def is_finite(output: Any) -> bool:
    rows = [*(output.prompt_logprobs or []), *(row for one in output.outputs for row in one.logprobs or [])]
    return all(math.isfinite(x.logprob) for row in rows for x in (row or {}).values())


# --- one engine, in a process of its own -----------------------------------------------------------------------------


def name_of(request_id: str) -> str:
    """vLLM adds to ids, for n = 4 and of its own."""
    found = re.search(r"q\d+x\d+", request_id)
    return found[0] if found else request_id


class Watch:
    """Counts preemptions, and keeps what kvant made."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.preempted: list[str] = []
        self.builders: list[Any] = []
        preempt = Scheduler._preempt_request

        def count(scheduler: Any, request: Any, *others: Any, **named: Any) -> Any:
            self.preempted.append(name_of(request.request_id))
            return preempt(scheduler, request, *others, **named)

        Scheduler._preempt_request = count
        from kvant.vllm.metadata import KvantMetadataBuilder as Builder

        init = Builder.__init__

        def keep(builder: Any, *others: Any, **named: Any) -> None:
            init(builder, *others, **named)
            self.builders.append(builder)

        Builder.__init__ = keep

    def plans(self) -> Iterator[Any]:
        for builder in self.builders:
            for plans in builder.plans.values():
                yield from plans.decode.values()
                for extend in (x for same in plans.extend.values() for x in same):
                    few = extend.few and extend.few.plan
                    yield from (x for x in (extend.stored, extend.fresh, few) if x is not None)

    def kvant(self) -> dict[str, int]:
        pages = {id(x): x for builder in self.builders for x in builder.pages.values()}.values()
        return {
            "copies": max((x.tail_copies for x in pages), default=0),
            "misses": sum(x.take_misses() for x in pages),
            "errors": sum(x.take_errors() for x in self.plans()) + sum(x.take_non_finite() for x in pages),
        }


class Engine:
    def __init__(self, a: argparse.Namespace, cache: str, options: dict[str, Any]) -> None:
        self.watch = Watch()
        self.llm = start(
            a.folder,
            cache,
            num_gpu_blocks_override=a.blocks,
            block_size=BLOCK,
            max_model_len=a.longest + MOST_NEW + 8,
            max_num_seqs=40,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.03,
            max_logprobs=5,
            enable_prefix_caching=True,
            scheduler_reserve_full_isl=False,  # prompts are admitted without room for all of them
            disable_log_stats=False,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.is_finite = True

    def add(self, name: str, request: Request) -> None:
        from vllm import SamplingParams

        options = SamplingParams(detokenize=False, **request.options)
        self.engine.add_request(name, {"prompt_token_ids": request.prompt}, options)

    def step(self) -> list[Any]:
        outputs = self.engine.step()
        self.is_finite &= all(map(is_finite, (x for x in outputs if x.finished)))
        return outputs

    def alone(self, name: str, request: Request) -> Chosen:
        """With an empty prefix cache."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: blocks are in use")
        self.add(name, request)
        done = None
        while self.engine.has_unfinished_requests():
            done = next((x for x in self.step() if x.finished), done)
        return chosen(done)

    def is_due(self, name: str, request: Request, since: int, begun: dict[str, int], step: int) -> str | None:
        """Where a request is that is to be aborted now."""
        kind, count = request.abort or (None, 0)
        mine = [x for i, x in self.scheduler.requests.items() if name_of(i) == name] if kind else []
        computed, new = any(x.num_computed_tokens for x in mine), max((x.num_output_tokens for x in mine), default=0)
        if computed:
            begun.setdefault(name, step)
        due = (
            (kind == "waiting" and step - since >= count)
            or (kind == "prompt" and step - begun.get(name, step + 1) >= count)
            or (kind == "tokens" and new >= count)
        )
        return ("decoding" if new else "prompt" if computed else "waiting") if due and mine else None

    def drive(self, tag: int, todo: list[Request]) -> tuple[dict[str, Any], dict[str, int]]:
        """Adds, steps, aborts: the outputs of those that ended, and how many were aborted where."""
        names = {f"q{tag}x{i}": x for i, x in enumerate(todo)}
        waiting, live, begun, done = list(names), {}, {}, {}
        aborted = {"waiting": 0, "prompt": 0, "decoding": 0}
        step = 0
        while waiting or live:
            if not live:
                step = max(step, names[waiting[0]].arrives)
            while waiting and names[waiting[0]].arrives <= step:
                name = waiting.pop(0)
                self.add(name, names[name])
                live[name] = step
            for output in self.step():
                if output.finished and live.pop(output.request_id, None) is not None:
                    done[output.request_id] = output
            step += 1
            for name, since in list(live.items()):
                if where := self.is_due(name, names[name], since, begun, step):
                    self.engine.abort_request([name])
                    aborted[where] += 1
                    del live[name]
        for _ in range(8):  # until nothing is in flight
            self.engine.step()
        return done, aborted

    def left(self) -> list[str]:
        s = self.scheduler
        counts = {"running": s.running, "waiting": s.waiting, "known": s.requests}
        return [f"{len(x)} requests {name}" for name, x in counts.items() if len(x)]

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def measure(a: argparse.Namespace, name: str) -> None:
    kind, cache = name.split(": ", 1)
    e = Engine(a, cache, LOADS[kind])
    tokenizer = e.llm.get_tokenizer()
    texts = [tokenizer(read(x), add_special_tokens=False).input_ids for x in ("topics", "code")]
    faults: list[str] = []
    found: dict[str, Any] = {"requests": 0, "ended": 0, "aborted": {}, "cached": 0, "faults": faults}
    free = e.free_blocks()
    probes = [x for x in requests(77, 60, texts, a.longest) if x.is_greedy][:PROBES]
    probes = [x._replace(options=x.options | {"max_tokens": PROBE_TOKENS}) for x in probes]

    def run_probes(tag: int) -> list[Chosen]:
        return [e.alone(f"q{tag}x{i}", x) for i, x in enumerate(probes)]

    first = run_probes(900)
    again: list[tuple[str, Request, Chosen]] = []
    for tag in range(1, a.rounds + 1):
        e.engine.reset_prefix_cache()
        todo = requests(tag, a.requests, texts, a.longest)
        done, aborted = e.drive(tag, todo)
        found["requests"] += len(todo)
        found["ended"] += len(done)
        for where, count in aborted.items():
            found["aborted"][where] = found["aborted"].get(where, 0) + count
        found["cached"] += sum(x.num_cached_tokens or 0 for x in done.values())
        if len(done) + sum(aborted.values()) != len(todo):
            faults.append(f"round {tag}: {len(todo) - len(done) - sum(aborted.values())} requests did not end")
        faults += [f"round {tag}: {x}" for x in e.left()]
        if e.free_blocks() != free:
            faults.append(f"round {tag}: {e.free_blocks()} of {free} blocks are free")
        if run_probes(900 + tag) != first:
            faults.append(f"round {tag}: probes have other tokens or log probabilities than before the load")
        greedy = [(f"q{tag}x{i}", x) for i, x in enumerate(todo) if x.is_greedy and f"q{tag}x{i}" in done]
        again += [(n, x, chosen(done[n])) for n, x in greedy]
    found["preemptions"] = len(e.watch.preempted)
    if not e.watch.preempted:
        faults.append("nothing was preempted: choose fewer --blocks")
    again.sort(key=lambda x: x[0] not in e.watch.preempted)
    apart = [compare(x, e.alone(f"{n}0", request)) for n, request, x in again[: a.alone]]
    found["alone"] = [len(apart), sum(x.equal for x in apart)]
    found["logprob"] = sum(x.logprob for x in apart) / max(1, len(apart))
    found["at difference"] = max((x.at_it for x in apart), default=0.0)
    if found["at difference"] > MOST_APART:
        faults.append(f"alone: log p of a token differs by {found['at difference']:.1f}")
    if not e.is_finite:
        faults.append("a log probability is not finite")
    found["kvant"] = e.watch.kvant()
    if found["kvant"]["errors"]:
        faults.append(f"{found['kvant']['errors']} of kvant's plans and pages met an error")
    counts = {m.name.split("spec_decode_")[-1]: m.value for m in e.llm.get_metrics() if hasattr(m, "value")}
    found["drafts"] = [counts.get(f"num_{x}_tokens", 0) for x in ("accepted", "draft")]
    end_part(a.out, name, found)


# --- all of them -----------------------------------------------------------------------------------------------------


def report(blocks: int, found: dict[str, dict[str, Any]]) -> list[str]:
    """Prints the table; the faults."""
    print(
        f"{'':42} {'ended':>10} {'aborted':>11} {'preempted':>9} {'cached':>7}  {'alone: equal':>12} {'d log p':>7} "
        f"{'most':>5}  {'copies':>9} {'misses':>6} {'drafts':>13}"
    )
    faults = []
    for name, x in found.items():
        ended, aborted = f"{x['ended']} of {x['requests']}", " ".join(str(n) for n in x["aborted"].values())
        count, equal = x["alone"]
        drafts = "{:.0f} of {:.0f}".format(*x["drafts"]) if x["drafts"][1] else "-"
        print(
            f"{name:42} {ended:>10} {aborted:>11} {x['preemptions']:9} {x['cached']:7}  {f'{equal} of {count}':>12} "
            f"{x['logprob']:7.4f} {x['at difference']:5.2f}  {x['kvant']['copies']:3} of {blocks:3} "
            f"{x['kvant']['misses']:6} {drafts:>13}",
            flush=True,
        )
        faults += [f"{name}: {fault}" for fault in x["faults"]]
    return faults


def main() -> None:
    parser = arguments(__doc__, parallel=1, seconds=900)
    parser.add_argument("--loads", default="load,drafts", help="one of these, or both")
    parser.add_argument("--blocks", type=int, default=60, help="of 64 tokens, in the pool")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=120, help="of a round")
    parser.add_argument("--alone", type=int, default=60, help="greedy requests that run again alone, at most")
    a = parser.parse_args()
    if unknown := set(a.loads.split(",")) - set(LOADS):
        parser.error(f"--loads: {', '.join(sorted(unknown))}: must be some of {', '.join(LOADS)}")
    if a.blocks * BLOCK < a.longest + MOST_NEW + 2 * BLOCK:
        parser.error(f"--blocks {a.blocks}: a request of {a.longest} tokens must fit: raise it, or lower --longest")
    if a.one:
        measure(a, a.one)
    parts = {f"{kind}: {cache}": {} for kind in a.loads.split(",") for cache in a.caches}
    failed = run_parts(parts, a.out, a.parallel, a.seconds)
    faults = report(a.blocks, {name: x for name in parts if (x := load(a.out, name)) is not None})
    faults += [f"{name}: failed" for name in failed]
    if faults:
        sys.exit("\n".join(["faults:", *faults]))


if __name__ == "__main__":
    main()
