"""Plans and steps: attention over a cache, decided once and run for each layer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence as SequenceOf
from ctypes import byref, c_float, c_int32, c_void_p, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _c, _tensors
from ._errors import InvalidArgument, KvantError

if TYPE_CHECKING:
    from ._cache import Cache, Sequence

__all__ = ["Plan", "PlanFacts", "Step"]

_NO_WINDOW = 1 << 40  # longer than any sequence


def _plain(x: Any, name: str, shape: tuple[int, ...], device: tuple[str, int], where: str) -> _tensors.Described:
    """A contiguous f32 tensor."""
    d = _tensors.describe(x, name)
    if d.dtype != _c.F32 or d.shape != shape or d.device != device:
        raise InvalidArgument(
            f"{name} is {_c.DTYPE_NAMES[d.dtype]} {list(d.shape)} on {d.device[0]}: must be f32 {list(shape)} where "
            f"{where}"
        )
    expected = 1
    for n, s in zip(reversed(d.shape), reversed(d.stride)):
        if n > 1 and s != expected:
            raise InvalidArgument(f"{name} has strides {list(d.stride)}: must be contiguous")
        expected *= n
    return d


def run_options(
    q: Any, rows: tuple[int, int], lse: Any, sink_logits: Any, device: tuple[str, int], where: str
) -> tuple[_c.RunOptions, Any, list[_tensors.Described]]:
    """The options of a run with its lse and sink_logits; the tensor of lse, or None; and what the options point to,
    which the caller keeps until the run was enqueued. rows: (queries, q_heads)."""
    options = _c.RunOptions()
    _c.run_options_init(byref(options), sizeof(options))
    kept = []
    if lse is False:
        lse = None
    if lse is not None:
        if lse is True:
            lse = _tensors.empty_like(q, rows, _c.F32)
        kept.append(_plain(lse, "lse", rows, device, where))
        options.lse = kept[-1].data
    if sink_logits is not None:
        kept.append(_plain(sink_logits, "sink_logits", rows[1:], device, where))
        options.sink_logits = kept[-1].data
    return options, lse, kept



@dataclass(frozen=True)
class PlanFacts:
    """The decisions of a plan, as numbers. The fields are those of kvant_plan_facts in kvant.h."""

    workspace_bytes: int
    total_queries: int
    kv_bytes: int
    threads: int
    splits: int
    isa: str
    kernel: str


class Plan:
    """How attention of one step will be computed. Made by Cache.plan; runs once for each layer.

    q_heads: query heads, a multiple of the cache's kv_heads; query head h reads kv head h // (q_heads // kv_heads).
    q_len: queries a sequence, its newest positions; q_lens: one count a sequence instead.
    scale: None: 1 / sqrt(head_dim). softcap: t = cap * tanh(s / cap), 0: none. alibi_slopes: [q_heads] numbers.
    causal: False lets queries see later keys too.
    window: the last W keys, the query's own included; None: the cache's window and window_sinks; 0: none. window_sinks:
        the first tokens that stay visible beyond it. With causal=False the window bounds from below only.
    mask: [batch, q_heads, queries, keys], boolean (True: visible) or additive; dimensions of 1 broadcast. Its key
        dimension begins at position mask_first_key.
    threads, split_keys, isa: 0 and None let the plan choose. CPU only. isa: "scalar", "avx2", "avx512", "amx" or
        "neon"; "amx" multiplies many rows as two bf16 numbers each: relative errors near 5e-6, of "avx512" near 2e-6.
    kernel: on a device "decode", "decode_sm90" or "prefill" ("prefill_sm90", "prefill_sm80" or "prefill_unpacked" for
        one kind of these; "prefill_fresh" with fresh), or "generic", which takes any pair of formats in float32, and is
        the only one for f32 and imported formats; None: what takes the least time. decode_sm90 and prefill kernels
        round weights to f16 or bf16, and "prefill_unpacked" what codes stand for.

    fresh: True: each run is given the keys and values of the queries' own tokens and attends to these as they are;
        only older tokens are read from the cache. On a device it takes prefill kernels.

    A plan is made after the reserve of a step. On the CPU it is for that step; on a device it follows sequences that
    grow. Errors: InvalidArgument, Unsupported.
    """

    def __init__(
        self,
        cache: Cache,
        sequences: Iterable[Sequence] | Sequence,
        *,
        q_heads: int,
        q_len: int = 1,
        q_lens: SequenceOf[int] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: SequenceOf[float] | None = None,
        causal: bool = True,
        window: int | None = None,
        window_sinks: int = 0,
        mask: Any = None,
        mask_first_key: int = 0,
        threads: int = 0,
        split_keys: int = 0,
        isa: str | None = None,
        kernel: str | None = None,
        fresh: bool = False,
    ):
        self._handle = None
        self.cache = cache
        ids = cache._ids(sequences)
        self._count = len(ids)
        o = _c.AttentionOptions()
        _c.attention_options_init(byref(o), sizeof(o))
        o.q_heads, o.q_len = q_heads, q_len
        if q_lens is not None:
            o.q_lens = (c_int32 * len(ids))(*cache._each("q_lens", q_lens, len(ids)))
        o.scale = 0.0 if scale is None else scale
        o.softcap = softcap
        if alibi_slopes is not None:
            slopes = [float(s) for s in alibi_slopes]
            if len(slopes) != q_heads:
                raise InvalidArgument(
                    f"alibi_slopes has {len(slopes)} values for {q_heads} query heads: give one a head"
                )
            o.alibi_slopes = (c_float * q_heads)(*slopes)
        o.is_causal = 1 if causal else 0
        # To the library 0 is the cache's window; none is one longer than any sequence.
        o.window = _NO_WINDOW if window == 0 and cache.window > 0 else window or 0
        o.window_sinks = window_sinks
        self._mask = None
        if mask is not None:
            o.mask, self._mask = _tensors.mask(mask, mask_first_key, cache.device)
        o.threads, o.split_keys = threads, split_keys
        o.isa = None if isa is None else isa.encode()
        o.kernel = None if kernel is None else kernel.encode()
        o.fresh_keys = 1 if fresh else 0
        handle = c_void_p()
        with cache._lock:
            _c.check(_c.plan_create(cache.handle, _c.sequences(ids), len(ids), byref(o), byref(handle)))
        self._handle = handle
        f = _c.plan_facts(handle)
        self.facts = PlanFacts(
            f.workspace_bytes,
            f.total_queries,
            f.kv_bytes,
            f.threads,
            f.splits,
            (f.isa or b"").decode(),
            (f.kernel or b"").decode(),
        )

    def __del__(self, destroy=_c.plan_destroy):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            destroy(handle)

    def explain(self) -> str:
        """Kernels, tiles, splits, bytes, and why."""
        return _c.text(_c.plan_explain, self._handle)

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
        head_dim]. out None: a new tensor of q's dtype. keys, values: of a plan with fresh=True the queries' own,
        [total queries, kv_heads, head_dim] or [batch, q_len, kv_heads, head_dim]. lse: True, or an f32 tensor
        [total queries, q_heads]: gets the natural log of each softmax denominator. sink_logits: [q_heads] f32, join the
        denominator only.
        workspace: on a device, memory of facts.workspace_bytes; None: a torch buffer that the cache keeps.
        Returns out, or (out, lse) if lse was requested. Errors: Stale, InvalidArgument.
        """
        cache = self.cache
        q_tensor, _q = _tensors.tensor(q, "q", cache.device, self._count)
        if out is None:
            out = _tensors.empty_like(q, tuple(q.shape))
        out_tensor, _o = _tensors.tensor(out, "out", cache.device, self._count, mutable=True)
        (k, _k), (v, _v) = (
            (None, None) if x is None else _tensors.tensor(x, name, cache.device, self._count)
            for x, name in ((keys, "keys"), (values, "values"))
        )
        rows = (self.facts.total_queries, q.shape[-2])
        options, lse, _kept = run_options(q, rows, lse, sink_logits, cache.device, "the cache is")
        with cache._lock:
            if cache.device[0] != "cpu":
                options.stream = _tensors.stream_of(cache.device, stream)
                self._give_workspace(options, workspace)
            elif stream is not None:
                raise InvalidArgument(
                    "stream is given, but this cache is in host memory: calls are done when they return"
                )
            fresh = (None if x is None else byref(x) for x in (k, v))
            _c.check(_c.run(self._handle, layer, byref(q_tensor), byref(out_tensor), byref(options), *fresh))
        return out if lse is None else (out, lse)

    def _give_workspace(self, options: _c.RunOptions, workspace: Any) -> None:
        needed = self.facts.workspace_bytes
        if workspace is None:
            torch = sys.modules.get("torch")
            if torch is None:
                raise InvalidArgument(
                    f"workspace is not given: without torch, pass device memory of {needed} bytes "
                    "(plan.facts.workspace_bytes)"
                )
            workspace = self.cache._workspace
            if workspace is None or workspace.numel() < needed:
                workspace = torch.empty(needed, dtype=torch.uint8, device=f"cuda:{self.cache.device[1]}")
                self.cache._workspace = workspace
        if _tensors.is_torch(workspace):
            options.workspace, options.workspace_size = (
                workspace.data_ptr(),
                workspace.numel() * workspace.element_size(),
            )
            return
        interface = workspace.__cuda_array_interface__
        size = int(interface["typestr"][2:])
        for n in interface["shape"]:
            size *= n
        options.workspace, options.workspace_size = interface["data"][0], size

    def __repr__(self) -> str:
        return f"<kvant.Plan {self.facts}>"


