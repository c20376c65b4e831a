"""kvant.PrefixIndex in a folder: files are never trusted, and processes share them."""

import errno
import os
import signal
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import kvant
from kvant import _prefix_folder as prefix_folder, _prefix_table as prefix_table
from prefix_support import attend, filled, run


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


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("where", ["header", "tokens", "pages", "end", "shorter", "empty"])
def test_damaged_files_are_removed_and_reported(tmp_path, where, known):
    """known: by an index that read the entry before."""
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
    with pytest.warns(RuntimeWarning, match="damaged and was removed"):
        reader = index if known else kvant.PrefixIndex(tmp_path)
        assert reader.find(ids).length == 200
    assert len(reader.problems) == 1 and str(path) in reader.problems[0]
    assert (reader.stats.refused, reader.stats.entries) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 1


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


def write(path, ids, part, model="", sequences=None, tokens=True, **options):
    """A file of an entry, or what says so."""
    given = sequences or [filled(ids, **options)]
    kvant.save(given[0].cache, path, sequences=given, model=model, metadata={"prefix.part": part},
               tokens=[ids] * len(given) if tokens else None)


def two(ids, **options):
    first = filled(ids, **options)
    return [first, first.fork()]


IDS, OTHER = list(range(200)), list(range(3000, 3200))
KEY = prefix_table.chain("m", prefix_table.packed(IDS))[-1].hex() + "-" + 16 * "0"
FIRST, SECOND = (IDS, f"0 of 2 of {KEY}", "m"), (IDS, f"1 of 2 of {KEY}", "m")


@pytest.mark.parametrize("files", [
    {"0of2": FIRST, "1of2": (IDS, f"1 of 2 of {KEY}", "n")},
    {"0of2": FIRST, "1of2": (OTHER, f"1 of 2 of {KEY}", "m")},
    {"0of2": FIRST, "1of2": (IDS + [1], f"1 of 2 of {KEY}", "m")},
    {"0of2": FIRST, "1of2": FIRST},
    {"0of2": FIRST, "1of2": (IDS, f"1 of 2 of {KEY[:-1]}1", "m")},
    {"0of2": FIRST, "1of2": (IDS, f"1 of 3 of {KEY}", "m")},
    {"0of1": FIRST},
    {"0of2": FIRST, "2of2": (IDS, f"2 of 2 of {KEY}", "m")},
    {"0of0": (IDS, f"0 of 0 of {KEY}", "m")},
    {"0of1": (IDS, f"0 of 1 of {KEY}", "n")},
    {"0of1": (OTHER, f"0 of 1 of {KEY}", "m")},
    {"0of1": (IDS[:63], f"0 of 1 of {KEY}", "m")},
    {"0of1": (IDS, f"0 of 1 of {KEY}", "m", two(IDS))},
    {"0of1": (IDS, f"0 of 1 of {KEY}", "m", None, False)},
    {"0of2": SECOND, "1of2": FIRST},
], ids=["model", "ids", "longer", "place", "key", "count", "name", "beyond", "none", "hash-model", "hash-ids", "short",
        "two", "no-ids", "swapped"])
def test_forged_entries_are_not_believed(tmp_path, files):
    kvant.PrefixIndex(tmp_path).insert(IDS[:100], filled(IDS[:100]), model="m")
    for name, given in files.items():
        write(tmp_path / f"{KEY}.{name}.kvs", *given)
    with pytest.warns(RuntimeWarning, match="damaged and was removed"):
        index = kvant.PrefixIndex(tmp_path)
    assert index.find(IDS, model="m").length == 100 and index.find(OTHER, model="m") is None
    assert len(list(tmp_path.iterdir())) == 1 and len(index.problems) == index.stats.refused == 1


@pytest.mark.parametrize("known", [True, False])
def test_what_is_not_forged_is_believed(tmp_path, known):
    """Else the test above would pass for the wrong reason."""
    index = kvant.PrefixIndex(tmp_path)
    for name, given in {"0of2": FIRST, "1of2": SECOND}.items():
        write(tmp_path / f"{KEY}.{name}.kvs", *given)
    index = index if known else kvant.PrefixIndex(tmp_path)
    assert len(index.find(IDS, model="m").sequences) == 2 and index.find(IDS) is None


