"""Plans and steps: attention over a cache, decided once and run for each layer."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int32, c_void_p, sizeof
from typing import Any

from . import _arguments, _c, _locks, _overlap, _tensors
from ._errors import InvalidArgument
from ._facts import Facts
from ._options import PLAN, Options

__all__ = ["Plan", "PlanFacts"]

_NO_WINDOW = 1 << 40  # longer than any sequence


def _plain(
    x: Any, name: str, shape: tuple[int, ...], where: _tensors.Place, mutable: bool = False
) -> _tensors.Described:
    """A contiguous f32 tensor."""
    d = _tensors.describe(x, name, where, ("f32",), mutable)
    if d.shape != shape:
        raise InvalidArgument(f"{name} has shape {list(d.shape)}: must be f32 {list(shape)}")
    expected = 1
    for n, s in zip(reversed(d.shape), reversed(d.stride)):
        if n > 1 and s != expected:
            raise InvalidArgument(f"{name} has strides {list(d.stride)}: must be contiguous")
        expected *= n
    return d


Named = list[tuple[str, _tensors.Described]]


def run_options(
    q: Any, rows: tuple[int, int], lse: Any, sink_logits: Any, where: _tensors.Place, outputs: Named, inputs: Named
) -> tuple[_c.RunOptions, Any]:
    """The options of a run with its stream, lse and sink_logits; and the tensor of lse, or None. rows: (queries,
    q_heads). outputs, inputs: the run's other tensors. Those of the options are added; the caller keeps all of them
    until the run was enqueued. Outputs that share memory are refused."""
    options = _c.RunOptions()
    _c.run_options_init(byref(options), sizeof(options))
    options.stream = where.stream
    if lse is False:
        lse = None
    if lse is not None:
        if lse is True:
            lse = _tensors.empty_like(q, rows, "f32")
        outputs.append(("lse", _plain(lse, "lse", rows, where, mutable=True)))
        options.lse = outputs[-1][1].data
    if sink_logits is not None:
        inputs.append(("sink_logits", _plain(sink_logits, "sink_logits", rows[1:], where)))
        options.sink_logits = inputs[-1][1].data
    _overlap.check_apart(outputs, inputs)
    return options, lse


def attention_options(options: Options, values: dict[str, Any]) -> _c.AttentionOptions:
    """The options of a plan for C; those without a field there are the caller's, but for slopes."""
    o = _c.AttentionOptions()
    _c.attention_options_init(byref(o), sizeof(o))
    options.fill(o, values)
    if values["alibi_slopes"] is not None:
        o.alibi_slopes = (c_float * o.q_heads)(
            *_arguments.slopes("alibi_slopes", values["alibi_slopes"], o.q_heads)
        )
    return o


class PlanFacts(Facts):
    """The decisions of a plan, as numbers. The fields are those of kvant_plan_facts in kvant.h."""

    _struct = _c.PlanFacts

    workspace_bytes: int
    total_queries: int
    kv_bytes: int
    threads: int
    splits: int
    isa: str
    kernel: str
    products: int


def comparable(options: dict[str, Any], q_heads: int) -> tuple[dict[str, Any], tuple]:
    """A plan's options as plain numbers, and a key that equal ones have in common."""
    options = dict(options)
    if options.get("alibi_slopes") is not None:  # repr() of a tensor leaves digits out
        options["alibi_slopes"] = _arguments.slopes("alibi_slopes", options["alibi_slopes"], q_heads)
    for name in ("scale", "softcap"):
        if options.get(name) is not None:
            options[name] = _arguments.real(name, options[name])
    texts = sorted((name, repr(x)) for name, x in options.items() if name != "mask")
    return options, (q_heads, id(options.get("mask")), *texts)


def prepare(plan: Plan, layer: int, q: Any, out: Any, **options: Any) -> Callable[[], Any]:
    """Checks the arguments of plan.run, and returns what runs."""
    return plan._ready(layer, q, out, **options)


