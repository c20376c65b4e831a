"""kvant.PrefixIndex as conversations grow: what stays, what goes, and that entries need no others that went."""

import linecache
import os
import sys
import threading

import numpy as np
import pytest

import kvant
from kvant import _prefix_folder, _prefix_table
from prefix_support import append, attend, filled, new_cache, run

EXACT = dict(k="f32", v="f32")  # pages that are cut off a longer entry are those of a short one, bit for bit


@pytest.fixture(params=["memory", "directory"])
def index(request, tmp_path):
    return kvant.PrefixIndex(tmp_path / "prefixes" if request.param == "directory" else None)


def ids_of(turns, words=100, first=200):
    """The token ids of a conversation after some turns."""
    return list(range(first)) + [10_000 + i for i in range(turns * words)]


class Chat:
    """A conversation in caches with these windows (0: full attention)."""

    def __init__(self, windows, ids, **options):
        self.ids = list(ids)
        self.sequences = [filled(self.ids, window=window, **options) for window in windows]

    def say(self, ids):
        for s in self.sequences:
            append(s, ids)
        self.ids += ids


def play(index, windows, turns, words=100, first=200, **options):
    chat = Chat(windows, ids_of(0, first=first), **options)
    assert index.insert(chat.ids, chat.sequences)
    for turn in range(1, turns + 1):
        chat.say(ids_of(turn, words, first)[len(chat.ids) :])
        found = index.find(chat.ids)
        assert found.length >= len(chat.ids) - words - 64
        assert index.insert(chat.ids, chat.sequences)
    return chat


def bytes_of(folder):
    """Bytes of each entry of a folder."""
    sizes = {}
    for path in folder.iterdir():
        key = path.name.partition(".")[0]
        sizes[key] = sizes.get(key, 0) + path.stat().st_size
    return sizes


def check(found, windows, ids, **options):
    """The sequences that were found are those of the ids, now and after more tokens."""
    assert len(found.sequences) == len(windows)
    for s, window in zip(found.sequences, windows):
        assert len(s) == found.length
        plain = filled(ids[: found.length], window=window, **options)
        for more in ((), (7,), range(500, 600)):
            append(s, more) if more else None
            append(plain, more) if more else None
            assert np.array_equal(attend(s), attend(plain))


# --- one text ---


@pytest.mark.parametrize("words", [1, 64, 100])
def test_an_entry_takes_the_place_of_those_that_it_continues(index, words):
    chat = play(index, [0], 20, words)
    assert index.stats.entries == 1 and index.stats.evicted == 0
    if index.directory:
        (path,) = os.listdir(index.directory)
        alone = kvant.PrefixIndex(index.directory + "-alone")
        alone.insert(chat.ids, chat.sequences)
        assert os.path.getsize(os.path.join(index.directory, path)) == alone.stats.bytes == index.stats.bytes
    back = index.find(ids_of(19, words) + [3] * 80)
    assert back.length == len(ids_of(19, words)) // 64 * 64 or back.truncated <= 64
    assert index.find(ids_of(0)).length == (200 if words == 1 else 192) and index.find(ids_of(0)[:70]).length == 64
    assert index.find(chat.ids).truncated == 0


def test_an_entry_where_two_texts_part_stays(index):
    ids = ids_of(0)
    one, other = ids + [1] * 100, ids + [2] * 100
    for each in (one, ids, other):  # `ids` is shorter than a known one, and takes no place
        index.insert(each, filled(each))
    assert index.stats.entries == 3 and index.find(ids).truncated == 0
    longer = one + [4] * 70  # continues `one` alone
    index.insert(longer, filled(longer))
    assert index.stats.entries == 3
    assert [index.find(each).truncated for each in (longer, other, ids)] == [0, 0, 0]
    for each in (one, other + [5]):  # shorter than a known one; a longer one
        index.insert(each, filled(each))
    assert index.find(ids).truncated == 0 and index.stats.entries == 4
    middle = ids + [1] * 50  # between, on one of the two lines
    index.insert(middle, filled(middle))
    assert index.find(ids).truncated == 0 and index.stats.entries == 5


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)], ids=["longer", "between"])
def test_entries_of_one_line_are_no_branches(index, order):
    """The last one continues the second, and the first is on the same line."""
    lists = [ids_of(turn) for turn in range(3)]
    for turn in order:
        assert index.insert(lists[turn], filled(lists[turn]))
    assert sorted(e.length for e in index._table.entries.values()) == ([400] if order[-1] == 2 else [300, 400])


