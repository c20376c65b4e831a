"""The first and last tokens of what a conversation knows, and of what a look at weights reads. No model is made."""

from __future__ import annotations

import base64
import types

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

from kvant.hf import prefixes, saving, weights  # noqa: E402
from kvant.hf.conversation import Conversation, _first_difference, go_back  # noqa: E402
from kvant.hf.settings import Settings  # noqa: E402

NAME = "model.rope_deltas"
SHIFT = torch.tensor([[7]])
IMAGE = {"pixel_values": torch.ones(1)}


def known(tokens=50, rows=1):
    made = Conversation()
    made.know(torch.arange(tokens).repeat(rows, 1))
    return made


# --- images, and tokens that see later ones ---


@pytest.mark.parametrize(("length", "media"), [(31, 2), (30, 1), (11, 1), (10, 0), (0, 0)])
def test_a_crop_forgets_images_that_begin_behind_it(length, media):
    made = known()
    made.media, made.ahead = [(10, 20), (30, 40)], [(10, 20), (30, 40)]
    made.crop(length)
    assert len(made.media) == len(made.ahead) == media
    assert not length or torch.equal(made.ids(length), torch.arange(length)[None])


def test_a_crop_to_nothing_leaves_nothing():
    made = known()
    made._change((0, 0), {NAME: SHIFT})
    made.restored = made.by_embeddings = True
    made._moments.add(1)
    made.crop(0)
    assert not (made._kept or made.restored or made.by_embeddings or made._moments) and made.ids(0) is None


@pytest.mark.parametrize("removed", [1, 2, 49])
def test_a_crop_of_few_tokens(removed):
    made = known()
    made.crop(50 - removed)
    assert torch.equal(made.ids(50 - removed), torch.arange(50 - removed)[None]) and made.ids(50) is None


@pytest.mark.parametrize("end", [11, 12, 20])
def test_positions_within_an_image_are_not_known(end):
    made = known()
    made._change((10, end), {NAME: SHIFT})
    for length in range(11):
        assert not made.kept(length)[NAME].any(), length
    for length in range(11, end):
        with pytest.raises(ValueError, match="into a step with images"):
            made.kept(length)
    for length in (end, 50):
        assert made.kept(length)[NAME] is SHIFT
    made.crop(end)
    assert made.kept(end)[NAME] is SHIFT
    if end > 11:
        made.crop(end - 1)
        with pytest.raises(ValueError, match="into a step with images"):
            made.kept(end - 1)


@pytest.mark.parametrize(("keep", "arguments", "refused"), [
    (9, {}, True), (10, {}, True), (19, {}, True), (20, {}, False),
    (9, IMAGE, False), (10, IMAGE, False), (11, IMAGE, True), (19, IMAGE, True), (20, IMAGE, False),
])  # fmt: skip
def test_tokens_of_an_image_are_computed_anew_with_the_image(keep, arguments, refused):
    made = known()
    made.media = [(10, 20)]
    if refused:
        with pytest.raises(ValueError, match=f"from {keep} on are to be computed anew"):
            made.refuse_without_images(arguments, keep)
    else:
        made.refuse_without_images(arguments, keep)


# --- ids ---


def test_ids_of_many_steps_are_joined():
    made = Conversation()
    for i in range(200):
        made._pass = types.SimpleNamespace(offset=i, ids=torch.tensor([[i]]), arguments={}, model=lambda: None)
        made.step(i, 1, 1, None)
        assert len(made._pieces) <= 64
    assert torch.equal(made.ids(200), torch.arange(200)[None]) and made.ids(199) is made.ids(201) is None


def test_a_copy_goes_on_by_itself():
    made = known()
    made.media, made.ahead, made._moments, made._adapters = [(1, 2)], [(3, 4)], {5}, {None}
    made._change((10, 20), {NAME: SHIFT})
    twin = made.copy()
    twin.crop(2)
    twin._moments.add(6), twin._adapters.add(("one", False, ()))
    assert (made.media, made.ahead, made._moments, made._adapters) == ([(1, 2)], [(3, 4)], {5}, {None})
    assert made.kept(20)[NAME] is SHIFT and made.ids(50) is not None
    made.clear()
    assert not made._moments and not made._adapters and twin._moments == {5, 6}


