"""Signals at every moment of kvant's calls: what arrives, and what is left.

    python interrupts_bar.py                    1000 random moments of each call, with a timer's signals; prints a table
    python interrupts_bar.py --generate         generate() with known prefixes and without kvant, too (needs torch
                                                and transformers)
    python interrupts_bar.py CALL...            only these

Handlers raise KeyboardInterrupt, TimeoutError and an exception of their own in turn. An exception must arrive as
itself, with the state from before the call or after it, no sequence without an owner, no file but whole ones, and no
lock. `exactly` goes through the moments one by one: CPython runs handlers at the end of some instructions, and a tracer
makes the signal come just before each of these.

An exception is lost where somebody drops it: Python, in a finaliser or a callback of a weak reference that is a
function of Python, or code that catches all exceptions. Its traceback ends where it was dropped. Losses in code of
other packages (torch, transformers, Python's library) are counted apart, with the place, and generate() without kvant
shows whether they come without kvant, too. A callback of Python's library may be of an object of kvant's: one that
only comes with kvant is kvant's.
"""

from __future__ import annotations

import _thread
import argparse
import collections
import copy
import dataclasses
import dis
import gc
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import kvant
from kvant import _locks

HEADS, DIM = 1, 32
NUMBER = getattr(signal, "SIGALRM", signal.SIGINT)


class Private(Exception):
    """No exception of Python's, and of nobody else."""


KINDS = (KeyboardInterrupt, TimeoutError, Private)


class Lost(Exception):
    """An exception of a handler that did not arrive."""


@dataclasses.dataclass
class Call:
    """One call. begin() makes a fresh state. call() is interrupted. state() is compared with those of before and after.
    caches: whose sequences are counted at the end. folder: whose files are, after each moment."""

    begin: Callable[[], None]
    call: Callable[[], Any]
    state: Callable[[], Any]
    caches: Callable[[], list[kvant.Cache]] = list
    folder: str | None = None


@dataclasses.dataclass
class Found:
    moments: int = 0
    arrived: int = 0
    before: int = 0
    after: int = 0
    between: list = dataclasses.field(default_factory=list)
    as_others: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lost: int = 0  # by kvant
    elsewhere: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # lost: by place
    orphans: int = 0
    files: int = 0
    locks: int = 0

    @property
    def good(self) -> bool:
        bad = self.lost or self.orphans or self.files or self.locks or self.between or self.as_others
        return not bad and self.arrived + sum(self.elsewhere.values()) == self.moments


def rows(tokens: int, seed: int = 0, heads: int = HEADS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, heads, DIM), np.float32)


# --- the calls --------------------------------------------------------------------------------------------------------


