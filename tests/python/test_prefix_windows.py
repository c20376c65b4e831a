"""kvant.PrefixIndex as conversations grow behind windows: checkpoints, and entries that complete these."""

import os

import pytest

import kvant
from growth_support import EXACT, Chat, bytes_of, check, ids_of, index, play  # noqa: F401
from kvant import _prefix_table
from prefix_support import filled


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
