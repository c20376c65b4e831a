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
    _c.check(_c.add_sequence(handle, _c.byref(number)))  # as a call in another thread that has begun
    assert number.value


def test_a_cycle_of_everything_goes_in_any_order():
    for _ in range(20):
        cache = make({})
        sequences = [cache.sequence() for _ in range(3)]
        append(sequences[0], range(70))
        cycle = [*sequences, cache.plan(sequences[0], q_heads=1), cache]
        cycle.insert(len(cycle) // 2, cycle)
        del cache, sequences, cycle
        gc.collect()


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


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs fork")
@pytest.mark.parametrize("busy", ["append", "run", "lock"])
def test_a_child_works_whatever_other_threads_were_doing(busy):
    cache = make({})
    mine, other = cache.sequence(), cache.sequence()
    append(mine, range(100))
    append(other, range(2000))
    expected = attend(cache, [mine]).tobytes()
    stop = threading.Event()

    def work():
        x, q = rows(range(64), 0), rows([1], 9)
        plan = cache.plan(other, q_heads=1)
        while not stop.is_set():
            if busy == "append":
                with other.fork() as sequence:
                    sequence.append(0, x, x)
            elif busy == "run":
                plan.run(0, q)
            else:
                with cache.owner.lock, plan._lock:
                    stop.wait(1e-3)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                append(mine, [5])
                mine.truncate(100)
                os._exit(0 if attend(cache, [mine]).tobytes() == expected else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_a_lock_that_no_thread_of_the_child_has_is_free_there():
    lock = _locks.new()
    lock.acquire()
    taken = threading.Thread(target=_locks.new().acquire)  # dies with it: a lock that nobody gives back
    taken.start()
    taken.join()
    lock.release()
    assert lock in _locks._existing()
    key = id(lock)
    del lock
    assert key not in _locks._all


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
