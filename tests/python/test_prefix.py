"""kvant.PrefixIndex: prefixes are found by their token ids, and go on bit for bit."""

import os
import threading
import time

import numpy as np
import pytest

import kvant
from kvant import _prefix_table
from prefix_support import append, attend, filled, new_cache, same


@pytest.fixture(params=["memory", "directory"])
def index(request, tmp_path):
    return kvant.PrefixIndex(tmp_path / "prefixes" if request.param == "directory" else None)


def test_a_whole_prefix_goes_on_bit_for_bit(index):
    ids = list(range(300))
    sequence = filled(ids)
    assert index.insert(ids, sequence, model="m", metadata={"a": "b"})
    assert not index.insert(ids, sequence, model="m")
    assert index.find(ids, model="other") is None
    assert index.find([1, *ids], model="m") is None
    assert index.find(ids[:63], model="m") is None
    found = index.find([*ids, 7, 8], model="m")
    assert (found.length, found.truncated, found.metadata) == (300, 0, {"a": "b"})
    same(found.sequences[0], sequence)
    again = index.find([*ids, 7, 8], model="m")  # what went on did not change the entry
    assert len(again.sequences[0]) == 300
    stats = index.stats
    assert (stats.entries, stats.lookups, stats.hits, stats.tokens) == (1, 5, 2, 600)
    index.clear()
    assert index.find(ids, model="m") is None and index.stats.entries == 0 and index.stats.bytes == 0


def test_a_few_tokens_less_leave_no_trace(index):
    ids = list(range(300))
    index.insert(ids, filled(ids))
    found = index.find([*ids[:240], 9, 9])
    assert (found.length, found.truncated) == (240, 60)
    assert [index.find([*ids[:n], 9, 9]).length for n in (236, 235)] == [236, 192]  # 64 tokens less, and 65
    same(found.sequences[0], filled(ids[:240]), more=(5,))


def test_more_tokens_less_end_at_a_page(index):
    ids = list(range(1000))
    index.insert(ids, filled(ids))
    found = index.find([*ids[:500], 9, 9])
    assert (found.length, found.truncated) == (448, 552)
    plain = filled(ids[:448])
    for s in (found.sequences[0], plain):  # 128 tokens later neither reads the pages exactly that stayed encoded
        append(s, range(2000, 2200))
    assert np.array_equal(attend(found.sequences[0]), attend(plain))
    assert index.find([*ids[:40], *range(3000, 3300)]) is None


def test_the_longest_wins(index):
    ids = list(range(640))
    for n in (128, 384, 256):
        index.insert(ids[:n], filled(ids[:n]))
    index.insert([*ids[:300], *range(5000, 5300)], filled([*ids[:300], *range(5000, 5300)]))
    assert index.find(ids).length == 384
    assert index.find(ids[:300]).length == 256  # longer ones encoded the page of the last 44
    assert index.find(ids[:330]).length == 330
    found = index.find([*ids[:260], 1, 1])  # 256 as it was stored, and 256 of longer ones
    assert (found.length, found.truncated) == (256, 0)
    assert index.find([*ids[:200], 1]).length == 200


def test_the_longest_wins_within_a_page(index):
    ids = list(range(300))
    for each in ([*ids[:150], *range(900, 950)], ids[:128]):  # cut off by less than a page: 150 tokens of 200
        index.insert(each, filled(each))
    assert index.find(ids).length == 150