class World:
    """A cache with two sequences, another cache, a file and an index; and the calls on them."""

    def __init__(self, tokens: int = 300):
        self.dir = tempfile.mkdtemp()
        self.tokens = tokens
        self.x, self.one, self.q = rows(tokens), rows(1, 1), rows(1, 2)
        self.cache = self.other = None
        self.sequences: list = []
        self.result: Any = None
        self.path = os.path.join(self.dir, "a.kvs")
        self.fresh()
        kvant.save(self.cache, self.path, tokens=[range(tokens)] * 2)
        self.snapshot = kvant.Snapshot(self.path)
        self.small = os.path.getsize(self.path)

    def fresh(self) -> None:
        self.result = None
        self.cache, self.other = (kvant.Cache(kv_heads=HEADS, head_dim=DIM, layers=2, threads=1) for _ in range(2))
        self.sequences = [self.cache.sequence(), self.cache.sequence()]
        for s in self.sequences:
            for layer in range(2):
                s.append(layer, self.x, self.x)

    def again(self) -> None:
        """As fresh() leaves it, in less time."""
        self.result = None
        for s in self.sequences:
            if len(s) != self.tokens:
                s.truncate(self.tokens)

    def lengths(self) -> Any:
        return [len(s) for s in self.sequences], self.cache.memory().tokens, self.other.memory().tokens

    def both(self) -> list:
        return [self.cache, self.other]

    def _keep(self, made: Any) -> None:
        self.result = made

    def _attend_and_append(self) -> None:
        self.cache.attend(self.sequences, 0, self._two(self.q), self._two(self.one), self._two(self.one))

    def _two(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, x])

    def _step(self) -> None:
        with self.cache.step(self.sequences) as step:
            for layer in range(2):
                step.write(layer, self._two(self.one), self._two(self.one))
                step.attend(layer, self._two(self.q))

    def _reported(self, done: int, total: int) -> None:
        self.seen = done

    def calls(self) -> dict[str, Call]:
        def of(call: Callable[[], Any], begin=self.again, state=self.lengths, folder=None) -> Call:
            return Call(begin, call, state, self.both, folder)

        new = os.path.join(self.dir, "new.kvs")

        def no_file() -> None:
            self.again()
            if os.path.exists(new):
                os.unlink(new)

        def file() -> Any:
            if not os.path.exists(new):
                return None
            kvant.Snapshot(new).verify()
            return True

        def gone() -> None:
            if not self.sequences[1].id:
                self.sequences[1] = s.fork()
            self.again()

        def longer() -> None:
            self.again()
            for layer in range(2):
                s.append(layer, self.x[:30], self.x[:30])

        def alive() -> Any:
            return bool(self.sequences[1].id), self.cache.owner.count()

        s = self.sequences[0]
        indexes = [kvant.PrefixIndex(), kvant.PrefixIndex(os.path.join(self.dir, "index"))]
        empty = [kvant.PrefixIndex(), kvant.PrefixIndex(os.path.join(self.dir, "empty"))]
        for index in indexes:
            index.insert(range(self.tokens), s)

        def insert(index: kvant.PrefixIndex) -> Call:
            def begin() -> None:
                self.again()
                index.clear()

            def state() -> Any:
                return index.stats.entries, index.find(range(self.tokens)) is not None

            return Call(begin, lambda: index.insert(range(self.tokens), s), state, self.both, index.directory)

        def find(index: kvant.PrefixIndex) -> Call:
            return of(lambda: self._keep(index.find(range(self.tokens))), folder=index.directory)

        saved = dict(folder=self.dir)
        p = self._reported
        return {
            "sequence": of(lambda: self._keep(self.cache.sequence())),
            "fork": of(lambda: self._keep(s.fork())),
            "append": of(lambda: s.append(0, self.one, self.one), state=self._layers),
            "attend": of(lambda: self.cache.attend(s, 0, self.q, lse=True)),
            "attend with keys": of(self._attend_and_append, state=self._layers),
            "step": of(self._step, state=self._layers),
            "reserve": of(lambda: self.cache.reserve(self.sequences, [1, 2])),
            "plan": of(lambda: self._keep(self.cache.plan(s, q_heads=1, softcap=np.float32(3), alibi_slopes=[1]))),
            "reorder": of(lambda: self.cache.reorder(self.sequences, [1, 1])),
            "truncate": of(lambda: s.truncate(self.tokens), longer),
            "decode": of(lambda: self.cache.decode(self.sequences, 0)),
            "remove": of(lambda: self.sequences[1].remove(), gone, alive),
            "save": of(lambda: kvant.save(self.cache, new), no_file, file, **saved),
            "save, progress": of(lambda: kvant.save(self.cache, new, progress=p), no_file, file, **saved),
            "load": of(lambda: self._keep(kvant.load(self.path))),
            "load, progress": of(lambda: self._keep(kvant.load(self.path, progress=p))),
            "load(into=)": of(lambda: self._keep(kvant.load(self.path, into=self.other))),
            "load(into=), progress": of(lambda: self._keep(kvant.load(self.path, into=self.other, progress=p))),
            "copy": of(lambda: self._keep(kvant.copy_sequences(self.sequences, self.other))),
            "copy, progress": of(lambda: self._keep(kvant.copy_sequences(self.sequences, self.other, progress=p))),
            "Snapshot.verify": of(lambda: self.snapshot.verify(progress=p)),
            "Snapshot.copy": of(lambda: self.snapshot.copy(new, progress=p), no_file, file, **saved),
            "find in memory": find(indexes[0]),
            "find in files": find(indexes[1]),
            "insert in memory": insert(empty[0]),
            "insert in files": insert(empty[1]),
        }

    def _layers(self) -> Any:
        """Lengths, and up to where each layer is written."""
        written = []
        for layer in range(2):
            try:
                self.cache.decode(self.sequences, layer)
                written.append(True)
            except kvant.InvalidArgument:
                written.append(False)
        return *self.lengths(), written


# --- moments ----------------------------------------------------------------------------------------------------------


class Handler:
    """Raises the next kind of exception at each signal while it is armed."""

    def __init__(self):
        self.armed, self.rung, self.kind, self.kept, self.raised = 0, 0, KINDS[0], None, None

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed -= 1
            self.rung += 1
            self.raised = self.kind("of the handler")
            raise self.raised

    def forget(self) -> None:
        """Drops the last exceptions, and with them the frames of the call that they stopped."""
        self.kept = self.raised = None