class Step:
    """The tokens that Cache.step reserved: write and attend, layer after layer.

    As a context manager: if the block raises, the step's tokens are dropped again.
    """

    def __init__(self, cache: Cache, sequences: list[Sequence], tokens: list[int], stream: Any):
        self.cache, self.sequences, self.tokens, self.stream = cache, sequences, tokens, stream
        self._plans: dict = {}

    def write(self, layer: int, keys: Any, values: Any) -> None:
        """Stores this step's keys and values of one layer; see Cache.write."""
        self.cache.write(self.sequences, layer, keys, values, stream=self.stream)

    def attend(
        self,
        layer: int,
        q: Any,
        out: Any = None,
        *,
        keys: Any = None,
        values: Any = None,
        lse: Any = None,
        sink_logits: Any = None,
        **options: Any,
    ) -> Any:
        """Attention of this step's queries; see Plan for the options. Layers with the same options share a plan.
        keys, values: this step's own, to be attended to as given (the option fresh); write them before or after."""
        if keys is not None or values is not None:
            options["fresh"] = True
        mask = options.get("mask")
        key = (q.shape[-2], id(mask), *sorted((k, repr(v)) for k, v in options.items() if k != "mask"))
        plan = self._plans.get(key)
        if plan is None:
            plan = self.cache.plan(self.sequences, q_heads=q.shape[-2], q_lens=self.tokens, **options)
            self._plans[key] = plan
        return plan.run(
            layer, q, out, keys=keys, values=values, lse=lse, sink_logits=sink_logits, stream=self.stream
        )

    def __enter__(self) -> Step:
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        self._plans.clear()
        if error_type is None:
            return
        for s, n in zip(self.sequences, self.tokens):
            try:
                s.truncate(len(s) - n)
            except KvantError:  # what the block raised is what the caller must see
                pass
