"""bench/vllm: the requests of a load, the comparison of two runs, tables and faults, models with other heads, kernels
of a trace."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDERS = [Path(__file__).resolve().parents[2] / "bench" / name for name in ("quality", "vllm")]


@pytest.fixture
def script(monkeypatch):
    import importlib

    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_caches_and_files(script, tmp_path):
    engines = script("engines")
    assert engines.settings("auto") == {"kv_cache_dtype": "auto"}
    assert engines.settings("kvant")["kv_cache_dtype"] == "auto"
    options = engines.settings('kvant_tq4 {"tail_pages": 0}')
    assert options["kv_cache_dtype"] == "kvant_tq4" and options["additional_config"] == {"kvant": {"tail_pages": 0}}
    assert options["attention_backend"] == "CUSTOM"
    assert engines.stem_of(tmp_path, 'load: kvant_tq4 {"tail_pages": 0}').name == "load_kvant_tq4_tail_pages_0"
    assert engines.load(tmp_path, "nothing") is None


def test_parts_are_processes(script, tmp_path, monkeypatch, capsys):
    """A part that fails or takes too long is named, and its workers end."""
    engines = script("engines")
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys, time; sys.path.append({str(FOLDERS[0])!r}); from engines import *\n"
        "name = sys.argv[-1]\n"
        "if name == 'wrong': sys.exit(3)\n"
        "if name == 'slow': time.sleep(60)\n"
        f"end_part(Path({str(tmp_path)!r}), name, {{'word': os.environ['WORD'], 'words': sys.argv[1:]}})\n"
    )
    monkeypatch.setattr(sys, "argv", [str(program), "a", "b"])
    parts = {name: {"WORD": name} for name in ("right", "wrong", "slow")}
    assert sorted(engines.run_parts(parts, tmp_path, 3, seconds=3)) == ["slow", "wrong"]
    assert engines.load(tmp_path, "right") == {"word": "right", "words": ["a", "b", "--one", "right"]}
    printed = capsys.readouterr().out
    assert "right: done" in printed and "wrong: failed (3)" in printed and "slow: failed (3 s were over)" in printed


def test_the_requests_of_a_load(script):
    soak = script("soak")
    texts = [[7 * i % 250 for i in range(9000)], [11 * i % 251 for i in range(9000)]]
    made = soak.requests(1, 400, texts, 3000)
    assert made == soak.requests(1, 400, texts, 3000) != soak.requests(2, 400, texts, 3000)
    lengths = [len(x.prompt) for x in made]
    assert min(lengths) >= 1 and max(lengths) <= 3000 and max(lengths) > 2000
    assert {n % 64 for n in lengths if n > 64} >= {0, 1, 63}  # cut at a block's boundary, and one token beside
    prompts = [tuple(x.prompt) for x in made]
    assert len(set(prompts)) < len(prompts) and any(x.options.get("n") == 4 for x in made)
    kinds = {x.abort[0] for x in made if x.abort}
    assert kinds == {"waiting", "prompt", "tokens"} and 0.25 < sum(x.abort is not None for x in made) / 400 < 0.42
    assert all(1 <= x.options["max_tokens"] <= 256 for x in made)
    assert sorted(x.arrives for x in made) == [x.arrives for x in made]
    short = soak.requests(1, 50, [[1, 2, 3] * 30] * 2, 100)  # texts that are shorter than a prompt may be
    assert all(1 <= len(x.prompt) <= 100 for x in short)


def test_two_runs_of_a_request(script):
    soak = script("soak")
    x = [(5, {5: -0.1, 6: -2.5}), (7, {7: -0.3, 9: -1.5}), (1, {1: -0.2})]
    assert soak.compare(x, x) == (True, 0.0, 0.0)
    y = [(5, {5: -0.2, 6: -2.5}), (9, {9: -0.4, 7: -1.0}), (2, {2: -0.2})]
    equal, apart, at_it = soak.compare(x, y)
    assert not equal and apart == pytest.approx(0.1) and at_it == pytest.approx(1.1)
    assert soak.compare(x, x[:2]) == (False, 0.0, 0.0)  # one ended earlier
    assert soak.name_of("0_q3x12-a1b2") == "q3x12" and soak.name_of("other") == "other"


def test_a_report_of_loads(script, tmp_path, monkeypatch, capsys):
    soak = script("soak")
    row = {
        "requests": 240, "ended": 160, "aborted": {"waiting": 10, "prompt": 20, "decoding": 50}, "cached": 6400,
        "preemptions": 90, "alone": [60, 41], "logprob": 0.014, "at difference": 1.25, "drafts": [0, 0], "faults": [],
        "kvant": {"copies": 7, "misses": 31, "errors": 0},
    }  # fmt: skip
    wrong = row | {"drafts": [30, 90], "faults": ["round 2: 58 of 59 blocks are free"]}
    assert soak.report(60, {"load: kvant_tq4": row}) == []
    printed = capsys.readouterr().out
    assert "160 of 240" in printed and "41 of 60" in printed and "7 of  60" in printed
    results = {"load: auto": row, "drafts: auto": wrong}

    def run_parts(parts, out, parallel, seconds):
        assert list(parts) == ["load: auto", "load: kvant_tq8", "drafts: auto", "drafts: kvant_tq8"]
        for name in set(parts) & set(results):
            soak.load.__globals__["stem_of"](out, name).with_suffix(".json").write_text(json.dumps(results[name]))
        return ["load: kvant_tq8", "drafts: kvant_tq8"]

    monkeypatch.setattr(soak, "run_parts", run_parts)
    monkeypatch.setattr(sys, "argv", ["soak.py", "model", "auto", "kvant_tq8", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        soak.main()
    for fault in ("drafts: auto: round 2: 58 of 59 blocks are free", "load: kvant_tq8: failed"):
        assert fault in end.value.code
    assert "30 of 90" in capsys.readouterr().out
    for words, reason in ((["--loads", "chat"], "must be some of load, drafts"), (["--blocks", "20"], "must fit")):
        monkeypatch.setattr(sys, "argv", ["soak.py", "model", "auto", "--out", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            soak.main()
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("heads, groups", [(6, 3), (9, 3), (8, 2), (4, 1)])
def test_models_with_other_heads(script, tmp_path, heads, groups):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models
    from transformers import AutoModelForCausalLM

    two_gpus = script("two_gpus")
    bias = {"attention_bias": True, "hidden_size": 288, "num_attention_heads": heads, "num_key_value_heads": groups}
    model = models.sharpen(models.tiny_llama(**bias))
    for name, x in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(x, std=0.1) if "o_proj" not in name else torch.nn.init.zeros_(x)
    model.save_pretrained(tmp_path / "model")
    ids = models.topics_bytes(60)
    with torch.no_grad():
        wanted = model(ids).logits
    two_gpus.make_model(tmp_path / "model", "even", tmp_path / "even")
    assert (tmp_path / "even").exists() == (groups == 3)  # two GPUs share the heads of the others
    if groups == 3:
        even = AutoModelForCausalLM.from_pretrained(tmp_path / "even", dtype=torch.float32)
        assert even.config.num_key_value_heads == 4 and even.config.num_attention_heads == heads * 4 // 3
        with torch.no_grad():
            assert (even(ids).logits - wanted).abs().max() < 1e-4 * wanted.abs().max()
    two_gpus.make_model(tmp_path / "model", "pooled", tmp_path / "pooled")
    assert (tmp_path / "pooled").exists() == (groups > 1)
    if groups > 1:
        pooled = AutoModelForCausalLM.from_pretrained(tmp_path / "pooled", dtype=torch.float32)
        assert pooled.config.num_key_value_heads == 1 and pooled.config.num_attention_heads % 2 == 0
        keys = model.model.layers[1].self_attn.k_proj.weight.view(groups, 32, 288)
        keys = torch.cat([keys, keys[:1]]) if groups == 3 else keys
        assert torch.allclose(pooled.model.layers[1].self_attn.k_proj.weight, keys.mean(0), atol=1e-6)


def test_a_report_of_two_gpus(script, tmp_path, monkeypatch, capsys):
    two_gpus = script("two_gpus")
    assert [len(x) for x in two_gpus.prompts_of([[1, 2, 3], [4] * 50000])] == 2 * list(two_gpus.LENGTHS)

    def run(tokens, logprob, text):
        return {"tokens": [[1, 2, 3], tokens], "logprobs": [[-0.1] * 3, [logprob] * 3], "text": [text] * 5, "again": 2}

    found = {
        "one: auto": run([4, 5, 6], -0.5, -1.0),
        "one: kvant_tq4": run([4, 5, 7], -0.52, -1.02),
        "tensor: auto": run([4, 5, 6], -0.51, -1.01),
        "tensor: kvant_tq4": run([4, 5, 6], -0.53, -1.03),
        "one pooled: auto": run([4, 5, 6], -0.5, -1.0),
        "one pooled: kvant_tq4": run([4, 5, 6], -0.52, -1.02),
        "context: kvant_tq4": run([8, 5, 6], -0.5, -1.5),
        "draft: kvant_tq4": {k: x for k, x in run([4, 5, 7], -0.52, 0).items() if k != "text"} | {"drafts": [9, 12]},
    }
    here = two_gpus.compare(found["tensor: kvant_tq4"], found["one: kvant_tq4"])
    assert (here.equal, here.of, here.tokens) == (1, 2, 2.5) and here.text == pytest.approx(0.01)

    def run_parts(parts, out, parallel, seconds):
        assert parts["tensor: auto"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
        alone = [x["CUDA_VISIBLE_DEVICES"] for name, x in parts.items() if name.startswith(("one", "draft"))]
        assert alone == ["0", "1"] * (len(alone) // 2)
        for name in set(parts) & set(found):
            two_gpus.load.__globals__["stem_of"](out, name).with_suffix(".json").write_text(json.dumps(found[name]))
        return ["context: auto"]

    monkeypatch.setattr(two_gpus, "run_parts", run_parts)
    monkeypatch.setattr(two_gpus, "make_model", lambda *a: None)
    words = ["two_gpus.py", "model", "auto", "kvant_tq4", "--out", str(tmp_path), "--modes", "tensor,draft,context"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="failed: context: auto; too far from one GPU: context: kvant_tq4"):
        two_gpus.main()
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["context: kvant_tq4"].endswith("FAR") and not lines["tensor: kvant_tq4"].endswith("FAR")
    assert "drafts 9 of 12" in lines["draft: kvant_tq4"]
    monkeypatch.setattr(sys, "argv", [*words[:-1], "tensor,many"])
    with pytest.raises(SystemExit):
        two_gpus.main()


# Names as torch's profiler gives them; what follows is cut. `...` stands for arguments of templates.
NAMES = {
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>": "write",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>": "write",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90"
    "<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, ..., 128, cutlass::bfloat16_t, float": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>, cute::C<64> >, 4, 256": "merge",
    "void flash::prepare_varlen_num_blocks_kernel<1, false>(int, int, int, int const*, int const*": "step",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false": "attention",
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false": "merge",
    "kernel_unified_attention_2d": "attention",
    "reduce_segments": "merge",
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT": "product",
    "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float": "product",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16": "product",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": "product",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, c10::BFloat16, true>(long const*": "other",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long": "other",
    "void vllm::scaled_fp8_quant_kernel_strided_dynamic<c10::BFloat16, c10::Float8_e4m3fn>": "other",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>": "other",
}
KIND_OF_FOLDER = {  # of src/cuda
    "append": "write", "decode": "attention", "decode_latent": "attention", "prefill_sm80": "attention",
    "prefill_sm90": "attention", "prefill_dense": "attention", "prefill_unpacked": "attention", "merge": "merge",
    "blocks": "step", "store": "step", "mask": "step", "read_back": "step", "schedule": "step",
}  # fmt: skip


def test_kernels_are_told_apart_by_their_names(script):
    kernels = script("kernels")
    assert {name: kernels.kind_of(name) for name in NAMES} == NAMES
    found = set()
    for file in sorted((FOLDERS[0].parents[1] / "src" / "cuda").rglob("*.cu*")):
        for name in re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", file.read_text(encoding="utf-8")):
            name_in_trace = f"void kvant::cuda::prefill::{name}<(kvant::Format)2, 128, 4>(kvant::cuda::AttendParams)"
            assert kernels.kind_of(name_in_trace) == KIND_OF_FOLDER[file.parent.name], (file, name)
            found.add(name)
    assert {"few_slots_kernel", "eight_warps_attend_kernel", "unpack_kernel", "begin_step_kernel"} <= found


def event(name, begin, time):
    return {"cat": "kernel", "name": name, "ts": begin, "dur": time}


def layer(begin, write, attention, merge=0.0, late=0.0):
    """Attention's launch begins beside the write's, as kvant's does. late: a write behind the merge."""
    made = [event("nvjet_tst_192x8_64x8", begin, 4), event("void vllm::rotary_embedding_kernel<int>()", begin + 4, 1)]
    made += [event("void kvant::cuda::few_slots_kernel<S>(P)", begin + 6, write)]
    made += [event("void kvant::cuda::attend_kernel<F, 128>(P)", begin + 7, attention)]
    if merge:
        made.append(event("void kvant::cuda::merge_kernel<128>(P)", begin + 7 + attention, merge))
    if late:
        made.append(event("void kvant::cuda::many_kernel<S>(P)", begin + 7 + attention + merge, late))
    made += [event("nvjet_tst_128x8_64x8", begin + 90, 3), event("void vllm::act_and_mul_kernel<int>()", begin + 93, 1)]
    return made


