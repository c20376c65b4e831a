"""vLLM's whole engine on the CPU, with a small trained model: scheduler, prefix cache, preemption."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest

SCRIPT = Path(__file__).with_name("generate.py")


def engine(model, cache_dtype, *rounds, **options):
    request = {"cache_dtype": cache_dtype, "options": options}
    request["rounds"] = [{"prompts": prompts, "max_tokens": count} for prompts, count in rounds]
    return subprocess.run(
        [sys.executable, SCRIPT, model, json.dumps(request)], capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def generate(nano_path):
    def run(cache_dtype, *rounds, model=nano_path, **options):
        done = engine(model, cache_dtype, *rounds, **options)
        result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert result, done.stderr[-3000:]
        return json.loads(result[0].removeprefix("RESULT "))

    return run


@pytest.fixture(scope="module")
def prompts(text):
    return [list(text[begin : begin + n]) for begin, n in ((0, 600), (3000, 90), (7000, 333), (12000, 64))]


@pytest.fixture(scope="module")
def exact(nano, torch, prompts):
    """The tokens that Hugging Face's model chooses."""
    found = []
    for p in prompts:
        with torch.no_grad():
            done = nano.generate(
                torch.tensor([p]),
                attention_mask=torch.ones(1, len(p), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(done[0, len(p) :].tolist())
    return found


def test_exact_pages_give_the_exact_models_tokens(generate, prompts, exact):
    """float32 pages: sliding layers of head_dim 256, a full one of 512, chunks of 256 tokens, a prefix hit at last."""
    batch, again = generate("auto", (prompts, 24), ([prompts[0] + exact[0][:8]], 8))["rounds"]
    assert [tokens for tokens, _ in batch] == exact
    tokens, cached = again[0]
    assert tokens == exact[0][8:16]
    assert cached >= 512  # of 608 tokens: whole blocks of the first round


def test_the_python_of_the_document(nano_path, tmp_path):
    """docs/vllm.md, with the log lines by which it says one sees that kvant serves."""
    model = tmp_path / "model"
    shutil.copytree(nano_path, model)
    models.byte_tokenizer().save_pretrained(model)
    done = subprocess.run(
        [sys.executable, SCRIPT.with_name("document.py"), model], capture_output=True, text=True, timeout=600,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )  # fmt: skip
    assert "RAN vllm.md" in done.stdout, done.stderr[-3000:]
    ends = r"exact copies of the first 64 and the newest 64 to 127 tokens: .* enough for 4 of 4 requests"
    assert re.search(ends + r", and for the newest block of 4\b", done.stdout + done.stderr)


def test_compressed_pages(nano, torch, generate, prompts):
    """Each token that tq8 chooses is the exact model's choice after the same tokens, but for near ties."""
    (batch,) = generate("kvant_tq8", (prompts, 24))["rounds"]
    for p, (tokens, _) in zip(prompts, batch):
        with torch.no_grad():
            exact = nano(torch.tensor([p + tokens])).logits[0, len(p) - 1 : -1].log_softmax(-1)
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (exact.amax(1) - chosen).max() < 0.05


@pytest.mark.slow
def test_batches(generate, prompts):
    """A batch gives what prompts alone give."""
    rounds = [(prompts, 24), *(([p], 24) for p in prompts)]
    together, *alone = generate("kvant_tq6_tq4", *rounds, enable_prefix_caching=False)["rounds"]
    assert [tokens for tokens, _ in together] == [one[0][0] for one in alone]


@pytest.mark.slow
def test_preemption(generate, prompts):
    """With too few blocks requests are preempted and computed again, and give the same tokens."""
    short = [p[:60] for p in prompts]
    roomy = generate("kvant_tq6_tq4", (short, 140), max_model_len=256)
    few = generate("kvant_tq6_tq4", (short, 140), max_model_len=256, num_gpu_blocks_override=60)
    assert roomy["preemptions"] == 0 and few["preemptions"] > 0
    assert [tokens for tokens, _ in few["rounds"][0]] == [tokens for tokens, _ in roomy["rounds"][0]]


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [1, 64])
def test_decode_context_parallel(generate, prompts, tmp_path, interleave):
    """Two worker processes that share the tokens of each request choose the tokens of one."""
    import models

    models.tiny_llama(num_key_value_heads=1, head_dim=64, initializer_range=0.2).save_pretrained(tmp_path)
    rounds = (prompts, 24), ([p + [65, 66] for p in prompts], 8)
    one = generate("auto", *rounds, model=str(tmp_path))
    both = generate(
        "auto",
        *rounds,
        model=str(tmp_path),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=interleave,
        distributed_executor_backend="mp",
    )
    for x, y in zip(one["rounds"], both["rounds"]):
        assert [tokens for tokens, _ in x] == [tokens for tokens, _ in y]
        assert all(len(set(tokens)) > 5 for tokens, _ in x)  # they depend on what the model reads
    assert sum(cached for _, cached in both["rounds"][1]) > 500  # prefix hits


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft, said",
    [
        ({"kv_cache_dtype": "kvant_tq8", "attention_backend": "CUSTOM"}, "kvant_tq4, and kv_cache_dtype in"),
        ({}, 'add "attention_backend": "CUSTOM" to --speculative-config'),
    ],
    ids=str,
)
def test_drafts_that_cannot_run(tmp_path, draft, said):
    """They are refused when the engine starts, in kvant's words."""
    import models

    models.tiny_llama(num_key_value_heads=1, head_dim=64).save_pretrained(tmp_path)
    speculative = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2} | draft
    done = engine(str(tmp_path), "kvant_tq4", block_size=64, speculative_config=speculative)
    assert done.returncode != 0 and "NotImplementedError: kvant: --" in done.stderr and said in done.stderr
