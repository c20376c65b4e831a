"""The first hour of a new user: reports, refusals at enable(), and messages that name what is wrong."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from hf_support import ISA

import kvant
import kvant.hf
from kvant._tools import tool
from kvant.hf import versions


@pytest.fixture
def disabled(llama, sliding):
    """Leaves the shared models as they were."""
    yield
    for model in (llama, sliding):
        kvant.hf.disable(model)


def step(model, cache, ids):
    with torch.no_grad():
        return model(ids, **{versions.CACHE_NAME: cache}).logits


# --- exact ends under short windows ---


def test_a_window_keeps_an_exact_tail(sliding, prompts, disabled):
    """Under a window of 128 all that a query sees is exact at first; further on, what is behind the tail is not."""
    cache = kvant.hf.cache(kvant.hf.enable(sliding, short_windows=True, isa=ISA))
    ids = prompts(400)["input_ids"]
    for begin, end, exact, encoded in ((0, 128, 128, 0), (128, 300, 44 + 64, 20), (300, 400, 16 + 64, 48)):
        step(sliding, cache, ids[:, begin:end])
        window, _, full, _ = kvant.hf.report(cache).rows
        assert window.ends.startswith("1 sink and 1 tail pages")
        # The next query sees the newest 127 tokens and its own: the rows count what is stored.
        assert (window.exact_tokens, window.encoded_tokens) == (exact, encoded), end
        assert full.exact_tokens == min(end, 64 + 64 + end % 64) and full.exact_tokens + full.encoded_tokens == end


def test_windows_that_take_as_much_as_bf16_stay(transformers):
    for window, stored in ((384, False), (385, True)):
        config = transformers.MistralConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=64,
            sliding_window=window,
        )  # fmt: skip
        model = transformers.MistralForCausalLM(config)
        assert [row.stored for row in kvant.hf.report(kvant.hf.enable(model)).rows] == [stored]


# --- reports ---


def test_the_report_counts_tokens_and_explains_short_caches(llama, prompts, disabled):
    cache = kvant.hf.cache(kvant.hf.enable(llama, isa=ISA))
    step(llama, cache, prompts(40)["input_ids"])
    short = kvant.hf.report(cache)
    assert {(row.exact_tokens, row.encoded_tokens) for row in short.rows} == {(40, 0)}
    assert short.bytes > short.bf16_bytes and "takes more than bf16 so far" in str(short)
    cache.reset()
    step(llama, cache, prompts(1000)["input_ids"])
    long = kvant.hf.report(cache)
    assert {(row.exact_tokens, row.encoded_tokens) for row in long.rows} == {(64 + 64 + 1000 % 64, 1000 - 168)}
    assert long.bytes < long.bf16_bytes and "more than bf16" not in str(long)
    assert " 168      832 " in str(long)
    mixed = kvant.hf.cache(llama, k="f32", v="tq4")
    step(llama, mixed, prompts(1000)["input_ids"])
    assert all(row.encoded_tokens for row in kvant.hf.report(mixed).rows)  # the values are


def test_what_is_counted_is_what_is_read(llama, prompts, disabled):
    """Tokens that the report calls exact are those that decode gives back as they were."""
    cache = kvant.hf.cache(kvant.hf.enable(llama, exact="f32", isa=ISA))
    ids = prompts(333)["input_ids"]
    step(llama, cache, ids)
    own = versions.DynamicCache(config=llama.config)
    kvant.hf.disable(llama)
    step(llama, own, ids)
    group = cache.groups[0]
    keys, _ = group.cache.decode(group.sequences, 0)
    given = own.layers[0].keys[0].transpose(0, 1).numpy()
    exact = int((abs(keys - given).max((1, 2)) < 1e-5).sum())
    row = kvant.hf.report(cache).rows[0]
    assert (row.exact_tokens, row.encoded_tokens) == (exact, 333 - exact) and 0 < exact < 333


# --- refusals at enable() ---


def test_strict_refuses_whatever_would_be_left(sliding, disabled):
    with pytest.raises(kvant.Unsupported, match=r"layer 0: a window of 128.*strict=True; skip_layers=\[0\]"):
        kvant.hf.enable(sliding, strict=True)
    assert "_kvant" not in sliding.__dict__
    kvant.hf.enable(sliding, strict=True, skip_layers=[0, 1, 3])  # wanted, so no error
    with pytest.raises(kvant.Unsupported, match="layer 1: a window of 128"):
        kvant.hf.cache(sliding, skip_layers=[0])


def test_settings_that_cannot_be_are_refused_by_enable(llama, tmp_path, disabled):
    bad = tmp_path / "bases.safetensors"
    bad.write_bytes(b"not a file of bases")
    for options, error, message in (
        ({"bases": str(bad)}, kvant.BadFile, "bases.safetensors"),
        ({"bases": tmp_path / "none"}, kvant.FileError, "none"),
        ({"bases": 3}, kvant.InvalidArgument, "bases is a int: must be a path or a kvant.Bases"),
        ({"isa": "sse9"}, kvant.InvalidArgument, 'isa = "sse9": this machine has .*scalar'),
        ({"k": "lut4"}, kvant.InvalidArgument, 'k = "lut4": this format is for imported caches'),
    ):
        with pytest.raises(error, match=message):
            kvant.hf.enable(llama, **options)
        assert "_kvant" not in llama.__dict__


def test_bases_of_another_model_are_refused_by_enable(llama, sliding, prompts, tmp_path, disabled):
    try:
        tool()
    except kvant.Unsupported as error:
        pytest.skip(f"needs kvant calibrate: {error}")
    captured, bases = tmp_path / "qkv.safetensors", tmp_path / "bases.safetensors"
    kvant.hf.capture(sliding, prompts(300)["input_ids"], captured, layers=[2], queries=200)
    assert {row["k_format"] for row in kvant.eval(captured, "tq4")["rows"]} == {"tq4"}
    kvant.calibrate(captured, bases)
    with pytest.raises(kvant.InvalidArgument, match="layer 0 has no calibrated basis"):
        kvant.hf.enable(llama, bases=bases)
    kvant.hf.enable(llama, bases=bases, skip_layers=[0, 1, 3])
    with pytest.raises(kvant.InvalidArgument, match="bf16 stores vectors as given"):
        kvant.hf.enable(llama, bases=bases, skip_layers=[0, 1, 3], k="bf16")
    with pytest.raises(kvant.InvalidArgument, match="bases is given, which k_basis = hadamard"):
        kvant.Cache(kv_heads=2, head_dim=64, bases=bases)


def test_encoders_are_refused(transformers):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    for model in (
        transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=64)),
        transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=16)),
    ):
        with pytest.raises(ValueError, match=f"{type(model).__name__} keeps no keys and values of earlier tokens"):
            kvant.hf.enable(model)


def test_a_mask_of_three_dimensions_is_refused(llama, prompts, disabled):
    kvant.hf.enable(llama, isa=ISA)
    ids = prompts(20)["input_ids"]
    mask = torch.ones(1, 20, 20, device=ids.device)
    for cache in (kvant.hf.cache(llama), None):
        with pytest.raises(ValueError, match=r"attention_mask has 3 dimensions, \[1, 20, 20\]: must be \[batch, tok"):
            with torch.no_grad():
                llama(ids, attention_mask=mask, use_cache=cache is not None, **{versions.CACHE_NAME: cache})


# --- messages ---


def test_an_interrupted_pass_is_named(llama, prompts, disabled):
    cache = kvant.hf.cache(kvant.hf.enable(llama, isa=ISA))
    ids = prompts(60)["input_ids"]
    step(llama, cache, ids[:, :50])

    def stop(*_):
        raise KeyboardInterrupt

    hook = llama.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        step(llama, cache, ids[:, 50:53])
    hook.remove()
    expected = r"layer 2 has 50 tokens, where others have 53.*cache.crop\(-3\)"
    with pytest.raises(RuntimeError, match=expected):
        step(llama, cache, ids[:, 53:])
    cache.crop(-3)
    again = step(llama, cache, ids[:, 50:])
    fresh = kvant.hf.cache(llama)
    step(llama, fresh, ids[:, :50])
    assert torch.equal(again, step(llama, fresh, ids[:, 50:]))


def test_an_enabled_model_is_not_pickled(llama, disabled):
    with pytest.raises(TypeError, match=r"with kvant enabled cannot be pickled: call kvant.hf.disable\(model\)"):
        pickle.dumps(kvant.hf.enable(llama))
    assert pickle.loads(pickle.dumps(kvant.hf.disable(llama))).config.head_dim == 64


def test_a_cache_of_a_smaller_model_is_named(llama, small_llama, prompts, disabled):
    kvant.hf.enable(llama, isa=ISA)
    with pytest.raises(ValueError, match="layer 1 of a cache that was made for a model of 1 layers"):
        step(llama, kvant.hf.cache(small_llama), prompts(5)["input_ids"])


def test_numbers_that_are_not_finite_name_their_layer(llama, prompts, device, disabled):
    if device != "cpu":
        pytest.skip("a device stores them, and its rows become NaN")
    cache = kvant.hf.cache(kvant.hf.enable(llama, isa=ISA))
    hook = llama.model.layers[3].self_attn.k_proj.register_forward_hook(lambda *x: x[2] * float("nan"))
    with pytest.raises(kvant.NonFinite, match="^layer 3: keys: sequence"):
        step(llama, cache, prompts(5)["input_ids"])
    hook.remove()


def test_captures_name_the_layers_there_are(llama, prompts, tmp_path):
    for layers in ([1, 4], [-1], []):
        with pytest.raises(kvant.InvalidArgument, match="is not in the model, whose layers are 0 to 3"):
            kvant.hf.capture(llama, prompts(5)["input_ids"], tmp_path / "x", layers=layers)


def test_an_empty_text_is_named(llama):
    for text in ("", [], torch.zeros(1, 0)):
        with pytest.raises(kvant.InvalidArgument, match="text_or_ids is empty"):
            kvant.hf.evaluate(llama, text, tokenizer=lambda text: {"input_ids": []})


# --- names and hints ---


def test_a_file_without_token_ids_says_so(llama, prompts, disabled, tmp_path):
    ids = prompts(70)["input_ids"]
    path = tmp_path / "chat.kvs"
    not_enabled = kvant.hf.cache(llama, isa=ISA)
    step(llama, not_enabled, ids)
    with pytest.warns(UserWarning, match="chat.kvs is saved without token ids, because this cache has not seen all of"):
        kvant.hf.save(not_enabled, path)
    cache = kvant.hf.cache(kvant.hf.enable(llama, isa=ISA))
    with torch.no_grad():
        llama(inputs_embeds=llama.get_input_embeddings()(ids), **{versions.CACHE_NAME: cache})
    with pytest.warns(UserWarning, match="because the model was given embeddings: .* Pass tokens="):
        kvant.hf.save(cache, path)
    assert kvant.Snapshot(path).tokens(0) == []
    seen = kvant.hf.cache(llama)
    step(llama, seen, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.hf.save(cache, path, tokens=ids.tolist())
        kvant.hf.save(seen, path)
    assert kvant.Snapshot(path).tokens(0) == ids[0].tolist()


@pytest.mark.parametrize(
    "options, hint",
    [
        ({"k": "tq4/tq4"}, "keys and values are given separately: k = tq4, v = tq4$"),
        ({"v": "q4_0"}, "^v: format 'q4_0' is not known: must be one of .*; for q4_0 write tq4$"),
        ({"k": "fp8_e4m3"}, "for fp8_e4m3 write fp8$"),
        ({"k": 4}, "^k = 4: must be a str"),
    ],
)
def test_names_of_other_software_get_a_hint(llama, disabled, options, hint):
    for call in (
        lambda: kvant.hf.enable(llama, **options),
        lambda: kvant.hf.Settings.make(**options),
        lambda: kvant.Cache(kv_heads=1, head_dim=64, **options),
    ):
        with pytest.raises(kvant.InvalidArgument, match=hint):
            call()


def test_the_modules_show_what_users_call():
    for module, names in ((kvant, {"Cache", "hf"}), (kvant.hf, {"enable", "report"})):
        shown = {name for name in dir(module) if not name.startswith("__")}
        assert names <= shown <= {*module.__all__, "hf", "vllm"}
        assert all(hasattr(module, name) for name in dir(module))