@PLAN.described
class Plan(_arguments.NotCopied):
    """How attention of one step will be computed. Made by Cache.plan; runs once for each layer.

    {options}

    A plan is made after the reserve of a step. On the CPU it is for that step; on a device it follows sequences that
    grow. Errors: InvalidArgument, Unsupported.
    """

    _instead = "cache.plan() makes another"
    _made_of = ("cache", "facts", "_held", "_lock", "_mask", "_q_heads", "_q_lens", "_sequences")

    def __init__(self, cache: Any, sequences: Any, **options: Any):
        values = PLAN.complete(options)
        self._lock = _locks.new("this plan")  # runs share the plan's own workspace
        self.cache = cache
        self._sequences = cache.owner.members(sequences)  # which live as long as the plan
        ids = [s.number for s in self._sequences]
        o = attention_options(PLAN, values)
        q_lens, mask = values["q_lens"], values["mask"]
        if q_lens is None:
            o.q_len = _arguments.int32("q_len", values["q_len"])
            self._q_lens = [o.q_len] * len(ids)
        else:
            self._q_lens = _arguments.one_or_each("q_lens", q_lens, len(ids), -(1 << 31), (1 << 31) - 1)
            o.q_lens = (c_int32 * len(ids))(*self._q_lens)
        if values["window"] is not None and o.window == 0 and cache.window > 0:
            o.window = _NO_WINDOW  # to the library 0 is the cache's window
        self._q_heads, self._mask = o.q_heads, None
        first_key = _arguments.int64("mask_first_key", values["mask_first_key"])
        if mask is not None:
            o.mask, self._mask = _tensors.mask(mask, first_key, cache.owner.place())
        handle = _c.PlanHandle()
        with cache.owner.lock:
            _c.check(_c.plan_create(cache.handle, _c.sequences(ids), len(ids), byref(o), byref(handle)))
            self._held = cache.owner.hold(handle)
        self.facts = PlanFacts.of(_c.plan_describe, handle)

    @property
    def handle(self) -> c_void_p:
        """The kvant_plan* of kvant.h."""
        return self._held.handle

    def explain(self) -> str:
        """Kernels, tiles, splits, bytes, and why."""
        return _c.text(_c.plan_explain, self.handle)

    def run(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        *,
        keys: Any = None,
        values: Any = None,
        lse: Any = None,
        sink_logits: Any = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> Any:
        """out = softmax(transform(scale * q k^T) + masks) v in one layer.

        q, out: [total queries, q_heads, head_dim], the sequences' rows one after another, or [batch, q_len, q_heads,
        head_dim]. out None: a new tensor of q's dtype. keys, values: of a plan with fresh_keys=True the queries' own,
        [total queries, kv_heads, head_dim] or [batch, q_len, kv_heads, head_dim]. lse: True, or an f32 tensor
        [total queries, q_heads]: gets the natural log of each softmax denominator. sink_logits: [q_heads] f32, join the
        denominator only.
        workspace: on a device, memory of facts.workspace_bytes; None: a torch buffer that the cache keeps.
        Returns out, or (out, lse) if lse was requested. Errors: Stale, InvalidArgument.
        """
        return self._ready(
            layer,
            q,
            out,
            keys=keys,
            values=values,
            lse=lse,
            sink_logits=sink_logits,
            workspace=workspace,
            stream=stream,
        )()

    def _ready(
        self, layer, q, out, *, keys=None, values=None, lse=None, sink_logits=None, workspace=None, stream=None
    ) -> Callable[[], Any]:
        """Checks the arguments of a run, and returns what runs."""
        self.handle  # raises if the cache was closed
        cache, where = self.cache, self.cache.owner.place(stream)
        cache.owner.lock.refuse_lender()
        layer = _arguments.int32("layer", layer)
        if workspace is not None and where.kind == "cpu":
            raise InvalidArgument("workspace is given, but the cache is in host memory, where plans have their own")
        q_tensor, q_described = self._rows(q, "q", self._q_heads, where)
        made = (out is None, lse is True)
        if made[0]:
            out = _tensors.empty_like(q, (*q_described.shape[:-1], cache.v_head_dim))
        out_tensor, out_described = self._rows(out, "out", self._q_heads, where, mutable=True)
        outputs, inputs = [("out", out_described)], [("q", q_described)]
        fresh = []
        for x, name in ((keys, "keys"), (values, "values")):
            if x is None:
                fresh.append(None)
                continue
            t, described = self._rows(x, name, cache.kv_heads, where)
            fresh.append(byref(t))
            inputs.append((name, described))
        if self._mask is not None:
            inputs.append(("mask", self._mask[0]))
        rows = (self.facts.total_queries, self._q_heads)
        options, lse = run_options(q, rows, lse, sink_logits, where, outputs, inputs)

        def run(_kept=(outputs, inputs)) -> Any:
            # In host memory runs change nothing that other calls use.
            with self._lock if where.kind == "cpu" else cache.owner.lock:
                if where.kind != "cpu":
                    given = cache.owner.workspace(self.facts.workspace_bytes) if workspace is None else workspace
                    options.workspace, options.workspace_size, _ = _tensors.memory(given, "workspace", where)
                _c.check(_c.run(self.handle, layer, byref(q_tensor), byref(out_tensor), byref(options), *fresh))
            return _tensors.given_back(out, lse, made, q)

        return run

    def _rows(self, x: Any, name: str, heads: int, where: _tensors.Place, mutable: bool = False):
        """A tensor with a row for each query, as tensor() gives it."""
        t, d = _tensors.tensor(x, name, where, len(self._q_lens), mutable)
        total, most = self.facts.total_queries, max(self._q_lens, default=0)
        dim = self.cache.q_head_dim if name == "q" else self.cache.v_head_dim if name != "keys" else self.cache.head_dim
        if tuple(t.shape) != (most if t.batch_stride else total, heads, dim):
            raise InvalidArgument(
                f"{name} has shape {list(d.shape)}: must be [{total}, {heads}, {dim}], a row for each query, or "
                f"[{len(self._q_lens)}, {most}, {heads}, {dim}]"
            )
        if t.stride[2] != 1:
            raise InvalidArgument(
                f"{name} has strides {list(d.stride)}: the numbers of a vector must lie side by side (a last stride of "
                "1); copy the tensor"
            )
        return t, d

    def __repr__(self) -> str:
        return f"<kvant.Plan {self.facts}>"
