"""One kvant cache for all layers of a geometry: its sequences, the step in progress, and the plans of that step.

A step's bookkeeping happens once for a group, in `begin`; then each layer writes and attends. The work of each layer at
every decoding step is kept free of allocations: C structs and argument arrays are made once and get a new pointer.
"""

from __future__ import annotations

from contextlib import nullcontext
from ctypes import byref, c_int32, c_int64, sizeof
from typing import Any

import torch

import kvant
from kvant import _c, _tensors
from kvant._options import PLAN
from kvant._plan import PlanFacts, attention_options

from .settings import Settings

PAGE_TOKENS = 64
_NO_LOCK = nullcontext()
Plan = tuple[_c.PlanHandle, Any]  # and what must live as long as it
_FEW_ROWS = 16  # that share a kv head: these are never multiplied in 8 bits
_MOST_STRUCTS = 256  # shapes whose C struct is kept; prompts come in many lengths


class Step:
    """The tokens of one forward pass: `tokens` for each of `batch` rows, of which `real` ones are stored.

    real: [batch, tokens] bool, False for padding; None: all are real. counts: real tokens of each row, None with real.
    """

    __slots__ = ("batch", "counts", "live", "real", "tokens", "_rows")

    def __init__(self, batch: int, tokens: int, real: torch.Tensor | None, counts: list[int] | None):
        self.batch, self.tokens, self.real, self.counts = batch, tokens, real, counts
        self.live = None if counts is None else [i for i, n in enumerate(counts) if n]
        self._rows: dict[Any, tuple[torch.Tensor, torch.Tensor, list[int]]] = {}

    def rows(self, newest: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Where the real ones of the newest positions are: indices of row and position, and how many each live row
        has."""
        found = self._rows.get((newest, device))
        if found is None:
            real = self.real[:, self.tokens - newest :]
            row, position = real.nonzero(as_tuple=True)
            counts = self.counts if newest == self.tokens else real.sum(1).tolist()
            found = (row.to(device), position.to(device), [counts[i] for i in self.live])
            self._rows[newest, device] = found
        return found


class Group:
    """Layers of one geometry. members: their numbers in the model, in the order of their slots in the kvant cache."""

    def __init__(self, cache: kvant.Cache, members: list[int], settings: Settings):
        self.cache, self.members, self.settings = cache, members, settings
        self.window = cache.window
        self.on_device = cache.device[0] != "cpu"
        self.ends = cache.exact_ends()
        self.sequences: list[kvant.Sequence] = []
        self.ids: Any = None  # of all rows, a C array
        self.rows: list[int] = []  # stored tokens of each row
        self.length = 0  # tokens of each row as Hugging Face counts them: with padding
        self.step: Step | None = None
        self._step_ids: Any = None  # of the rows that have tokens in this step
        self._step_rows = 0
        self._plans: dict[Any, Plan] = {}  # plain ones; on a device they follow sequences that grow
        self._step_plans: dict[Any, Plan] = {}  # with a mask tensor or ragged rows: for this step only
        self._planned_length = 0
        self._options: dict[Any, _c.AttentionOptions] = {}
        self.products = 0  # bits, as plans of many queries chose; 0: there was none
        self.own_refused: str | None = None  # why attention does not take a step's keys and values as they are
        self._structs: tuple[dict, dict, dict, dict] = ({}, {}, {}, {})  # of keys, values, queries, outputs
        self._run = _c.RunOptions()
        _c.run_options_init(byref(self._run), sizeof(self._run))
        self._sinks: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._workspace: torch.Tensor | None = None

    # --- sequences ---

    def start(self, batch: int) -> None:
        """New, empty sequences."""
        self._enqueue_here()
        self._use([self.cache.sequence() for _ in range(batch)], [0] * batch)

    def _use(self, sequences: list[kvant.Sequence], rows: list[int]) -> None:
        self.drop_plans()
        self.sequences, self.rows = sequences, rows
        self.ids = _c.sequences(s.id for s in sequences)
        self.step = None

    def forget(self) -> None:
        """Removes all sequences; the pages go back to the cache."""
        self._use([], [])
        self.length = 0

    def copy(self) -> Group:
        """A group over the same kvant cache, whose sequences are forks of these: pages are shared."""
        self._enqueue_here()
        other = Group(self.cache, self.members, self.settings)
        other._use([s.fork() for s in self.sequences], list(self.rows))
        other.length = self.length
        return other

    def rearrange(self, parents: list[int]) -> None:
        """Row i becomes what row parents[i] was; there may be more rows than before, or fewer."""
        self._enqueue_here()
        used: set[int] = set()
        sequences = []
        for p in parents:
            sequences.append(self.sequences[p].fork() if p in used else self.sequences[p])
            used.add(p)
        self._use(sequences, [self.rows[p] for p in parents])

    def reorder(self, parents: list[int]) -> None:
        """Row i becomes what row parents[i] was, as many rows as before. Sequences keep their ids, a device its
        plans."""
        if not self.on_device:
            self.drop_plans()
        with self.cache.owner.lock:
            self._use_stream()
            _c.check(_c.cache_reorder(self.cache.handle, self.ids, _c.counts(parents), len(parents)))
        self.rows = [self.rows[p] for p in parents]
        self.step = None

    def truncate(self, removed: list[int], tokens: int) -> None:
        """Takes back the newest `tokens` positions, of which removed[i] are stored in row i."""
        self._enqueue_here()
        if not self.on_device:
            self.drop_plans()
        for i, (sequence, n) in enumerate(zip(self.sequences, removed)):
            if n:
                sequence.truncate(self.rows[i] - n)
                self.rows[i] -= n
        self.length -= tokens
        self.step = None

    def try_truncate(self, removed: list[int]) -> None:
        """Raises the error that truncate would raise where a window has let go of pages; changes nothing."""
        self._enqueue_here()
        for i, (sequence, n) in enumerate(zip(self.sequences, removed)):
            with sequence.fork() as twin:
                twin.truncate(self.rows[i] - n)

    # --- a step ---

    def begin(self, step: Step) -> None:
        """Takes room for a step's tokens in all layers."""
        if self._step_plans:
            self._step_plans = {}
        # A device's plan stays right when sequences grow, but its work was cut for the lengths of then.
        if not self.on_device or len(self._plans) > 16 or self.length + step.tokens > 2 * self._planned_length + 64:
            if self._plans:
                self._plans = {}
        if len(self.sequences) != step.batch:  # none, or those of a first step that failed
            self.start(step.batch)
        if step.counts is None:
            ids, n = self.ids, step.batch
            counts = (c_int64 * n)(*([step.tokens] * n))
        else:
            ids, n = _c.sequences(self.sequences[i].id for i in step.live), len(step.live)
            counts = _c.counts(step.counts[i] for i in step.live)
        if n:
            with self.cache.owner.lock:
                self._use_stream()
                status = _c.cache_reserve(self.cache.handle, ids, counts, n)
            if status:
                self._refuse(status)
        self._step_ids, self._step_rows, self.step = ids, n, step
        self.length += step.tokens
        for i in range(step.batch):
            self.rows[i] += step.tokens if step.counts is None else step.counts[i]

    def reserve_ahead(self, tokens: int) -> None:
        """On a device: pages for so many more tokens of each row, so that recorded steps take none."""
        self.cache.reserve_ahead(self.sequences, tokens)

    def advance(self) -> None:
        """A recorded step of one token for each row was launched."""
        self.cache.advance(self.sequences, 1)
        self.length += 1
        self.rows = [n + 1 for n in self.rows]
        self.step = None

    def _use_stream(self) -> int:
        """Makes torch's current stream the one that calls enqueue on. Under the cache's lock."""
        if not self.on_device:
            return 0
        return self.cache.owner.use_stream(torch.cuda.current_stream(self.cache.device[1]).cuda_stream)

    def _enqueue_here(self) -> None:
        if self.on_device:
            with self.cache.owner.lock:
                self._use_stream()

    @staticmethod
    def _refuse(status: int) -> None:
        """Raises the error of a reserve, in words of kvant.hf."""
        try:
            _c.check(status)
        except kvant.OutOfCapacity as error:
            raise kvant.OutOfCapacity(
                f"this cache is full, and holds what it held before: {error}. "
                "Its capacity comes from max_length= and batch= of kvant.hf.cache, "
                "or from what generate() was asked for: make a cache with larger ones, or crop or reset this one"
            ) from None

    def _refuse_write(self, slot: int, status: int) -> None:
        """Raises the error of a write; a number that is not finite is most often the model's, so with its layer."""
        try:
            _c.check(status)
        except kvant.NonFinite as error:
            raise kvant.NonFinite(f"layer {self.members[slot]}: {error}") from None

    def _struct(self, role: int, x: torch.Tensor) -> Any:
        """A tensor [batch, heads, tokens, head_dim] or [rows, heads, head_dim] as the C argument of its role."""
        structs = self._structs[role]
        key = (x.shape, x.stride(), x.dtype, self._step_rows)
        found = structs.get(key)
        if found is None:
            if len(structs) >= _MOST_STRUCTS:
                structs.clear()
            rows_first = x.transpose(1, 2) if x.ndim == 4 else x
            name = ("keys", "values", "q", "out")[role]
            struct, _ = _tensors.tensor(rows_first, name, self.cache.device, self._step_rows, role == 3)
            found = structs[key] = (struct, byref(struct))
        found[0].data = x.data_ptr()
        return found[1]

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] as kvant takes it: vectors side by side, and on a device the rows of a batch
        one after another. Else a copy."""
        batch, _, tokens, _ = x.shape
        apart = self.on_device and batch > 1 and tokens > 1 and x.stride(0) != tokens * x.stride(2)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if apart or x.stride(-1) != 1 else x

    def write(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores a step's keys and values [batch, kv_heads, tokens, head_dim] of one layer."""
        step = self.step
        if step.real is not None:
            if self._step_rows == 0:
                return
            row, position, _ = step.rows(step.tokens, keys.device)
            keys, values = keys.transpose(1, 2)[row, position], values.transpose(1, 2)[row, position]
        else:
            keys, values = self._readable(keys), self._readable(values)
        k, v = self._struct(0, keys), self._struct(1, values)
        cache = self.cache
        with cache.owner.lock:
            if self.on_device:
                self._use_stream()
            status = _c.cache_write(cache.handle, self._step_ids, self._step_rows, slot, k, v)
        if status:
            self._refuse_write(slot, status)

    # --- attention ---

    def attend(
        self,
        slot: int,
        query: torch.Tensor,
        scale: float | None,
        softcap: float,
        causal: bool,
        window: int,
        sinks: torch.Tensor | None,
        mask: Any = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of the newest queries [batch, q_heads, queries, head_dim] in one layer: [batch, queries, q_heads,
        v_head_dim].

        mask: None, or (object that tells masks apart, function that makes (tensor [rows, heads, queries, keys], first
            key, window)).
        own: keys and values [batch, kv_heads, tokens, head_dim] of the step, which are attended to as they are; or
            None: as they are stored.
        """
        batch, heads, queries, _ = query.shape
        step, dim = self.step, self.cache.v_head_dim
        if own is not None:  # those of the queries
            own = tuple(x[:, :, x.shape[2] - queries :] for x in own)
        if step.real is None:
            q = self._readable(query)
            out = torch.empty((batch, queries, heads, dim), dtype=q.dtype, device=q.device)
            plan = self._plan(queries, heads, scale, softcap, causal, window, mask, own is not None)
            if own is not None:
                own = tuple(self._aligned(self._readable(x)) for x in own)
            self._attend(plan, slot, q, out.transpose(1, 2), sinks, own)
            return out
        out = torch.zeros((batch, queries, heads, dim), dtype=query.dtype, device=query.device)
        row, position, counts = step.rows(queries, query.device)
        if any(counts):
            q = query.transpose(1, 2)[row, position]
            packed = q.new_empty((*q.shape[:2], dim))
            plan = self._plan(queries, heads, scale, softcap, causal, window, mask, own is not None, counts)
            if own is not None:
                own = tuple(x.transpose(1, 2)[row, position] for x in own)
            self._attend(plan, slot, q, packed, sinks, own)
            out[row, position] = packed
        return out

    def takes_own(self, tokens: int, first: bool) -> bool:
        """Whether attention of a step of so many tokens should take its keys and values as they are. A step that is no
        longer than a page finds them in the exact tail. On the CPU torch takes a first prompt in less time, but counts
        padding as tokens of a window."""
        if self.own_refused is not None:
            return False
        counts_padding = self.window > 0 and self.step.real is not None
        return self.on_device or counts_padding if first else tokens > PAGE_TOKENS

    def attend_own(self, slot: int, *arguments: Any) -> torch.Tensor | None:
        """As attend, with `own`; None if kvant does not compute it here, which own_refused tells from then on."""
        try:
            return self.attend(slot, *arguments)
        except kvant.Unsupported as error:
            self.own_refused = str(error)
            return None

    @staticmethod
    def _aligned(x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] as kernels on a device take fresh keys, at multiples of 16 bytes; else a
        copy."""
        if x.device.type == "cpu":
            return x
        size = x.element_size()
        if x.data_ptr() % 16 == 0 and all(x.stride(i) * size % 16 == 0 for i in (1, 2)):
            return x
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def _attend(
        self, plan: Plan, slot: int, q: torch.Tensor, out: torch.Tensor, sinks: Any, own: Any = None
    ) -> None:
        run = keys = values = None
        q_struct, out_struct = self._struct(2, q), self._struct(3, out)
        if own is not None:
            keys, values = self._struct(0, own[0]), self._struct(1, own[1])
        with self.cache.owner.lock if self.on_device else _NO_LOCK:  # in host memory runs go on at the same time
            if sinks is not None or self.on_device:
                self._run.sink_logits = None if sinks is None else self._f32(sinks).data_ptr()
                if self.on_device:
                    self._run.stream = self._use_stream()
                    self._run.workspace, self._run.workspace_size = self._workspace.data_ptr(), self._workspace.numel()
                run = byref(self._run)
            _c.check(_c.run(plan[0], slot, q_struct, out_struct, run, keys, values))

    def _f32(self, sinks: torch.Tensor) -> torch.Tensor:
        """Sink logits [q_heads] as contiguous f32. A layer's parameter is converted once."""
        version = 0 if sinks.is_inference() else sinks._version
        found = self._sinks.get(id(sinks))
        if found is None or found[0] is not sinks or found[1] != version:
            converted = sinks.detach().to(torch.float32).contiguous()
            found = self._sinks[id(sinks)] = (sinks, version, converted)
        return found[2]

    def _plan(self, queries, heads, scale, softcap, causal, window, mask, own, counts=None) -> Plan:
        plain = mask is None and counts is None
        key = (queries, heads, scale, softcap, causal, window, own, None if mask is None else id(mask[0]))
        plans = self._plans if plain else self._step_plans
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = self._make_plan(key, mask, counts)
        return plan

    def _make_plan(self, key: tuple, mask: Any, counts: list[int] | None) -> Plan:
        """A plan, and what must live as long as it. counts: queries of each live row of a ragged step."""
        keep: list[Any] = [mask]
        plain = mask is None and counts is None
        options = self._options.get(key) if plain else None
        if options is None:
            queries, heads, scale, softcap, causal, window, own, _ = key
            given = dict(q_heads=heads, scale=scale, softcap=softcap, is_causal=causal, window=window, fresh_keys=own)
            options = attention_options(PLAN, PLAN.complete({**given, **self.settings.of_plans()}))
            options.q_len = queries
            if plain:
                if len(self._options) >= _MOST_STRUCTS:
                    self._options.clear()
                self._options[key] = options
        if not self.on_device:
            options.threads = self.settings.threads or torch.get_num_threads()
            options.isa = None if self.settings.isa is None else self.settings.isa.encode()
        if counts is not None:
            keep.append((c_int32 * len(counts))(*counts))
            options.q_lens = keep[-1]
        if mask is not None:
            tensor, first_key, options.window = mask[1]()
            options.mask, described = _tensors.mask(tensor, first_key, self.cache.device)
            keep.append(described)
        handle = _c.PlanHandle()
        with self.cache.owner.lock:
            _c.check(_c.plan_create(self.cache.handle, self._step_ids, self._step_rows, byref(options), byref(handle)))
        many = key[0] * key[1] > _FEW_ROWS * self.cache.kv_heads
        facts = PlanFacts.of(_c.plan_describe, handle) if many or self.on_device else None
        if many:
            self.products = facts.products
        if self.on_device:
            self._planned_length = self.length
            self._make_workspace(facts.workspace_bytes)
        return handle, keep

    def _make_workspace(self, needed: int) -> None:
        if self._workspace is None or self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=f"cuda:{self.cache.device[1]}")

    def hand_over(self) -> tuple[dict, torch.Tensor | None]:
        """The plain plans and their workspace, for a recording that must keep them."""
        plans, self._plans = self._plans, {}
        return plans, self._workspace

    def drop_plans(self) -> None:
        """Destroys all plans."""
        self._plans, self._step_plans = {}, {}

    # --- looking inside ---

    def tokens_read(self, queries: int = 1) -> tuple[int, int]:
        """How many tokens the newest queries read exactly and encoded, over all rows (docs/design.md, "The cache's
        rules")."""
        sinks, tail = self.ends.sink_pages, self.ends.tail_pages
        visible = encoded = 0
        for n in self.rows:
            first = max(n - queries - self.window + 1, 0) if self.window else 0
            exact_from = n
            if tail:
                exact_from = ((n - min(queries - 1, PAGE_TOKENS)) // PAGE_TOKENS - tail) * PAGE_TOKENS
            visible += n - first
            encoded += max(exact_from - max(first, sinks * PAGE_TOKENS), 0)
        return visible - encoded, encoded

    def decode(self, slot: int, which: int, begins: list[int], out: torch.Tensor, batch_stride: bool) -> None:
        """Decodes the keys (0) or values (1) of each row from begins[i] to its end.

        out: [rows, kv_heads, head_dim], or with batch_stride [batch, kv_heads, tokens, head_dim].
        """
        n = len(self.sequences)
        struct, _ = _tensors.tensor(
            out.transpose(1, 2) if batch_stride else out, "out", self.cache.device, n, mutable=True
        )
        keys, values = (byref(struct), None) if which == 0 else (None, byref(struct))
        with self.cache.owner.lock:
            self._use_stream()
            ranges = self.ids, _c.counts(begins), _c.counts(self.rows), n
            _c.check(_c.cache_decode(self.cache.handle, *ranges, slot, keys, values))

    def memory(self) -> int:
        """Bytes of one layer, on average; what other copies of the cache hold is counted, too."""
        return self.cache.memory().total_bytes // len(self.members)


__all__ = ["Group", "Step"]