def test_a_text_that_differs_in_its_last_tokens_is_another(index):
    ids = ids_of(0)  # 200: 8 tokens behind the third page
    for each in (ids, ids[:-1] + [5], ids[:192] + [6] * 200):
        index.insert(each, filled(each))
    assert index.stats.entries == 3
    index.insert(ids + [5], filled(ids + [5]))
    assert index.stats.entries == 3 and index.find(ids + [5]).truncated == 0


def test_entries_of_other_caches_or_models_stay(index):
    ids = ids_of(1)
    index.insert(ids[:200], filled(ids[:200]), model="m")
    index.insert(ids[:200], filled(ids[:200], k="tq4"), model="n")
    for model, options in (("m", {"k": "tq4"}), ("m", {"window": 512}), ("n", {})):
        index.insert(ids, filled(ids, **options), model=model)
        index.insert(ids[:250], [filled(ids[:250])] * 2, model=model)
    assert [index.find(ids[:200], model=model).truncated for model in "mn"] == [0, 0]
    assert index.find(ids[:200], model="n").sequences[0].cache.k == "tq4"


# --- windows ---


@pytest.mark.parametrize("windows", [[0, 128], [128], [128, 0, 256], [128, 256]], ids=str)
def test_a_turn_back_is_found_behind_windows(index, windows, tmp_path):
    chat = play(index, windows, 20, **EXACT)
    for _ in range(2):  # what is found goes on and leaves the entries as they are
        for words in (80, 1):
            prompt = ids_of(19) + [3] * words
            found = index.find(prompt)
            assert len(ids_of(19)) - 64 < found.length <= len(ids_of(19)) + 1
            check(found, windows, prompt, **EXACT)
        check(index.find(chat.ids + [1]), windows, chat.ids, **EXACT)
    if index.directory is None:
        return
    sizes = sorted(bytes_of(tmp_path / "prefixes").values())
    full = 0 in windows
    assert len(sizes) > 1 and sum(sizes) == index.stats.bytes <= (1.5 if full else 2) * sizes[-1]
    again = kvant.PrefixIndex(index.directory)  # another process's view
    assert again.stats.entries == index.stats.entries
    check(again.find(ids_of(19) + [3] * 80), windows, ids_of(19) + [3], **EXACT)
    entries = index.stats.entries
    for path in (tmp_path / "prefixes").iterdir():  # a checkpoint is old some day
        os.utime(path, (1, 1))
    assert kvant.PrefixIndex(index.directory).stats.entries == entries


def test_what_windows_still_see_needs_no_checkpoint(index):
    play(index, [0, 4096], 5)
    assert index.stats.entries == 1
    assert index.find(ids_of(2) + [3] * 80).length == 384


def test_checkpoints_are_a_page_apart(index):
    play(index, [0, 128], 70, words=1)
    assert sorted(e.length for e in index._table.entries.values()) == [264, 270]
    for back in (64, 30, 1):  # turns of one token each
        assert index.find(ids_of(70 - back, words=1) + [3] * 80).length == 270 - back


def test_an_entry_that_became_a_checkpoint_meanwhile(tmp_path):
    """Another process did that after this one looked: the same search finds the entry again."""
    one, other = kvant.PrefixIndex(tmp_path), kvant.PrefixIndex(tmp_path)
    chat = Chat([0, 128], ids_of(1), **EXACT)
    one.insert(chat.ids, chat.sequences)
    chat.say([10_100 + i for i in range(300)])
    other.insert(chat.ids, chat.sequences)
    looks, refresh = [], one._kept.refresh
    one._kept.refresh = lambda now=False: refresh(now) if looks else looks.append("not yet")
    assert one.find(ids_of(1) + [3] * 80).length == 256


def test_the_least_rollback_of_several_windows_counts(index):
    ids = ids_of(3)
    index.insert(ids, [filled(ids, window=128, rollback_tokens=n) for n in (200, 100, 300)])
    (entry,) = index._table.entries.values()
    assert entry.rollback == 100


def test_checkpoints_take_half_of_the_last_state(tmp_path):
    index = kvant.PrefixIndex(tmp_path)
    play(index, [0, 128], 30, words=200)
    kept = [e for e in index._table.entries.values() if not e.whole]
    whole = [e for e in index._table.entries.values() if e.whole]
    assert len(whole) == 1 and len(kept) >= 2 and sum(e.bytes for e in kept) <= whole[0].bytes // 2
    found = index.find(ids_of(28, 200) + [3] * 80)  # two turns
    assert found.length >= len(ids_of(28, 200)) - 64


