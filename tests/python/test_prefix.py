"""kvant.PrefixIndex: prefixes are found by their token ids, go on bit for bit, and files are never trusted."""
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvant
from kvant import _prefix

HEADS, DIM, LAYERS = 2, 64, 2
SOURCE = """
import sys
sys.path[:0] = {folders!r}
import test_prefix as t
"""


def rows(ids, layer, what):
    """Keys or values of tokens: functions of the id and its position in steps of the test, as a model's are."""
    made = [np.random.default_rng((i, layer, what)).standard_normal((HEADS, DIM)) for i in ids]
    return np.array(made, np.float32)


def new_cache(**options):
    return kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, **options)


def append(sequence, ids):
    for layer in range(sequence.cache.layers):
        sequence.append(layer, rows(ids, layer, 0), rows(ids, layer, 1))


def filled(ids, **options):
    sequence = new_cache(**options).sequence()
    append(sequence, ids)
    return sequence


def attend(sequence, seed=9):
    q = np.random.default_rng(seed).standard_normal((1, 2 * HEADS, DIM)).astype(np.float32)
    return np.array([sequence.cache.attend(sequence, layer, q) for layer in range(LAYERS)])


def same(a, b, more=(5, 6, 7)):
    """Two sequences give the same bits, now and after more tokens."""
    assert np.array_equal(attend(a), attend(b))
    for ids in (more, range(1000, 1100)):
        append(a, ids)
        append(b, ids)
        assert np.array_equal(attend(a), attend(b))


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


def test_equal_hashes_are_not_equal_tokens(index, monkeypatch):
    monkeypatch.setattr(_prefix, "_chain", lambda model, ids: [b"0" * 16] * (len(ids) // 512))
    ids = list(range(256))
    assert index.insert(ids, filled(ids))
    assert index.find(range(5000, 5300)) is None
    other = [*ids[:100], *range(7000, 7156)]
    assert index.insert(other, filled(other))
    assert index.find(other).truncated == 0 and index.find(ids).truncated == 0
    same(index.find(other).sequences[0], filled(other))


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


# --- files ---


def test_other_processes_know_it(tmp_path):
    ids = list(range(300))
    kvant.PrefixIndex(tmp_path).insert(ids, filled(ids), model="m")
    run(tmp_path, """
        index = t.kvant.PrefixIndex(sys.argv[1])
        found = index.find(range(400), model="m")
        assert found.length == 300
        t.same(found.sequences[0], t.filled(list(range(300))))
        index.insert(list(range(100, 300)), t.filled(list(range(100, 300))), model="m")
    """)
    index = kvant.PrefixIndex(tmp_path)
    assert index.stats.entries == 2 and index.find(range(100, 400), model="m").length == 200
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["header", "tokens", "pages", "end", "shorter", "empty"])
def test_damaged_files_are_removed_and_reported(tmp_path, where):
    ids = list(range(400))
    index = kvant.PrefixIndex(tmp_path)
    index.insert(ids[:200], filled(ids[:200]))
    index.insert(ids, [filled(ids), filled(ids)])
    path = max(tmp_path.iterdir(), key=lambda p: (p.stat().st_size, p.name))
    data = bytearray(path.read_bytes())
    place = {"header": 40, "tokens": -2000, "pages": len(data) // 2, "end": -1}.get(where)
    if place is not None:
        data[place] ^= 4
    path.write_bytes(data[:-100] if where == "shorter" else b"" if where == "empty" else data)
    for one in (kvant.PrefixIndex, lambda _: index):  # one that reads the folder anew, and one that knows the entry
        with pytest.warns(RuntimeWarning, match="damaged and was removed") if one is kvant.PrefixIndex else _quiet():
            reader = one(tmp_path)
            assert reader.find(ids).length == 200
        if one is kvant.PrefixIndex:
            assert len(reader.problems) == 1 and reader.stats.refused == 1
    assert len(list(tmp_path.iterdir())) == 1


class _quiet:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def test_a_known_entry_that_is_damaged_later(tmp_path):
    ids = list(range(400))
    index = kvant.PrefixIndex(tmp_path)
    index.insert(ids, filled(ids))
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="not as it was saved"):
        assert index.find(ids) is None
    assert list(tmp_path.iterdir()) == [] and index.insert(ids, filled(ids)) and index.find(ids).length == 400


def test_files_of_another_name_or_entry_are_not_believed(tmp_path):
    ids = list(range(200))
    index = kvant.PrefixIndex(tmp_path)
    index.insert(ids, [filled(ids), filled(ids)])
    first, second = sorted(tmp_path.iterdir())
    forged = tmp_path / ("0" * 32 + "-" + "0" * 16 + ".0of1.kvs")
    forged.write_bytes(first.read_bytes())
    second.write_bytes(first.read_bytes())
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "chat.kvs").write_bytes(b"kept")
    with pytest.warns(RuntimeWarning, match="is not this part"):
        assert kvant.PrefixIndex(tmp_path).find(ids) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.kvs", "notes.txt"]


