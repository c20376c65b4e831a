"""Models with latent attention (MLA): a small one of DeepSeek V2's kind in vLLM's engine, beside vLLM's own backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .engine import ON_CPU
from .latent_engine import LatentEngine

SCRIPT = Path(__file__).with_name("latents.py")
PROMPTS = [[(7 * i * i + 3 * i + n) % 120 + 3 for i in range(n)] for n in (300, 90, 64, 10)]


@pytest.fixture(scope="module")
def model(transformers, torch, tmp_path_factory):
    """Two dense layers of the widths that vLLM's own backend has on a CPU."""
    config = transformers.DeepseekV2Config(
        vocab_size=128, hidden_size=128, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, first_k_dense_replace=2, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=2048,
        initializer_range=0.12, bos_token_id=1, eos_token_id=2, topk_method="greedy",
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
        runs[name] = {"attention_backend": "CUSTOM", "kv_cache_dtype": name, "max_num_batched_tokens": 96}
    found, log = run_engines(model, *({"options": options, "rounds": rounds} for options in runs.values()))
    return {name: result["rounds"] for name, result in zip(runs, found)}, log


def test_exact_pages_give_the_tokens_of_vllms_own_backend(engines):
    """vLLM's reads prompts as a whole, and kvant's in chunks of 96 tokens in all."""
    found, _ = engines
    for own, exact in zip(found["vllm"], found["auto"]):
        assert [tokens for tokens, *_ in exact] == [tokens for tokens, *_ in own]
    assert all(len(set(tokens)) > 5 for tokens, *_ in found["vllm"][0])  # they depend on what the model reads


def test_prefix_hits(engines):
    found, _ = engines
    for name in ("auto", "kvant_tq8", "kvant_tq4"):
        assert found[name][1][0][2] == 128  # of 200 tokens in common: a whole block of vLLM's, which is two of kvant's
    assert found["vllm"][1][0][2] == 0


@pytest.mark.parametrize("name, most", [("auto", 1e-4), ("kvant_tq8", 0.1), ("kvant_tq4", 0.7)])
def test_log_probabilities_by_format(engines, name, most):
    """They are compared up to the first token that differs."""
    found, _ = engines
    worst, compared = 0.0, 0
    for own, ours in zip(found["vllm"], found[name]):
        for (tokens, likely, _), (other, near, _) in zip(own, ours):
            same = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), len(tokens))
            worst = max([worst, *(abs(a - b) for a, b in zip(likely[:same], near[:same]))])
            compared += same
    assert worst < most and compared > 60


def test_the_log_says_both_formats(engines):
    _, log = engines
    for words in ("512 in f32, rotary keys of 64 in f32, 2304", "512 in tq8, rotary keys of 64 in tq8, 587",
                  "512 in tq4, rotary keys of 64 in tq8, 325"):  # fmt: skip
        assert re.search(f"latent attention: latents of {words} bytes a token and layer", log)
    assert "exact copies of the first 64 and the newest 64 to 127 tokens" in log


@pytest.mark.slow
def test_tensor_parallel(model):
    """Two worker processes have half of the heads each, and all latents."""
    rounds = [[PROMPTS, 24], [[PROMPTS[0][:200] + PROMPTS[1]], 8]]
    one = {"attention_backend": "CUSTOM", "kv_cache_dtype": "kvant_tq4", "max_num_batched_tokens": 96}
    two = one | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    (alone, both), _ = run_engines(model, {"options": one, "rounds": rounds}, {"options": two, "rounds": rounds})
    for x, y in zip(alone["rounds"], both["rounds"]):
        assert [tokens for tokens, *_ in x] == [tokens for tokens, *_ in y]


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def latent_engine(vllm):
    return lambda *layers, **options: LatentEngine(vllm, layers or ({},), **options)


@pytest.mark.parametrize("sizes", [{}, {"latent": 256, "rope": 32, "nope": 16, "values": 48}], ids=str)
def test_layers_beside_float64(latent_engine, sizes):
    """Prompts in chunks that end within blocks, decoding, drafts that are rejected, preemption, a prefix hit."""
    if sizes and not ON_CPU:
        pytest.skip("devices have kernels of latents of 512 and rotary keys of 64")
    e = latent_engine({}, {"q_heads": 2}, cache_dtype="auto", drafts=3, **sizes)
    a, b, c = (e.request(seed) for seed in (1, 2, 3))
    e.step([(a, 100), (b, 40)])
    e.step([(a, 90), (b, 1), (c, 70)])
    e.step([(a, 64), (b, 4), (c, 2)])
    e.rewind(b, 3)
    e.step([(a, 4), (b, 4), (c, 1)])
    e.preempt(c)
    d = e.request(4, prefix_of=a, prefix_blocks=3)
    e.step([(c, 80), (d, 20), (b, 1), (a, 3)])
    e.step([(c, 1), (d, 2), (b, 1), (a, 4)], pad_to=(8, 24))
    e.dummy_step([1] * 4, 64, capture=True)
    e.step([(c, 1), (d, 1), (b, 1), (a, 1)])