def test_the_kernels_of_a_layer(script, tmp_path):
    kernels = script("kernels")
    steps = [event("void kvant::cuda::begin_step_kernel(kvant::cuda::BeginStep)", 0, 9)]
    steps += layer(10, 2, 20, 3) + layer(110, 2, 22, 3, late=4) + layer(210, 5, 40)
    events = [*steps[::2], *steps[1::2], {"cat": "gpu_memset", "ts": 1}]
    (tmp_path / "tp0.json").write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "tp1.json").write_text(json.dumps({"traceEvents": []}))
    found = kernels.summary(kernels.of_trace(kernels.take_trace(tmp_path)))
    assert found["layers"] == 3
    assert [found[x] for x in ("write", "attention", "merge", "step")] == pytest.approx([13 / 3, 82 / 3, 2, 3])
    assert found["all"] == pytest.approx(26)  # of 24, 26 and 41
    assert found["kernels"][0] == ("void kvant::cuda::attend_kernel<F, 128>(P)", 1, pytest.approx(82 / 3))
    with pytest.raises(RuntimeError, match="wrote no trace"):
        kernels.take_trace(tmp_path)
    with pytest.raises(RuntimeError, match="no attention among 1 kernels"):
        kernels.summary(kernels.of_trace({"traceEvents": steps[:1]}))


