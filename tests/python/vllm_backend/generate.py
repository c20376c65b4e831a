"""generate.py MODEL REQUEST: runs vLLM's engine on the CPU with kvant's backend, and prints the result as JSON:
{"rounds": [[[tokens, cached tokens of the prompt], ...], ...], "preemptions"}.

REQUEST is JSON: {"cache_dtype", "rounds": [{"prompts": [[token, ...], ...], "max_tokens"}, ...], "options": {...}}, the
options are LLM's. Compiled functions of vLLM are replaced here, since its wheel for GPUs has none for CPUs, and so is
its choice of a backend, which on CPUs is always the same. Worker processes import this file, and have these, too.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1"
)
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dense
import torch

import kvant.vllm

torch.set_num_threads(1)

# Options of an engine for a small model on a CPU.
SMALL = dict(
    dtype="float32",
    max_model_len=2048,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    enforce_eager=True,
    compilation_config={"custom_ops": ["none"]},  # their definitions in torch
    kv_cache_memory_bytes=1 << 28,
)


def compute_slot_mapping(table, requests, query_start_loc, positions):
    """BlockTable's: the slots of tokens; -1 where another rank has the token."""
    ranks, turn, slots = table.dcp_world_size, table.cp_kv_cache_interleave_size, table.slot_mapping.gpu
    begins = query_start_loc.tolist()
    slots.fill_(-1)
    for i in range(requests):
        here = slice(begins[i], begins[i + 1])
        block, place = positions[here] // (table.block_size * ranks), positions[here] % (table.block_size * ranks)
        place_here = place // (turn * ranks) * turn + place % turn
        stored = table.block_table.gpu[i, block].long() * table.block_size + place_here
        slots[here] = torch.where(place // turn % ranks == table.dcp_rank, stored, -1)


def choose(cls, selected, attn_selector_config, num_heads=None):
    backend = selected.get_class()
    reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
    if reasons:
        raise ValueError(f"{selected.name}: {reasons}")
    return selected.get_path()


def stand_in():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.impl("greedy_argmax", lambda logits: logits.argmax(dim=-1), "CPU")
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.compute_slot_mapping = compute_slot_mapping
    dcp.correct_attn_out = dense.correct_attn_out
    type(current_platform).get_attn_backend_cls = classmethod(choose)
    return library


def main():
    model, request = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preemptions = Scheduler._preempt_request, []
    Scheduler._preempt_request = lambda *a, **k: preemptions.append(0) or preempt(*a, **k)

    options = dict(skip_tokenizer_init=True, attention_backend="CUSTOM", kv_cache_dtype=request["cache_dtype"])
    llm = LLM(model, **(SMALL | options | request.get("options", {})))
    rounds = []
    for r in request["rounds"]:
        sampling = SamplingParams(max_tokens=r["max_tokens"], temperature=0.0, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": p} for p in r["prompts"]]
        done = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([[list(o.outputs[0].token_ids), o.num_cached_tokens] for o in done])
    print("RESULT " + json.dumps({"rounds": rounds, "preemptions": len(preemptions)}), flush=True)


kvant.vllm.register()
library = stand_in()  # ends with the process

if __name__ == "__main__":
    main()
