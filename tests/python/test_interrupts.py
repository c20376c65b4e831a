"""Signals' handlers and progress functions: an exception arrives as itself, at any moment of any call, with the state
from before the call or after it; and a progress function never waits for its own call."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import interrupts_bar
import numpy as np
import pytest

import kvant
from kvant import _c, _locks, _long_calls, _signals

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")

NAMES = list(interrupts_bar.World().calls())


@pytest.fixture(scope="module")
def calls():
    return interrupts_bar.World().calls()


@pytest.fixture
def session():
    with interrupts_bar.Session() as made:
        yield made


# --- every moment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_at_every_moment(calls, session, name):
    found = session.exactly(calls[name])
    assert found.good, interrupts_bar.line(name, found)
    assert found.moments == found.before + found.after
    assert found.moments > 5 or sys.version_info >= (3, 13)  # which traces the instructions of few functions


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("name", ["sequence", "append", "attend with keys", "save, progress", "load(into=)", "copy"])
def test_another_signal_while_the_first_ones_exception_is_on_its_way(calls, session, name, gap):
    found = session.exactly(calls[name], gap, stride=3)
    assert found.good, interrupts_bar.line(name, found)


@pytest.mark.parametrize("name", NAMES)
def test_signals_at_random_moments(calls, session, name):
    found = session.randomly(calls[name], 15)
    assert found.good, interrupts_bar.line(name, found)


@pytest.mark.parametrize("name", ["attend with keys", "step"])
def test_a_call_that_was_interrupted_can_be_made_again(session, name):
    """And gives what it gives where nothing came."""
    world = interrupts_bar.World()
    call = world.calls()[name]
    call.begin()
    call.call()
    for s in world.sequences:
        s.append(1, world.one, world.one) if name == "attend with keys" else None
    expected = world.cache.decode(world.sequences, 1)[0].tobytes()
    moments = interrupts_bar._count_moments(lambda: (call.begin(), call.call()))
    for n in range(0, moments, 29):
        call.begin()
        tracer = interrupts_bar._Tracer({n})

        def arm(tracer=tracer):
            session.handler.armed = 1
            tracer.start()

        interrupts_bar.interrupted(call, session.handler, arm, lambda: sys.settrace(None))
        if len(world.sequences[0]) == world.tokens:
            call.call()
        for s in world.sequences:
            s.append(1, world.one, world.one) if name == "attend with keys" else None
        assert world.cache.decode(world.sequences, 1)[0].tobytes() == expected


def test_what_a_handler_raises_is_no_error_of_an_argument():
    class Slow:
        """Whose methods are functions of Python, in which a handler runs."""

        def __index__(self):
            raise TimeoutError("of a handler")

        __float__ = __repr__ = __iter__ = __fspath__ = __bool__ = __dlpack__ = __index__

        def __dlpack_device__(self):
            return 1, 0

    cache = kvant.Cache(kv_heads=1, head_dim=32)
    sequence = cache.sequence()
    for call in (
        lambda: sequence.truncate(Slow()),
        lambda: cache.plan(sequence, q_heads=1, scale=Slow()),
        lambda: cache.plan(Slow(), q_heads=1),
        lambda: cache.attend(sequence, 0, Slow()),
        lambda: kvant.Snapshot(Slow()),
        lambda: kvant.Cache(kv_heads=1, head_dim=32, k=Slow()),
    ):
        with pytest.raises(TimeoutError, match="of a handler"):
            call()


def test_errors_of_an_object_are_no_errors_of_attempt():
    assert _signals.attempt(len, [1, 2]) == (2, None)
    assert _signals.attempt(dict) == ({}, None)
    for error in (*_signals.REFUSALS, RecursionError, NotImplementedError, UnicodeError):
        made = error("utf-8", b"", 0, 1, "") if error is UnicodeDecodeError else error("no")

        def refuse(_, made=made):
            raise made

        assert _signals.attempt(refuse, 1) == (None, made)
    for error in (OSError, TimeoutError, KeyboardInterrupt, SystemExit, interrupts_bar.Private, MemoryError):

        def interrupt(_, error=error):
            raise error

        with pytest.raises(error):
            _signals.attempt(interrupt, 1)
    assert isinstance(_signals.attempt(os.stat, "/none", refusals=(OSError,))[1], FileNotFoundError)

    def time_out(_):
        raise TimeoutError("of a handler")  # without a number, which systems give

    with pytest.raises(TimeoutError):
        _signals.attempt(time_out, 1, refusals=(OSError,))


def test_finalisers_are_calls_of_c():
    """Python prints and drops what a handler raises in a finaliser that is a function of Python."""
    for name in ("Bases", "Cache", "Sequence", "Plan", "Pages", "PagesPlan", "Snapshot", "Step"):
        assert not hasattr(getattr(kvant, name), "__del__"), name
    cache = kvant.Cache(kv_heads=1, head_dim=32)
    sequence = cache.sequence()
    sequence.append(0, np.ones((1, 1, 32), "f4"), np.ones((1, 1, 32), "f4"))
    plan = cache.plan(sequence, q_heads=1)
    dropped = []
    old = sys.unraisablehook, sys.getprofile()
    sys.unraisablehook = dropped.append
    functions = []
    sys.setprofile(lambda frame, event, _: functions.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del plan
        del sequence
        del cache
    finally:
        sys.setprofile(None)
        sys.unraisablehook = old[0]
    assert not dropped and not functions


# --- progress functions -----------------------------------------------------------------------------------------------


def rows(tokens):
    return np.random.default_rng(0).standard_normal((tokens, 2, 128), np.float32)


def script(text, timeout=60):
    """Runs a program in which a mistake is a hang, and returns its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": str(Path(kvant.__file__).parents[1]), "KVANT_LIBRARY": str(_c.library_path)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout.splitlines()