def count_loss(found: Found, error: BaseException) -> None:
    """error: that did not arrive."""
    *frames, of_handler = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    places = [(f.f_code.co_filename, f.f_code.co_name) for f in frames or [of_handler.f_back]]
    if any(file.startswith(_PACKAGE) for file, _ in places):
        found.lost += 1
    else:
        file, function = places[0]
        found.elsewhere[f"{os.sep.join(file.split(os.sep)[-3:])}, {function}()"] += 1


def leftovers(found: Found, call: Call, printed: list) -> None:
    """Counts what an interrupted call left: exceptions that Python printed and dropped, locks, files."""
    for error in printed:
        count_loss(found, error)
    printed.clear()
    found.locks += len(_locks.lent)
    for lock in _locks._existing():
        if not lock.acquire(timeout=5):  # a call's own thread may be about to give it back
            found.locks += 1
            continue
        lock.release()
        while lock._is_owned():
            lock.release()
            found.locks += 1
    if call.folder:
        found.files += sum(".tmp" in name for name in os.listdir(call.folder))


def orphans(call: Call, handler: Handler) -> int:
    """Sequences that the library has and nobody else."""
    handler.forget()  # frames of the last call have sequences that the library may not have made yet
    gc.collect()  # one that goes between the two counts would be counted as less than none
    count = 0
    for cache in call.caches():
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "all.kvs")
            alive = cache.owner.count()
            kvant.save(cache, path)
            count += len(kvant.Snapshot(path).info.lengths) - alive
    return count


def interrupted(call: Call, handler: Handler, arm: Callable[[], None], disarm: Callable[[], None]) -> str | None:
    """One call with a signal. Returns the exception's name, None if no exception came."""
    name = None
    try:
        arm()
        call.call()
        handler.armed = 0
    except BaseException as error:
        handler.armed, handler.kept = 0, error  # as a debugger keeps it, with all that its frames have
        name = type(error).__name__
        if type(error) is not handler.kind or str(error) != "of the handler":
            name += f": {error}"[:150]
    handler.armed = 0
    disarm()
    return name


def note(found: Found, call: Call, name: str | None, handler: Handler, states: tuple, printed: list) -> None:
    found.moments += 1
    if name == handler.kind.__name__:
        found.arrived += 1
    elif name is None:
        if handler.raised not in printed:  # else leftovers() counts that
            count_loss(found, handler.raised)
    else:
        found.as_others[name] += 1
    state = call.state()
    if state == states[0]:
        found.before += 1
    elif state == states[1]:
        found.after += 1
    else:
        found.between.append(state)


def states_of(call: Call) -> tuple[Any, Any]:
    gc.collect()  # else a sequence of an earlier call may go, and be counted, at any moment of this one
    call.begin()
    before = call.state()
    call.call()
    return before, call.state()


class Session:
    """Installs the handler, and gathers what Python prints and drops."""

    def __enter__(self) -> Session:
        self.handler, self.printed = Handler(), []
        self._old = signal.signal(NUMBER, self.handler), sys.unraisablehook
        sys.unraisablehook = lambda what: self.printed.append(what.exc_value)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(NUMBER, self._old[0])
        sys.unraisablehook = self._old[1]
        self.handler.forget()

    def randomly(self, call: Call, moments: int, seed: int = 0) -> Found:
        """A timer's signals at random times within the call."""
        rng, found, handler, took = random.Random(seed), Found(), self.handler, []
        states = states_of(call)
        for _ in range(5):
            call.begin()
            begin = time.perf_counter()
            call.call()
            took.append(time.perf_counter() - begin)
        longest, tries = 1.2 * sorted(took)[2] + 20e-6, 0
        while found.moments < moments and tries < 20 * moments:
            tries += 1
            call.begin()
            handler.kind = KINDS[tries % len(KINDS)]
            rung = handler.rung
            delay = max(rng.random() * longest, 1e-6)

            def arm(delay=delay) -> None:
                handler.armed = 1
                signal.setitimer(signal.ITIMER_REAL, delay)

            name = interrupted(call, handler, arm, lambda: signal.setitimer(signal.ITIMER_REAL, 0))
            if handler.rung == rung:  # the call was over
                continue
            note(found, call, name, handler, states, self.printed)
            leftovers(found, call, self.printed)
        call.begin()
        found.orphans = orphans(call, handler)
        return found

    def exactly(self, call: Call, gap: int = 0, stride: int = 1) -> Found:
        """The signal at each moment in which CPython runs handlers in kvant's own code. gap: another signal so many
        moments later, while the first one's exception is on its way."""
        found, handler = Found(), self.handler
        states = states_of(call)
        call.begin()
        last = _count_moments(call.call)
        for n in range(0, last, stride):
            call.begin()
            handler.kind = KINDS[n % len(KINDS)]
            rung, tracer = handler.rung, _Tracer({n, n + gap})

            def arm() -> None:
                handler.armed = 2
                tracer.start()

            name = interrupted(call, handler, arm, lambda: sys.settrace(None))
            if handler.rung == rung:
                if tracer.rang:
                    raise Lost(f"moment {n}: the signal's handler was not called")
                continue  # this time the call took another way, and was shorter
            note(found, call, name, handler, states, self.printed)
            leftovers(found, call, self.printed)
        call.begin()
        found.orphans = orphans(call, handler)
        return found


