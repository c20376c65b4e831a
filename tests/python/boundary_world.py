"""Calls of kvant for boundary_fuzz.py: their arguments, good ones and others, and what numpy says of the results."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
from boundary_memory import LAYOUTS, ODD_LAYOUTS, Made, from_bf16, make
from reference import attention

import kvant

OWNERS = ["numpy"] * 3 + ["torch", "dlpack", "old dlpack"]
JUNK = [
    None, True, False, 0, -1, 1.0, 1.5, float("nan"), float("inf"), 2**31, 2**32 + 1, 2**63, 2**64 + 1, -(2**63) - 1,
    10**400, 1j, "", "1", "tq4", "tq4\0x", b"1", [], [1.5], ["1"], [None], {}, (), object(), np.array([1, 2]),
    np.float32(1), np.bool_(True), np.zeros(0, np.float32), np.ones((2, 3)), range(3), lambda: 0, "cpu:3", "f8", [[1]],
]  # fmt: skip


class Wrong(Exception):
    """A finding."""


class World:
    """A cache of two layers and three sequences, and the numbers that they hold."""

    def __init__(self, rng):
        self.rng = rng
        self.kv_heads, self.group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.dim = int(rng.choice([8, 16, 64, 5, 72]))
        self.cache = kvant.Cache(layers=2, kv_heads=self.kv_heads, head_dim=self.dim, k="f32", v="f32", threads=2)
        self.sequences = [self.cache.sequence() for _ in range(3)]
        lengths = rng.integers(0, 150, 3).tolist()
        self.held = [[self.random(n, self.kv_heads, self.dim) for _ in range(4)] for n in lengths]
        for s, (k0, v0, k1, v1) in zip(self.sequences, self.held):
            s.append(0, k0.astype(np.float32), v0.astype(np.float32))
            s.append(1, k1.astype(np.float32), v1.astype(np.float32))
        self.pages = kvant.Pages(kv_heads=self.kv_heads, head_dim=self.dim, k="f32", v="f32")

    def random(self, *shape) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    # --- arguments ---

    def tensor(self, numbers: np.ndarray, *, output=False, dtypes=("f32", "f32", "f16", "bf16"), exact=False) -> Made:
        """The numbers as an argument: mostly a good one."""
        rng = self.rng
        dtype, owner = str(rng.choice(dtypes)), str(rng.choice(OWNERS))
        layout, frozen = str(rng.choice(LAYOUTS)), rng.random() < 0.1
        odd = rng.random()
        if odd < 0.06:
            layout = str(rng.choice(ODD_LAYOUTS))
        elif odd < 0.14:  # another shape
            shape = list(numbers.shape)
            how = rng.integers(0, 5)
            if how == 0 and shape:
                i = rng.integers(0, len(shape))
                shape[i] = max(0, shape[i] + int(rng.choice([-1, 1, 2])))
            elif how == 1:
                shape.insert(int(rng.integers(0, len(shape) + 1)), int(rng.integers(1, 3)))
            elif how == 2 and shape:
                shape.pop(int(rng.integers(0, len(shape))))
            elif how == 3 and len(shape) > 1:
                i = rng.integers(0, len(shape) - 1)
                shape[i], shape[i + 1] = shape[i + 1], shape[i]
            else:
                shape = [0, *shape[1:]]
            if tuple(shape) != numbers.shape:
                made = make(rng, self.random(*shape), dtype, layout, owner)
                same = [n for n in shape if n != 1] == [n for n in numbers.shape if n != 1]
                return Made(made.given, None, same, made.memory, made.view)
        elif odd < 0.17:
            made = make(rng, numbers, str(rng.choice(["int32", "bool"])), layout, owner)
            return Made(made.given, None, False, made.memory, made.view)
        elif odd < 0.20:
            return Made(JUNK[int(rng.integers(0, len(JUNK)))], None)
        made = make(rng, numbers, dtype, layout, owner, frozen=frozen)
        if output and (frozen or layout == "repeated" or layout == "every second"):
            if frozen or made.view.size > len(made.memory.bytes) // made.view.itemsize:
                made.numbers = None
            made.may_refuse = True
        elif exact and layout != "contiguous":
            made.may_refuse = True
        return made

    def rows(self, counts: list[int], heads: int, dtypes=("f32", "f32", "f16", "bf16"), output=False):
        """A tensor with a row for each of the counts: rows one after another, or a batch. Also the rows' numbers of
        each sequence."""
        batched = len(set(counts)) <= 1 and self.rng.random() < 0.5 or self.rng.random() < 0.1
        if not batched:
            made = self.tensor(self.random(sum(counts), heads, self.dim), dtypes=dtypes, output=output)
            if made.numbers is None:
                return made, None
            return made, np.split(made.numbers, np.cumsum(counts)[:-1])
        most = max(counts, default=0)
        made = self.tensor(self.random(len(counts), most, heads, self.dim), dtypes=dtypes, output=output)
        if made.numbers is None:
            if made.view is not None and made.view.shape == (sum(counts), heads, self.dim):
                made.may_refuse = True  # rows one after another
            return made, None
        if made.view.strides[0] == 0 and len(counts) > 1:
            made.may_refuse = True
        if most == 1 and any(n != 1 for n in counts):
            made.may_refuse = True
        return made, [x[:n] for x, n in zip(made.numbers, counts)]

    def number(self, good: int, *also: Any) -> Made:
        """A whole number as an argument: mostly a good one."""
        rng = self.rng
        odd = rng.random()
        if odd < 0.04:
            junk = JUNK[int(rng.integers(0, len(JUNK)))]
            fits = type(junk) is int and junk == good or any(junk is a for a in also)
            if type(junk) is int and any(type(a) is range and junk in a for a in also):
                return Made(junk, junk)
            return Made(junk, good if fits else None, fits)
        kinds = [int, int, int, np.int64, np.int32, np.array, np.uint8 if 0 <= good < 256 else int]
        return Made(kinds[int(rng.integers(0, len(kinds)))](good), good)

    def some(self) -> list[int]:
        return sorted(self.rng.choice(3, int(self.rng.integers(1, 4)), replace=False).tolist())

    # --- calls ---

    def run(self, arguments: dict[str, Made], call: Callable, check: Callable[[Any], None]) -> str:
        """Makes the call. check gets its result."""
        given = {name: m.given for name, m in arguments.items()}
        self.what = {name: _describe(x) for name, x in given.items()}
        outputs = {name for name in arguments if name in ("out", "lse", "keys_out", "values_out", "pool_out")}
        for m in arguments.values():
            m.before()
        before = [len(s) for s in self.sequences]
        bad = [name for name, m in arguments.items() if m.numbers is None]
        doubt = any(m.may_refuse for m in arguments.values())
        try:
            result = call(given)
        except kvant.KvantError as error:
            text = str(error)
            if not bad and not doubt:
                raise Wrong(f"a good call was refused: {text}") from None
            if isinstance(error, kvant.InternalError) or len(text) < 20:
                raise Wrong(f"{type(error).__name__}: {text}") from None
            if [len(s) for s in self.sequences] != before:
                raise Wrong(f"a refused call changed lengths: {text}") from None
            for name, m in arguments.items():
                if not m.untouched(False):
                    raise Wrong(f"a refused call wrote to {name}: {text}") from None
            return "refused"
        except Exception as error:
            raise Wrong(f"bare {type(error).__name__}: {error}") from error
        if bad and not all(arguments[name].may_refuse for name in bad):
            raise Wrong(f"{', '.join(bad)} was taken")
        for name, m in arguments.items():
            if not m.untouched(name in outputs):
                raise Wrong(f"memory of {name} was written")
        if not bad:
            check(result)
        return "right"

    def close(self, name: str, got, expected, dtype: str = "f32") -> None:
        tolerance = {"f32": 3e-5, "f16": 2e-3, "bf16": 2e-2}[dtype]
        got = np.asarray(got, np.float64)
        if got.shape != expected.shape:
            raise Wrong(f"{name} has shape {got.shape}, expected {expected.shape}")
        finite = np.isfinite(expected)
        if not (np.isfinite(got) == finite).all():
            raise Wrong(f"{name} is not finite where it should be, or is where it should not")
        error = np.abs(got - expected)[finite].max(initial=0) / max(1.0, np.abs(expected[finite]).max(initial=0))
        if error > tolerance:
            raise Wrong(f"{name} is off by {error:.2e}")

    def append(self) -> str:
        i, layer = int(self.rng.integers(0, 3)), self.number(0)
        n = int(self.rng.integers(0, 9))
        shape = (1, n, self.kv_heads, self.dim) if self.rng.random() < 0.2 else (n, self.kv_heads, self.dim)
        k, v = self.tensor(self.random(*shape)), self.tensor(self.random(*shape))
        sequence, held = self.sequences[i], self.held[i]
        if k.numbers is None and v.numbers is None and k.view is not None and v.view is not None:
            k.may_refuse = v.may_refuse = k.view.shape == v.view.shape  # other tokens than those that were meant

        def check(_):
            if len(sequence) != len(held[0]) + n:
                raise Wrong(f"{len(sequence)} tokens, expected {len(held[0])} + {n}")
            got = self.cache.decode(sequence, 0, begin=len(held[0]))
            for name, x, m in (("keys", got[0], k), ("values", got[1], v)):
                if not np.array_equal(x, m.numbers.reshape(n, self.kv_heads, self.dim).astype(np.float32)):
                    raise Wrong(f"stored {name} differ")

        try:
            return self.run(
                {"layer": layer, "keys": k, "values": v},
                lambda a: sequence.append(a["layer"], a["keys"], a["values"]),
                check,
            )
        finally:
            sequence.truncate(len(held[0]))

    def decode(self) -> str:
        those = self.some()
        layer = self.number(int(self.rng.integers(0, 2)), range(2))
        bounds = [sorted(self.rng.integers(0, len(self.held[i][0]) + 1, 2).tolist()) for i in those]
        shape = (sum(b - a for a, b in bounds), self.kv_heads, self.dim)
        arguments = {"layer": layer}
        for name in ("keys_out", "values_out"):
            if self.rng.random() < 0.7:
                arguments[name] = self.tensor(self.random(*shape), output=True)
        for name, m in arguments.items():
            if m.given is None:  # a new tensor, which is not looked at
                m.numbers, m.may_refuse = 0, True
            elif m.numbers is None and m.view is not None and m.view.ndim == 4:  # may be a batch, with rows left over
                m.may_refuse = True

        def check(result):
            kv = [[self.held[i][2 * layer.numbers + w][a:b] for i, (a, b) in zip(those, bounds)] for w in (0, 1)]
            for w, name in enumerate(("keys_out", "values_out")):
                m = arguments.get(name)
                if m is not None and m.view is not None:
                    self.close(name, _numbers(m), np.concatenate(kv[w]), _dtype(m))
                elif "keys_out" not in arguments and "values_out" not in arguments:
                    self.close(name, result[w], np.concatenate(kv[w]))

        return self.run(
            arguments,
            lambda a: self.cache.decode(
                [self.sequences[i] for i in those], a["layer"], [a for a, _ in bounds], [b for _, b in bounds],
                keys=a.get("keys_out"), values=a.get("values_out"),
            ),
            check,
        )  # fmt: skip

    def options(self, those, q_lens, heads) -> tuple[dict[str, Made], dict[str, Any]]:
        """Options of a plan as arguments, and as attention() takes them (mask: one for each sequence)."""
        rng, given, meaning = self.rng, {}, {}
        if rng.random() < 0.3:
            window = self.number(int(rng.integers(1, 90)), None, range(2**63))  # 0: none
            given["window"], meaning["window"] = window, 0 if window.given is None else window.numbers
        for name, value in (("scale", 0.3), ("softcap", 5.0)):
            if rng.random() < 0.2:
                kinds = [float, np.float32, np.float64, np.array]
                made = Made(kinds[int(rng.integers(0, 4))](value), value)
                if rng.random() < 0.15:
                    junk = JUNK[int(rng.integers(0, len(JUNK)))]
                    made = Made(junk, value if junk is None and name == "scale" else None, True)
                given[name], meaning[name] = made, None if made.given is None else value
        if rng.random() < 0.2:
            given["is_causal"], meaning["is_causal"] = Made(False, False), False
        if rng.random() < 0.2:
            slopes = [0.5 / (h + 1) for h in range(heads)]
            wrong = rng.random() < 0.2
            given["alibi_slopes"] = Made(slopes[1:] if wrong else np.array(slopes), None if wrong else slopes)
            meaning["alibi"] = slopes
        if rng.random() < 0.1:
            given["threads"] = self.number(1, 0)
        if rng.random() < 0.1:
            given["split_keys"] = self.number(64, 0)
        if rng.random() < 0.4:
            self.mask(those, q_lens, heads, given, meaning)
        return given, meaning

    def mask(self, those, q_lens, heads, given, meaning) -> None:
        rng = self.rng
        most, longest = max(q_lens), max(len(self.held[i][0]) for i in those)
        if most == 0 or longest == 0:
            return
        whole = [len(those), heads, most, longest]
        shape = [n if rng.random() < 0.6 else 1 for n in whole]
        shape = shape[int(rng.integers(0, 4)) if rng.random() < 0.2 else 0 :]
        boolean = rng.random() < 0.5
        visible = rng.random(shape) < 0.7
        made = self.tensor(
            visible.astype(float) if boolean else np.where(visible, 0.0, -2.0),
            dtypes=("bool",) if boolean else ("f32", "f16"),
        )
        given["mask"], meaning["mask"] = made, None
        if made.given is None:
            made.numbers = 0
        elif made.numbers is not None and made.view is not None:
            full = np.broadcast_to(made.numbers, whole)
            meaning["mask"] = [
                (full[j, :, :n, : len(self.held[i][0])] != 0) if boolean else full[j, :, :n, : len(self.held[i][0])]
                for j, (i, n) in enumerate(zip(those, q_lens))
            ]
        elif made.memory is not None:  # another shape may broadcast as well
            made.may_refuse = True

    def attend(self) -> str:
        rng, heads = self.rng, self.kv_heads * self.group
        those = self.some()
        lengths = [len(self.held[i][0]) for i in those]
        q_lens = [min(int(rng.integers(0, 5)), n) for n in lengths]
        if rng.random() < 0.6:
            q_lens = [min(int(rng.integers(1, 4)), *lengths)] * len(those)
        q, rows = self.rows(q_lens, heads)
        layer = self.number(int(rng.integers(0, 2)), range(2))
        arguments, meaning = self.options(those, q_lens, heads)
        arguments |= {"q": q, "layer": layer}
        total = sum(q_lens)
        if rng.random() < 0.5:
            arguments["out"] = self.rows(q_lens, heads, output=True)[0]
        if rng.random() < 0.4:
            arguments["lse"] = self.tensor(self.random(total, heads), dtypes=("f32",), output=True, exact=True)
        if rng.random() < 0.3:
            arguments["sink_logits"] = self.tensor(self.random(heads), dtypes=("f32",), exact=True)
        for name in ("out", "lse", "sink_logits"):
            m = arguments.get(name)
            if m is not None and (m.given is None or name == "lse" and (m.given is True or m.given is False)):
                m.numbers, m.may_refuse = 0, True
        # An output that shares memory with q.
        if rng.random() < 0.03 and q.view is not None and q.numbers is not None and q.view.size > 0:
            arguments["out"] = Made(q.given, None)
        if q.numbers is None and q.view is not None and q.view.ndim >= 3:  # another number of heads is another call
            for name in ("q", "out", "lse", "sink_logits", "alibi_slopes", "mask"):
                if name in arguments:
                    arguments[name].may_refuse = True
        sequences = [self.sequences[i] for i in those]
        plans = rng.random() < 0.5

        def call(a):
            rest = {n: x for n, x in a.items() if n not in ("q", "layer", "out", "lse", "sink_logits")}
            run = {n: a[n] for n in ("out", "lse", "sink_logits") if n in a}
            if plans:
                plan = self.cache.plan(sequences, q_heads=heads, q_lens=q_lens, **rest)
                return plan.run(a["layer"], a["q"], **run)
            return self.cache.attend(sequences, a["layer"], a["q"], q_lens=q_lens, **rest, **run)

        return self.run(arguments, call, lambda r: self.check_attention(arguments, meaning, those, rows, q_lens, r))

    def check_attention(self, arguments, meaning, those, rows, q_lens, result) -> None:
        layer, masks = arguments["layer"].numbers, meaning.pop("mask", None)
        sinks = arguments.get("sink_logits")
        outs, lses = [], []
        for j, i in enumerate(those):
            mask = None if masks is None else masks[j]
            o, l = attention(
                rows[j], *self.held[i][2 * layer : 2 * layer + 2], mask=mask,
                sinks=None if sinks is None or sinks.given is None else sinks.numbers, **meaning,
            )  # fmt: skip
            outs.append(o)
            lses.append(l)
        lse = arguments.get("lse")
        if lse is not None and lse.given is not None and lse.given is not False:
            result, returned = result
            self.close("lse", returned if lse.view is None else _numbers(lse), np.concatenate(lses))
        out = arguments.get("out")
        made = out if out is not None and out.view is not None else arguments["q"]
        got = _numbers(made) if made is out else _as_numbers(result)
        dtype = _dtype(made)
        parts = [x[:n] for x, n in zip(got, q_lens)] if got.ndim == 4 else [got]
        self.close("out", np.concatenate(parts), np.concatenate(outs), dtype)

    def attend_new(self) -> str:
        """With keys and values, which are taken away again."""
        rng, heads = self.rng, self.kv_heads * self.group
        those, n = self.some(), int(rng.integers(1, 6))
        layer, counts = self.number(0), [n] * len(those)
        (q, rows), (k, k_rows), (v, v_rows) = (
            self.rows(counts, h) for h in (heads, self.kv_heads, self.kv_heads)
        )
        arguments = {"layer": layer, "q": q, "keys": k, "values": v}
        meaning = {}
        if q.numbers is None and q.view is not None and q.view.ndim >= 3:  # another number of heads is another call
            q.may_refuse = True
        for name, m in (("keys", k), ("values", v)):
            if m.given is None:
                m.may_refuse = False
        if rng.random() < 0.3:
            arguments["fresh_keys"] = Made(True, True)
        if rng.random() < 0.3:
            arguments["scale"], meaning["scale"] = Made(0.2, 0.2), 0.2
        if rng.random() < 0.2:
            arguments[str(rng.choice(["isa", "kernel", "softcap", "window_sinks", "mask"]))] = Made("nowhere", None)
        lengths = [len(self.held[i][0]) for i in those]
        sequences = [self.sequences[i] for i in those]

        def check(result):
            outs = []
            for j, i in enumerate(those):
                if len(sequences[j]) != lengths[j] + n:
                    raise Wrong(f"{len(sequences[j])} tokens, expected {lengths[j]} + {n}")
                keys = np.concatenate([self.held[i][0], k_rows[j]])
                values = np.concatenate([self.held[i][1], v_rows[j]])
                outs.append(attention(rows[j], keys, values, **meaning)[0])
            self.close("out", _as_numbers(result).reshape(-1, heads, self.dim), np.concatenate(outs), _dtype(q))

        try:
            return self.run(
                arguments,
                lambda a: self.cache.attend(
                    sequences, a["layer"], a["q"], a["keys"], a["values"],
                    **{x: y for x, y in a.items() if x not in ("layer", "q", "keys", "values")},
                ),
                check,
            )  # fmt: skip
        finally:
            for s, length in zip(sequences, lengths):
                s.truncate(length)

    def sequence_calls(self) -> str:
        """truncate, reserve, reorder, fork."""
        rng = self.rng
        i = int(rng.integers(0, 3))
        copy, length = self.sequences[i].fork(), len(self.held[i][0])
        n = self.number(int(rng.integers(0, length + 1)))
        if type(n.given) is int and n.numbers is None and 0 <= n.given <= length and n.given is not True:
            n.numbers = n.given
        which = int(rng.integers(0, 3))
        if which == 0:
            what = lambda a: copy.truncate(a["tokens"])  # noqa: E731
            expected = lambda: n.numbers  # noqa: E731
        elif which == 1:
            what = lambda a: self.cache.reserve(copy, a["tokens"])  # noqa: E731
            expected = lambda: length + n.numbers  # noqa: E731
        else:
            what = lambda a: self.cache.reserve([copy], [a["tokens"]])  # noqa: E731
            expected = lambda: length + n.numbers  # noqa: E731
        if type(n.given) is int and n.given is not True and 0 <= n.given < 2**32 and which > 0:
            n.numbers, n.may_refuse = int(n.given), n.given > 10000
        if which == 1 and n.numbers is None and isinstance(n.given, (np.ndarray, range, list, tuple)):
            n.may_refuse = True

        def check(_):
            if len(copy) != expected():
                raise Wrong(f"{len(copy)} tokens, expected {expected()}")

        return self.run({"tokens": n}, what, check)

    def paged(self) -> str:
        """Pages: write, decode, attend, in a pool of four blocks."""
        rng, pages = self.rng, self.pages
        size, h = pages.block_bytes, self.kv_heads
        pool = make(rng, np.zeros((4, h, size)), "bool", "contiguous", "numpy")
        pool.given = pool.view = pool.view.view(np.uint8)
        if rng.random() < 0.1:
            pool.given = pool.given.view()
            pool.given.flags.writeable = False
            pool.numbers = None
        n = int(rng.integers(1, 100))
        blocks = rng.permutation(4)[:2]
        slots = [int(blocks[t // 64] * 64 + t % 64) for t in range(n)]
        k, v = self.tensor(self.random(n, h, self.dim)), self.tensor(self.random(n, h, self.dim))
        layer = self.number(0)
        listed = Made(slots if rng.random() < 0.5 else np.array(slots), slots)
        odd = rng.random()
        if odd < 0.05:
            listed = Made([*slots[:-1], [1.5, "1", None, 2**64, -5, 4 * 64, True][int(rng.integers(0, 7))]], None)
        elif odd < 0.1:
            listed = Made(JUNK[int(rng.integers(0, len(JUNK)))], None, True)
        for m in (k, v):  # rows beyond the slots are not read
            m.may_refuse = m.may_refuse or m.numbers is None and m.memory is not None and m.view.ndim == 3
        state = self.run(
            {"pool_out": pool, "keys": k, "values": v, "slots": listed, "layer": layer},
            lambda a: pages.write(a["pool_out"], a["keys"], a["values"], a["slots"], layer=a["layer"]),
            lambda _: None,
        )
        if state != "right" or any(m.numbers is None for m in (pool, k, v, listed)):
            return state
        heads, rows = h * self.group, min(n, int(rng.integers(1, 4)))
        plan = pages.plan(heads, max_batch=1, max_blocks=2, max_query_len=rows)
        plan.set_tables(np.array([blocks], np.int32), [n], [0, rows])
        q = self.tensor(self.random(rows, heads, self.dim))
        arguments = {"pool": pool, "q": q}
        if rng.random() < 0.5:
            arguments["out"] = self.tensor(self.random(rows, heads, self.dim), output=True)
            if arguments["out"].given is None:
                arguments["out"].numbers = 0
        if q.numbers is None and q.memory is not None:
            q.may_refuse = q.view.ndim == 3 and q.view.shape[0] > rows  # rows of no sequence
            if "out" in arguments:
                arguments["out"].may_refuse = True

        def check(result):
            expected = attention(q.numbers, k.numbers, v.numbers)[0]
            out = arguments.get("out")
            made = out if out is not None and out.view is not None else q
            self.close("out", _numbers(out) if made is out else _as_numbers(result), expected, _dtype(made))

        return self.run(arguments, lambda a: plan.run(a["pool"], a["q"], out=a.get("out")), check)

    def merged(self) -> str:
        rng = self.rng
        shape = tuple(int(n) for n in rng.integers(1, 5, int(rng.integers(1, 4))))
        count, pairs = int(rng.integers(1, 4)), []
        arguments = {}
        for i in range(count):
            pairs.append((self.random(*shape), self.random(*shape[:-1])))
            for name, x in zip(("o", "l"), pairs[-1]):
                m = make(rng, x, "f32", str(rng.choice(LAYOUTS)), "numpy")
                if rng.random() < 0.04:
                    m = Made(JUNK[int(rng.integers(0, len(JUNK)))], None, True)
                arguments[f"{name}{i}"] = m
                if m.view is None:  # scalars and lists are arrays of their own shape
                    m.may_refuse = True

        def check(result):
            lse = np.logaddexp.reduce([l for _, l in pairs], 0)
            out = sum(o * np.exp(l - lse)[..., None] for o, l in pairs)
            self.close("out", result[0], out)
            self.close("lse", result[1], lse)

        return self.run(
            arguments, lambda a: kvant.merge([(a[f"o{i}"], a[f"l{i}"]) for i in range(count)]), check
        )

    def configured(self) -> str:
        """A cache, pages or plans with one argument of another type."""
        rng = self.rng
        good = {"kv_heads": 2, "head_dim": 16, "threads": 1}
        of_cache = "layers kv_heads head_dim k v device sink_pages tail_pages exact window window_sinks " \
                   "rollback_tokens max_sequences max_sequence_tokens k_basis v_basis bases basis_layers k_centre " \
                   "threads isa".split()  # fmt: skip
        of_pages = "kv_heads head_dim k v device threads isa tail_pages tail_sequences layers exact".split()
        of_plan = "q_heads q_len q_lens scale softcap alibi_slopes is_causal window window_sinks mask mask_first_key " \
                  "threads split_keys isa kernel fresh_keys".split()  # fmt: skip
        which = int(rng.integers(0, 3))
        name = str(rng.choice((of_cache, of_pages, of_plan)[which]))
        junk = JUNK[int(rng.integers(0, len(JUNK)))]
        if type(junk) is int and name in ("max_sequences", "max_sequence_tokens"):
            junk = -1
        made = Made(junk, None, True)
        if junk is not None and type(junk) is not bool and not isinstance(
            junk, (int, np.bool_, np.ndarray, range, list, tuple)
        ):
            plain = isinstance(junk, str) and name in ("k", "v") or isinstance(junk, float) and name in (
                "scale", "softcap")
            plain = plain or isinstance(junk, np.float32) and name in ("scale", "softcap")
            plain = plain or junk == "" and name == "kernel"
            made.may_refuse = plain
        if which == 0:
            call = lambda a: kvant.Cache(**{**good, name: a[name]})  # noqa: E731
        elif which == 1:
            call = lambda a: kvant.Pages(**{**good, name: a[name]})  # noqa: E731
        else:
            options = {"q_heads": self.kv_heads * self.group}
            call = lambda a: self.cache.plan(self.sequences[:1], **{**options, name: a[name]})  # noqa: E731
        return self.run({name: made}, call, lambda _: None)


CALLS = [World.append, World.decode, World.attend, World.attend, World.attend_new, World.sequence_calls, World.paged,
         World.merged, World.configured]  # fmt: skip


def _dtype(m: Made) -> str:
    return {"float32": "f32", "float16": "f16", "uint16": "bf16"}[str(m.view.dtype)]


def _numbers(m: Made) -> np.ndarray:
    return from_bf16(m.view) if m.view.dtype == np.uint16 else m.view.astype(np.float64)


def _as_numbers(x: Any) -> np.ndarray:
    if hasattr(x, "bits"):
        return from_bf16(x.bits)
    return x.double().numpy() if hasattr(x, "double") else np.asarray(x, np.float64)


def _describe(x: Any) -> str:
    inner = getattr(x, "array", getattr(x, "bits", x))
    if hasattr(inner, "shape"):
        strides = getattr(inner, "strides", None) or (inner.stride() if hasattr(inner, "stride") else ())
        return f"{type(x).__name__} {getattr(inner, 'dtype', '')} {tuple(inner.shape)} strides {strides}"
    try:
        return repr(x)[:80]
    except Exception:
        return type(x).__name__