def test_long_contexts_are_read_in_parts(latent_engine, monkeypatch):
    """vLLM's workspace bounds a part: parts end at a block's end, within a request, and begin with the rest of it. The
    first part here has 168 tokens in four blocks, which are more than the workspace of vLLM's own kernels."""
    from kvant.vllm.latent import LatentMetadataBuilder

    monkeypatch.setattr(LatentMetadataBuilder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: 192))
    e = latent_engine(cache_dtype="auto")
    a, b, c, d = (e.request(seed) for seed in (1, 2, 3, 4))
    e.step([(a, 250)])
    e.step([(a, 200), (b, 30), (d, 10)])
    made, _, _ = e.metadata([(c, 20), (d, 25), (b, 40), (a, 60)])
    chunks = next(iter(made.values())).prefill.chunked_context.chunks
    parts = [(x.is_continuation, x.seq_lens.tolist()) for x in chunks]
    assert parts == [(False, [10, 30, 128]), (True, [192]), (True, [130])]
    e.step([(c, 20), (d, 25), (b, 40), (a, 60)])
    e.step([(c, 100), (b, 100)])


@pytest.mark.parametrize("name", ["auto", "kvant_tq8"])
def test_a_model_in_bf16(latent_engine, torch, name):
    e = latent_engine(cache_dtype=name, dtype=torch.bfloat16, tail_pages=0)
    a, b = e.request(1), e.request(2)
    e.step([(a, 100), (b, 70)])
    e.step([(a, 1), (b, 90)])
    e.step([(a, 1), (b, 1)])


@pytest.mark.parametrize(
    "name, pair, low, high",
    [("kvant_tq8", "tq8/tq8", 4e-3, 1.5e-2), ("kvant_tq6", "tq8/tq6", 1.5e-2, 5e-2),
     ("kvant_tq4", "tq8/tq4", 6e-2, 0.15), ("kvant_fp8", "fp8/fp8", 1.5e-2, 6e-2),
     ("kvant_tq4_tq8", "tq4/tq8", 2e-2, 0.1)],
)  # fmt: skip
def test_formats(latent_engine, name, pair, low, high):
    """The error of a format without exact ends, in decoding and in a prompt's older tokens. A first chunk has none."""
    e = latent_engine(cache_dtype=name, tail_pages=0)
    assert str(e.layers[0].made.impl.layer.pair) == pair
    a = e.request(1)
    e.step([(a, 180)])
    for new in (1, 220, 1):
        e.worst = 0.0
        e.step([(a, new)], tolerance=high)
        assert e.worst > low


def test_exact_ends(latent_engine):
    """Decoding reads the first and the newest tokens exactly; a prompt's older tokens are read back encoded."""
    e = latent_engine({}, {}, cache_dtype="kvant_tq4", exact_memory=10.0)
    a = e.request(1)
    e.step([(a, 128)])
    for _ in range(3):
        e.step([(a, 1)])
    e.step([(a, 59)], tolerance=0.15)
    assert e.worst > 5e-2
    e.step([(a, 1)])  # of 191: 64 first and 127 newest
    e.worst = 0.0
    e.step([(a, 1)], tolerance=0.15)
    assert e.worst > 2e-2
    # The newest block of the prefix has an exact copy, and no codes until somebody reads it back.
    b = e.request(2, prefix_of=a, prefix_blocks=3)
    e.step([(b, 40), (a, 1)], tolerance=0.15)
    e.step([(b, 1), (a, 1)], tolerance=0.15)


def test_layers_that_stay_exact(latent_engine):
    e = latent_engine({}, {}, cache_dtype="kvant_tq4", skip_layers=("1",), tail_pages=0)
    assert [layer.made.impl.layer.pair.v for layer in e.layers] == ["tq4", "f32" if ON_CPU else "bf16"]
    a = e.request(1)
    made, slots, rows = e.metadata([(a, 150)])
    e.finish([(a, 150)], e.forward(made, slots, e.inputs([(a, 150)], rows)), 2e-5)
    made, slots, rows = e.metadata([(a, 1)])
    exact = e.forward(made, slots, e.inputs([(a, 1)], rows))[1]
    e.check(1, a, 1, exact.view(1, 4, 32), 2e-5)