@pytest.mark.parametrize("given", [
    (OTHER, f"0 of 1 of {KEY}", "m"),
    (IDS[:-1] + [7], f"0 of 1 of {KEY}", "m"),
    (IDS, f"0 of 1 of {KEY}", "n"),
    (IDS, f"0 of 2 of {KEY}", "m"),
    (IDS, f"0 of 1 of {KEY[:-1]}1", "m"),
], ids=["ids", "last-id", "model", "count", "key"])
def test_a_file_that_is_replaced_is_not_loaded(tmp_path, given):
    """By an index that has read the one before: another prompt's cache is never returned."""
    path = tmp_path / f"{KEY}.0of1.kvs"
    write(path, IDS, f"0 of 1 of {KEY}", "m")
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS[:100], filled(IDS[:100]), model="m")
    assert index.find(IDS, model="m").length == 200
    os.unlink(path)
    write(path, *given)
    with pytest.warns(RuntimeWarning, match="damaged and was removed"):
        assert index.find(IDS, model="m").length == 100
    assert not path.exists() and index.stats.refused == 1
    write(path, IDS, f"0 of 1 of {KEY}", "m", k="tq4")  # of another configuration
    assert index.find(IDS, model="m").sequences[0].cache.k == "tq4"
    os.unlink(path)
    write(path, IDS, f"0 of 1 of {KEY}", "m")
    with pytest.warns(RuntimeWarning, match="is another file than it was"):
        assert index.find(IDS, model="m").length == 100


@pytest.mark.parametrize("known", [True, False])
def test_a_file_of_another_version_stays(tmp_path, known):
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS, filled(IDS))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert data.count(b'"kvant.snapshot":"1"') == 1
    path.write_bytes(data.replace(b'"kvant.snapshot":"1"', b'"kvant.snapshot":"2"'))
    with pytest.warns(RuntimeWarning, match="is not used.*reads layout 1"):
        index = index if known else kvant.PrefixIndex(tmp_path)
        assert index.find(IDS) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert index.find(IDS) is None and index.stats.entries == 0
        assert index.insert(IDS, filled(IDS)) and index.find(IDS).length == 200
        index.clear()
    assert list(tmp_path.iterdir()) == [path] and index.stats.refused == 0 and len(index.problems) == 1


def test_half_entries_are_not_entries(tmp_path):
    kvant.PrefixIndex(tmp_path).insert(IDS, [filled(IDS), filled(IDS)])
    first, second = sorted(tmp_path.iterdir())
    data = second.read_bytes()
    second.unlink()
    index = kvant.PrefixIndex(tmp_path)
    assert index.find(IDS) is None and first.exists()  # its writer may still write
    second.write_bytes(data)
    assert len(index.find(IDS).sequences) == 2  # it did
    second.unlink()
    left_over = tmp_path / f"{first.name}.tmp-1-1"
    left_over.write_bytes(b"half")
    for age, left in ((3000, [first, left_over]), (4000, [])):
        for path in (first, left_over):
            os.utime(path, (time.time() - age,) * 2)
        assert kvant.PrefixIndex(tmp_path).find(IDS) is None and sorted(tmp_path.iterdir()) == left
    assert index.stats.entries == 0


def test_half_entries_stay_while_one_file_is_young(tmp_path):
    kvant.PrefixIndex(tmp_path).insert(IDS, [filled(IDS) for _ in range(3)])
    first, second, third = sorted(tmp_path.iterdir())
    third.unlink()  # its writer may still write
    os.utime(first, (time.time() - 4000,) * 2)
    assert kvant.PrefixIndex(tmp_path).find(IDS) is None and sorted(tmp_path.iterdir()) == [first, second]
    os.utime(second, (time.time() - 4000,) * 2)
    assert kvant.PrefixIndex(tmp_path).find(IDS) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, kvant.OutOfMemory, kvant.FileError])
