"""Models with latent attention (MLA): a small one of DeepSeek V2's kind in vLLM's engine, beside vLLM's own backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("latents.py")
PROMPTS = [[(7 * i * i + 3 * i + n) % 120 + 3 for i in range(n)] for n in (300, 90, 64, 10)]


@pytest.fixture(scope="module")
def model(transformers, torch, tmp_path_factory):
    """Two dense layers of the widths that vLLM's own backend has on a CPU."""
    config = transformers.DeepseekV2Config(
        vocab_size=128, hidden_size=128, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, first_k_dense_replace=2, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=2048,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, topk_method="greedy",
    )  # fmt: skip
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("latents")
    transformers.DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return folder


def run_engines(model, *runs):
    done = subprocess.run(
        [sys.executable, SCRIPT, model, json.dumps(runs)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )  # fmt: skip
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, done.stderr[-3000:]
    return json.loads(result[0].removeprefix("RESULT ")), done.stdout + done.stderr


@pytest.fixture(scope="module")
def engines(model):
    """By name what each engine found in its rounds, and the log of all."""
    rounds = [[PROMPTS, 24], [[PROMPTS[0][:200] + PROMPTS[1]], 8]]
    runs = {"vllm": {"attention_backend": "CPU_MLA"}}
    for name in ("auto", "kvant_tq8", "kvant_tq4"):
        runs[name] = {"attention_backend": "CUSTOM", "kv_cache_dtype": name}
    found, log = run_engines(model, *({"options": options, "rounds": rounds} for options in runs.values()))
    return {name: result["rounds"] for name, result in zip(runs, found)}, log


def test_exact_pages_give_the_tokens_of_vllms_own_backend(engines):
    found, _ = engines
    for own, exact in zip(found["vllm"], found["auto"]):
        assert [tokens for tokens, *_ in exact] == [tokens for tokens, *_ in own]
        assert all(len(set(tokens)) > 5 for tokens, *_ in own)  # they depend on what the model reads


def test_prefix_hits(engines):
    found, _ = engines
    for name in ("auto", "kvant_tq8", "kvant_tq4"):
        assert found[name][1][0][2] == 128  # of 200 tokens in common: a whole block of vLLM's, which is two of kvant's
    assert found["vllm"][1][0][2] == 0


@pytest.mark.parametrize("name, most", [("auto", 1e-4), ("kvant_tq8", 0.2), ("kvant_tq4", 1.5)])
def test_log_probabilities_by_format(engines, name, most):
    """Of each token up to the first other one."""
    found, _ = engines
    worst, compared = 0.0, 0
    for own, ours in zip(found["vllm"], found[name]):
        for (tokens, likely, _), (other, near, _) in zip(own, ours):
            same = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), len(tokens))
            worst = max([worst, *(abs(a - b) for a, b in zip(likely[:same], near[:same]))])
            compared += same
    print(name, worst, compared)
    assert worst < most and compared > 60


def test_the_log_says_both_formats(engines):
    _, log = engines
    for words in ("512 in f32, rotary keys of 64 in f32, 2304", "512 in tq8, rotary keys of 64 in tq8, 587",
                  "512 in tq4, rotary keys of 64 in tq8, 325"):  # fmt: skip
        assert re.search(f"latent attention: latents of {words} bytes a token and layer", log)
    assert "exact copies of the first 64 and the newest 64 to 127 tokens" in log
