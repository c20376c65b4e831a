"""A cache knows its conversation: positions of images are its own, also in files."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from conversation_support import (  # noqa: E402, F401
    EXACT, GREEDY, MEDIA, SHIFT, answer, filled, ids_of, longer_frequencies, picture, restored, seeing,
)  # fmt: skip
from hf_support import forward, with_cache  # noqa: E402
from kvant.hf import conversation, positions, versions  # noqa: E402


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