def test_a_failed_insert_leaves_no_file(tmp_path, monkeypatch, error):
    index, count = kvant.PrefixIndex(tmp_path), []

    def save(*given, **options):
        count.append(given[1])
        if len(count) == 2:
            raise error(f"{given[1]}: failed")
        kvant.save(*given, **options)

    monkeypatch.setattr(prefix_folder, "save", save)
    with pytest.raises(error):
        index.insert(IDS, [filled(IDS), filled(IDS)])
    assert list(tmp_path.iterdir()) == [] and index.stats.entries == 0
    assert index.insert(IDS, [filled(IDS), filled(IDS)]) and len(index.find(IDS).sequences) == 2


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    index = kvant.PrefixIndex("~/kv")
    assert index.directory == str(tmp_path / "home" / "kv") and os.listdir(tmp_path) == ["home"]


# --- what other processes do meanwhile ---


def test_an_entry_that_goes_during_a_search(tmp_path, monkeypatch):
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS, [filled(IDS), filled(IDS)])
    index.insert(IDS[:100], filled(IDS[:100]))
    opened = prefix_folder._open
    gone = []

    def removing(path, *given):
        if ".1of2." in path:
            gone.append(path)
            os.unlink(path)
        return opened(path, *given)

    monkeypatch.setattr(prefix_folder, "_open", removing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert index.find(IDS).length == 100
    assert len(gone) == 1 and not index.problems
    assert index.insert(IDS, filled(IDS)) and index.find(IDS).length == 200


def test_an_entry_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS, filled(IDS))
    index.insert(IDS[:100], filled(IDS[:100]))
    opened = prefix_folder._open

    def refusing(path, key, place, count):
        if len(index._table.entries[key].ids) == 1600:
            raise kvant.FileError(f"{path}: too many open files")
        return opened(path, key, place, count)

    with monkeypatch.context() as patch:
        patch.setattr(prefix_folder, "_open", refusing)
        assert index.find(IDS).length == 100
    assert index.find(IDS).length == 200 and index.stats.entries == 2


def test_an_entry_that_went_is_kept_again(tmp_path):
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS, filled(IDS))
    for path in tmp_path.iterdir():
        os.unlink(path)
    index._kept.refresh = lambda now=False: None  # a folder whose time stamps are coarse shows no change
    assert index.insert(IDS, filled(IDS)) and index.find(IDS).length == 200


def test_what_others_use_stays(tmp_path):
    one = kvant.PrefixIndex(tmp_path)
    lists = [list(range(1000 * i, 1000 * i + 200)) for i in range(4)]
    for ids in lists[:3]:
        one.insert(ids, filled(ids))
    each = one.stats.bytes // 3
    other = kvant.PrefixIndex(tmp_path)
    assert other.find(lists[0])
    one.max_bytes = int(3.5 * each)
    one.insert(lists[3], filled(lists[3]))
    assert [i for i in range(4) if other.find(lists[i])] == [0, 2, 3] and one.stats.evicted == 1


def test_uses_count_here_where_the_times_of_files_cannot_be_set(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(prefix_folder.os, "utime", refuse)
    index, lists = kvant.PrefixIndex(tmp_path), lists_of(4)
    for ids in lists[:3]:
        index.insert(ids, filled(ids))
    assert index.find(lists[0])
    index.max_bytes = int(3.5 * index.stats.bytes / 3)
    index.insert(lists[3], filled(lists[3]))
    assert [i for i in range(4) if index.find(lists[i])] == [0, 2, 3]


def test_what_others_removed_counts_no_more(tmp_path):
    one, other = kvant.PrefixIndex(tmp_path), kvant.PrefixIndex(tmp_path)
    lists = [list(range(1000 * i, 1000 * i + 200)) for i in range(4)]
    for ids in lists[:3]:
        one.insert(ids, filled(ids))
    one.max_bytes = int(3.5 * one.stats.bytes / 3)
    for path in sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:2]:
        os.unlink(path)
    one._kept._seen, one._kept.refresh = None, lambda now=False: None  # it does not look
    one.insert(lists[3], filled(lists[3]))
    assert one._counts["evicted"] == 0 and [i for i in range(4) if other.find(lists[i])] == [2, 3]