WORLD = """
import kvant, numpy as np, os, sys, tempfile, threading, time
from kvant import _long_calls
_long_calls._PATIENCE = 0.05
rows = lambda *s: np.random.default_rng(0).standard_normal(s).astype("f")
def cache():
    return kvant.Cache(kv_heads=2, head_dim=128, k="f32", v="f32")
a, b = cache(), cache()
s = a.sequence(); s.append(0, rows(20000, 2, 128), rows(20000, 2, 128))
t = b.sequence(); t.append(0, rows(10, 2, 128), rows(10, 2, 128))
plan = a.plan(s, q_heads=4)
folder = tempfile.mkdtemp()
path, new = folder + "/x.kvs", folder + "/y.kvs"
kvant.save(a, path)
snapshot = kvant.Snapshot(path)
calls = {
    "save": lambda p: kvant.save(a, new, progress=p),
    "copy": lambda p: kvant.copy_sequences(s, b, progress=p),
    "copy to": lambda p: kvant.copy_sequences(t, a, progress=p),
    "load": lambda p: kvant.load(path, into=a, progress=p),
    "verify": lambda p: snapshot.verify(progress=p),
    "file copy": lambda p: snapshot.copy(new, progress=p),
}
"""


def test_a_progress_function_that_uses_the_cache_gets_an_error():
    said = script(
        WORLD
        + """
acts = {
    "memory": a.memory, "attend": lambda: a.attend(s, 0, rows(1, 4, 128)), "run": lambda: plan.run(0, rows(1, 4, 128)),
    "new": a.sequence, "fork": s.fork, "append": lambda: s.append(0, rows(1, 2, 128), rows(1, 2, 128)),
    "truncate": lambda: s.truncate(10), "len": lambda: len(s), "decode": lambda: a.decode(s, 0, 0, 5),
    "step": lambda: a.step(s), "reorder": lambda: a.reorder([s], [0]), "trim": a.trim, "describe": a.describe,
    "remove": s.remove, "close": a.close, "save": lambda: kvant.save(a, folder + "/z.kvs"),
    "copy": lambda: kvant.copy_sequences(s, cache()), "load": lambda: kvant.load(path, into=a),
    "index": lambda: kvant.PrefixIndex().insert(range(20000), s),
}
for name in ("save", "copy", "copy to", "load"):
    call = calls[name]
    for act, do in acts.items():
        said = []
        def progress(done, total):
            if not said:
                try:
                    do()
                    said.append("went through")
                except kvant.InvalidArgument as error:
                    said.append("refused" if "progress function" in str(error) else str(error))
        before = a.memory().tokens, len(s)
        call(progress)
        assert said == ["refused"], (name, act, said)
        assert (a.memory().tokens, len(s)) == before, (name, act)
    print(name)
"""
    )
    assert said == ["save", "copy", "copy to", "load"]