@pytest.mark.parametrize("size, expected", [(50, {"256", "384"}), (51, {"384"}), (101, {"384"})])
def test_checkpoints_take_half_and_the_longest_stays(size, expected):
    entries = [entry_of(n, [True]) for n in (128, 256, 384)]
    for entry in entries:
        entry.key, entry.bytes = str(entry.length), size
    newest = entry_of(1000, [True])
    newest.bytes = 200
    assert kvant.PrefixIndex()._checkpoints(entries, newest) == expected


def test_a_checkpoint_serves_with_an_entry_that_has_the_rest_alone(tmp_path):
    """Its parts of full attention are taken from a longer entry of the same ids, and of nothing else."""
    index = kvant.PrefixIndex(tmp_path)
    chat = play(index, [0, 128], 4, **EXACT)
    (last,) = (e for e in index._table.entries.values() if e.whole)
    checkpoint = max((e for e in index._table.entries.values() if not e.whole), key=lambda e: e.length)
    assert checkpoint.parts[0] is None and checkpoint.parts[1] is not None
    prompt = ids_of(3) + [3] * 80
    for path in last.parts:
        os.unlink(path)
    assert index.find(prompt) is None and index.find(chat.ids) is None
    # Another text from the last page on, other caches, another model: none of them completes it.
    other = prompt[: checkpoint.length // 64 * 64 - 1] + [9] * 200
    index.insert(other, Chat([0, 128], other, **EXACT).sequences)
    index.insert(chat.ids, Chat([0, 64], chat.ids, **EXACT).sequences)
    index.insert(chat.ids, Chat([256, 128], chat.ids, **EXACT).sequences)
    index.insert(chat.ids, Chat([0, 128], chat.ids, **EXACT).sequences, model="m")
    found = index.find(prompt)
    assert found is None or found.length < checkpoint.length // 64 * 64
    again = Chat([0, 128], ids_of(3) + [4] * 100, **EXACT)
    index.insert(again.ids, again.sequences, metadata={"turn": "again"})
    found = index.find(prompt)
    assert found.length == checkpoint.length // 64 * 64
    assert found.truncated == len(again.ids) - found.length and found.metadata == {"turn": "again"}
    found.metadata.clear()  # is the caller's
    assert index.find(prompt).metadata == {"turn": "again"}
    check(found, [0, 128], prompt, **EXACT)


def test_the_entry_that_completes_a_checkpoint_outlives_it(tmp_path):
    index = kvant.PrefixIndex(tmp_path)
    play(index, [0, 128], 4, **EXACT)
    back = ids_of(3) + [3] * 80
    before = {e.key: e.whole for e in index._table.entries.values()}
    other = kvant.PrefixIndex(tmp_path, max_bytes=index.stats.bytes + 1000)
    others = [[7000 + 300 * i + j for j in range(200)] for i in range(8)]
    gone = []
    for i, ids in enumerate(others):
        if i == 0:
            assert index.find(back)  # used last: the checkpoint, and the entry that completes it
        other.insert(ids, filled(ids))
        now = {e.key for e in kvant.PrefixIndex(tmp_path)._table.entries.values()}
        gone += [whole for key, whole in before.items() if key not in now and key in {k for k in before}]
        before = {key: whole for key, whole in before.items() if key in now}
        if any(not whole for whole in before.values()):
            assert any(before.values())
    assert gone and gone == sorted(gone)  # checkpoints first


def entry_of(length, windows, parts=None, rollback=64, kinds=None, model="", first=0):
    ids = _prefix_table.packed(range(first, first + length))
    parts = parts or ["file"] * len(windows)
    kinds = kinds or [None if part is None else i for i, part in enumerate(parts)]
    return _prefix_table.Entry("key", ids, _prefix_table.chain(model, ids), model, {}, parts, kinds, windows, rollback)


def test_tokens_of_an_entry_that_are_usable():
    def usable(entry, common):
        return entry.usable(_prefix_table.packed([*range(common), 9999]))

    for entry, expected in (
        (entry_of(300, [False]), {300: 300, 236: 236, 235: 192, 64: 64, 63: 0}),
        (entry_of(300, [True], rollback=64), {300: 300, 236: 236, 235: 0}),
        (entry_of(300, [False, True], rollback=108), {236: 236, 235: 192, 192: 192, 191: 0}),
        (entry_of(300, [False, True], rollback=107), {236: 236, 235: 0}),
        (entry_of(300, [False, True], [None, "file"], rollback=107), {300: 256, 256: 256, 255: 0}),
        (entry_of(300, [False, False], [None, "file"]), {300: 256, 255: 192, 64: 64, 63: 0}),
    ):
        assert {common: usable(entry, common) for common in expected} == expected


def test_entries_that_complete_a_checkpoint():
    checkpoint = entry_of(300, [False, True], [None, "file"])
    assert entry_of(400, [False, True]).completes(checkpoint, 256)
    assert entry_of(256, [False, True]).completes(checkpoint, 256)
    for other in (
        entry_of(255, [False, True]),
        entry_of(400, [True, True]),  # pages have left the window of the part that is missing
        entry_of(400, [False, True], [None, "file"]),
        entry_of(400, [False, True, False]),
        entry_of(400, [False, True], kinds=[0, 7]),
        entry_of(400, [False, True], model="m"),
        entry_of(400, [False, True], first=1),
    ):
        assert not other.completes(checkpoint, 256)


def test_a_checkpoint_is_completed_where_both_serve_a_page_alike():
    checkpoint = entry_of(300, [False, True], [None, "file"], rollback=107)  # 193 tokens or more: 256
    for length, expected in ((192, False), (255, False), (256, True), (400, True)):
        table, other = _prefix_table.Table(), entry_of(length, [False, True])
        other.key = "other"
        table.add(checkpoint)
        assert not table.completed(checkpoint)
        table.add(other)
        assert table.completed(checkpoint) == expected


def test_the_shortest_entry_completes_a_checkpoint():
    table, checkpoint = _prefix_table.Table(), entry_of(300, [False, True], [None, "file"])
    entries = [entry_of(length, [False, True], rollback=64) for length in (500, 400, 600)]
    for i, entry in enumerate((checkpoint, *entries)):
        entry.key = str(i)
        table.add(entry)
    ids = _prefix_table.packed([*range(290), 9999])
    assert table.best(checkpoint.chain, "", ids, set()) == (256, checkpoint, entries[1])
    assert table.best(checkpoint.chain, "", ids, {"2"}) == (256, checkpoint, entries[0])


def test_the_newest_entry_is_spared_once():
    table, entry = _prefix_table.Table(), entry_of(300, [False])
    table.add(entry)
    assert table.oldest(entry) is None and table.oldest(None) is entry


# --- caches that are closed ---


def three_entries():
    index = kvant.PrefixIndex()
    short, long = filled(ids_of(0)[:100]), filled(ids_of(0))
    other = filled(ids_of(0)[:150] + [8] * 30)
    for s, ids in ((long, ids_of(0)), (other, ids_of(0)[:150] + [8] * 30), (short, ids_of(0)[:100])):
        assert index.insert(ids, s)
    return index, short, other, long


def test_entries_of_closed_caches_go():
    index, _, other, long = three_entries()
    long.cache.close()
    assert index.find(ids_of(0)).length == 150 and index.stats.entries == 2
    other.cache.close()
    assert index.find(ids_of(0)).length == 100 and index.stats.entries == 1
    assert index.insert(ids_of(0), filled(ids_of(0))) and index.find(ids_of(0)).length == 200
    for entry in index._table.entries.values():
        for s in entry.parts:
            s.cache.close()
    assert index.find(ids_of(0)) is None and index.stats.entries == 0 and index.stats.bytes == 0


def test_an_entry_of_a_closed_cache_is_not_known():
    index, ids = kvant.PrefixIndex(), ids_of(0)
    sequence = filled(ids)
    index.insert(ids, sequence)
    sequence.cache.close()
    assert index.insert(ids, filled(ids)) and index.stats.entries == 1
    assert index.find(ids).length == 200


@pytest.mark.parametrize("call", ["fork", "truncate", "__len__"])
def test_caches_that_are_closed_during_a_search(monkeypatch, call):
    index, ids = kvant.PrefixIndex(), ids_of(0)
    for each in (ids[:150] + [8] * 90, ids[:100]):
        index.insert(each, filled(each))
    original = getattr(kvant.Sequence, call)

    def closing(self, *given):
        if len(index._table.entries) == 2:
            self.cache.close()
        return original(self, *given)

    monkeypatch.setattr(kvant.Sequence, call, closing)
    assert index.find(ids).length == 100 and len(index._table.entries) == 1


def test_a_copy_from_a_cache_that_is_closed_meanwhile(monkeypatch):
    index, ids = kvant.PrefixIndex(), ids_of(0)
    for each in (ids[:150] + [8] * 90, ids[:100]):
        index.insert(each, filled(each))
    from kvant import _prefix_memory

    def closing(sequence, to):
        if len(index._table.entries) == 2:
            sequence.cache.close()
        return kvant.copy_sequences(sequence, to)

    monkeypatch.setattr(_prefix_memory, "copy_sequences", closing)
    mine = new_cache()
    assert index.find(ids, into=[mine]).length == 100
    assert index.stats.entries == 1


def test_a_cache_of_the_callers_that_is_closed_meanwhile(index, monkeypatch):
    ids, mine, truncate = ids_of(0), new_cache(), kvant.Sequence.truncate
    index.insert(ids, filled(ids))
    monkeypatch.setattr(kvant.Sequence, "truncate", lambda self, n: (mine.close(), truncate(self, n)))
    with pytest.raises(kvant.InvalidArgument, match="was closed"):
        index.find(ids[:130] + [9] * 80, into=[mine])
    assert index.stats.entries == 1


def test_errors_of_the_callers_caches_are_the_callers(index):
    ids = ids_of(0)
    index.insert(ids, [filled(ids), filled(ids)])
    closed, small, mine = new_cache(), new_cache(capacity_tokens=64), new_cache()
    closed.close()
    for second, error in ((closed, "was closed"), (small, "capacity"), (new_cache(k="tq4"), "differ in k")):
        for prompt in (ids, ids[:130] + [9]):
            with pytest.raises(kvant.KvantError, match=error) as kept:  # an error has what its frames have
                index.find(prompt, into=[mine, second])
            assert mine.memory().tokens == 0, kept
    assert index.stats.entries == 1 and not index.problems and index.stats.hits == 0
    assert index.find(ids, into=[mine, new_cache()]).length == 200

    def closes(place, metadata):
        raise kvant.BadFile("the caller's own")

    with pytest.raises(kvant.BadFile, match="the caller's own"):
        index.find(ids, into=closes)
    assert index.stats.entries == 1 and not index.problems


# --- interrupts ---


class Interrupt(BaseException):
    pass


def interrupted(call, moment):
    """Calls, and raises at a line of the index's modules: the moment-th. Returns whether there was one. Not where a
    `with` block ends, where Python runs no signal's handler."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if "_prefix" not in os.path.basename(frame.f_code.co_filename) or "tests" in frame.f_code.co_filename:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            count += 1
            if count == moment:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def holds(cache):
    m = cache.memory()
    return m.tokens, m.encoded_bytes, m.exact_bytes, m.table_bytes


def is_whole(index):
    """The table is what its entries say, nothing else is in the folder, and no lock is held."""
    table = index._table
    stats = index.stats
    other = _prefix_table.Table()
    for entry in table.entries.values():
        other.add(entry)
    assert other.bytes == table.bytes == stats.bytes
    for name in ("_by_block", "_by_end", "_shared"):
        assert getattr(table, name) == getattr(other, name), name
    assert {age[-1] for age in table._ages} >= table.entries.keys()
    if index.directory:
        files = {path for e in table.entries.values() for path in e.parts if path is not None}
        assert files == {os.path.join(index.directory, name) for name in os.listdir(index.directory)}
    got = []
    thread = threading.Thread(target=lambda: got.append(index._lock.acquire(timeout=5) and index._lock.release()))
    thread.start()
    thread.join()
    assert got == [None]


@pytest.mark.parametrize("windows", [[0], [0, 128]], ids=str)
def test_an_interrupted_insert_is_done_or_is_not(index, windows):
    """At every line: an entry that takes places, evicts another, and leaves a checkpoint."""
    ids = ids_of(3)
    chat = Chat(windows, ids[:300], **EXACT)
    short = [s.fork() for s in chat.sequences]
    chat.say(ids[300:])
    other = filled(range(5000, 5200), **EXACT)
    index.insert(ids[:300], short)
    index.insert(ids, chat.sequences)
    index.max_bytes = index.stats.bytes + 1000
    stride = 1 if index.directory is None else 8  # files take their time
    moment, done, stopped = 0, 0, True
    index.clear()
    held = [holds(s.cache) for s in chat.sequences]
    while stopped:
        index.insert(range(5000, 5200), other)
        index.insert(ids[:300], short)
        moment += stride
        stopped = interrupted(lambda: index.insert(ids, chat.sequences), moment)
        is_whole(index)
        length = index.find(ids).length
        assert length in (300, len(ids))
        done += length == len(ids)
        index.insert(ids, chat.sequences)  # goes on as if nothing had been
        assert index.find(ids).length == len(ids)
        is_whole(index)
        index.clear()
        assert [holds(s.cache) for s in chat.sequences] == held
    assert moment > 60 and 1 < done < moment // stride


def test_an_interrupted_search_leaves_nothing(index):
    ids = ids_of(3)
    chat = play(index, [0, 128], 3, **EXACT)
    mine = [new_cache(**EXACT), new_cache(window=128, **EXACT)]
    moment = 0
    while True:
        moment += 1
        prompt = (ids, ids_of(2) + [3] * 80)[moment % 2]
        stopped = interrupted(lambda: index.find(prompt, into=mine), moment)
        assert [c.memory().tokens for c in mine] == [0, 0]
        is_whole(index)
        assert index.find(prompt).length >= len(ids_of(2)) - 64
        if not stopped and moment > 150:
            break
    assert index.stats.entries >= 2


# --- many entries ---


def lines_of(call):
    """Lines of Python that a call runs in kvant."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace if "kvant" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("full", [False, True])
def test_an_insert_does_as_much_among_many(index, full, monkeypatch):
    """full: each evicts another one."""
    monkeypatch.setattr(_prefix_folder, "_FEW_FILES", 8)
    monkeypatch.setattr(_prefix_folder, "_SHARE", 1e9)  # the folder's names are read once
    sequence = filled(range(200))
    shared = list(range(64))

    def insert(i):
        assert index.insert(shared + [100_000 + 1000 * i + j for j in range(136)], sequence)

    insert(0)
    each = index.stats.bytes
    worst = []
    for begin, end in ((1, 30), (30, 300)):
        if full:
            index.max_bytes = (index.stats.bytes // each + (end - begin - 10)) * each
        for i in range(begin, end - 10):
            insert(i)
        worst.append(max(lines_of(lambda i=i: insert(i)) for i in range(end - 10, end)))
    assert worst[1] <= 1.2 * worst[0]


def test_processes_that_grow_and_evict(tmp_path):
    """Three processes talk over one folder, whose budget is small. Whatever one removes, the others' answers are
    right, and no checkpoint is left without the entry that completes it."""
    code = """
        import random
        random.seed({seed})
        index = t.kvant.PrefixIndex(sys.argv[1], max_bytes={limit})
        kinds = [dict(k="f32", v="f32"), dict(k="f32", v="f32", window=128)]
        hits = 0
        chats = [[[1000 * i + j for j in range(150)]] for i in range(3)]  # of each its turns
        for step in range(40):
            chat = random.choice(chats)
            if len(chat) > 1 and random.random() < 0.3:
                chat.pop()
            elif len(chat) < 6:
                chat.append([10_000 + 100 * random.randrange(2) + j for j in range(70)])
            ids = sum(chat, [])
            found = index.find(ids)
            if found is not None:
                hits += 1
                for s, kind in zip(found.sequences, kinds):
                    plain = t.filled(ids[: found.length], **kind)
                    assert len(s) == found.length
                    assert t.np.array_equal(t.attend(s), t.attend(plain)), (step, found.length)
            if found is None or found.length < len(ids):
                index.insert(ids, [t.filled(ids, **kind) for kind in kinds])
        assert not index.problems, index.problems
        assert hits > 5, hits
    """
    one = kvant.PrefixIndex(tmp_path / "one")
    ids = ids_of(3)
    one.insert(ids, Chat([0, 128], ids, **EXACT).sequences)
    limit = 6 * one.stats.bytes
    processes = [run(tmp_path / "all", code.format(seed=seed, limit=limit), wait=False) for seed in range(3)]
    for process in processes:
        error = process.communicate()[1]
        assert process.returncode == 0, error
    index = kvant.PrefixIndex(tmp_path / "all", max_bytes=limit)
    entries = index._table.entries.values()
    assert not index.problems and entries
    assert all(entry.whole or index._table.completed(entry) for entry in entries)
