"""A cache knows its conversation: prompts are compared with its token ids, also in files and prefixes."""

from __future__ import annotations

import copy
import types
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from conversation_support import (  # noqa: E402, F401
    EXACT, GREEDY, answer, filled, ids_of, longer_frequencies, longrope, model, picture, plain, restored, seeing,
)  # fmt: skip
from hf_support import forward, with_cache  # noqa: E402
from kvant.hf import conversation, versions  # noqa: E402


# --- prompts and token ids ---


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150, 199, 200, 201, 260])
@pytest.mark.parametrize("saved", [False, True], ids=["lasting", "restored"])
def test_a_prompt_that_begins_as_the_cache_does(plain, model, tmp_path, tokens, saved):
    """Shorter, equal and longer than the cache: the answer of the prompt alone."""
    ids = ids_of(260)
    cache = filled(model, ids[:, :200])
    if saved:
        cache = restored(model, cache, tmp_path)
    assert torch.equal(answer(model, ids[:, :tokens], **with_cache(cache)), answer(plain, ids[:, :tokens]))
    assert cache.get_seq_length() == tokens + 7  # the last token of an answer is not computed
    assert cache.conversation.ids(tokens + 7)[0, :tokens].tolist() == ids[0, :tokens].tolist()


@pytest.mark.parametrize("same", [1, 64, 100, 199])
def test_a_prompt_that_branches(plain, model, same):
    cache = filled(model, ids_of(200))
    other = torch.cat([ids_of(200)[:, :same], ids_of(60, seed=9)], 1)
    other[0, same] = (ids_of(200)[0, same % 199] + 1) % 250  # surely another token
    assert torch.equal(answer(model, other, **with_cache(cache)), answer(plain, other))


def test_another_text_is_refused_and_the_cache_stays(model):
    ids = ids_of(200)
    cache = filled(model, ids)
    with pytest.raises(ValueError, match="no token in common with the 200 tokens that the cache holds"):
        answer(model, (ids + 1) % 250, **with_cache(cache))
    assert cache.get_seq_length() == 200 and torch.equal(cache.conversation.ids(200), ids)


def test_new_ids_alone_need_a_mask_over_all(plain, model):
    ids, cache = ids_of(230), filled(model, ids_of(230)[:, :200])
    got = answer(model, ids[:, 200:], attention_mask=torch.ones_like(ids), **with_cache(cache))
    assert torch.equal(got, answer(plain, ids))


def test_padded_rows(plain, model, tmp_path):
    """Left padding is no part of a prompt, whatever ids stand there."""
    ids, mask = ids_of(150, rows=3), torch.ones(3, 150, dtype=torch.long)
    mask[1, :40] = mask[2, :1] = 0
    places = (mask[:, :120].cumsum(1) - 1).clamp(min=0)
    cache = filled(model, ids[:, :120], attention_mask=mask[:, :120], position_ids=places)
    cache = restored(model, cache, tmp_path)
    assert [len(row) for row in kvant.Snapshot(tmp_path / "chat.kvs").load().sequences] == [120, 80, 119]
    for tokens in (150, 120, 100):  # longer, then shorter than what the answer before left
        expected = answer(plain, ids[:, :tokens], attention_mask=mask[:, :tokens])
        got = answer(model, ids[:, :tokens], attention_mask=mask[:, :tokens], **with_cache(cache))
        assert torch.equal(got, expected), tokens
    branch = ids[:, :110].clone()
    branch[1, 90] += 1  # one row parts from what it was: all go back to there
    got = answer(model, branch, attention_mask=mask[:, :110], **with_cache(cache))
    assert torch.equal(got, answer(plain, branch, attention_mask=mask[:, :110]))
    mask[1, 30:40] = 1  # what was padding is to be seen
    got = answer(model, branch, attention_mask=mask[:, :110], **with_cache(cache))
    assert torch.equal(got, answer(plain, branch, attention_mask=mask[:, :110]))


def test_padding_that_generate_infers_is_no_part_of_a_prompt(plain, model, tmp_path):
    """From pad_token_id, where no mask is given; a file has no ids of padding."""
    ids, mask = ids_of(90, rows=2), torch.ones(2, 90, dtype=torch.long)
    ids[1, :20], mask[1, :20] = 255, 0
    places = (mask[:, :60].cumsum(1) - 1).clamp(min=0)
    cache = filled(model, ids[:, :60], attention_mask=mask[:, :60], position_ids=places)
    got = answer(model, ids, pad_token_id=255, **with_cache(restored(model, cache, tmp_path)))
    assert torch.equal(got, answer(plain, ids, pad_token_id=255))


def test_rows_of_a_batch_stay_with_their_ids(plain, model):
    ids = ids_of(90, rows=3)
    cache = filled(model, ids)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(cache.conversation.ids(90), ids[[2, 0]])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.conversation.ids(90), ids[[0, 2]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.conversation.ids(90), ids[[0, 0, 2, 2]])
    twin = copy.deepcopy(cache)
    cache.crop(-30)
    assert torch.equal(cache.conversation.ids(60), ids[[0, 0, 2, 2], :60]) and twin.conversation.ids(60) is None
    assert torch.equal(twin.conversation.ids(90), ids[[0, 0, 2, 2]])
    again = ids[[0, 2]]
    assert torch.equal(answer(model, again, num_beams=2, **with_cache(twin)), answer(plain, again, num_beams=2))


