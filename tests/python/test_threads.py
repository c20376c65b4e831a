"""Threads, garbage collectors and forks over one cache: a sequence is what it would be alone.

A history draws threads over one cache. Each steps, forks, truncates and reorders sequences of its own, drops others for
Python's collector to find, and compares with the same calls in a cache of its own, bit for bit.
KVANT_RANDOM_CASES=FIRST:COUNT runs other histories.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import kvant
from kvant import _c, _locks, _tensors

D, LAYERS = 32, 2
CONFIGS = (
    {},
    {"k": "f32", "v": "f32"},
    {"k": "tq4", "v": "tq4", "sink_pages": 0, "tail_pages": 0},
    {"window": 70, "window_sinks": 4, "sink_pages": 1, "tail_pages": 1, "rollback_tokens": 100},
)


def make(options, **more):
    return kvant.Cache(kv_heads=1, head_dim=D, layers=LAYERS, threads=1, **options, **more)


@functools.lru_cache(4096)  # a history asks for each some times, and to draw one takes longer than to append it
def row(number, layer):
    return np.random.default_rng((number, layer)).standard_normal((1, D), np.float32)


def rows(numbers, layer):
    """Keys or values of tokens that are numbers: the same for the same numbers."""
    return np.stack([row(n, layer) for n in numbers])


def append(sequence, numbers):
    for layer in range(LAYERS):
        x = rows(numbers, layer)
        sequence.append(layer, x, x)


def attend(cache, sequences, layer=LAYERS - 1, **options):
    q = np.concatenate([rows([len(s)], 9) for s in sequences])
    return cache.attend(sequences, layer, q, threads=1, **options)


def alone(options, deeds):
    cache = make(options)
    sequence = cache.sequence()
    for numbers, length in deeds:
        append(sequence, numbers) if numbers else sequence.truncate(length)
    return attend(cache, [sequence])


class Ring:
    """Keeps sequences until Python's collector comes by: a cycle."""

    def __init__(self, sequences):
        self.sequences, self.me = sequences, self


class History(threading.Thread):
    def __init__(self, options, cache, prefix, seed):
        super().__init__()
        self.options, self.cache, self.prefix = options, cache, prefix
        self.rng, self.next = np.random.default_rng(seed), 1000 * (seed + 1)
        self.mine, self.error, self.compared = [], None, 0  # [sequence, deeds, longest]

    def run(self):
        try:
            for _ in range(int(self.rng.integers(5, 20))):
                self.deed()
            for sequence, deeds, _ in self.mine:
                self.compare(sequence, deeds)
        except BaseException as error:
            self.error = error

    def numbers(self):
        count = int(self.rng.choice([1, 1, 2, 30, 80]))
        self.next += count
        return list(range(self.next - count, self.next))

    def deed(self):
        what = self.rng.integers(12) if self.mine else 0
        if what < 2 and len(self.mine) < 4:
            sequence, deeds, longest = self.prefix
            self.mine.append([sequence.fork(), list(deeds), longest])
        elif what < 6:
            self.step()
        elif what < 8:
            each = self.mine[self.rng.integers(len(self.mine))]
            to = int(self.rng.integers(max(1, each[2] - 60), len(each[0]) + 1))
            each[0].truncate(to)
            each[1].append(([], to))
        elif what < 9:
            parents = [int(p) for p in self.rng.integers(len(self.mine), size=len(self.mine))]
            self.cache.reorder([m[0] for m in self.mine], parents)
            self.mine = [[m[0], list(self.mine[p][1]), self.mine[p][2]] for m, p in zip(self.mine, parents)]
        elif what < 10:
            Ring(self.mine.pop(0))
        elif what < 11:
            gc.collect()
        else:
            self.compare(*self.mine[self.rng.integers(len(self.mine))][:2])

    def step(self):
        """Some sequences, layer by layer; between layers a fork of one grows and goes."""
        batch = [m for m in self.mine if self.rng.integers(2)] or self.mine[:1]
        numbers = [self.numbers() for _ in batch]
        with self.cache.step([m[0] for m in batch], [len(n) for n in numbers]) as step:
            for layer in range(LAYERS):
                x = rows(sum(numbers, []), layer)
                step.write(layer, x, x)
                if layer == 0:
                    other = self.prefix[0].fork()
                    append(other, [3])
                    Ring(other)
                out = step.attend(layer, np.concatenate([rows(n, 9) for n in numbers]), threads=1)
        assert np.isfinite(out).all()
        for m, n in zip(batch, numbers):
            m[1].append((n, None))
            m[2] = max(m[2], len(m[0]))

    def compare(self, sequence, deeds):
        np.testing.assert_array_equal(attend(self.cache, [sequence]), alone(self.options, deeds))
        self.compared += 1


