"""Encoded pages in memory that an engine owns: its pool of blocks, its block tables and lengths."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p, sizeof
from typing import Any

from . import _arguments, _c, _locks, _overlap, _tensors
from ._errors import InvalidArgument
from ._facts import Facts
from ._options import LIMITS, PAGES, PAGES_ATTENTION, PAGES_PLAN, complete_store
from ._owner import Owner
from ._plan import attention_options, run_options

__all__ = ["PageFacts", "Pages", "PagesPlan"]

_WORDS = {4: "int32", 8: "int64"}


def _list(x: Any, name: str, size: int, where: _tensors.Place):
    """(address, count, owner) of a contiguous one-dimensional tensor of integers, or of a list of numbers."""
    if isinstance(x, (list, tuple, range)):
        most = (1 << (8 * size - 1)) - 1
        numbers = _arguments.integers(name, x, -most - 1, most)
        if where.kind == "cpu":
            array = ((c_int32 if size == 4 else c_int64) * len(numbers))(*numbers)
            return ctypes.addressof(array), len(numbers), array
        torch = _tensors.torch_module()
        if torch is None:
            raise InvalidArgument(f"{name} is a list: without torch, pass a {_WORDS[size]} tensor in device memory")
        dtype = torch.int32 if size == 4 else torch.int64
        x = torch.tensor(numbers, dtype=dtype, device=f"cuda:{where.number}")
    d = _tensors.describe(x, name, where, (_WORDS[size],))
    if len(d.shape) != 1 or (d.shape[0] > 1 and d.stride[0] != 1):
        raise InvalidArgument(
            f"{name} has shape {list(d.shape)} and strides {list(d.stride)}: must be contiguous, [count]"
        )
    return d.data, d.shape[0], d


def _rows(x: Any, name: str, where: _tensors.Place, mutable: bool = False):
    d = _tensors.describe(x, name, where, mutable=mutable)
    if len(d.shape) != 3:
        raise InvalidArgument(f"{name} has shape {list(d.shape)}: must be [tokens, heads, head_dim]")
    return _tensors.fill(_c.MutableTensor() if mutable else _c.Tensor(), d, name, 1), d


def _step_tables(block_table: Any, seq_lens: Any, query_start_loc: Any, where: _tensors.Place):
    """(tables, owners) of a step."""
    d = _tensors.describe(block_table, "block_table", where, ("int32",))
    if len(d.shape) != 2 or (d.shape[1] > 1 and d.stride[1] != 1):
        raise InvalidArgument(
            f"block_table has shape {list(d.shape)} and strides {list(d.stride)}: must be [batch, columns], with "
            "contiguous rows"
        )
    lengths, batch, lengths_owner = _list(seq_lens, "seq_lens", 4, where)
    starts, count, starts_owner = _list(query_start_loc, "query_start_loc", 4, where)
    if count < batch + 1 or d.shape[0] < batch:
        raise InvalidArgument(
            f"seq_lens has {batch} sequences, block_table {d.shape[0]} rows and query_start_loc {count} numbers: "
            f"must be {batch} rows or more, and {batch + 1} numbers or more"
        )
    t = _c.StepTables()
    t.struct_size = sizeof(t)
    t.block_table, t.row_stride, t.columns = d.data, d.stride[0] if d.shape[0] > 1 else d.shape[1], d.shape[1]
    t.seq_lens, t.query_start_loc, t.batch = lengths, starts, _arguments.int32("the length of seq_lens", batch)
    return t, (d, lengths_owner, starts_owner)


@PAGES.described
class Pages(_arguments.NotCopied):
    """The geometry and formats of encoded pages in an engine's blocks. Holds no blocks.

    {options}

    The lut formats are refused.
    A block is 64 tokens of one sequence; a (block, kv head) is block_bytes contiguous bytes. A block is filled from its
    first position on; the write that stores the first position clears those that it does not store. Tokens are encoded
    as they come. With tail_pages the tokens of a block that has an exact copy go to the copy alone, and begin_step
    encodes the block, in all layers, once it is full or its sequence is not in the step: so the pool that each layer
    was written to last must stay. Layers whose sequences have other block tables need Pages of their own, if there are
    centres or tail_pages.

    Errors: InvalidArgument, Unsupported, OutOfMemory.
    """

    block_tokens = 64
    _instead = "make others of the same options"
    _made_of = (
        "device", "owner", "k", "v", "kv_heads", "head_dim", "v_head_dim", "q_head_dim", "latent", "rope", "layers",
        "tail_pages", "tail_sequences", "sink_pages", "block_bytes", "tail_bytes", "tail_copies", "encode_at_once",
        "_pools"
    )  # fmt: skip

    def __init__(self, **options: Any):
        values = complete_store(PAGES, options)
        self.device = _arguments.device(values["device"])
        self.owner = Owner(self.device, "pages")  # of kvant's own modules
        c = _c.PagesConfig()
        _c.pages_config_init(byref(c), sizeof(c))
        PAGES.fill(c, values)
        if c.exact_copies == 0 and values["exact_copies"] is not None:  # to the library: as many as sequences may have
            raise InvalidArgument("exact_copies is 0: must be 1 or more, or None; tail_pages = 0 makes none")
        c.device = f"{self.device[0]}:{self.device[1]}".encode() if self.device[0] != "cpu" else None
        self.k, self.v, self.encode_at_once = c.k.decode(), c.v.decode(), bool(c.encode_at_once)
        for name in ("kv_heads", "layers", "tail_pages", "tail_sequences", "sink_pages"):
            setattr(self, name, getattr(c, name))
        _arguments.set_dims(self, c.head_dim, c.v_head_dim, c.latent, c.rope)
        handle = _c.PagesHandle()
        _c.check(_c.pages_create(byref(c), byref(handle)))
        self.owner.pointer = handle
        self._pools: dict[int, Any] = {}  # with a tail, of each layer that was written
        size = c_int64()
        _c.check(_c.pages_block_bytes(handle, byref(size)))
        self.block_bytes = size.value
        _c.check(_c.pages_tail_bytes(handle, byref(size)))
        self.tail_bytes = size.value
        copies = c_int32()
        _c.check(_c.pages_tail_copies(handle, byref(copies)))
        self.tail_copies = copies.value

    def close(self) -> None:
        """Frees the exact copies now instead of when the object goes. The pages and their plans cannot be used any
        more."""
        self.owner.close()
        self._pools.clear()

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def handle(self) -> c_void_p:
        """The kvant_pages* of kvant.h."""
        return self.owner.handle

    def begin_step(
        self, block_table: Any, seq_lens: Any, query_start_loc: Any, stream: Any = None, max_query_len: int = 0
    ) -> None:
        """With centres or a tail: once a step, before its writes and set_tables. The whole batch, with a tail up to
        tail_sequences.

        The tables are those of PagesPlan.set_tables; on a device they must stay as they are until the step's writes are
        done. Writes find there the block before a block that begins. Blocks that begin in this step and are in the tail
        get exact copies; what is written to them goes there, too. max_query_len: the most queries of a sequence; 0: not
        known; on a device 1 saves a launch a write. Errors: InvalidArgument.
        """
        where = self.owner.place(stream)
        t, _tables = _step_tables(block_table, seq_lens, query_start_loc, where)
        t.max_query_len = _arguments.int32("max_query_len", max_query_len)
        _c.check(_c.pages_begin_step(self.handle, byref(t), where.stream))

    def take_misses(self, stream: Any = None) -> int:
        """Waits for the stream. Since the last call: pages that a step was to read exactly, and that had no exact copy,
        as those of a prefix that was cached long ago. They are read encoded."""
        found = c_int64()
        _c.check(_c.pages_take_misses(self.handle, self.owner.place(stream).stream, byref(found)))
        return found.value

    def write(
        self, pool: Any, keys: Any, values: Any, slot_mapping: Any, stream: Any = None, layer: int = 0
    ) -> None:
        """Encodes tokens into their slots.

        pool: uint8 [num_blocks, kv_heads, block_bytes], or [num_blocks, kv_heads, 64, block_bytes / 64]. Block and head
            strides are multiples of 64 bytes, a (block, kv head) is contiguous, and the base is aligned to 64 bytes. On
            a device heads of a block follow one another.
        keys, values: [tokens, kv_heads, head_dim] f32, f16 or bf16, any token and head stride.
        slot_mapping: int64 [tokens or fewer]: block * 64 + position, -1: not stored. Tokens of one block follow one
            another, in ascending order. With centres row i is row i of begin_step's query_start_loc.
        stream: a CUDA stream; None: torch's current one.
        layer: with a tail, whose pool this is.
        Errors: on the CPU NonFinite, and InvalidArgument for slots outside the pool. On a device take_non_finite tells.
        """
        where = self.owner.place(stream)
        p, blocks = self._pool(pool, where, layer, mutable=True)
        k, keys_described = _rows(keys, "keys", where)
        v, values_described = _rows(values, "values", where)
        slots, count, _s = _list(slot_mapping, "slot_mapping", 8, where)
        _overlap.check_apart([("pool", blocks)], [("keys", keys_described), ("values", values_described)])
        _c.check(_c.pages_write(self.handle, byref(p), byref(k), byref(v), slots, count, where.stream))
        if self.tail_pages:
            self._pools[layer] = pool  # begin_step encodes blocks there

    def decode(self, pool: Any, block_ids: Any, keys_out: Any, values_out: Any, stream: Any = None) -> None:
        """Decodes whole blocks. keys_out, values_out: [len(block_ids) * 64, kv_heads, head_dim] f32, f16 or bf16;
        either may be None. block_ids: int32, or a list."""
        where = self.owner.place(stream)
        p, blocks = self._pool(pool, where)
        ids, count, _ids = _list(block_ids, "block_ids", 4, where)
        outputs, structs = [], []
        for x, name in ((keys_out, "keys_out"), (values_out, "values_out")):
            if x is None:
                structs.append(None)
                continue
            t, d = _rows(x, name, where, mutable=True)
            outputs.append((name, d))
            structs.append(byref(t))
        _overlap.check_apart(outputs, [("pool", blocks)])
        _c.check(_c.pages_decode(self.handle, byref(p), ids, count, *structs, where.stream))

    def copy(self, pool: Any, from_ids: Any, to_ids: Any, stream: Any = None) -> None:
        """Copies blocks from_ids[i] to to_ids[i], all kv heads. int32, or lists. Blocks to_ids have no exact copy then,
        until they begin anew: plans whose tables have them need set_tables again."""
        where = self.owner.place(stream)
        p, _pool = self._pool(pool, where, mutable=True)
        source, count, _s = _list(from_ids, "from_ids", 4, where)
        target, count_to, _t = _list(to_ids, "to_ids", 4, where)
        if count != count_to:
            raise InvalidArgument(f"from_ids has {count} blocks and to_ids {count_to}: must be as many")
        _c.check(_c.pages_copy(self.handle, byref(p), source, target, count, where.stream))

    def take_non_finite(self, stream: Any = None) -> bool:
        """Waits for the stream: True if a write since the last call met values that are not finite, or a slot outside
        the pool. On the CPU these are refused: False."""
        found = c_int32()
        _c.check(_c.pages_take_non_finite(self.handle, self.owner.place(stream).stream, byref(found)))
        return bool(found.value)

    @PAGES_PLAN.shown
    def plan(self, q_heads: int, **options: Any) -> PagesPlan:
        """A plan for all steps within its limits; see PagesPlan."""
        return PagesPlan(self, q_heads, **options)

    def _pool(self, pool: Any, where: _tensors.Place, layer: int = 0, mutable: bool = False):
        d = _tensors.describe(pool, "pool", where, ("uint8",), mutable)
        shape, stride = d.shape, d.stride
        if len(shape) == 4 and shape[2] * shape[3] == self.block_bytes and stride[3] == 1 and stride[2] == shape[3]:
            shape, stride = (*shape[:2], self.block_bytes), (*stride[:2], 1)
        if len(shape) != 3 or shape[1:] != (self.kv_heads, self.block_bytes) or stride[2] != 1:
            raise InvalidArgument(
                f"pool has shape {list(shape)} and strides {list(stride)}: must be [num_blocks, kv_heads, block_bytes] "
                f"= [num_blocks, {self.kv_heads}, {self.block_bytes}], a (block, kv head) contiguous"
            )
        p = _c.BlockPool()
        p.data, p.blocks, p.block_stride, p.head_stride = d.data, shape[0], stride[0], stride[1]
        p.layer = _arguments.int32("layer", layer)
        if shape[0] == 1:  # strides of dimensions of one element mean nothing
            p.block_stride = self.kv_heads * self.block_bytes
        if self.kv_heads == 1:
            p.head_stride = self.block_bytes
        return p, d

    def __repr__(self) -> str:
        return (
            f"kvant.Pages({_arguments.geometry(self)}, k={self.k!r}, v={self.v!r}, "
            f"device={self.device[0]!r}, block_bytes={self.block_bytes})"
        )


class PageFacts(Facts):
    """The decisions of a plan over an engine's blocks. The fields are those of kvant_pages_plan_facts in kvant.h."""

    _struct = _c.PagesPlanFacts

    workspace_bytes: int
    isa: str
    kernel: str
    threads: int
    products: int