def test_other_caches_and_files_can_be_used_meanwhile():
    assert script(
        WORLD
        + """
def progress(done, total):
    other = cache()
    kvant.copy_sequences(t, other, progress=lambda *_: other.memory if False else None)
    assert len(kvant.load(path).sequences[0]) == 20000
    snapshot.verify()
kvant.save(a, new, progress=progress)
said = []
def inner(done, total):
    try:
        said.append(a.memory())
    except kvant.InvalidArgument:
        said.append("refused")
kvant.save(a, new, progress=lambda *_: kvant.copy_sequences(t, cache(), progress=inner))
assert set(said) == {"refused"}, said
snapshot.verify(progress=lambda *_: (a.memory(), s.fork(), snapshot.verify(progress=lambda *_: None)))
print(a.memory().tokens)
"""
    ) == ["20000"]


def test_a_progress_function_that_waits_for_another_thread_that_uses_the_cache():
    """The work goes on after a while, and the other thread comes to its turn."""
    said = script(
        WORLD
        + """
for name, call in calls.items():
    reports = []
    def progress(done, total):
        reports.append((done, total))
        if len(reports) == 1:
            thread = threading.Thread(target=lambda: s.append(0, rows(1, 2, 128), rows(1, 2, 128)))
            thread.start(); thread.join()
    before = len(s)
    call(progress)
    assert len(s) == before + 1 and reports[-1][0] == reports[-1][1], (name, reports)
    print(name)
"""
    )
    assert said == ["save", "copy", "copy to", "load", "verify", "file copy"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_progress_function_that_forks():
    said = script(
        WORLD
        + """
for name, call in calls.items():
    children = []
    def progress(done, total):
        if not children:
            children.append(os.fork())
    call(progress)
    assert len(s) == 20000
    s.fork().append(0, rows(1, 2, 128), rows(1, 2, 128))
    if children[0] == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    print(name)
"""
    )
    assert said == ["save", "copy", "copy to", "load", "verify", "file copy"]


def test_a_save_as_the_interpreter_ends():
    said = script(
        WORLD
        + """
import atexit
def at_end():
    for progress in (None, lambda done, total: print(done == total)):
        kvant.save(b, new, progress=progress)
    def use(done, total):
        for act in (a.sequence, t.fork, lambda: t.truncate(5), lambda: kvant.save(b, new)):
            try:
                act()
            except kvant.InvalidArgument as error:
                print("progress function" in str(error))
    kvant.copy_sequences(t, a, progress=use)
    def stop(done, total):
        raise TimeoutError
    try:
        kvant.save(b, folder + "/never.kvs", progress=stop)
    except TimeoutError:
        print(sorted(os.listdir(folder)), flush=True)
atexit.register(at_end)
threading._register_atexit(lambda: setattr(_long_calls._thread, "start_new_thread", refuse))  # as from 3.12 on
def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
"""
    )
    assert said == ["True"] * 5 + ["['x.kvs', 'y.kvs']"]


@pytest.fixture
def pair():
    made = [kvant.Cache(kv_heads=2, head_dim=128, k="f32", v="f32") for _ in range(2)]
    sequence = made[0].sequence()
    sequence.append(0, rows(40000), rows(40000))
    return *made, sequence


def test_progress_is_told_in_the_callers_thread_and_in_order(pair, tmp_path):
    cache, other, sequence = pair
    for call in (
        lambda p: kvant.save(cache, tmp_path / "a.kvs", progress=p),
        lambda p: kvant.load(tmp_path / "a.kvs", progress=p),
        lambda p: kvant.load(tmp_path / "a.kvs", into=other, progress=p),
        lambda p: kvant.copy_sequences(sequence, other, progress=p),
        lambda p: kvant.Snapshot(tmp_path / "a.kvs").verify(progress=p),
    ):
        told = []
        call(lambda done, total: told.append((done, total, threading.get_ident())))
        assert len(told) > 2 and told == sorted(told) and told[-1][0] == told[-1][1] == told[0][1]
        assert {thread for *_, thread in told} == {threading.get_ident()}


def test_an_exception_stops_the_work_at_that_report(pair, tmp_path):
    cache, other, sequence = pair
    kvant.save(cache, tmp_path / "a.kvs")
    told = []

    def stop(done, total):
        told.append(done)
        if len(told) == 2:
            raise interrupts_bar.Private("of the function")

    for call in (
        lambda: kvant.save(cache, tmp_path / "b.kvs", progress=stop),
        lambda: kvant.load(tmp_path / "a.kvs", into=other, progress=stop),
        lambda: kvant.copy_sequences(sequence, other, progress=stop),
        lambda: kvant.Snapshot(tmp_path / "a.kvs").copy(tmp_path / "b.kvs", progress=stop),
    ):
        told.clear()
        with pytest.raises(interrupts_bar.Private, match="of the function"):
            call()
        assert len(told) == 2 and other.memory().tokens == 0 and other.owner.count() == 0
        assert [p.name for p in tmp_path.iterdir()] == ["a.kvs"] and not _locks.lent
    assert cache.memory().tokens == 40000


def test_a_function_slower_than_the_work_is_told_the_end(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(_long_calls, "_PATIENCE", 0.01)
    told = []

    def slow(done, total):
        time.sleep(0.3 if not told else 0)
        told.append((done, total))

    kvant.copy_sequences(pair[2], pair[1], progress=slow)
    assert told[-1][0] == told[-1][1]
    told.clear()

    def stop(done, total):
        slow(done, total)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        kvant.copy_sequences(pair[2], pair[1], progress=stop)
    assert len(told) == 1 and pair[1].memory().tokens == 0


def test_answers_of_a_function_that_was_slow_for_a_while(monkeypatch):
    monkeypatch.setattr(_long_calls, "_PATIENCE", 0.01)
    thread = _long_calls._Thread(lambda report: None, [], True)
    assert [thread._report(None, done, 4) for done in (1, 2)] == [0, 0] and thread.skipped == (2, 4)
    for answer in (False, False):  # to the first report and the third
        thread.answers.put(answer)
    assert thread._report(None, 3, 4) == 0 and thread.skipped is None  # or 2 would be told behind 3
    assert thread._report(None, 3, 4) == thread._report(None, 3, 4) == 0
    thread.answers.put(True)  # the function raised
    assert thread._report(None, 4, 4) == 1


def test_calls_of_other_threads_wait_and_are_not_refused(pair):
    cache, other, sequence = pair
    waited, threads = [], []

    def work():
        cache.owner.lock.refuse_lender()
        waited.append(len(sequence))

    def progress(done, total):
        if not threads:
            threads.append(threading.Thread(target=work))
            threads[0].start()
            time.sleep(0.02)
            assert not waited

    kvant.copy_sequences(sequence, other, progress=progress)
    threads[0].join(20)
    assert waited == [40000]


def test_a_long_call_of_a_thread_that_has_the_lock(pair, tmp_path):
    cache, other, sequence = pair
    with cache.owner.lock, other.owner.lock:
        kvant.save(cache, tmp_path / "a.kvs", progress=lambda *_: None)
        assert len(kvant.copy_sequences(sequence, other)[0]) == 40000
        assert cache.owner.lock._is_owned()
    assert not cache.owner.lock._is_owned()