def test_clocks_of_others_may_be_ahead(tmp_path):
    lists = lists_of(5)
    for ids in lists[:2]:
        kvant.PrefixIndex(tmp_path).insert(ids, filled(ids))
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() + 3600,) * 2)
    index = kvant.PrefixIndex(tmp_path)
    index.max_bytes = int(2.5 * index.stats.bytes / 2)
    for ids in lists[2:]:
        assert index.insert(ids, filled(ids)) and index.find(ids)
    assert sum(index.find(ids) is not None for ids in lists[:2]) == 1  # the newest one stays, and goes before it later
    assert index.find(lists[4]) and not index.find(lists[2]) and not index.find(lists[3])


def count_scans(monkeypatch):
    scans = []
    scandir = os.scandir
    monkeypatch.setattr(prefix_folder.os, "scandir", lambda path: scans.append(path) or scandir(path))
    return scans


def test_time_stamps_of_folders_may_be_coarse(tmp_path, monkeypatch):
    one, other = kvant.PrefixIndex(tmp_path), kvant.PrefixIndex(tmp_path)
    assert one.find(IDS) is None
    stamp = os.stat(tmp_path).st_mtime_ns
    other.insert(IDS, filled(IDS))
    os.utime(tmp_path, ns=(stamp, stamp))  # the same second
    assert one.find(IDS).length == 200
    for age, wanted in ((1, 3), (5, 1), (-1000, 3)):  # -1000: another machine's clock
        when = time.time_ns() - age * 10**9
        os.utime(tmp_path, ns=(when, when))
        scans = count_scans(monkeypatch)
        for _ in range(3):
            one.find(IDS)
        assert len(scans) == wanted, age


def test_after_an_interrupted_change_the_folder_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_folder, "_COARSE_NS", 0)
    index = kvant.PrefixIndex(tmp_path)
    index.insert(IDS, filled(IDS))
    assert index.find(IDS) and index._kept._seen == os.stat(tmp_path).st_mtime_ns
    index._table._changing = True  # as within Table.remove: the entry is gone, and the file is not
    index._table.entries.clear()
    assert index.find(IDS).length == 200


def test_names_of_many_files_are_read_seldom(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_folder, "_FEW_FILES", 3)
    monkeypatch.setattr(prefix_folder, "_SHARE", 1e9)
    one, other = kvant.PrefixIndex(tmp_path), kvant.PrefixIndex(tmp_path)
    lists = [list(range(1000 * i, 1000 * i + 100)) for i in range(8)]
    for ids in lists[:6]:
        one.insert(ids, filled(ids))
    scans = count_scans(monkeypatch)
    other.insert(lists[6], filled(lists[6]))
    assert one.find(lists[6]) is None and scans.count(one.directory) == 1  # `other` looked
    for ids in lists[:6]:
        assert one.find(ids).length == 100
    assert one.insert(lists[7], filled(lists[7])) and one.find(lists[7]).length == 100
    assert len(scans) == 1
    assert one.stats.entries == 8 and one.find(lists[6]).length == 100  # stats look
    monkeypatch.setattr(prefix_folder, "_SHARE", 0)
    other.insert([5] * 100, filled([5] * 100))
    assert one.find([5] * 100).length == 100


# --- a full disk ---


def disk_of(monkeypatch, folder, size, number=errno.ENOSPC):
    """A disk that has room for so many bytes of a folder."""
    tries = []

    def save(cache, path, **options):
        tries.append(path)
        kvant.save(cache, path, **options)
        if sum(p.stat().st_size for p in folder.iterdir()) > size:
            os.unlink(path)
            raise kvant.FileError(f"{path}: not written: cannot write: {os.strerror(number)}")

    monkeypatch.setattr(prefix_folder, "save", save)
    return tries