def test_passes_without_a_step_write_nothing(latent_engine):
    """vLLM warms up and measures memory with slots, and without metadata."""
    e = latent_engine()
    before = e.layers[0].made.kv_cache.clone()
    a = e.request(1)
    _, slots, rows = e.metadata([(a, 70)])
    out = e.forward(None, slots, e.inputs([(a, 70)], rows))[0]
    assert out.eq(0).all() and before.equal(e.layers[0].made.kv_cache)


@pytest.mark.parametrize("name", ["auto", "kvant_tq4"])
def test_draft_models(latent_engine, name):
    """vLLM changes a draft's tables in place between its steps, and metadata are not built anew."""
    e = latent_engine(cache_dtype=name, exact_memory=10.0)
    a = e.request(1)
    e.step([(a, 100)])
    made, slots, rows = e.metadata([(a, 1)])
    e.finish([(a, 1)], e.forward(made, slots, e.inputs([(a, 1)], rows)), 2e-5)
    for _ in range(2):
        a.salts.append(a.seed)
        e.kept["lengths"][0] += 1
        e.kept["slots 0"][0] += 1
        e.builder().update_draft_decode_metadata(next(iter(made.values())))
        e.finish([(a, 1)], e.forward(made, slots, e.inputs([(a, 1)], rows)), 2e-5)


def test_plans_are_for_decoding_alone(latent_engine):
    """vLLM attends to prompts."""
    (plans,) = latent_engine().builder().plans.values()
    assert plans.extend == {} and list(plans.decode) == [1, 2, 4, 8]


def test_the_bytes_of_latents(registered, vllm, latent_engine, torch):
    """They are those of docs/formats.md."""
    from kvant.vllm import dtypes
    from kvant.vllm.backend import LatentBackend
    from kvant.vllm.versions import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

    for name, pair, size in (("kvant_tq4", ("tq8", "tq4"), 325), ("kvant_tq6", ("tq8", "tq6"), 459),
                             ("kvant_tq8", ("tq8", "tq8"), 587), ("kvant_fp8", ("fp8", "fp8"), 581),
                             ("kvant_tq4_tq4", ("tq4", "tq4"), 293)):  # fmt: skip
        assert dtypes.parse_latent(name, torch.bfloat16) == pair
        dtypes.note_layer(name, "page")
        dtypes.note_latent(512, 64)
        spec = MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, kv_quant_mode=KVQuantMode.CUSTOM
        )
        assert LatentBackend.customize_spec(spec).state_content_bytes == size
    with pytest.raises(RuntimeError, match="pages of 500 numbers a token before it has a layer or a configuration"):
        LatentBackend.customize_spec(replace(spec, head_size=500))
    with vllm.set_current_vllm_config(latent_engine().config), pytest.raises(RuntimeError, match="pages of 500 "):
        LatentBackend.customize_spec(replace(spec, head_size=500))
    other = FullAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=64, dtype=torch.uint8, kv_quant_mode=KVQuantMode.CUSTOM
    )
    with pytest.raises(NotImplementedError, match="FullAttentionSpec are not supported in a model with latent attenti"):
        LatentBackend.customize_spec(other)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_work(latent_engine, monkeypatch):
    from kvant.vllm import versions
    from kvant.vllm.latent import LatentMetadataBuilder

    with pytest.raises(NotImplementedError, match="fresh_keys = false is not supported with latent attention"):
        latent_engine(fresh_keys=False)
    with pytest.raises(NotImplementedError, match="layers of latents with sliding_window are not supported"):
        latent_engine({"sliding_window": 64})
    e = latent_engine()
    own = next(iter(e.specs.values()))
    e.config.attention_config.use_prefill_query_quantization = True
    with pytest.raises(NotImplementedError, match="use_prefill_query_quantization asks for queries in fp8"):
        LatentMetadataBuilder(own, list(e.specs), e.config, "cpu")
    e.config.attention_config.use_prefill_query_quantization = False
    e.layers[0].made.__class__ = type("OwnLatents", (type(e.layers[0].made),), {})
    with pytest.raises(NotImplementedError, match="OwnLatents is this model's own layer of latent attention"):
        LatentMetadataBuilder(own, list(e.specs), e.config, "cpu")
    monkeypatch.setattr(versions, "records_writes_alone", lambda config: True)
    with pytest.raises(NotImplementedError, match="CUDA graphs that record writes to the cache"):
        latent_engine()


def test_graphs_of_pieces_that_hold_writes(latent_engine, monkeypatch):
    from kvant.vllm import versions
    from vllm.config import CompilationMode, CUDAGraphMode

    config = latent_engine().config
    compilation = config.compilation_config
    compilation.mode, compilation.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
    assert not versions.records_writes_alone(config)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert versions.records_writes_alone(config)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    compilation.splitting_ops = ["vllm::unified_kv_cache_update"]
    assert versions.records_writes_alone(config)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert not versions.records_writes_alone(config)
