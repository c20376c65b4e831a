"""kvant.save and kvant.load: what was saved goes on bit for bit, other libraries read the file, and what does not fit
is refused."""
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvant

HEADS, DIM, LAYERS = 2, 64, 2


def rows(seed, tokens):
    return np.random.default_rng(seed).standard_normal((tokens, HEADS, DIM)).astype(np.float32)


def append(sequence, seed, tokens):
    for layer in range(LAYERS):
        sequence.append(layer, rows(seed + layer, tokens), rows(seed + 50 + layer, tokens))


def attend(cache, sequence, seed=9):
    q = np.random.default_rng(seed).standard_normal((1, 2 * HEADS, DIM)).astype(np.float32)
    return [cache.attend(sequence, layer, q) for layer in range(LAYERS)]


@pytest.fixture
def cache():
    return kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.kvs"


def test_a_loaded_cache_goes_on_bit_for_bit(cache, path):
    first = cache.sequence()
    append(first, 1, 300)
    second = first.fork()
    append(second, 100, 30)
    kvant.save(cache, path, name="chat", model="nano", metadata={"user": "ä"}, tokens=[range(300), None])
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    loaded = kvant.load(path, model="nano", metadata={"user": "ä"}, tokens=[list(range(300)), None])
    assert [len(s) for s in loaded.sequences] == [300, 330]
    assert repr(loaded.cache) == repr(cache)
    for fact in ("tokens", "encoded_bytes", "exact_bytes"):
        assert getattr(loaded.cache.memory(), fact) == getattr(cache.memory(), fact)
    for step in range(3):
        for mine, theirs in zip((first, second), loaded.sequences, strict=True):
            append(mine, 1000 + step, 40)
            append(theirs, 1000 + step, 40)
            for a, b in zip(attend(cache, mine), attend(loaded.cache, theirs), strict=True):
                assert np.array_equal(a, b)


@pytest.mark.parametrize("given, fits", [(None, False), (0, True), (192, False), (1024, True)])
def test_the_capacity_of_a_loaded_cache(path, given, fits):
    cache = kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, capacity_tokens=192)
    first = cache.sequence()
    append(first, 1, 100)
    kvant.save(cache, path)
    (loaded,) = kvant.load(path, capacity_tokens=given).sequences
    if fits:
        append(loaded, 2, 400)
    else:
        with pytest.raises(kvant.OutOfCapacity):
            append(loaded, 2, 400)