@pytest.mark.parametrize(("stored", "mask", "same"), [
    (None, None, 4), ([0, 1, 1, 1], None, 4), ([0, 1, 1, 1], [0, 1, 1, 1], 4), ([0, 1, 1, 1], [1, 1, 1, 1], 0),
    ([1, 1, 1, 1], [0, 1, 1, 1], 4), ([1, 1, 0, 1], [1, 1, 1, 1], 2),
])  # fmt: skip
def test_padding_that_a_prompt_shows_has_no_keys(stored, mask, same):
    ids = torch.tensor([[9, 5, 6, 7]])
    stored = None if stored is None else torch.tensor([stored]).bool()
    mask = None if mask is None else torch.tensor([mask])
    assert _first_difference(ids, ids, mask, stored) == same
    other = ids.clone()
    other[0, 3] = 1
    assert _first_difference(ids, other, mask, stored) == min(same, 3)


def held(tokens, rows=1, **attributes):
    """A cache that notes crops."""
    taken = []
    return types.SimpleNamespace(
        conversation=known(tokens, rows), length=tokens, stored=None, get_seq_length=lambda: tokens,
        crop=taken.append, reset=lambda: taken.append("reset"), taken=taken, **attributes,
    )  # fmt: skip


def prompt(tokens, other_from=None):
    ids = torch.arange(tokens)[None]
    if other_from is not None:
        ids[0, other_from:] += 1000
    return ids


@pytest.mark.parametrize(("bound", "refused"), [(99, True), (100, False), (None, False)])
def test_texts_up_to_the_bound_of_frequencies_go_back(bound, refused):
    cache = held(100)
    if refused:
        with pytest.raises(ValueError, match="depend on their length"):
            go_back(cache, None, prompt(100, 50), 0, None, {}, bound)
        assert not cache.taken
        go_back(cache, None, prompt(100), 0, None, {}, bound)  # the same text
        assert cache.taken == [-1]
    else:
        go_back(cache, None, prompt(100, 50), 0, None, {}, bound)
        assert cache.taken == [-50]


@pytest.mark.parametrize(("ids", "crop"), [
    (prompt(100), [-1]), (prompt(101), []), (prompt(63), [-38]), (prompt(64), [-37]), (prompt(65), [-36]),
    (prompt(101, 100), []), (prompt(101, 99), [-1]), (prompt(200, 1), [-99]), (prompt(1), ["reset"]),
])  # fmt: skip
def test_a_cache_goes_back_to_what_both_have(ids, crop):
    cache = held(100)
    go_back(cache, None, ids, 0, None, {}, None)
    assert cache.taken == crop


def test_rows_of_one_prompt_are_compared_with_each_of_their_beams():
    cache = held(100, rows=4)
    cache.conversation._pieces[0][3, 80] = 5
    go_back(cache, None, prompt(100).repeat(2, 1), 0, None, {}, None)
    assert cache.taken == [-20]
    go_back(other := held(100, rows=4), None, prompt(100).repeat(3, 1), 0, None, {}, None)
    assert not other.taken  # another batch, which the cache refuses
    two = torch.cat([prompt(100), prompt(100, 0)])
    cache = held(100, rows=4)
    cache.conversation.know(two.repeat_interleave(2, 0))
    go_back(cache, None, two, 0, None, {}, None)
    assert cache.taken == [-1]


def test_new_ids_are_compared_with_nothing():
    cache = held(100)
    go_back(cache, None, prompt(3, 0), 0, torch.ones(1, 103), {}, None)
    assert not cache.taken and not cache.conversation.whole_prompt
    go_back(cache, None, prompt(100), 0, torch.ones(1, 100), {}, None)
    assert cache.taken == [-1] and cache.conversation.whole_prompt


@pytest.mark.parametrize(("ids", "refused"), [
    (prompt(100, 15), True), (prompt(100, 20), False), (prompt(100, 10), False), (prompt(16), True),
    (prompt(20), False), (prompt(21), False), (prompt(21, 20), False),
])  # fmt: skip
def test_tokens_that_saw_a_later_one_stay_together(ids, refused):
    cache = held(100)
    cache.conversation.ahead = [(10, 20)]
    if refused:
        with pytest.raises(ValueError, match="see each other in both directions"):
            go_back(cache, None, ids, 0, None, {}, None)
    else:
        go_back(cache, None, ids, 0, None, {}, None)
        assert cache.taken


