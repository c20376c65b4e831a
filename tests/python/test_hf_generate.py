"""generate() over kvant caches: with f32 pages the same tokens as transformers' own cache; packed, the same however
batched."""

from __future__ import annotations

import copy
import threading

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvant.hf  # noqa: E402
from hf_support import EXACT, ON_DEVICE, PACKED, assert_same, new_cache, with_cache  # noqa: E402

@pytest.fixture(params=["llama", "sliding", pytest.param("nano", marks=pytest.mark.slow)])
def model(request):
    model = request.getfixturevalue(request.param)
    yield model
    kvant.hf.disable(model)


def generate(model, inputs, new=16, **options):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new, **options}
    return model.generate(**inputs, **options)


def both(model, inputs, **options):
    """The tokens of transformers' own cache, and of kvant with f32 pages."""
    expected = generate(model, inputs, **options)
    kvant.hf.enable(model, **EXACT)
    got = generate(model, inputs, **options)
    kvant.hf.disable(model)
    return expected, got


CASES = {
    "greedy": ((300,), {}),
    "padded batch": ((400, 90, 233), {}),
    "beam": ((150,), {"num_beams": 3}),
    "beam on a padded batch": ((300, 90), {"num_beams": 3, "num_return_sequences": 2}),
    "chunked prefill": ((300,), {"prefill_chunk_size": 128}),
    "prompt lookup": ((300,), {"prompt_lookup_num_tokens": 6}),
    "long prompt lookup": ((300,), {"prompt_lookup_num_tokens": 50}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(model, prompts, case):
    lengths, options = CASES[case]
    expected, got = both(model, prompts(*lengths), **options)
    assert_same(model, expected, got, prompts(*lengths)["attention_mask"], best="num_beams" not in options)


def test_sampling(model, prompts):
    expected, got = [], []
    for tokens, enabled in ((expected, False), (got, True)):
        if enabled:
            kvant.hf.enable(model, **EXACT)
        torch.manual_seed(5)
        tokens.append(generate(model, prompts(120), do_sample=True, num_return_sequences=4, top_k=20))
    assert ON_DEVICE or torch.equal(expected[0], got[0])
    assert len({tuple(row.tolist()) for row in got[0]}) > 1


@pytest.mark.parametrize("length", [100, 300])
def test_padded_batch_is_each_alone(model, prompts, length):
    """Padding is never stored, so packed caches give bit for bit what they give for each row alone."""
    if ON_DEVICE:
        pytest.skip("torch's own products depend on the batch there")
    kvant.hf.enable(model, **PACKED)
    inputs = prompts(length, 40, 77)
    batch = generate(model, inputs)
    for i, n in enumerate((length, 40, 77)):
        alone = generate(model, {"input_ids": inputs["input_ids"][i : i + 1, length - n :]})
        assert torch.equal(batch[i, length - n :], alone[0])


def cache_of(model, exact):
    """kvant's cache with f32 pages, or transformers' own."""
    if exact:
        kvant.hf.enable(model, **EXACT)
        return new_cache(model)
    kvant.hf.disable(model)
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("equal", [True, False], ids=["equal assistant", "worse assistant"])
def test_assisted_generation(model, small_llama, prompts, equal):
    """Drafts are written and taken back. Prompts shorter than the window: transformers 5.16 itself fails beyond it."""
    inputs = prompts(60)
    assistant = copy.deepcopy(model) if equal else small_llama
    expected = generate(model, inputs)
    kvant.hf.enable(model, **EXACT)
    kvant.hf.enable(assistant, **EXACT)
    got = generate(model, inputs, assistant_model=assistant)
    kvant.hf.disable(assistant)
    assert_same(model, expected, got)


def test_three_turns_on_one_cache(model, prompts):
    answers = []
    for kvants in (False, True):
        cache, ids = cache_of(model, kvants), prompts(100)["input_ids"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids}, new=16, **with_cache(cache))
            assert cache.get_seq_length() == ids.shape[1] - 1
            if ON_DEVICE and kvants:
                assert_same(model, ids, ids, new=16)
            ids = torch.cat([ids, prompts(50 + 10 * turn, begin=1000 * turn)["input_ids"]], 1)
        answers.append(ids)
    assert ON_DEVICE or torch.equal(*answers)


def test_three_turns_of_a_padded_batch(model, prompts):
    """Padding stands between the turns, too, where a row said less than the others."""
    answers = []
    for kvants in (False, True):
        cache, inputs = cache_of(model, kvants), prompts(60, 35)
        for turn in range(3):
            ids = generate(model, inputs, new=8, **with_cache(cache))
            said = prompts(20 - 9 * turn, 12, begin=500 + 1000 * turn)
            mask = inputs["attention_mask"]
            mask = torch.cat([mask, mask.new_ones(2, 8), said["attention_mask"]], 1)
            inputs = {"input_ids": torch.cat([ids, said["input_ids"]], 1), "attention_mask": mask}
        answers.append(ids)
    if not ON_DEVICE:
        assert torch.equal(*answers)
    elif not any(cache.is_sliding):  # transformers counts the padding between turns as tokens of the window
        assert_same(model, answers[1], answers[1], inputs["attention_mask"][:, : ids.shape[1]], new=8)


def test_a_copied_cache_is_a_prefix(model, prompts):
    """Copies go on by themselves, and the original is as it was."""
    prefix = prompts(200)["input_ids"]
    ends = [torch.cat([prefix, prompts(20 + i, begin=3000 + 500 * i)["input_ids"]], 1) for i in range(2)]
    expected = [generate(model, {"input_ids": ids}) for ids in ends]
    cache = cache_of(model, True)
    with torch.no_grad():
        model(input_ids=prefix, **with_cache(cache))
    for _ in range(2):
        for ids, tokens in zip(ends, expected):
            assert_same(model, tokens, generate(model, {"input_ids": ids}, **with_cache(copy.deepcopy(cache))))
    assert cache.get_seq_length() == 200


def test_reset_and_again(model, prompts):
    """A cache that was reset takes another batch."""
    expected = [generate(model, prompts(150)), generate(model, prompts(90, 40))]
    cache = cache_of(model, True)
    assert_same(model, expected[0], generate(model, prompts(150), **with_cache(cache)))
    cache.reset()
    assert cache.get_seq_length() == 0
    inputs = prompts(90, 40)
    assert_same(model, expected[1], generate(model, inputs, **with_cache(cache)), inputs["attention_mask"])


def test_the_model_is_as_before_after_disable(model, prompts):
    before = {name: model.__dict__[name] for name in model.__dict__}
    implementation = model.config._attn_implementation
    expected = generate(model, prompts(80), return_dict_in_generate=True)
    kvant.hf.enable(model, **EXACT)
    got = generate(model, prompts(80), return_dict_in_generate=True)
    name = kvant.hf.versions.CACHE_NAME
    assert isinstance(got[name], kvant.hf.KvantCache)
    assert_same(model, expected.sequences, got.sequences)
    kvant.hf.disable(model)
    assert {name: model.__dict__[name] for name in model.__dict__} == before
    assert model.config._attn_implementation == implementation
    again = generate(model, prompts(80), return_dict_in_generate=True)
    assert type(again[name]) is DynamicCache and torch.equal(again.sequences, expected.sequences)


def test_two_models_in_two_threads(llama, sliding, prompts):
    inputs = prompts(150, 60)
    expected = {m: generate(m, inputs) for m in (llama, sliding)}
    for m in expected:
        kvant.hf.enable(m, **EXACT)
    got = {m: [] for m in expected}
    threads = [
        threading.Thread(target=lambda m=m: got[m].extend(generate(m, inputs) for _ in range(3))) for m in expected
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for m, tokens in expected.items():
        kvant.hf.disable(m)
        assert len(got[m]) == 3
        for x in got[m]:
            assert_same(m, tokens, x, inputs["attention_mask"])


def test_the_models_say_different_things(model, prompts):
    """What equal tokens prove: they depend on the prompt, and are many."""
    tokens = generate(model, prompts(100, 100), new=32)[:, 100:]
    assert not torch.equal(tokens[0], tokens[1])
    assert len(set(tokens.flatten().tolist())) > 8


def test_a_bf16_model_in_inference_mode(llama, prompts):
    """Pages in bf16 are what transformers' own cache holds: the logits differ as those of sdpa and eager do."""
    model = copy.deepcopy(llama).to(torch.bfloat16)
    ids, new = prompts(200)["input_ids"], prompts(20, begin=900)["input_ids"]
    logits = {}
    with torch.inference_mode():
        for how in ("f32", "sdpa", "kvant"):
            m = llama if how == "f32" else model
            if how == "kvant":
                kvant.hf.enable(model, k="bf16", v="bf16")
            cache = kvant.hf.cache(model, max_length=256, batch=1) if how == "kvant" else DynamicCache(config=m.config)
            m(input_ids=ids, **with_cache(cache))
            logits[how] = m(input_ids=new, **with_cache(cache)).logits.float()
    def error(how):
        return float((logits[how] - logits["f32"]).norm() / logits["f32"].norm())
    assert error("kvant") < 1.3 * error("sdpa") < 0.1