def test_many_steps_keep_their_ids(model):
    ids = ids_of(150)
    cache = filled(model, ids[:, :10])
    for i in range(10, 150):
        forward(model, cache, ids[:, i : i + 1])
    assert len(cache.conversation._pieces) <= 64
    assert torch.equal(cache.conversation.ids(150), ids)
    cache.reset()
    given = ids[:, :5].clone()
    forward(model, cache, given)
    given.fill_(7)  # the caller's to write the next ones to
    assert torch.equal(cache.conversation.ids(5), ids[:, :5])


def test_ids_that_are_not_known(plain, model, tmp_path):
    ids = ids_of(120)
    embed = model.get_input_embeddings()
    cache = kvant.hf.cache(model)
    forward(model, cache, None, inputs_embeds=embed(ids[:, :50]))
    forward(model, cache, ids[:, 50:80])
    assert cache.conversation.ids(80) is None
    with pytest.raises(ValueError, match="the prompt has 80 tokens, where the cache holds 80 that it does not know"):
        answer(model, ids[:, :80], **with_cache(cache))
    kvant.hf.save(cache, tmp_path / "a.kvs")
    with pytest.raises(ValueError, match="pass tokens= to kvant.hf.save"):
        answer(model, ids, **with_cache(kvant.hf.load(model, tmp_path / "a.kvs")))
    expected = answer(plain, ids)
    kvant.hf.save(cache, tmp_path / "a.kvs", tokens=ids[:, :80].tolist())
    assert torch.equal(answer(model, ids, **with_cache(kvant.hf.load(model, tmp_path / "a.kvs"))), expected)
    got = model.generate(inputs_embeds=embed(ids), **GREEDY, **with_cache(copy.deepcopy(cache)))
    assert torch.equal(got, expected)
    assert torch.equal(answer(model, ids, **with_cache(cache)), expected)  # of one's own: the caller knows
    inner = kvant.hf.cache(model)
    with torch.no_grad():
        model.model(ids, **with_cache(inner))
    assert inner.get_seq_length() == 120 and inner.conversation.ids(120) is None


def test_ids_of_other_rows_than_were_computed_are_not_known(model):
    known = conversation.Conversation()
    for rows, expected in ((2, None), (1, 5)):
        known.clear()
        known.expect(model, {"input_ids": ids_of(5)}, 0, 0)
        known.step(0, rows, 5, model)
        assert (known.ids(5) if expected is None else known.ids(5).shape[1]) == expected


def test_a_pass_that_failed_leaves_no_ids(model):
    ids, cache = ids_of(60), filled(model, ids_of(60)[:, :40])

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[0].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, ids[:, 40:50])
    hook.remove()
    assert torch.equal(cache.conversation.ids(40), ids[:, :40])
    forward(model, cache, ids[:, 50:60])
    assert torch.equal(cache.conversation.ids(50), torch.cat([ids[:, :40], ids[:, 50:]], 1))


def test_assisted_generation_goes_on_over_a_cache(plain, model):
    """It gives the model the whole prompt, whatever the cache has."""
    ids = ids_of(150)
    cache = filled(model, ids[:, :100])
    for _ in range(2):
        got = answer(model, ids, prompt_lookup_num_tokens=4, **with_cache(cache))
        assert torch.equal(got, answer(plain, ids))


def test_windows_that_cannot_go_back_refuse_and_stay(sliding):
    model = kvant.hf.enable(copy.deepcopy(sliding).cpu(), short_windows=True, rollback_tokens=0, **EXACT)
    ids, cache = ids_of(700), kvant.hf.cache(model)
    for i in range(0, 700, 100):
        forward(model, cache, ids[:, i : i + 100])
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="200 tokens in common.* cannot go back to 200 tokens"):
        answer(model, torch.cat([ids[:, :200], ids_of(20, 8)], 1), **with_cache(cache))
    assert [g.length for g in cache.groups] == [700, 700] and cache.get_seq_length() == 700
    more = ids_of(10, seed=8)
    assert torch.equal(forward(model, cache, more), forward(model, twin, more))


def test_layers_of_transformers_that_cannot_go_back_refuse_and_stay(sliding):
    model = kvant.hf.enable(copy.deepcopy(sliding).cpu(), **EXACT)  # windows of 128 are left
    ids = ids_of(200)
    cache = filled(model, ids)
    with pytest.raises(ValueError, match="cannot go back to 150 tokens.*activate_past_recording"):
        answer(model, torch.cat([ids[:, :150], ids_of(20, 8)], 1), **with_cache(cache))
    assert {layer.get_seq_length() for layer in cache.layers} == {200} and cache.length == 200