# --- padding in files ---


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 7), (1, 8), (3, 3), (2, 8), (2, 64), (3, 65)])
def test_each_bit_of_padding_is_in_the_file(rows, length):
    for place in (0, rows * length // 2, rows * length - 1):
        stored = torch.ones(rows * length, dtype=torch.bool)
        stored[place] = False
        cache = types.SimpleNamespace(groups=[], stored=stored.view(rows, length), conversation=known(length, rows),
                                      rows=rows, length=length, settings=Settings.make())  # fmt: skip
        packed = base64.b64decode(saving.describe(cache)["hf.stored"])
        assert len(packed) == (rows * length + 7) // 8
        assert [packed[i // 8] >> i % 8 & 1 for i in range(rows * length)] == stored.tolist()
        assert int.from_bytes(packed, "little") < 1 << rows * length


# --- plain texts ---


def test_what_a_plain_text_is():
    ones = torch.ones(2, 5)
    hidden = ones.clone()
    hidden[1, 0] = 0
    for mask, plain in ((None, True), (ones, True), (ones.bool(), True), (hidden, False), (ones[None, None], False),
                        (2 * ones, False)):  # fmt: skip
        assert prefixes.is_plain_text({"attention_mask": mask, "use_cache": True}) == plain
    rows = prefixes._rows_of_one_text
    ids, positions = prompt(5), torch.arange(5)[None]
    assert rows(ids, None) == rows(ids, positions) == [[0, 1, 2, 3, 4]]
    assert len(rows(ids.repeat(3, 1), positions.repeat(3, 1))) == 3
    assert rows(torch.cat([ids, ids + 1]), positions) == rows(ids, positions + 1) == []
    assert rows(ids, torch.stack([positions, positions + 1])) == []  # three-dimensional ones of an image
    assert rows(ids, positions[:, 1:]) == rows(ids, positions.flip(1)) == []


# --- weights ---


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_place_of_a_tensor_in_memory_does_not_count(shift):
    x = torch.arange(100_003, dtype=torch.float32)[shift : 100_000 + shift]
    assert weights.checksum(x, "x") == weights.checksum(x.clone(), "x")


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 8 * 4096 * 3, 8 * 4096 * 3 + 1])
def test_the_last_byte_counts(size):
    x = torch.zeros(size, dtype=torch.uint8)
    found = {weights.checksum(x, "x")}
    for place in (0, size // 2, size - 2, size - 1):
        x[place] = 1
        found.add(weights.checksum(x, "x"))
        x[place] = 0
    assert len(found) == 5


@pytest.mark.parametrize(("one", "other"), [((0, 1), (0, 2)), ((1, 0), (2, 0)), ((0, 0), (1, 1)), ((9, 4095), (9, 0))])
def test_values_that_change_places_are_seen(one, other):
    x = torch.arange(10 * 4096).view(10, 4096)
    y = x.clone()
    y[one], y[other] = x[other], x[one]
    assert weights.checksum(x, "x") != weights.checksum(y, "x")


def test_strides_and_shapes_are_signs():
    x = torch.zeros(8, 8)
    found = [weights.stamps([y]) for y in (x, x.t(), x.view(64), x[1:], x.view(torch.int32))]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])
    before = weights.stamps([x])
    x.add_(1)
    assert weights.stamps([x]) != before


def test_samples_are_of_every_column():
    """As many values as leave an even distance, which the width of the rows divides."""
    x = torch.zeros(4128, 128)
    sampler = weights.Sampler()
    before = sampler.read([x], weights.stamps([x]))
    now = weights.stamps([x])
    for column in range(128):
        x.data[:, column] = 1
        assert sampler.read([x], now) != before, column
        x.data[:, column] = 0
    assert sampler.read([x], now) == before


def test_checksums_follow_signs():
    contents, x = weights.Contents(), torch.zeros(100)
    first = contents.of(weights.Weight("x", x))
    x.data[3] = 1  # which no version counts
    second = contents.of(weights.Weight("x", x))
    x.add_(1)
    assert len({first, second, contents.of(weights.Weight("x", x))}) == 3
    files = [weights.Weight("x", None, lambda n=n: torch.full((3,), float(n)), ("file", n)) for n in (1, 2)]
    assert contents.of(files[0]) != contents.of(files[1])
    del x
    contents.forget_the_dead()
    assert len(contents._known) == 2


def test_a_checksum_is_of_one_tensor():
    """Another one in the same place of memory, with the same number, differs between its samples."""
    contents, x = weights.Contents(), torch.zeros(100_000)
    first = contents.of(weights.Weight("x", x))
    y = x.detach()
    for place in range(100):
        contents._known = {id(y): contents._known.popitem()[1]}
        x.data[place] = 1
        assert weights.stamps([x]) == weights.stamps([y])
        assert contents.of(weights.Weight("y", y)) != first
        x.data[place] = 0
        first, x, y = contents.of(weights.Weight("y", y)), y, x


def test_sets_are_described_in_one_order():
    assert list({8, 1}) == [8, 1] and weights.describe({8, 1}, "x") == [1, 8]
    assert weights.describe([8, 1], "x") == [8, 1] and weights.describe(b"1", "x") != weights.describe(b"2", "x")