def test_equal_hashes_are_not_equal_tokens(index, monkeypatch):
    monkeypatch.setattr(_prefix_table, "chain", lambda model, ids: [b"0" * 16] * (len(ids) // 512))
    ids = list(range(256))
    assert index.insert(ids, filled(ids))
    assert index.find(range(5000, 5300)) is None and index.find(ids, model="m") is None
    index.insert(ids[:100], filled(ids[:100]))
    assert index.find([*ids[:63], *range(7000, 7100)]) is None  # 63 tokens in common
    other = [*ids[:100], *range(7000, 7156)]
    assert index.insert(other, filled(other))
    assert index.find(other).truncated == 0 and index.find(ids).truncated == 0
    same(index.find(other).sequences[0], filled(other))
    for model in ("m", "n"):  # of other models nothing is known, continued or replaced
        assert index.insert(ids, filled(ids), model=model)
        assert index.insert([*ids, *range(64)], filled([*ids, *range(64)]), model=model)
    assert index.stats.entries == 5 and index.find([*ids, *range(64)]).length == 256


def test_windows(index):
    ids = list(range(900))
    sequence = filled(ids[:899], window=256)
    append(sequence, ids[899:])
    index.insert(ids, sequence)
    assert index.find([*ids[:500], 1]) is None  # these pages were released
    assert index.find([*ids[:880], 1]).length == 880
    same(index.find(ids).sequences[0], sequence)
    index.insert(ids[:128], filled(ids[:128], window=256))
    assert index.find([*ids[:500], 1]).length == 128


def test_several_caches(index):
    ids = list(range(200))
    both = [filled(ids), filled(ids, k="tq4", v="tq8")]
    index.insert(ids, both)
    found = index.find(ids)
    assert [s.cache.k for s in found.sequences] == ["tq6", "tq4"]
    for a, b in zip(found.sequences, both):
        same(a, b)


def test_into_caches_of_the_caller(index):
    ids = list(range(200))
    index.insert(ids, filled(ids))
    mine = new_cache(max_sequences=4, capacity_tokens=1024)
    found = index.find(ids, into=[mine])
    assert found.sequences[0].cache is mine
    same(found.sequences[0], filled(ids))
    assert index.find(ids, into=lambda place, metadata: mine).sequences[0].cache is mine
    with pytest.raises(kvant.InvalidArgument, match="differ in k = tq6 and tq4"):
        index.find(ids, into=[new_cache(k="tq4")])
    with pytest.raises(kvant.OutOfCapacity):
        index.find(ids, into=[new_cache(capacity_tokens=64)])
    with pytest.raises(kvant.InvalidArgument, match="must be a kvant.Cache"):
        index.find(ids, into=[3])
    with pytest.raises(kvant.InvalidArgument, match="for 1 sequences"):
        index.find(ids, into=[mine, mine])


def test_the_least_recently_used_goes(tmp_path):
    def ids(i):
        return list(range(1000 * i, 1000 * i + 200))

    for directory in (None, tmp_path):
        index = kvant.PrefixIndex(directory)
        index.insert(ids(0), filled(ids(0)))
        each = index.stats.bytes
        index = kvant.PrefixIndex(None if directory is None else directory / "small", max_bytes=3.5 * each)
        for i in range(3):
            index.insert(ids(i), filled(ids(i)))
            time.sleep(0.02)  # files have times
        assert index.find(ids(0)).length == 200
        index.insert(ids(3), filled(ids(3)))
        assert [i for i in range(4) if index.find(ids(i))] == [0, 2, 3]
        assert index.stats.evicted == 1 and index.stats.bytes <= 3.5 * each
        tiny = kvant.PrefixIndex(None if directory is None else directory / "tiny", max_bytes=each / 2)
        assert not tiny.insert(ids(0), filled(ids(0))) and tiny.stats.entries == 0
    assert os.listdir(tmp_path / "tiny") == []


def test_uses_have_an_order_where_the_clock_stands_still(monkeypatch):
    """An insert of what is known is a use, and what takes the budget exactly is within it."""
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    index, lists = kvant.PrefixIndex(), [list(range(1000 * i, 1000 * i + 200)) for i in range(4)]
    for ids in lists[:3]:
        assert index.insert(ids, filled(ids))
    assert not index.insert(lists[0], filled(lists[0]))
    index.max_bytes = index.stats.bytes
    index.insert(lists[3], filled(lists[3]))
    assert [i for i in range(4) if index.find(lists[i])] == [0, 2, 3]


def test_shared_pages_count_once():
    index, ids = kvant.PrefixIndex(), list(range(64 * 40))
    sequence = filled(ids)
    index.insert(ids, sequence)
    one = index.stats.bytes
    append(sequence, range(9000, 9064))
    index.insert([*ids, *range(9000, 9064)], sequence)
    assert index.stats.bytes < 1.5 * one
    held = sequence.cache.memory().total_bytes
    assert 0.5 * held < index.stats.bytes < 2 * held


def test_memory_is_given_back():
    index, ids = kvant.PrefixIndex(), list(range(64 * 200))
    sequence = filled(ids)
    cache = sequence.cache
    index.insert(ids, sequence)
    sequence.remove()
    before = cache.memory().reserved_bytes
    index.clear()
    assert cache.memory().tokens == 0 and cache.memory().reserved_bytes < before / 2


def test_arguments():
    index, ids = kvant.PrefixIndex(), list(range(100))
    sequence = filled(ids)
    for call, message in (
        (lambda: index.insert(ids[:99], sequence), "99 ids for a sequence of 100"),
        (lambda: index.insert(ids, []), "sequences is empty"),
        (lambda: index.insert(ids, [3]), "must be sequences"),
        (lambda: index.insert(["a"], sequence), "must be a whole number"),
        (lambda: index.insert(ids, sequence, metadata={"prefix.a": ""}), "do not begin with"),
        (lambda: index.insert(ids, sequence, metadata={"kvant.a": ""}), 'do not begin with "prefix." or "kvant."'),
        (lambda: index.insert(ids, sequence, metadata={"a": 1}), r'metadata\["a"\] = 1: must be a str'),
        (lambda: index.insert(ids, sequence, metadata={"a": "\ud800"}), "text that UTF-8 has"),
        (lambda: index.insert(ids, sequence, metadata={5: "a"}), "a key of metadata = 5: must be a str"),
        (lambda: index.insert(ids, sequence, metadata=5), "metadata = 5: must be a dict of str"),
        (lambda: index.insert(ids, sequence, metadata=[("a", "b")]), "must be a dict of str"),
        (lambda: index.insert(ids, sequence, model="\ud800"), "text that UTF-8 has"),
        (lambda: index.find(ids, model="a\0"), "must be a str without zeros"),
        (lambda: index.insert(ids, sequence, model=None), "must be a str"),
        (lambda: index.find(3), "must be a list"),
        *((lambda n=n: index.find([0, n]), rf"tokens\[1\] = {n}: must be -") for n in (1 << 63, -(1 << 63) - 1)),
        *((lambda n=n: kvant.PrefixIndex(max_bytes=n), r"max_bytes = \S+: must be 1 to 9e\+18")
          for n in (0, 0.5, -1, 1 << 63, float("inf"), float("nan"))),
        (lambda: kvant.PrefixIndex(max_bytes="1"), "must be a number"),
    ):
        with pytest.raises(kvant.InvalidArgument, match=message):
            call()
    assert [kvant.PrefixIndex(max_bytes=n).max_bytes for n in (1, 9e18)] == [1, 9 * 10**18]
    assert index.stats.entries == 0
    with pytest.raises(TypeError, match="another index"):
        __import__("copy").copy(index)


def test_threads(tmp_path):
    ids = [list(range(1000 * i, 1000 * i + 200)) for i in range(4)]
    plain = [attend(filled(one)) for one in ids]
    for index in (kvant.PrefixIndex(max_bytes=2e6), kvant.PrefixIndex(tmp_path, max_bytes=2e6)):
        errors = []

        def work(seed, index=index, errors=errors):
            try:
                random = np.random.default_rng(seed)
                for _ in range(15):
                    i = int(random.integers(4))
                    found = index.find(ids[i])
                    if found is None:
                        index.insert(ids[i], filled(ids[i]))
                    else:
                        assert np.array_equal(attend(found.sequences[0]), plain[i])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and index.stats.hits > 0 and not index.problems