# --- prefixes ---


def hits(model, index, ids, **options):
    before = index.stats.hits
    got = answer(model, ids, **options)
    return index.stats.hits - before, got


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prefixes_of_texts_whose_length_changes_keys(kind):
    if kind == "longrope":
        plain = longrope()
    else:
        plain = longer_frequencies(kind)
    index, ids = kvant.PrefixIndex(), ids_of(300)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for tokens, hit in ((100, 0), (110, 1), (200, 0), (250, 0), (115, 1)):
            found, got = hits(model, index, ids[:, :tokens])
            assert (found, torch.equal(got, answer(copy.deepcopy(plain), ids[:, :tokens]))) == (hit, True), tokens
    assert ["depend on their length" in str(w.message) for w in said].count(True) == 1


def test_text_prompts_of_image_models_use_prefixes(seeing):
    index, ids = kvant.PrefixIndex(), ids_of(200)
    model = kvant.hf.enable(copy.deepcopy(seeing), prefix_cache=index, strict=True, **EXACT)
    assert [hits(model, index, ids)[0] for _ in range(2)] == [0, 1]
    found, got = hits(model, index, ids_of(200, 5))
    assert found == 1 and torch.equal(got, answer(copy.deepcopy(seeing), ids))
    image, more = picture()
    lookups = index.stats.lookups
    answer(model, image, **more)
    assert index.stats.lookups == lookups and index.stats.entries == 1


@pytest.mark.parametrize(("arguments", "text"), [
    ({}, True), ({"mm_encoder_outputs": {}}, True), ({"mm_encoder_outputs": {"image": None}}, True),
    ({"mm_encoder_outputs": {"image": [torch.ones(1)]}}, False), ({"images": []}, True), ({"images": [None]}, True),
    ({"pixel_values": torch.zeros(1)}, False), ({"token_type_ids": torch.zeros(1, 3)}, True),
    ({"token_type_ids": torch.tensor([[0, 1]])}, False), ({"mm_token_type_ids": torch.tensor([[1]])}, False),
    ({"use_cache": True, "logits_to_keep": 1, "position_ids": torch.ones(1)}, True), ({"x": "y"}, True),
    ({"inputs_embeds": torch.ones(1)}, False), ({"input_ids": torch.ones(1)}, True), ({"scale": 2.0}, False),
])  # fmt: skip
def test_what_is_only_text(arguments, text):
    assert conversation.only_text(arguments) is text


def test_states_of_all_tokens_are_asked_for_and_come(plain):
    index, ids = kvant.PrefixIndex(), ids_of(200)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    answer(model, ids)
    with pytest.warns(UserWarning, match="output_hidden_states=True asks for all tokens"):
        out = model.generate(ids, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    assert out.hidden_states[0][0].shape[1] == 200 and index.stats.hits == 0
    model.generate(ids, output_hidden_states=True, **GREEDY)  # which returns none
    assert index.stats.hits == 1


def test_a_known_prefix_knows_its_ids(plain):
    index, ids = kvant.PrefixIndex(), ids_of(200)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    for _ in range(2):
        out = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    cache = versions.given_cache(dict(out))
    assert index.stats.hits == 1 and torch.equal(cache.conversation.ids(207), out.sequences[:, :207])
    assert torch.equal(answer(model, ids[:, :90], **with_cache(cache)), answer(plain, ids[:, :90]))


def test_soft_prompts_have_no_prefixes(plain):
    """peft puts virtual tokens before a prompt, by another prepare_inputs_for_generation for the time of a call."""
    index, ids = kvant.PrefixIndex(), ids_of(100)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    answer(model, ids)
    virtual, original = model.get_input_embeddings()(ids_of(20, 7)), model.prepare_inputs_for_generation

    class Wrapper:
        active_peft_config = types.SimpleNamespace(is_prompt_learning=True)

        def prepare(self, *args, **kwargs):
            found = original(*args, **kwargs)
            if not versions.given_cache(found).get_seq_length():
                words = model.get_input_embeddings()(found.pop("input_ids"))
                found |= {"input_ids": None, "inputs_embeds": torch.cat([virtual, words], 1), "position_ids": None}
            else:
                found["position_ids"] = None
            return {**found, "attention_mask": None}

    expected = answer(plain, torch.cat([ids_of(20, 7), ids], 1))
    cache = kvant.hf.cache(model)
    model.prepare_inputs_for_generation = Wrapper().prepare
    with pytest.warns(RuntimeWarning, match="replaced by that of Wrapper.*a soft prompt"):
        for _ in range(2):
            assert torch.equal(answer(model, ids), expected)
    assert (index.stats.hits, index.stats.entries) == (0, 1)
    assert torch.equal(answer(model, ids, **with_cache(cache)), expected)
    with pytest.raises(ValueError, match="a soft prompt"):
        answer(model, torch.cat([ids, ids_of(60, 3)], 1), **with_cache(cache))
    del model.prepare_inputs_for_generation
    assert hits(model, index, ids)[0] == 1
