"""kvant.PrefixIndex as conversations grow: what stays, what goes, and that entries need no others that went."""

import linecache
import os
import sys
import threading

import pytest

import kvant
from growth_support import EXACT, Chat, ids_of, index, play  # noqa: F401
from kvant import _prefix_folder, _prefix_table
from prefix_support import filled, new_cache, run


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