def lists_of(count):
    return [list(range(1000 * i, 1000 * i + 200)) for i in range(count)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_older_entries_make_room_on_a_full_disk(tmp_path, monkeypatch, number):
    index, lists = kvant.PrefixIndex(tmp_path), lists_of(12)
    index.insert(lists[0], filled(lists[0]))
    each = index.stats.bytes
    disk_of(monkeypatch, tmp_path, 4.5 * each, number)
    monkeypatch.setattr(prefix_folder.os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in lists[1:]:
            assert index.insert(ids, filled(ids))
            assert index.find(lists[0]) is not None or ids is lists[-1]
    assert index.find(lists[0]) and index.find(lists[11]) and 2 <= index.stats.entries <= 4
    assert index.stats.evicted == 12 - index.stats.entries


def test_a_disk_without_room_is_said_once(tmp_path, monkeypatch):
    index, lists = kvant.PrefixIndex(tmp_path), lists_of(7)
    for ids in lists[:2]:
        index.insert(ids, filled(ids))
    tries = disk_of(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(prefix_folder.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=1000))
    needed = index.stats.bytes
    with pytest.warns(RuntimeWarning) as said:
        for ids in lists[2:]:  # longer than all that the others could give back
            ids = ids + list(range(40_000, 40_800))
            assert not index.insert(ids, filled(ids, k="f32", v="f32"))
    assert len(said) == 1 and os.strerror(errno.ENOSPC) in str(said[0].message)
    assert said[0].filename == __file__ and ".kvs" not in str(said[0].message)
    assert index.stats.entries == 2 and index.stats.evicted == 0 and index.stats.bytes == needed
    assert len(tries) == 5


def test_a_disk_that_others_fill_costs_a_few_entries(tmp_path, monkeypatch):
    index, lists = kvant.PrefixIndex(tmp_path), lists_of(12)
    for ids in lists:
        index.insert(ids, filled(ids))
    tries = disk_of(monkeypatch, tmp_path, 0)
    with pytest.warns(RuntimeWarning, match="has no room"):
        assert not index.insert([5] * 200, filled([5] * 200))
    assert len(tries) == 4 and 3 <= index.stats.evicted <= 9


def test_a_disk_is_tried_once_where_nothing_can_go(tmp_path, monkeypatch):
    index, tries = kvant.PrefixIndex(tmp_path), disk_of(monkeypatch, tmp_path, 0)
    with pytest.warns(RuntimeWarning, match="has no room"):
        assert not index.insert(IDS, filled(IDS))
    assert len(tries) == 1 and index.stats.evicted == 0


def test_a_limit_of_sizes_evicts_nothing(tmp_path):
    """ulimit -f is no smaller when other files go."""
    run(tmp_path, """
        import resource, warnings
        index = t.kvant.PrefixIndex(sys.argv[1])
        ids = list(range(200))
        index.insert(ids, t.filled(ids))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for i in range(3):
                more = [i] * 300
                assert not index.insert(more, t.filled(more))
        assert len(said) == 1 and "ulimit -f" in str(said[0].message), said
        assert ".kvs" not in str(said[0].message)
        assert index.find(ids).length == 200 and index.stats.entries == 1 and not index.stats.evicted
    """)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_limit_of_sizes_and_a_full_disk_are_each_said_once(tmp_path, monkeypatch):
    index = kvant.PrefixIndex(tmp_path)
    with pytest.warns(RuntimeWarning) as said:
        for number in (errno.EFBIG, errno.ENOSPC) * 2:
            disk_of(monkeypatch, tmp_path, 0, number)
            assert not index.insert(IDS, filled(IDS))
            monkeypatch.setattr(prefix_folder, "save", kvant.save)
    assert ["ulimit -f" in str(w.message) for w in said] == [True, False]


def test_errors_of_files(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(kvant.FileError, match="file"):
        kvant.PrefixIndex(tmp_path / "file")
    index, ids = kvant.PrefixIndex(tmp_path / "gone"), list(range(200))
    os.rmdir(tmp_path / "gone")
    with pytest.raises(kvant.FileError, match="gone"):
        index.insert(ids, filled(ids))
    with pytest.raises(kvant.FileError, match="gone"):
        index.find(ids)


def test_an_error_has_one_text_for_all_entries(tmp_path, monkeypatch):
    """Python shows equal texts once."""
    index, texts = kvant.PrefixIndex(tmp_path), set()

    def save(cache, path, **options):
        raise kvant.FileError(f"{path}: not written: cannot create {path}.tmp-{len(texts)}: {os.strerror(errno.EROFS)}")

    monkeypatch.setattr(prefix_folder, "save", save)
    for ids in lists_of(3):
        with pytest.raises(kvant.FileError, match=os.strerror(errno.EROFS)) as error:
            index.insert(ids, filled(ids))
        texts.add(str(error.value).partition(".tmp-")[0])
    assert len(texts) == 1 and str(tmp_path) in texts.pop()


# --- processes ---

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
