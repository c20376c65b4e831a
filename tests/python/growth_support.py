"""Helpers of tests of kvant.PrefixIndex as conversations grow."""

from __future__ import annotations

import numpy as np
import pytest

import kvant
from prefix_support import append, attend, filled

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