def history(seed):
    options = CONFIGS[seed % len(CONFIGS)]
    cache = make(options)
    prefix = cache.sequence()
    numbers = list(range(1, 2 + seed * 37 % 150))
    append(prefix, numbers)
    shared = (prefix, [(numbers, None)], len(numbers))
    threads = [History(options, cache, shared, 3 * seed + i) for i in range(1 + seed % 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.error is not None:
            raise AssertionError(f"seed {seed}: {thread.error!r}") from thread.error
    compared = sum(thread.compared for thread in threads)
    del threads, thread
    gc.collect()
    assert cache.memory().tokens == len(prefix) or options.get("window")
    return compared


def test_each_sequence_equals_itself_alone():
    first, _, count = os.environ.get("KVANT_RANDOM_CASES", "0:12").partition(":")
    gc.freeze()  # what was there before takes most of a collection's time
    compared = sum(history(int(first) + i) for i in range(int(count)))
    gc.unfreeze()
    assert compared >= int(count) // 2


# --- staleness --------------------------------------------------------------------------------------------------------


def test_a_step_goes_on_whatever_becomes_of_other_sequences():
    cache = make({})
    prefix = cache.sequence()
    append(prefix, range(100))
    a, b = prefix.fork(), prefix.fork()
    x = rows([500], 0)
    step = cache.step(a, 1)
    step.write(0, x, x)
    plan = cache.plan(a, q_heads=1)
    before = plan.run(0, x)
    b.fork()
    append(b, [7])
    b.truncate(90)
    cache.reorder([b, prefix], [1, 0])
    del b
    prefix.remove()
    cache.trim()
    gc.collect()
    assert plan.run(0, x).tobytes() == before.tobytes()
    step.write(1, x, x)
    plan.run(1, x)
    append(a, [8])
    with pytest.raises(kvant.Stale, match=f"sequence {a.id}.*plan again"):
        plan.run(1, x)


def test_a_plan_keeps_its_sequences():
    cache = make({})
    sequence = cache.sequence()
    append(sequence, range(10))
    plan = cache.plan(sequence.fork(), q_heads=1)
    gc.collect()
    assert np.isfinite(plan.run(0, rows([1], 9))).all()


def test_attend_of_one_sequence_between_the_layers_of_another():
    cache = make({})
    a, b = cache.sequence(), cache.sequence()
    for token in range(3):
        for layer in range(LAYERS):
            for s in (a, b):
                x = rows([token], layer)
                cache.attend(s, layer, x, x, x)
    assert len(a) == len(b) == 3
    assert attend(cache, [a]).tobytes() == attend(cache, [b]).tobytes()


def test_a_finalizer_waits_for_no_lock():
    """It may come in a thread that has another lock, whose owner waits for this one."""
    cache = make({})
    sequences = [cache.sequence()]
    append(sequences[0], range(100))
    with cache.owner.lock:
        thread = threading.Thread(target=sequences.clear)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert cache.memory().tokens == 0


def test_a_cache_closed_during_a_call_goes_after_it():
    cache = make({})
    handle = cache.handle
    cache.close()
    number = _c.c_uint64()
    _c.check(_c.cache_add_sequence(handle, _c.byref(number)))  # as a call in another thread that has begun
    assert number.value


def test_a_cycle_of_everything_goes_in_any_order(monkeypatch):
    destroyed = []
    for kind in (_c.CacheHandle, _c.PlanHandle):
        real = kind._destroy

        def destroy(value, ref, kind=kind, real=real):
            destroyed.append((kind, value.value))
            real(value, ref)

        monkeypatch.setattr(kind, "_destroy", staticmethod(destroy))
    for place in range(6):
        cache = make({})
        sequences = [cache.sequence() for _ in range(3)]
        append(sequences[0], range(70))
        plan = cache.plan(sequences[0], q_heads=1)
        expected = [(_c.CacheHandle, cache.handle.value), (_c.PlanHandle, plan.handle.value)]
        cycle = [*sequences, plan, cache]
        cycle.insert(place, cycle)
        del cache, sequences, plan, cycle
        gc.collect()
        assert sorted(map(str, destroyed)) == sorted(map(str, expected))
        destroyed.clear()


def test_a_finaliser_in_a_cycle_may_still_use_the_cache():
    """The collector tells weak references first, and calls finalisers then."""
    seen = []

    class Reporter:
        def __del__(self):
            seen.append((self.cache.memory().tokens, len(self.sequence), self.cache.owner.count()))
            self.plan.run(0, rows([1], 9))

    for place in range(5):
        reporter = Reporter()
        reporter.cache = cache = make({})
        reporter.sequence = cache.sequence()
        append(reporter.sequence, range(70))
        reporter.plan = cache.plan(reporter.sequence, q_heads=1)
        ring = [reporter, cache, reporter.sequence, reporter.plan]
        ring.insert(place, ring)
        reporter.ring = ring
        del reporter, cache, ring
        gc.collect()
    assert seen == [(70, 70, 1)] * 5


def test_a_handle_that_the_library_never_filled_or_that_was_closed_goes(monkeypatch):
    destroyed = []
    monkeypatch.setattr(
        _c.CacheHandle, "_destroy", staticmethod(lambda value, _: destroyed.append(value.value))
    )
    _c.CacheHandle()
    handle = _c.CacheHandle()
    handle.value = 0x1000
    ring = [handle]
    ring.append(ring)
    del handle, ring
    gc.collect()
    assert destroyed == [None, 0x1000]
    before = len(_c._Handle._finalisers)
    for _ in range(1000):
        _c.CacheHandle()
    assert len(_c._Handle._finalisers) <= 2 * before + 200 and len(destroyed) == 1002


def test_sequences_that_go_make_room_for_the_next_call():
    cache = make({}, capacity_tokens=128)
    for _ in range(5):
        sequence = cache.sequence()
        append(sequence, range(128))
        Ring([sequence])
        del sequence
        gc.collect()
    assert cache.memory().tokens == 0 and cache.owner.count() == 0
    sequences = [cache.sequence() for _ in range(3)]
    sequences[1].remove()
    sequences[1].remove()
    assert cache.owner.count() == 2 and sequences[1].id == 0
    with pytest.raises(kvant.InvalidArgument, match="was removed"):
        len(sequences[1])


def test_runs_of_one_plan_take_turns():
    cache = make({})
    sequence = cache.sequence()
    append(sequence, range(3000))
    plan = cache.plan(sequence, q_heads=1, threads=1)
    q = rows([1], 9)
    expected, failures = plan.run(0, q).tobytes(), []

    def work():
        try:
            for _ in range(50):
                assert plan.run(0, q).tobytes() == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# --- forks ------------------------------------------------------------------------------------------------------------


forks = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs fork")


def script(text, first=""):
    """Runs a program in which a mistake is a hang. first: before kvant is imported."""
    source = textwrap.dedent(first) + "import gc, kvant, numpy as np, os, signal, sys, threading, time\n"
    source += "from kvant import _locks\n"
    source += "x = np.ones((4, 1, 32), 'f4')\nmake = lambda **o: kvant.Cache(kv_heads=1, head_dim=32, threads=1, **o)\n"
    done = subprocess.run(
        [sys.executable, "-c", source + textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": str(Path(kvant.__file__).parents[1]), "KVANT_LIBRARY": str(_c.library_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    return done.stdout


@forks
def test_a_fork_waits_for_each_lock():
    """The child of a process whose other thread is within a lock finds what the lock guards whole, and the lock
    free."""
    assert script(
        """
        cache = make(); sequence = cache.sequence(); sequence.append(0, x, x)
        plan, index = cache.plan(sequence, q_heads=1), kvant.PrefixIndex()
        pages = kvant.Pages(kv_heads=1, head_dim=32, k_centre="none")
        pages_plan = pages.plan(1, max_batch=1, max_blocks=1)
        for lock in (cache.owner.lock, plan._lock, index._lock, pages_plan._lock):
            state, inside = ["whole"], threading.Event()
            def work():
                with lock:
                    state[0] = "half"
                    inside.set()
                    time.sleep(0.1)
                    state[0] = "whole"
            thread = threading.Thread(target=work); thread.start(); inside.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                with lock:
                    os._exit(0 if state == ["whole"] and np.isfinite(plan.run(0, x[:1])).all() else 1)
            print(os.waitpid(child, 0)[1]); thread.join()
        """
    ).split() == ["0"] * 4


@forks
def test_a_fork_waits_for_an_append_that_goes_on():
    assert script(
        """
        cache = make(); sequence = cache.sequence()
        keys = np.random.default_rng(0).standard_normal((200000, 1, 32), np.float32)
        thread = threading.Thread(target=sequence.append, args=(0, keys, keys)); thread.start()
        while cache.owner.lock.acquire(blocking=False):
            cache.owner.lock.release()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            stored = cache.decode(sequence, 0)[0]
            fine = len(sequence) == len(keys) and np.abs(stored[-1000:] - keys[-1000:]).max() < 1
            sequence.append(0, x, x)
            os._exit(0 if fine else 1)
        print(os.waitpid(child, 0)[1]); thread.join()
        """
    ).split() == ["0"]


@forks
def test_a_fork_and_a_thread_that_take_locks_in_other_orders_wait_for_each_other_not_for_ever():
    assert script(
        """
        low, high = _locks.new(), _locks.new()
        inside = threading.Event()
        def work():
            with high:
                inside.set()
                while low.acquire(blocking=False):  # until the fork has it
                    low.release()
                    time.sleep(1e-3)
                with low:
                    print("both", flush=True)
        thread = threading.Thread(target=work); thread.start(); inside.wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        print(os.waitpid(child, 0)[1]); thread.join()
        with low, high: print("free")
        """
    ).split() == ["both", "0", "free"]


@forks
def test_a_lock_that_was_made_and_taken_while_a_fork_began_is_free_in_the_child():
    first = """
    import os, threading, time
    made, taken = [], threading.Event()
    def before():  # runs after kvant's own function, since it is registered before that
        def work():
            made.append(_locks.new())
            with made[0]:
                taken.set()
                time.sleep(1)
        threading.Thread(target=work).start(); taken.wait()
    os.register_at_fork(before=before)
    """
    assert script(
        """
        child = os.fork()
        if child == 0:
            os._exit(0 if made[0].acquire(blocking=False) else 1)
        print(os.waitpid(child, 0)[1])
        """,
        first,
    ).split() == ["0"]


def test_a_lock_is_known_as_long_as_somebody_has_it():
    lock = _locks.new()
    ring = [lock]
    ring.append(ring)
    assert lock in _locks._existing()
    known = len(_locks._all)
    del lock, ring
    gc.collect()
    assert len(_locks._all) == known - 1


# --- copies between two caches ----------------------------------------------------------------------------------------


def test_threads_that_copy_in_opposite_directions():
    """Each copy takes two locks. A thread that has its first rests until the other has its own: without one order for
    all each has one, and waits for the other for ever."""
    assert script(
        """
        a, b = make(), make()
        enter = _locks.Lock.__enter__
        def resting(lock):
            entered = enter(lock)
            if lock in (a.owner.lock, b.owner.lock):
                time.sleep(0.02)
            return entered
        _locks.Lock.__enter__ = resting
        starts = threading.Barrier(2)
        def work(source, target):
            sequence = source.sequence(); sequence.append(0, x, x)
            starts.wait(20)
            for _ in range(3):
                for progress in (None, lambda *_: None):
                    assert len(kvant.copy_sequences(sequence, target, progress=progress)[0]) == 4
            os.write(1, b"done\\n")  # whole: print writes the line's end apart
        threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in ((a, b), (b, a))]
        for thread in threads: thread.start()
        for thread in threads: thread.join(25)
        sys.stdout.flush()
        os._exit(any(thread.is_alive() for thread in threads))
        """
    ).split() == ["done", "done"]


# --- torch that another thread imports --------------------------------------------------------------------------------


@pytest.mark.parametrize("has", [(), ("Tensor",)])
def test_numpy_goes_on_while_torch_is_being_imported(monkeypatch, has):
    torch = types.ModuleType("torch")
    torch.__spec__ = types.SimpleNamespace(_initializing=True)
    for name in has:
        setattr(torch, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    cache = make({})
    sequence = cache.sequence()
    append(sequence, range(70))
    out, lse = attend(cache, [sequence], lse=True)
    k, v = cache.decode(sequence, 0)
    merged, _ = kvant.merge([(out, lse), (out, lse)])
    np.testing.assert_allclose(merged, out, rtol=1e-6)
    assert k.shape == v.shape == (70, 1, D)
    pages = kvant.Pages(kv_heads=1, head_dim=64, k_centre="none")
    size = 2 * pages.block_bytes
    memory = np.zeros(size + 64, np.uint8)
    pool = memory[-memory.ctypes.data % 64 :][:size].reshape(2, 1, -1)
    x = np.ones((3, 1, 64), np.float32)
    pages.write(pool, x, x, np.arange(3, dtype=np.int64))
    assert _tensors.torch_module() is None and _tensors.stream_of(("cuda", 0)) == 0


# --- the library ------------------------------------------------------------------------------------------------------


def run(*arguments, library, cwd=None):
    package = Path(kvant.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package), "KVANT_LIBRARY": str(library)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_a_library_by_its_bare_name_is_the_file_that_was_found(tmp_path):
    (tmp_path / "libkvant.so").symlink_to(_c.library_path)
    done = run("-c", "import kvant._c as c; print(c.library_path)", library="libkvant.so", cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "libkvant.so"), done.stderr


@pytest.mark.parametrize("kind", ["absent", "text", "folder", "foreign"])
def test_a_library_that_cannot_be_loaded_is_an_import_error_and_a_line_of_doctor(tmp_path, kind):
    path, reason = tmp_path / "libkvant.so", "could not be loaded"
    if kind == "absent":
        reason = "was not found"
    elif kind == "text":
        path.write_text("not a library")
    elif kind == "folder":
        path.mkdir()
    else:
        import _ctypes  # a shared library of something else

        path, reason = Path(_ctypes.__file__), "is not kvant's shared library"
    done = run("-c", "try:\n    import kvant\nexcept ImportError as error:\n    print(error)", library=path)
    assert reason in done.stdout and str(path) in done.stdout, done
    doctor = run("-m", "kvant", "doctor", library=path)
    assert doctor.returncode == 1 and doctor.stderr == "", doctor
    assert doctor.stdout.startswith("kvant         not available: ") and reason in doctor.stdout
    assert "python " in doctor.stdout
    tool = run("-m", "kvant", "info", library=path)
    assert tool.returncode == 1 and tool.stdout == "" and tool.stderr.count("\n") == 1, tool
    assert tool.stderr.startswith("kvant: ") and reason in tool.stderr