_PACKAGE = os.path.dirname(kvant.__file__)
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_code: dict = {}


def _looks(code: Any) -> dict[int, bool]:
    """Whether CPython looks for signals at the end of the instruction at an offset. At other instructions the tracer
    itself would be the next to run, and the moment none that a program has."""
    if code not in _code:
        _code[code] = {
            i.offset: i.opname.startswith(_LOOKS) and "INTRINSIC" not in i.opname for i in dis.get_instructions(code)
        }
    return _code[code]


class _Tracer:
    """Makes the signal come as instructions with these numbers, of those that may run a handler, begin."""

    def __init__(self, numbers: set[int]):
        self.numbers, self.at, self.rang = numbers, -1, False

    def start(self) -> None:
        sys._getframe().f_trace_opcodes = True  # CPython 3.12 sees at settrace whether instructions are traced
        sys.settrace(self)

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.each(frame, "opcode", None)  # as a function begins

    def each(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode" and (frame.f_lasti <= 0 or _looks(frame.f_code).get(frame.f_lasti, False)):
            self.at += 1
            if self.at in self.numbers:
                self.rang = True
                ring = map(_thread.interrupt_main, (NUMBER,))
                [_] = ring  # no handler runs from here to the instruction
        return self.each


def _count_moments(call: Callable[[], Any]) -> int:
    tracer = _Tracer(set())
    tracer.start()
    try:
        call()
    finally:
        sys.settrace(None)
    return tracer.at + 1


# --- the table --------------------------------------------------------------------------------------------------------


def generate_calls() -> dict[str, Call]:
    """generate() of a tiny model, with prefixes in files, and without kvant."""
    import torch
    import transformers

    import kvant.hf

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, vocab_size=128, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config).eval()
    model = kvant.hf.enable(copy.deepcopy(plain), prefix_cache=(folder := tempfile.mkdtemp()))
    ids = torch.arange(100)[None] % 128

    def call(of: Any, **options: Any) -> Call:
        def generate() -> Any:
            return of.generate(ids, max_new_tokens=3, do_sample=False)

        expected = generate()
        return Call(gc.collect, generate, lambda: torch.equal(generate(), expected), **options)

    return {"generate with prefixes": call(model, folder=folder), "generate without kvant": call(plain)}


def line(name: str, f: Found) -> str:
    others = "; ".join(f"{n} {what}" for what, n in f.as_others.most_common(3))
    return (
        f"{name:24} {f.moments:7} {f.arrived:8} {f.before:7} {f.after:6} {len(f.between):8} {f.orphans:8} {f.files:6} "
        f"{f.locks:6} {f.lost:5}  {others}{' ' + str(f.between[0])[:90] if f.between else ''}"
    )


HEADING = (
    f"{'call':24} {'moments':>7} {'arrived':>8} {'before':>7} {'after':>6} {'between':>8} {'orphans':>8} {'files':>6} "
    f"{'locks':>6} {'lost':>5}"
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("calls", nargs="*")
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--exactly", action="store_true", help="each moment once, instead of random ones")
    parser.add_argument("--gap", type=int, default=0, help="with --exactly: another signal so many moments later")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    calls = World().calls()
    if arguments.generate:
        calls |= generate_calls()
    print(HEADING)
    bad = 0
    with Session() as session:
        for name, call in calls.items():
            if arguments.calls and name not in arguments.calls:
                continue
            try:
                if arguments.exactly:
                    found = session.exactly(call, arguments.gap)
                else:
                    found = session.randomly(call, arguments.moments, arguments.seed)
            except Exception as error:  # of a call that nothing interrupted
                print(f"{name:24} cannot be called any more: {type(error).__name__}: {error}", flush=True)
                bad += 1
                continue
            bad += not found.good
            print(line(name, found), flush=True)
            for place, n in found.elsewhere.most_common():
                print(f"{'':24} {n} lost elsewhere, in {place}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