@PAGES_PLAN.described
class PagesPlan(_arguments.NotCopied):
    """Attention over an engine's blocks. Made by Pages.plan for the largest step; gets the tables once a step, and runs
    once a layer.

    {options}

    A plan can be recorded in CUDA graphs: set_tables and run read lengths and tables on the device, and launches are
    made for the limits. Errors: InvalidArgument, Unsupported.
    """

    _instead = "pages.plan() makes another"
    _made_of = ("pages", "q_heads", "fresh_keys", "facts", "_held", "_lock")

    def __init__(self, pages: Pages, q_heads: int, **options: Any):
        values = PAGES_PLAN.complete({"q_heads": q_heads, **options})
        self._lock = _locks.new("this plan")
        o = attention_options(PAGES_ATTENTION, values)
        self.pages, self.q_heads, self.fresh_keys = pages, o.q_heads, bool(o.fresh_keys)
        limits = _c.PageLimits()
        limits.struct_size = sizeof(limits)
        LIMITS.fill(limits, values)
        if limits.max_query_len == 0:
            raise InvalidArgument("max_query_len is 0: must be 1 or more, the most queries of one sequence in a step")
        if limits.max_tokens == 0 and values["max_tokens"] is not None:
            raise InvalidArgument("max_tokens is 0: must be 1 or more, or None for max_batch * max_query_len")
        handle = _c.PagesPlanHandle()
        _c.check(_c.pages_plan_create(pages.handle, byref(o), byref(limits), byref(handle)))
        self._held = pages.owner.hold(handle)
        self.facts = PageFacts.of(_c.pages_plan_describe, handle)
        self._held.memory = self._take_workspace(values["workspace"])

    @property
    def handle(self) -> c_void_p:
        """The kvant_pages_plan* of kvant.h."""
        return self._held.handle

    def explain(self) -> str:
        """Kernels, splits, limits, and why."""
        return _c.text(_c.pages_plan_explain, self.handle)

    def set_tables(self, block_table: Any, seq_lens: Any, query_start_loc: Any, stream: Any = None) -> None:
        """The batch of the runs that follow: once a step, for all layers.

        block_table: int32 [batch, columns], the blocks of each sequence; entries behind a sequence's length, and of
            pages that the window hides, are not read. seq_lens: int32 [batch], tokens with those of this step.
            query_start_loc: int32 [batch + 1]; sequence i has rows query_start_loc[i] to query_start_loc[i + 1] of q.
        A sequence may have no query, and with is_causal=False and fresh_keys=False fewer tokens than queries. On a
        device the tensors are read when the stream comes to it, and sequences that do not fit the limits get no query
        (take_errors tells); the CPU refuses them. Errors: InvalidArgument.
        """
        where = self.pages.owner.place(stream)
        t, _tables = _step_tables(block_table, seq_lens, query_start_loc, where)
        with self._lock:
            _c.check(_c.pages_plan_set_tables(self.handle, byref(t), where.stream))

    def run(
        self,
        pool: Any,
        q: Any,
        out: Any = None,
        lse: Any = None,
        sink_logits: Any = None,
        keys: Any = None,
        values: Any = None,
        stream: Any = None,
        layer: int = 0,
    ) -> Any:
        """out = softmax(transform(scale * q k^T) + masks) v over one layer's pool.

        q, out: [tokens, q_heads, head_dim]; tokens: all rows of query_start_loc at least, up to max_tokens. Rows of no
        sequence are left as they are. out None: a new tensor of q's dtype. lse: True, or an f32 tensor
        [tokens, q_heads]: gets the natural log of each softmax denominator. sink_logits: [q_heads] f32, join the
        denominator only.
        keys, values: of a plan with fresh_keys=True the tokens' own, [tokens or more, kv_heads, head_dim]; on a device
            both f16 or both bf16. The step's write may come before or after. None otherwise.
        layer: with a tail, whose pool this is.
        Returns out, or (out, lse) if lse was requested. Errors: InvalidArgument, Unsupported.
        """
        where = self.pages.owner.place(stream)
        p, blocks = self.pages._pool(pool, where, layer)
        q_tensor, q_described = _rows(q, "q", where)
        made = (out is None, lse is True)
        if made[0]:
            out = _tensors.empty_like(q, (*q_described.shape[:-1], self.pages.v_head_dim))
        out_tensor, out_described = _rows(out, "out", where, mutable=True)
        outputs, inputs = [("out", out_described)], [("q", q_described), ("pool", blocks)]
        fresh = []
        for x, name in ((keys, "keys"), (values, "values")):
            if x is None:
                fresh.append(None)
                continue
            t, d = _rows(x, name, where)
            fresh.append(byref(t))
            inputs.append((name, d))
        rows = (q_described.shape[0], self.q_heads)
        options, lse = run_options(q, rows, lse, sink_logits, where, outputs, inputs)
        if self._held.memory is not None:
            options.workspace, options.workspace_size, _ = self._held.memory
        with self._lock:
            _c.check(
                _c.pages_plan_run(
                    self.handle,
                    byref(p),
                    byref(q_tensor),
                    byref(out_tensor),
                    byref(options),
                    *fresh,
                )
            )
        return _tensors.given_back(out, lse, made, q)

    def take_errors(self, stream: Any = None) -> bool:
        """Waits for the stream: True if since the last call a sequence did not fit the limits, or (check_ids) had a
        block outside the pool. On the CPU these are refused: False."""
        found = c_int32()
        with self._lock:
            _c.check(_c.pages_plan_take_errors(self.handle, self.pages.owner.place(stream).stream, byref(found)))
        return bool(found.value)

    def _take_workspace(self, workspace: Any):
        needed = self.facts.workspace_bytes
        pages = self.pages
        if needed == 0:
            if workspace is not None:
                raise InvalidArgument("workspace is given, but this plan needs none: leave it out")
            return None
        if workspace is None:
            workspace = pages.owner.workspace(needed)
        return _tensors.memory(workspace, "workspace", pages.owner.place())

    def __repr__(self) -> str:
        return f"<kvant.PagesPlan {self.facts}>"