def test_rows_of_speed(script, monkeypatch, capsys):
    speed = script("speed")
    rows = speed.rows_of("16x2048,16x8192+7,128x4096:512,16x2048")
    assert rows == [(16, 2048, 0, 0), (16, 8192, 7, 0), (128, 4096, 0, 512)]
    assert [str(x) for x in rows] == ["16x2048", "16x8192+7", "128x4096:512"]
    assert [x.words for x in rows] == ["16 x 2048", "16 x 8192, 7 drafts", "128 requests of 4096 + 512"]
    assert rows[1].most_new > 8 * 64 * 4 and rows[2].most_new == 512
    a = speed.parse([])
    assert a.caches == ["auto", "fp8", "kvant_tq4", "kvant_tq6_tq4"] and a.seconds is None and not a.kernels
    assert speed.drafts_of(a.rows) == [0, 3, 7] and len(a.rows) == 11
    # The bfloat16 cache holds each row but those that run to their end.
    assert all(x.requests * (x.prompt + x.most_new) <= 24 * 2**30 // 2**17 for x in a.rows if not x.new)
    assert speed.split(speed.name_of(3, 'kvant_tq4 {"tail_pages": 0}')) == (3, 'kvant_tq4 {"tail_pages": 0}')
    for wrong in ("16", "16x", "0x5", "16x2048+3:5", "16x2048+0", "2048"):
        with pytest.raises(SystemExit):
            speed.parse(["--rows", wrong])
        assert "a row is such as 16x2048" in capsys.readouterr().err


class Steps:
    """An engine whose requests get their first tokens one after another, then `each` tokens a step. Every fifth call
    gives nothing, as where steps are scheduled ahead."""

    def __init__(self, each):
        self.each, self.names, self.done, self.aborted, self.calls = each, [], {}, [], 0

    def add_request(self, name, prompt, sampling):
        self.names.append((name, sampling))
        self.done[name] = 0

    def has_unfinished_requests(self):
        return any(self.done[name] < most for name, most in self.names if name not in self.aborted)

    def step(self):
        self.calls += 1
        if self.calls % 5 == 0:
            return []
        begun = [x for x in self.names if self.done[x[0]]]
        for name, most in begun:
            self.done[name] = min(most, self.done[name] + self.each)
        begun += self.names[len(begun) : len(begun) + 1]
        self.done[begun[-1][0]] = max(1, self.done[begun[-1][0]])
        tokens = {name: self.done[name] for name, _ in begun} | {"of the batch before": 99}
        return [SimpleNamespace(request_id=n, outputs=[SimpleNamespace(token_ids=range(x))]) for n, x in tokens.items()]

    def abort_request(self, names):
        self.aborted += names


def test_a_batch_is_timed_when_all_of_it_decodes(script, monkeypatch):
    speed = script("speed")
    monkeypatch.setattr(speed, "greedy", lambda tokens: tokens)
    engine = Steps(4)
    batch = speed.Batch(SimpleNamespace(llm_engine=engine), [[1, 2]] * 3, 1000)
    batch.until(3)
    assert list(batch.tokens.values()) == [13, 9, 5] and len(batch.first) == 3
    assert list(batch.first.values()) == sorted(batch.first.values())
    assert batch.steps(10)[1] == 120 and sum(batch.tokens.values()) == 147
    batch.end()
    assert len(engine.aborted) == 3
    with pytest.raises(RuntimeError, match="requests ended with 5 of 9 tokens"):
        speed.Batch(SimpleNamespace(llm_engine=Steps(4)), [[1]], 5).until(9)


def test_kernels_come_after_all_speeds(script, tmp_path, monkeypatch):
    """Not of rows that were left out or run to their end; the prompt's once, without drafts."""
    speed = script("speed")
    done = []

    class Engine:
        def __init__(self, a, cache, rows):
            self.about = {"tokens in the cache": 64}
            done.append((cache, len(rows)))

        def prompt(self, tokens):
            done.append(f"prompt {tokens}")

        def kernels(self, run):
            run()
            return {"all": 1}

        def decode(self, row):
            done.append(str(row))
            return {"left out": "small"} if row.requests == 64 else {"tokens/s": 1}

        def to_the_end(self, row):
            done.append(str(row))
            return {"tokens/s": 2}

        def decode_kernels(self, row):
            done.append(f"kernels {row}")
            return {"all": 2}

    def end_part(out, name, found):
        speed.save(out, name, found)
        raise SystemExit

    monkeypatch.setattr(speed, "Engine", Engine)
    monkeypatch.setattr(speed, "end_part", end_part)
    monkeypatch.setattr(speed, "versions", lambda: {"vllm": "0.33.0"})
    words = ["kvant_tq4", "--rows", "64x9000,2x70,2x70+3,4x64:8", "--kernels", "--out", str(tmp_path)]
    for drafts, wanted in (
        (0, [("kvant_tq4", 3), "prompt 8192", "64x9000", "2x70", "4x64:8", "prompt 8192", "kernels 2x70"]),
        (3, [("kvant_tq4", 1), "prompt 70", "2x70+3", "kernels 2x70+3"]),
    ):
        done.clear()
        with pytest.raises(SystemExit):
            speed.measure(speed.parse(words), speed.name_of(drafts, "kvant_tq4"))
        assert done == wanted
    found = speed.gather(speed.parse(words))["caches"]["kvant_tq4"]
    assert found["prompt"] == {"all": 1} and found["about"] == {"tokens in the cache": 64, "vllm": "0.33.0"}
    assert found["rows"] == {
        "64x9000": {"left out": "small"},
        "2x70": {"tokens/s": 1, "kernels": {"all": 2}},
        "4x64:8": {"tokens/s": 2},
        "2x70+3": {"tokens/s": 1, "kernels": {"all": 2}},
    }


def speeds(rate, ms, first, tokens=1.0, parts=None):
    found = {"tokens/s": rate, "ms a step": ms, "tokens a step": tokens, "last first token, s": first}
    return found if parts is None else found | {"kernels": dict(zip(("write", "attention", "merge", "all"), parts))}


def test_the_table_of_speed(script, tmp_path, monkeypatch, capsys):
    speed = script("speed")
    about = {"GPU": "NVIDIA H200", "vllm": "0.33.0", "tokens in the cache": 196608}
    results = {
        "0 drafts: auto": {
            "about": about,
            "prompt": {"write": 49, "attention": 939, "merge": 0, "all": 990},
            "rows": {
                "1x2048": speeds(196.0, 5.1, 0.08, parts=(2.24, 10.8, 3, 17.8)),
                "16x2048": speeds(2601, 6.15, 0.738),
                "128x4096:512": {"tokens/s": 2173.0, "s": 30, "last first token, s": 20},
            },
        },
        "0 drafts: kvant_tq4": {
            "about": about | {"tokens in the cache": 746834},
            "rows": {
                "1x2048": speeds(176.4, 5.7, 0.09, parts=(2.6, 21.2, 3.3, 26.4)),
                "16x2048": {"left out": "small"},
            },
        },
        "3 drafts: auto": {"about": about, "rows": {"16x8192+3": speeds(6772, 9.45, 3.4, 4.0)}},
        "3 drafts: kvant_tq4": {"about": about, "rows": {"16x8192+3": speeds(7640, 8.38, 3.5, 3.5)}},
    }

    def run_parts(parts, out, parallel, seconds=None, total=None):
        assert list(parts) == list(results) and parallel == 1 and total == 200
        assert json.loads((out / "model" / "config.json").read_text()) == {"made": "llama-8b"}
        for name, x in results.items():
            speed.save(out, name, x)
        return ["3 drafts: kvant_tq4"]

    def make_model(folder, shape):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"made": shape}))

    monkeypatch.setattr(speed, "run_parts", run_parts)
    monkeypatch.setattr(speed, "make_model", make_model)
    words = ["speed.py", "auto", "kvant_tq4", "--rows", "1x2048,16x2048,128x4096:512,16x8192+3", "--seconds", "200"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path), "--json", str(tmp_path / "all.json")])
    with pytest.raises(SystemExit, match="failed, or out of time: 3 drafts: kvant_tq4"):
        speed.main()
    printed = capsys.readouterr().out
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    assert {x[0]: x[1:] for x in rows} == {
        "": ["auto", "kvant_tq4"],
        "---": ["---", "---"],
        "1 x 2048, tokens/s": ["196.0", "176.4 (0.90)"],
        "16 x 2048, tokens/s": ["2601", "-"],
        "128 requests of 4096 + 512, tokens/s": ["2173", "-"],
        "16 x 8192, 3 drafts, tokens/s": ["6772", "7640 (1.13), 3.50 of 4 a step"],
        "16 x 2048, s to the last first token": ["0.74", "-"],
        "1 x 2048, us a layer": ["2.2, 10.8, 3.0; 17.8", "2.6, 21.2, 3.3; 26.4"],
        "prompt of 8192, us a layer": ["49.0, 939.0, 0.0; 990.0", "-"],
    }
    assert "kvant_tq4 746834" in printed and "left out: kvant_tq4, 16x2048: small" in printed
    monkeypatch.setattr(sys, "argv", ["speed.py", "--table", str(tmp_path / "all.json")])
    speed.main()
    assert capsys.readouterr().out == printed


def test_parts_share_what_is_left_of_the_time(script, tmp_path, monkeypatch, capsys):
    """A part that needs less leaves more for the next ones."""
    engines = script("engines")
    program = tmp_path / "program.py"
    program.write_text("import sys, time; time.sleep(60 if sys.argv[-1] == 'slow' else 0)")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert engines.run_parts({"quick": {}, "slow": {}, "last": {}}, tmp_path, 1, total=2) == ["slow"]
    assert "slow: failed (1 s were over)" in capsys.readouterr().out
    assert engines.run_parts({"quick": {}, "slow": {}}, tmp_path, 1, total=2) == ["slow"]
    assert "slow: failed (2 s were over)" in capsys.readouterr().out
    assert engines.run_parts({"slow": {}}, tmp_path, 1, seconds=0.5, total=30) == ["slow"]