def test_half_entries_are_not_entries(tmp_path):
    ids = list(range(200))
    kvant.PrefixIndex(tmp_path).insert(ids, [filled(ids), filled(ids)])
    first, second = sorted(tmp_path.iterdir())
    second.unlink()
    index = kvant.PrefixIndex(tmp_path)
    assert index.find(ids) is None and first.exists()  # its writer may still write
    left_over = tmp_path / f"{first.name}.tmp-1-1"
    left_over.write_bytes(b"half")
    for path in (first, left_over):
        os.utime(path, (1, 1))
    assert index.find(ids) is None and list(tmp_path.iterdir()) == []


def test_errors_of_files(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(kvant.FileError, match="file"):
        kvant.PrefixIndex(tmp_path / "file")
    index, ids = kvant.PrefixIndex(tmp_path / "gone"), list(range(200))
    os.rmdir(tmp_path / "gone")
    with pytest.raises(kvant.FileError, match="gone"):
        index.insert(ids, filled(ids))


def test_arguments():
    index, ids = kvant.PrefixIndex(), list(range(100))
    sequence = filled(ids)
    for call, message in (
        (lambda: index.insert(ids[:99], sequence), "99 ids for a sequence of 100"),
        (lambda: index.insert(ids, []), "sequences is empty"),
        (lambda: index.insert(ids, [3]), "must be sequences"),
        (lambda: index.insert(["a"], sequence), "must be a whole number"),
        (lambda: index.insert(ids, sequence, metadata={"prefix.a": ""}), "do not begin with"),
        (lambda: index.insert(ids, sequence, metadata={"a": 1}), "must be a str"),
        (lambda: index.insert(ids, sequence, model=None), "must be a str"),
        (lambda: index.find(3), "must be a list"),
        (lambda: kvant.PrefixIndex(max_bytes=0), "must be above 0"),
        (lambda: kvant.PrefixIndex(max_bytes="1"), "must be a number"),
    ):
        with pytest.raises(kvant.InvalidArgument, match=message):
            call()
    assert index.stats.entries == 0
    with pytest.raises(TypeError, match="another index"):
        __import__("copy").copy(index)


# --- several at once ---


def run(folder, code, wait=True):
    import textwrap

    folders = [str(Path(__file__).parent), *sys.path]
    text = SOURCE.format(folders=folders) + textwrap.dedent(code)
    process = subprocess.Popen([sys.executable, "-c", text, str(folder)], stderr=subprocess.PIPE, text=True)
    if not wait:
        return process
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return process


WRITER = """
    import random
    random.seed({seed})
    index = t.kvant.PrefixIndex(sys.argv[1], max_bytes={limit})
    for step in range({steps}):
        i = random.randrange(6)
        ids = list(range(1000 * i, 1000 * i + 130 + 64 * random.randrange(3)))
        found = index.find(ids)
        if found is None or found.length < len(ids):
            index.insert(ids, [t.filled(ids), t.filled(ids, k="tq4")])
        else:
            plain = t.filled(ids[: found.length])
            if not found.truncated:
                assert t.np.array_equal(t.attend(found.sequences[0]), t.attend(plain)), step
    assert not index.problems, index.problems
"""


def test_processes_share_a_directory(tmp_path):
    ids = list(range(130))
    index = kvant.PrefixIndex(tmp_path / "one")
    index.insert(ids, [filled(ids), filled(ids, k="tq4")])
    limit = 4 * index.stats.bytes
    writers = [
        run(tmp_path / "all", WRITER.format(seed=seed, limit=limit, steps=40), wait=False) for seed in range(3)
    ]
    for writer in writers:
        error = writer.communicate()[1]
        assert writer.returncode == 0, error
    index = kvant.PrefixIndex(tmp_path / "all", max_bytes=limit)
    assert not index.problems and 1 <= index.stats.entries <= 6
    assert not [p for p in (tmp_path / "all").iterdir() if ".tmp-" in p.name]


@pytest.mark.slow
def test_killed_writers_leave_no_half_entry(tmp_path):
    entries = 0
    for seed in range(40):
        before, begin = set(tmp_path.iterdir()), time.monotonic()
        writer = run(tmp_path, WRITER.format(seed=seed, limit=1e7, steps=1000), wait=False)
        while set(tmp_path.iterdir()) <= before and time.monotonic() - begin < 30:  # until it writes
            time.sleep(0.01)
        time.sleep(0.02 * (seed % 20))
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        index = kvant.PrefixIndex(tmp_path)
        assert not index.problems
        for i in range(6):
            found = index.find(range(1000 * i, 1000 * i + 400))
            if found is not None:
                entries += 1
                plain = filled(range(1000 * i, 1000 * i + found.length))
                assert found.truncated or np.array_equal(attend(found.sequences[0]), attend(plain))
        index.clear()
    print(f"40 writers killed, {entries} entries read, none half")
    assert entries > 20


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
