"""What a cache knows of its conversation: prompts are compared with its token ids, positions of images are its own,
also in files; and whatever kvant does not serve is said."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

import kvant.hf  # noqa: E402
import models  # noqa: E402
import zoo  # noqa: E402
from hf_support import ISA, forward, with_cache  # noqa: E402
from kvant.hf import conversation, positions, versions  # noqa: E402

EXACT = dict(k="f32", v="f32", isa=ISA)
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


def ids_of(tokens, seed=5, rows=1):
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def plain():
    return models.sharpen(models.tiny_llama())


@pytest.fixture(scope="module")
def model(plain):
    return kvant.hf.enable(copy.deepcopy(plain), **EXACT)


def answer(model, ids, **options):
    """The new tokens."""
    out = model.generate(ids, **GREEDY | options)
    return getattr(out, "sequences", out)[:, ids.shape[1] :]


def filled(model, ids, **options):
    cache = kvant.hf.cache(model)
    forward(model, cache, ids, **options)
    return cache


def restored(model, cache, folder):
    kvant.hf.save(cache, folder / "chat.kvs")
    return kvant.hf.load(model, folder / "chat.kvs")


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


# --- positions that models keep ---

MEDIA, SHIFT = 290, -12  # the token of an image, and how far one of 16 tokens shifts what comes after


@pytest.fixture(scope="module")
def seeing():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = models.TINY | {"vocab_size": 300, "rope_parameters": rope}
    text.pop("head_dim")
    vision = dict(depth=1, embed_dim=32, hidden_size=128, num_heads=2, mlp_ratio=2, patch_size=4)
    vision |= dict(spatial_merge_size=2, temporal_patch_size=1)
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=MEDIA, video_token_id=291, vision_start_token_id=292,
        vision_end_token_id=293,
    )  # fmt: skip
    return models.sharpen(transformers.Qwen2VLForConditionalGeneration(config).eval(), 4.0)


def picture(seed=3, rows=1):
    """Ids with an image in their middle, and what else a first pass takes."""
    words = ids_of(80, seed, rows)
    image = torch.tensor([[292] + [MEDIA] * 16 + [293]]).expand(rows, -1)
    ids = torch.cat([words[:, :20], image, words[:, 20:]], 1)
    pixels = torch.randn(64 * rows, 48, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, 8, 8]] * rows)
    return ids, dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == MEDIA).long())


def first_turn(model, cache, seed=3, rows=1):
    ids, more = picture(seed, rows)
    return model.generate(ids, **more, **GREEDY, **with_cache(cache))


def turns(model, cache, between, rows=1):
    """The answer of a second turn. between: what happens to the cache before."""
    first = first_turn(model, cache, rows=rows)
    cache = between(cache)
    return answer(model, torch.cat([first, ids_of(10, 8, rows)], 1), **with_cache(cache))


@pytest.fixture(scope="module")
def lasting(seeing):
    return turns(copy.deepcopy(seeing), versions.DynamicCache(config=seeing.config.get_text_config()), lambda c: c)


@pytest.fixture
def enabled(seeing):
    return kvant.hf.enable(copy.deepcopy(seeing), **EXACT)


def another(model, seed=6):
    """Another conversation of the same model, of text."""
    answer(model, ids_of(150, seed))
    return model


@pytest.mark.parametrize("how", ["loaded", "loaded elsewhere", "copied", "alternating", "rearranged", "cropped"])
def test_positions_are_those_of_the_conversation(seeing, enabled, lasting, tmp_path, how):
    def between(cache):
        if how == "loaded elsewhere":
            kvant.hf.save(cache, tmp_path / "chat.kvs")
            return cache
        kept = copy.deepcopy(cache) if how == "copied" else cache
        if how == "loaded":
            kvant.hf.save(cache, tmp_path / "chat.kvs")
        another(enabled)
        if how == "loaded":
            kept = kvant.hf.load(enabled, tmp_path / "chat.kvs")
        elif how == "rearranged":
            kept.batch_repeat_interleave(3)
            kept.batch_select_indices(torch.tensor([1]))
        elif how == "cropped":
            forward(enabled, kept, ids_of(30, 2))
            another(enabled)
            kept.crop(-30)
        return kept

    got = turns(enabled, kvant.hf.cache(enabled), between)
    if how == "loaded elsewhere":
        other = another(kvant.hf.enable(copy.deepcopy(seeing), **EXACT))
        first = first_turn(copy.deepcopy(seeing), None)
        turn = torch.cat([first, ids_of(10, 8)], 1)
        got = answer(other, turn, **with_cache(kvant.hf.load(other, tmp_path / "chat.kvs")))
    assert torch.equal(got, lasting)


def test_forward_passes_count_from_the_conversations_positions(seeing, enabled):
    """Passes without position_ids, over caches that take turns; one of text has no shift, whatever was before."""
    (ids, more), text, new = picture(), ids_of(60, 2), ids_of(5, 4)
    expected = []
    for begin in (dict(input_ids=ids, **more), dict(input_ids=text)):
        alone, cache = copy.deepcopy(seeing), versions.DynamicCache(config=seeing.config.get_text_config())
        with torch.no_grad():
            alone(**begin, **with_cache(cache))
            expected.append(alone(input_ids=new, **with_cache(cache)).logits)
    caches = [kvant.hf.cache(enabled), kvant.hf.cache(enabled)]
    with torch.no_grad():
        enabled(input_ids=ids, **more, **with_cache(caches[0]))
        enabled(input_ids=text, **with_cache(caches[1]))
        got = [enabled(input_ids=new, **with_cache(each)).logits for each in caches]
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * float(b.std()))


def test_rows_have_their_own_shifts(enabled, tmp_path):
    cache = kvant.hf.cache(enabled)
    first_turn(enabled, cache, rows=2)
    deltas = enabled.model.rope_deltas
    assert deltas.shape == (2, 1) and bool((deltas == SHIFT).all())
    cache.conversation._kept[-1][1]["model.rope_deltas"] = torch.tensor([[-1], [-2]])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 3, 0, 1]))
    loaded = restored(enabled, cache, tmp_path)
    for each in (cache, loaded):
        each.conversation.put_back(enabled, each.length, 2)
        assert enabled.model.rope_deltas.tolist() == [[-2], [-1]]
        each.conversation.put_back(enabled, each.length, 4)
        assert enabled.model.rope_deltas.tolist() == [[-2], [-2], [-1], [-1]]


def test_shifts_of_prompts_are_those_of_all_their_beams():
    shifts = torch.tensor([[-1], [-2]])
    assert positions.picked(shifts, [1, 2], 4).tolist() == [[-1], [-2]]
    assert positions.rows_of(shifts.repeat_interleave(2, 0), 2).tolist() == [[-1], [-2]]


def test_a_prompt_goes_back_to_behind_an_image_and_no_further(seeing, enabled, lasting):
    ids, more = picture()
    cache = kvant.hf.cache(enabled)
    first = first_turn(enabled, cache)
    for keep in (ids.shape[1], 38):  # the image ends before token 38
        turn = torch.cat([first[:, :keep], ids_of(10, 8)], 1)
        alone = answer(copy.deepcopy(seeing), turn, **more | {"mm_token_type_ids": (turn == MEDIA).long()})
        assert torch.equal(answer(another(enabled), turn, **with_cache(cache)), alone), keep
    for keep in (37, 25, 21, 20):  # the image begins with token 20
        turn = torch.cat([first[:, :keep], ids_of(40, 8)], 1)
        with pytest.raises(ValueError, match="are of images, sounds or embeddings"):
            answer(enabled, turn, **with_cache(cache))


def test_half_an_image_is_still_one():
    known = conversation.Conversation()
    known.media, known.ahead = [(20, 38), (50, 60)], [(0, 38)]
    known.crop(30)
    assert (known.media, known.ahead) == ([(20, 38)], [(0, 38)])
    known.crop(20)
    assert (known.media, known.ahead) == ([], [(0, 38)])


def test_an_image_again_is_computed_again(seeing, enabled):
    """A prompt that parts before an image brings it again."""
    ids, more = picture()
    cache = kvant.hf.cache(enabled)
    first_turn(enabled, cache)
    other = ids.clone()
    other[0, 10] += 1
    expected = answer(copy.deepcopy(seeing), other, **more)
    assert torch.equal(answer(another(enabled), other, **more, **with_cache(cache)), expected)


def test_positions_that_are_not_known_are_refused(seeing, enabled, tmp_path):
    cache = kvant.hf.cache(enabled)
    first_turn(enabled, cache)
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    for each in (copy.deepcopy(cache), kvant.hf.load(enabled, tmp_path / "chat.kvs")):
        each.crop(30 - each.length)
        with pytest.raises(ValueError, match="cropped to 30 tokens, into a step with images"):
            kvant.hf.save(each, tmp_path / "other.kvs")
        with pytest.raises(ValueError, match="cropped to 30 tokens, into a step with images"):
            forward(enabled, each, ids_of(3))
        forward(enabled, each, ids_of(3), position_ids=torch.arange(30, 33).expand(3, 1, 3))  # the caller counts
    strange = kvant.hf.KvantCache(enabled.config, enabled._kvant.settings)
    with torch.no_grad():
        enabled.model.language_model(inputs_embeds=torch.randn(1, 8, 128), **with_cache(strange))
    with pytest.raises(ValueError, match="has not recorded them"):
        kvant.hf.save(strange, tmp_path / "other.kvs", model=enabled)
    kvant.hf.disable(enabled)
    with pytest.raises(ValueError, match="call kvant.hf.enable"):
        kvant.hf.load(enabled, tmp_path / "chat.kvs")


@pytest.mark.parametrize("kept", [
    "", "5", "{}", '{"kept": [], "media": [], "ahead": []}', '{"kept": {}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": ["int64", [2, 1], [1, 2]]}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": ["int64", [1, 1], [1, 2]]}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": ["complex64", [1, 1], [1]]}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": ["int64", [1, 1], ["x"]]}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": ["int64", [0, 1], []]}, "media": [], "ahead": []}',
    '{"kept": {"lm_head.weight": null, "model.rope_deltas": null}, "media": [], "ahead": []}',
    '{"kept": {"model.rope_deltas": null}, "media": [[4, 4]], "ahead": []}',
    '{"kept": {"model.rope_deltas": null}, "media": [], "ahead": [[-1, 4]]}',
    '{"kept": {"model.rope_deltas": null}, "media": [[1]], "ahead": []}',
])  # fmt: skip
def test_forged_positions_are_refused(enabled, tmp_path, kept):
    cache = kvant.hf.cache(enabled)
    first_turn(enabled, cache)
    path = tmp_path / "chat.kvs"
    kvant.hf.save(cache, path)
    snapshot = kvant.Snapshot(path)
    assert set(json.loads(snapshot.info.metadata["hf.kept"])["kept"]) == {"model.rope_deltas"}
    loaded = snapshot.load()
    kvant.save(loaded.cache, path, sequences=loaded.sequences, model=snapshot.info.model,
               metadata={**snapshot.info.metadata, "hf.kept": kept})  # fmt: skip
    with pytest.raises(ValueError, match="chat.kvs: "):
        kvant.hf.load(enabled, path)


def test_shifts_of_a_file_are_on_the_device_that_computes(seeing, enabled, tmp_path):
    """Weights that accelerate keeps elsewhere leave model.device at torch's meta device, which holds no values."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    cache = kvant.hf.cache(enabled)
    first_turn(enabled, cache)
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    other = accelerate.cpu_offload(copy.deepcopy(seeing), execution_device=torch.device("cpu"))
    assert other.device.type == "meta"
    loaded = kvant.hf.load(kvant.hf.enable(other, **EXACT), tmp_path / "chat.kvs")
    kept = loaded.conversation.kept(loaded.length)["model.rope_deltas"]
    assert kept.device.type == "cpu" and kept.tolist() == [[SHIFT]]