def test_info(cache, path):
    sequence = cache.sequence()
    append(sequence, 1, 200)
    kvant.save(cache, path, name="chat", model="nano", metadata={"user": "ann"}, tokens=[[7] * 200])
    snapshot = kvant.Snapshot(path)
    info = snapshot.info
    assert (info.name, info.model, info.metadata) == ("chat", "nano", {"user": "ann"})
    assert (info.lengths, info.has_tokens, info.bases) == ((200,), (True,), ())
    assert info.written_by == kvant.version()
    assert info.config["k"] == "tq6" and info.config["layers"] == LAYERS
    assert info.file_bytes == os.path.getsize(path)
    assert snapshot.tokens(0) == [7] * 200
    with pytest.raises(kvant.InvalidArgument, match="place is 1; the file has 1 sequences"):
        snapshot.tokens(1)
    snapshot.verify()
    seen = []
    snapshot.copy(path.with_name("copy.kvs"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (info.page_bytes, info.page_bytes)
    assert path.with_name("copy.kvs").read_bytes() == path.read_bytes()


def test_the_ordinary_library_reads_it(cache, path):
    safetensors = pytest.importorskip("safetensors")
    sequence = cache.sequence()  # removed when nobody has it
    append(sequence, 1, 300)
    kvant.save(cache, path, model="nano", tokens=[range(300)])
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["kvant.k"] == "tq6"
        assert file.metadata()["kvant.model"] == "nano"
        names = set(file.keys())
        assert {"encoded", "exact", "sequences", "pages", "tokens", "checksums"} == names
        assert file.get_tensor("sequences").tolist() == [[300, 0, 300]]
        assert file.get_tensor("tokens").tolist() == list(range(300))
        encoded = file.get_tensor("encoded")
        assert encoded.shape[:3] == (file.get_tensor("pages")[:, 1].max() + 1, LAYERS, HEADS)
        assert encoded.dtype == np.uint8


def test_what_that_library_refuses_is_refused(cache, path):
    """Files that were altered at random: each is refused, and one that opens here opens in the ordinary library."""
    safetensors = pytest.importorskip("safetensors")
    sequence = cache.sequence()
    append(sequence, 1, 100)
    kvant.save(cache, path)
    whole = path.read_bytes()
    random = np.random.default_rng(3)
    other = path.with_name("altered.kvs")
    opened = 0
    for i in range(400):
        altered = bytearray(whole)
        altered[random.integers(0, 1500 if i % 2 else len(whole))] ^= 1 << random.integers(0, 8)
        other.write_bytes(altered[: random.integers(0, len(whole))] if i % 5 == 0 else altered)
        try:
            snapshot = kvant.Snapshot(other)
        except (kvant.BadFile, kvant.Unsupported):
            continue
        opened += 1
        with pytest.raises(kvant.BadFile, match="not as it was saved"):
            snapshot.verify()
        with safetensors.safe_open(other, framework="np") as file:
            assert "checksums" in file.keys()
    assert opened > 10


def test_some_sequences_and_into_a_cache(cache, path):
    sequences = [cache.sequence() for _ in range(3)]
    for i, sequence in enumerate(sequences):
        append(sequence, 10 * i, 70 * (i + 1))
    kvant.save(cache, path, sequences=[sequences[2], sequences[0]])
    loaded = kvant.load(path, sequences=[1])
    assert [len(s) for s in loaded.sequences] == [70]
    more = kvant.load(path, into=loaded.cache)
    assert more.cache is loaded.cache
    assert [len(s) for s in more.sequences] == [210, 70]
    assert np.array_equal(attend(cache, sequences[2])[1], attend(more.cache, more.sequences[0])[1])
    other = kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, k="tq4")
    with pytest.raises(kvant.InvalidArgument, match="differ in k = tq6 and tq4"):
        kvant.load(path, into=other)
    assert other.memory().tokens == 0


def test_a_chat_that_grows(cache, path):
    sequence = cache.sequence()
    append(sequence, 1, 64 * 40)
    kvant.save(cache, path)
    append(sequence, 500, 64)
    grown = path.with_name("grown.kvs")
    kvant.save(cache, grown, base=path)
    assert os.path.getsize(grown) < os.path.getsize(path) / 3
    assert kvant.Snapshot(grown).info.bases == ("chat.kvs",)
    loaded = kvant.load(grown)
    assert np.array_equal(attend(cache, sequence)[0], attend(loaded.cache, loaded.sequences[0])[0])
    path.unlink()
    with pytest.raises(kvant.FileError, match='needs "chat.kvs"'):
        kvant.load(grown)


def test_files_that_another_one_needs_stay(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sequence = cache.sequence()
    append(sequence, 1, 300)
    kvant.save(cache, "a.kvs")
    append(sequence, 100, 300)
    os.symlink("a.kvs", "link.kvs")
    os.link("a.kvs", "hard.kvs")
    os.symlink(".", "here")
    names = ["a.kvs", "./a.kvs", str(tmp_path / "a.kvs"), "here/a.kvs", "link.kvs", "hard.kvs", b"a.kvs"]
    for name in names:
        for base in names:
            with pytest.raises(kvant.InvalidArgument, match="choose another name"):
                kvant.save(cache, name, base=base)
    kvant.save(cache, "b.kvs", base="link.kvs")
    assert kvant.Snapshot("b.kvs").info.bases == ("a.kvs",)
    for name in names:
        with pytest.raises(kvant.InvalidArgument, match='"b.kvs" needs the file of that name'):
            kvant.Snapshot("b.kvs").copy(name)
    for name in names[:5]:
        with pytest.raises(kvant.InvalidArgument, match='"b.kvs" needs the file of that name'):
            kvant.save(cache, name)
    os.unlink("link.kvs")
    os.symlink("b.kvs", "link.kvs")
    assert len(kvant.load("b.kvs").sequences[0]) == len(kvant.load("link.kvs").sequences[0]) == 600
    assert len(kvant.load("a.kvs").sequences[0]) == 300
    assert sorted(os.listdir()) == ["a.kvs", "b.kvs", "hard.kvs", "here", "link.kvs"]


def test_links_are_written_through_and_what_is_no_file_is_refused(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    os.symlink("folder/chat.kvs", "link")
    sequence = cache.sequence()  # removed when nobody has it
    append(sequence, 1, 100)
    kvant.save(cache, "link")
    assert os.readlink("link") == "folder/chat.kvs" and os.listdir("folder") == ["chat.kvs"]
    os.mkfifo("pipe")
    for name, message in (("folder", "is a directory"), ("pipe", "not a regular file")):
        for call in (kvant.load, kvant.Snapshot, kvant.Snapshot("link").copy, lambda name: kvant.save(cache, name)):
            with pytest.raises(kvant.FileError, match=message):
                call(name)


def doors(cache):
    """Every call that takes a path, and the name of its argument."""
    snapshot = kvant.Snapshot
    return (
        ("path", lambda path: kvant.save(cache, path)),
        ("base", lambda path: kvant.save(cache, "other.kvs", base=path)),
        ("path", kvant.load),
        ("path", snapshot),
        ("path", lambda path: snapshot("chat.kvs").copy(path)),
        ("path", kvant.Bases),
        ("bases", lambda path: kvant.Cache(kv_heads=2, head_dim=64, k_basis="calibrated", bases=path)),
        ("directory", kvant.PrefixIndex),
        ("captures", kvant.eval),
        ("report", lambda path: kvant.eval("chat.kvs", report=path)),
        ("path", lambda path: kvant.calibrate("chat.kvs", path)),
    )


def test_names_of_files(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sequence = cache.sequence()  # removed when nobody has it
    append(sequence, 1, 100)
    kvant.save(cache, "chat.kvs")
    for argument, call in doors(cache):
        for name in ("\ud800", "a\udfff", "", "a\0b", 5, object(), "~no such user/chat.kvs"):
            with pytest.raises(kvant.InvalidArgument, match=f"^{argument} = "):
                call(name)
    with pytest.raises(kvant.InvalidArgument, match=r'a file of that name is "\./~no such user/chat\.kvs"'):
        kvant.load("~no such user/chat.kvs")
    assert os.listdir() == ["chat.kvs"]
    for name in ("b\udcff\udcfe.kvs", b"c\x80.kvs", "ä€.kvs", "n" * 255, "ü" * 127):
        kvant.save(cache, name)
        assert [len(s) for s in kvant.load(name).sequences] == [100]
        kvant.save(cache, b"grown\xff.kvs", base=name)
        kvant.Snapshot(b"grown\xff.kvs").verify()
        os.unlink(b"grown\xff.kvs")
        os.unlink(name)
    with pytest.raises(kvant.FileError, match="File name too long"):
        kvant.save(cache, "n" * 256)
    assert os.listdir() == ["chat.kvs"]


def test_the_home_folder(cache, tmp_path, monkeypatch):
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir(), home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    sequence = cache.sequence()
    append(sequence, 1, 300)
    kvant.save(cache, "~/chat.kvs")
    append(sequence, 100, 300)
    kvant.save(cache, Path("~/grown.kvs"), base="~/chat.kvs")
    kvant.Snapshot("~/grown.kvs").copy("~/copy.kvs")
    assert kvant.PrefixIndex("~/prefixes").directory == str(home / "prefixes")
    assert sorted(os.listdir(home)) == ["chat.kvs", "copy.kvs", "grown.kvs", "prefixes"]
    assert len(kvant.load("~/grown.kvs").sequences[0]) == len(kvant.load(home / "copy.kvs").sequences[0]) == 600
    assert os.listdir(here) == []
    with pytest.raises(kvant.BadFile, match=str(home)):
        kvant.Bases("~/chat.kvs")
    user = pwd.getpwuid(os.getuid())
    with pytest.raises(kvant.FileError, match=f"^{user.pw_dir.rstrip('/')}/no-such-file-of-kvant: "):
        kvant.load(f"~{user.pw_name}/no-such-file-of-kvant")
    # Files of these names.
    kvant.save(cache, "./~")
    kvant.save(cache, b"~chat.kvs")
    kvant.save(cache, "chat~.kvs")
    assert sorted(os.listdir(here)) == ["chat~.kvs", "~", "~chat.kvs"]


def test_a_limit_on_the_size_of_files(tmp_path):
    """Python ignores the signal of that limit; a program that embeds Python need not."""
    program = """if True:
        import resource, signal, numpy, kvant
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        cache = kvant.Cache(kv_heads=2, head_dim=64)
        sequence = cache.sequence()
        sequence.append(0, *numpy.ones((2, 300, 2, 64), "f"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        try:
            kvant.save(cache, "chat.kvs")
        except kvant.FileError as error:
            assert "File too large" in str(error)
            assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_DFL
            print("refused")
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_refusals(cache, path, tmp_path):
    sequence = cache.sequence()
    append(sequence, 1, 100)
    kvant.save(cache, path, model="nano", tokens=[range(100)])
    for options, message in (
        ({"model": "mini"}, '"nano", and "mini" is required'),
        ({"metadata": {"a": "b"}}, '"a" is missing'),
        ({"metadata": {"kvant.k": "tq6"}}, "kvant's own"),
        ({"tokens": [[1]]}, "differ from position 0 on"),
        ({"sequences": [1]}, "the file has 1 sequences"),
        ({"sequences": [-1]}, r"sequences\[0\] = -1"),
        ({"capacity_tokens": 64}, "needs 2 more pages"),
        ({"into": 3}, "must be a kvant.Cache"),
        ({"progress": 3}, "must be a function"),
        ({"model": 3}, "must be a str"),
        ({"metadata": "a"}, "must be a dict"),
    ):
        with pytest.raises((kvant.InvalidArgument, kvant.OutOfCapacity), match=message):
            kvant.load(path, **options)
    for options, message in (
        ({"metadata": {"kvant.k": "b"}}, "kvant's own"),
        ({"metadata": {"a": 1}}, "must be a str"),
        ({"tokens": [[1, 2]]}, "has 2 ids"),
        ({"tokens": [["a"]]}, "must be a whole number"),
        ({"sequences": [3]}, "must be sequences of this cache"),
        ({"name": "\ud800"}, "UTF-8"),
    ):
        with pytest.raises(kvant.InvalidArgument, match=message):
            kvant.save(cache, tmp_path / "other.kvs", **options)
    with pytest.raises(kvant.InvalidArgument, match="must be a kvant.Cache"):
        kvant.save(sequence, path)
    with pytest.raises(kvant.FileError, match="No such file"):
        kvant.save(cache, tmp_path / "no" / "folder.kvs")
    with pytest.raises(kvant.FileError, match="cannot open"):
        kvant.load(tmp_path / "none.kvs")
    with pytest.raises(TypeError, match="open the file again"):
        __import__("copy").copy(kvant.Snapshot(path))
    assert [p.name for p in tmp_path.iterdir()] == ["chat.kvs"]


def test_an_exception_of_progress_stops_the_call(cache, path):
    sequence = cache.sequence()  # removed when nobody has it
    append(sequence, 1, 100)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvant.save(cache, path, progress=stop)
    assert not path.exists()
    kvant.save(cache, path)
    with pytest.raises(KeyboardInterrupt):
        kvant.load(path, progress=stop)


def test_the_collector_may_run_during_progress(cache, path):
    keep, gone = cache.sequence(), [cache.sequence()]
    append(keep, 1, 100)
    append(gone[0], 2, 100)

    def collect(done, total):
        gone.clear()

    kvant.save(cache, path, progress=collect)
    assert not gone
    assert cache.memory().tokens == 100
    assert kvant.Snapshot(path).info.lengths == (100, 100)
    gone.append(cache.sequence())
    kvant.load(path, into=cache, progress=collect)
    assert not gone


def test_a_damaged_page_is_named(cache, path):
    sequence = cache.sequence()  # removed when nobody has it
    append(sequence, 1, 300)
    kvant.save(cache, path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(kvant.BadFile, match='row [0-9]+ of tensor "(encoded|exact)"'):
        kvant.load(path)


def test_copies_in_another_cache(cache):
    first = cache.sequence()
    append(first, 1, 300)
    second = first.fork()
    append(second, 100, 30)
    other = kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, capacity_tokens=640, max_sequences=8)
    seen = []
    copies = kvant.copy_sequences([first, second], other, progress=lambda done, total: seen.append((done, total)))
    assert [len(s) for s in copies] == [300, 330] and copies[0].cache is other
    assert seen[-1][0] == seen[-1][1] > 0
    assert other.memory().encoded_bytes == cache.memory().encoded_bytes  # shared pages are there once
    for mine, theirs in zip((first, second), copies, strict=True):
        append(mine, 1000, 40)
        append(theirs, 1000, 40)
        for a, b in zip(attend(cache, mine), attend(other, theirs), strict=True):
            assert np.array_equal(a, b)
    with pytest.raises(kvant.OutOfCapacity, match="the copy needs"):
        kvant.copy_sequences([first, second], other)
    assert [len(s) for s in copies] == [340, 370]
    assert kvant.copy_sequences([], other) == []
    for arguments, message in (
        ((first, cache), "one cache"),
        ((3, other), "sequences"),
        (([3], other), "must be sequences"),
        (([first, copies[0]], other), "must be sequences of this cache"),
        ((first, kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS, k="tq4")), "differ in k = tq6 and tq4"),
        ((first, 3), "must be a kvant.Cache"),
    ):
        with pytest.raises(kvant.InvalidArgument, match=message):
            kvant.copy_sequences(*arguments)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvant.copy_sequences(copies[0], kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=LAYERS), progress=stop)