def longer_frequencies(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    return models.sharpen(models.tiny_llama(rope_parameters=rope, max_position_embeddings=128))


def test_frequencies_of_long_texts_are_those_of_the_conversation():
    """A "dynamic" rotary embedding keeps the frequencies of the longest text that it has met."""
    plain, ids = longer_frequencies("dynamic"), ids_of(230)
    model = kvant.hf.enable(copy.deepcopy(plain), **EXACT)
    lasting, cache = versions.DynamicCache(config=plain.config), kvant.hf.cache(model)
    first = plain.generate(ids[:, :200], **GREEDY, **with_cache(lasting))
    assert torch.equal(model.generate(ids[:, :200], **GREEDY, **with_cache(cache)), first)
    turn, text = torch.cat([first, ids[:, 200:]], 1), cache.conversation.encode(cache.length)
    expected = answer(plain, turn, **with_cache(lasting))
    answer(model, ids_of(900, 2))  # another conversation, of longer texts
    cache.conversation.decode(text, model, 1, cache.length)  # as a file has it
    assert torch.equal(answer(model, turn, **with_cache(cache)), expected)
    with pytest.raises(ValueError, match="above 128 tokens depend on their length"):
        answer(model, ids[:, :150], **with_cache(cache))
    other = torch.cat([ids[:, :100], ids_of(20, 8)], 1)
    answer(model, other, **with_cache(filled(model, ids[:, :128])))
    with pytest.raises(ValueError, match="above 128 tokens depend on their length"):
        answer(model, other, **with_cache(filled(model, ids[:, :129])))


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


# --- what is not served is said ---


def longrope():
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    config = transformers.Phi3Config(
        **models.TINY | {"max_position_embeddings": 1024}, original_max_position_embeddings=128, pad_token_id=0,
        rope_parameters=rope | {"original_max_position_embeddings": 128},
    )  # fmt: skip
    return models.sharpen(transformers.Phi3ForCausalLM(config).eval())


@pytest.mark.parametrize("case", ["guidance", "longrope"])
def test_a_cache_that_the_model_makes_is_kvants(plain, case):
    ids = ids_of(120)
    alone = copy.deepcopy(plain) if case == "guidance" else longrope()
    options = {"guidance_scale": 1.5} if case == "guidance" else {"max_new_tokens": 30}
    expected = answer(alone, ids, **options)
    model = kvant.hf.enable(copy.deepcopy(alone), strict=True, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(answer(model, ids, **options), expected)
    assert all(row.stored for row in kvant.hf.report(model).rows)
    if case == "guidance":  # the answer's cache, and not the second run's
        assert "1 rows of 127 tokens" in str(kvant.hf.report(model))


def test_only_a_call_that_asks_gets_a_cache(plain):
    model, ids = kvant.hf.enable(copy.deepcopy(plain), **EXACT), ids_of(30)
    with torch.no_grad():
        asked = model(ids, use_cache=True)
        assert isinstance(versions.given_cache(dict(asked)), kvant.hf.KvantCache)
        more = model(ids[:, :1], use_cache=True, **with_cache(versions.given_cache(dict(asked)))).logits
        expected = plain(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(more, expected, rtol=0, atol=2e-4 * float(expected.std()))
        for options in ({}, {"use_cache": False}, {"use_cache": None}):
            assert not isinstance(versions.given_cache(dict(model(ids, **options))), kvant.hf.KvantCache)
    model(ids, use_cache=True).logits.sum().backward()  # to be trained
    with torch.no_grad():
        given = kvant.hf.cache(model)
        model(ids, None, None, given, use_cache=True)  # by its place
    assert given.get_seq_length() == 30 and torch.equal(given.conversation.ids(30), ids)


def test_no_cache_is_said(plain):
    model, ids = kvant.hf.enable(copy.deepcopy(plain), **EXACT), ids_of(30)
    with pytest.warns(UserWarning, match="no cache holds the keys and values .use_cache=False.*stores nothing"):
        answer(model, ids, use_cache=False)
    assert "went to no cache" in str(kvant.hf.report(model))
    kvant.hf.enable(model, strict=True, **EXACT)
    with pytest.raises(kvant.Unsupported, match="use_cache=False"):
        answer(model, ids, use_cache=False)


def too_wide():
    """A model whose latents are larger than any head_dim of kvant."""
    entry = next(entry for entry in zoo.ZOO if entry.prefix == "DeepseekV3")
    return zoo.build(dataclasses.replace(entry, changes=entry.changes | {"kv_lora_rank": 600})).eval()


def test_layers_left_are_said_before_and_after():
    with pytest.warns(UserWarning, match="kvant stores no layer of DeepseekV3ForCausalLM: head_dim 600 is above 576"):
        model = kvant.hf.enable(too_wide())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (0, 42):
            if tokens:
                answer(model, ids_of(40) % 100 + 5, max_new_tokens=3)
            report = kvant.hf.report(model)
            assert report.tokens == tokens and {row.stored for row in report.rows} == {False}
            assert all("head_dim 600 is above" in row.reason for row in report.rows)
        cache = filled(model, ids_of(30) % 100 + 5)
        assert kvant.hf.report(cache).tokens == 30 and kvant.hf.report(cache).batch == 1
    with pytest.raises(kvant.Unsupported, match="head_dim 600 is above"):
        kvant.hf.enable(model, strict=True)
    with pytest.raises(ValueError, match="head_dim 600 is above.*prefix_cache"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.hf.enable(model, prefix_cache=100)
    fresh = too_wide()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.hf.enable(fresh, skip_layers=range(2))  # as it was asked for


def test_layers_that_only_tokens_tell_are_said_once(plain, monkeypatch):
    monkeypatch.setattr(versions, "predicted_geometry", lambda config, layer: None)
    model = kvant.hf.enable(too_wide())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in (1, 2):
            answer(model, ids_of(40, seed) % 100 + 5, max_new_tokens=3)
    assert ["left to transformers" in str(w.message) for w in said] == [True]
    assert kvant.hf.report(model).tokens == 42 and not any(row.stored for row in kvant.hf.report(model).rows)


@pytest.mark.parametrize("entry", zoo.ZOO, ids=lambda entry: entry.name)
def test_reports_before_tokens_are_those_after(entry):
    model = zoo.build(entry)
    if model is None:
        pytest.skip("this version of transformers does not have it")
    cache = kvant.hf.cache(model.eval(), isa=ISA)
    cache.try_out()


    def facts():
        rows = kvant.hf.report(cache).rows
        return [(r.stored, r.k, r.v, *((r.kv_heads, r.head_dim, r.v_head_dim) if r.stored else ())) for r in rows]

    before = facts()
    forward(model, cache, ids_of(20) % 100 + 5)
    assert facts() == before


def test_a_prompt_whose_tokens_see_later_ones_goes_back_no_further(model, monkeypatch):
    ids, cache = ids_of(100), kvant.hf.cache(model)
    cache.conversation.saw_ahead(50)
    forward(model, cache, ids)
    assert cache.conversation.ahead == [(0, 50)]
    with pytest.raises(ValueError, match="tokens 0 to 49 see each other in both directions"):
        answer(model, torch.cat([ids[:, :30], ids_of(30, 8)], 1), **with_cache(cache))
    answer(model, torch.cat([ids[:, :50], ids_of(30, 8)], 1), **with_cache(cache))
    answer(model, ids[:, :50], **with_cache(cache))  # its last token is computed anew, and is the one that was seen


def test_a_prompt_whose_tokens_see_later_ones_is_no_prefix(plain, monkeypatch):
    index, expect = kvant.PrefixIndex(), conversation.Conversation.expect

    def seeing_ahead(self, model, arguments, length, seen):
        expect(self, model, arguments, length, seen)
        if not length:
            self.saw_ahead(50)

    monkeypatch.setattr(conversation.Conversation, "expect", seeing_ahead)
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=index, **EXACT)
    with pytest.warns(RuntimeWarning, match="tokens of a prompt see later ones"):
        answer(model, ids_of(100))
    assert index.stats.entries == 0


def test_masks_tell_which_tokens_see_later_ones(sliding):
    both = types.SimpleNamespace(q_offset=2)
    from kvant.hf.masks import LazyMask

    for blocks, end in (([0, 1, 1, 1, 2, 3], 6), ([0, 1, 2, 3, 4, 5], 0), ([0, 0, 1, 2, 3, 4], 4)):
        ids = torch.tensor(blocks)

        def seen(batch, head, q, k, ids=ids):
            at, of = ((x - both.q_offset).clamp(min=0) for x in (q, k))
            return (k <= q) | (ids[at] == ids[of]) & (k >= 2)

        mask = LazyMask(dict(batch_size=1, q_length=6, kv_length=8, q_offset=2, kv_offset=0, mask_function=seen,
                             device="cpu", allow_is_causal_skip=False, use_vmap=True), "overlay", 0)  # fmt: skip
        assert mask.sees_ahead() == end, blocks
