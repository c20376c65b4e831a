# Made by scripts/python_stub.py --write from the package; a test compares the two.
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from ctypes import c_void_p
from pathlib import Path
from typing import Any

__version__: str

class Bf16Array:
    bits: Any

__all__: list[str]

class BadFile(KvantError):
    """A file is not what it claims to be."""
    status: int

class Bases:
    """Calibrated bases from a file that `kvant calibrate` wrote. Errors: FileError, BadFile."""
    def __init__(self, path: str | Path):
        ...

class Cache:
    """Keys and values of the layers of one geometry, compressed, in pages of 64 tokens.

    layers: all of one geometry: layers that differ in kv_heads, head_dim or window are another cache.
    kv_heads, head_dim: heads of keys and values, and the numbers of a vector: required, but with latent. head_dim
        is 1 to 576 on the CPU, where sizes outside `kvant.info()["head_dims"]` are stored padded with zeros. On a
        device head_dim is 1 to 512, and 64, 96, 128, 192, 256 and 512 are stored as they are.
    v_head_dim: the numbers of a value, and of an output, where they are not as many as those of a key and a query;
        0: head_dim. On a device both are the same, or 192 and 128.
    latent, rope: a latent cache, of multi-head latent attention (on a device 512 and 64): the numbers of a token's
        latent and of its rotary key, which all query heads share. Calls take rotary keys as keys and latents as values,
        queries of latent + rope numbers in this order, and give outputs of `latent`; plans need the model's scale.
        kv_heads, head_dim and v_head_dim follow. 0: keys and values of heads.
    k, v: formats of keys and values; `kvant.formats()` lists them. k = None: tq6, about 5 bits a value with tq4;
        tq8 for the rotary keys of a latent cache.
    device: "cpu", "cuda", "cuda:1" or a torch.device. On a CUDA device all memory is taken at once, so a cache
        needs capacity_tokens, and tensors must be on that device; work is enqueued on torch's current stream (or
        `stream=`).
    sink_pages, tail_pages: first and newest full pages of 64 tokens that stay exact, the first while a window
        covers them. None: one each.
    exact: "f32", "f16" or "bf16", the dtype of exact pages. None: f16 where the first write is f16, f32 where a
        format is f32, else bf16.
    window, window_sinks: tokens. Pages that no query of a sliding window can see any more are freed; the first
        window_sinks tokens stay.
    rollback_tokens: with a window, so many of the newest tokens can always be truncated: drafts of assisted
        generation. 0: 64.
    capacity_tokens: at most so many tokens in pages, 0: no limit.
    max_sequences, max_sequence_tokens: on a device: sequences alive at once, 0: 256; tokens of the longest, 0:
        capacity_tokens.
    pinned: on the CPU, pages are in pinned memory: copies to and from a device (kvant.copy_sequences) go at the
        speed of the link and take no processor. Needs CUDA; taking memory is slower.
    k_basis, v_basis: "automatic", "hadamard", "none" or "calibrated".
    bases, basis_layers: a kvant.Bases or its path, for "calibrated"; basis_layers: the file's layer number of each
        layer of the cache.
    k_centre: "page": encoded pages keep a mean of their keys and encode what is left, but of keys that are nearer
        to zero, for at most 0.125 bits a key value: tq and fp8 keys. "none". "automatic": "page" for these keys. With
        "page" over an engine's blocks, call begin_step once a step.
    v_centre: the same of latents. "automatic": "page" for tq and fp8 latents, but not beside k_centre="none", and
        not on a device.
    threads: workers that encode, 0: the processors that the process may use.
    isa: an instruction set to encode with, "scalar", "avx2", "avx512", "amx" or "neon" (all store the same bytes),
        None: the best.

    Errors: InvalidArgument, Unsupported, OutOfMemory.
    Any thread may make any call at any time. Sequences do not disturb each other, also where they share pages; the
    calls for one sequence are the caller's to order. Plans run at the same time, on a device one after another; calls
    that change something wait for them.
    """
    def __init__(self, *, layers: int = 1, kv_heads: int = 0, head_dim: int = 0, v_head_dim: int = 0, latent: int = 0, rope: int = 0, k: str | None = None, v: str = 'tq4', device: Any = 'cpu', sink_pages: int | None = None, tail_pages: int | None = None, exact: str | None = None, window: int = 0, window_sinks: int = 0, rollback_tokens: int = 0, capacity_tokens: int = 0, max_sequences: int = 0, max_sequence_tokens: int = 0, pinned: bool = False, k_basis: str = 'automatic', v_basis: str = 'automatic', bases: Bases | str | Path | None = None, basis_layers: SequenceOf[int] | None = None, k_centre: str = 'automatic', v_centre: str = 'automatic', threads: int = 0, isa: str | None = None):
        ...
    def close(self) -> None:
        """Frees the cache's memory now instead of when the object goes. Its sequences and plans cannot be used any
        more.
        """
    def __enter__(self) -> Cache:
        ...
    def __exit__(self, *error) -> None:
        ...
    @property
    def handle(self) -> c_void_p:
        """The kvant_cache* of kvant.h."""
    def sequence(self) -> Sequence:
        """A new, empty sequence."""
    def reorder(self, sequences: SequenceOf[Sequence], parents: SequenceOf[int]) -> None:
        """Beams: sequences[i] becomes what sequences[parents[i]] was, for all at once. Pages are shared until one side
        writes.
        """
    def reserve(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1, *, stream: Any = None) -> None:
        """Takes room for `tokens` new tokens of each sequence (one number, or one a sequence) in every layer, all or
        nothing.

        Errors: OutOfCapacity, InvalidArgument.
        """
    def write(self, sequences: Iterable[Sequence], layer: int, keys: Any, values: Any, *, stream: Any = None) -> None:
        """Stores keys and values of the tokens just reserved, once for each layer.

        keys, values: [tokens of all sequences, kv_heads, head_dim], the sequences' rows one after another, or
        [batch, tokens, kv_heads, head_dim]; f32, f16 or bf16; any strides whose last is 1.
        Errors: NonFinite (on the CPU), InvalidArgument.
        """
    def step(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1, *, stream: Any = None) -> Step:
        """Reserves tokens and returns the step, which writes and attends layer after layer.

        As a context manager the step drops its tokens again if the block raises.
        """
    def reserve_ahead(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int], *, stream: Any = None) -> None:
        """Device only: takes pages for steps to come, so that these take none and can be replayed from a CUDA graph."""
    def advance(self, sequences: Iterable[Sequence], tokens: int | SequenceOf[int] = 1) -> None:
        """Device only: tells of a step that the launch of a CUDA graph took, so that lengths here follow the
        device's.
        """
    def take_non_finite(self) -> bool:
        """Device only: True if keys or values that are not finite were stored since the last call. Waits for the
        stream.
        """
    def plan(self, sequences: Iterable[Sequence], *, q_heads: int, q_len: int = 1, q_lens: SequenceOf[int] | None = None, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, mask: Any = None, mask_first_key: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0) -> Plan:
        """Plans attention of the newest queries of `sequences`; does all validation. See Plan for the options."""
    def attend(self, sequences: Iterable[Sequence] | Sequence, layer: int, q: Any, keys: Any = None, values: Any = None, *, out: Any = None, lse: Any = None, sink_logits: Any = None, stream: Any = None, q_len: int = 1, q_lens: SequenceOf[int] | None = None, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, mask: Any = None, mask_first_key: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0) -> Any:
        """Attention of the newest queries; with keys and values these are appended first.

        q: [tokens, q_heads, head_dim], the sequences' rows one after another, or [batch, tokens, q_heads, head_dim].
        keys, values: as for write, with one row for each row of q. The first layer of a step reserves, the others fill
            in.
        out: a tensor of q's shape, f32, f16 or bf16; None: a new one of q's dtype. options: see Plan (window, scale,
            ...). With fresh_keys=True keys and values are attended to as given, and only older tokens are read from the
            cache. Returns out; with lse=True (out, lse), lse [tokens, q_heads] f32.
        """
    def decode(self, sequences: Iterable[Sequence] | Sequence, layer: int, begin: int | SequenceOf[int] = 0, end: int | SequenceOf[int] | None = None, *, keys: Any = None, values: Any = None, stream: Any = None) -> tuple[Any, Any]:
        """Stored tokens [begin, end) as attention computes with them, in the original coordinates.

        begin, end: one number, or one a sequence; end None: the length.
        keys, values: tensors [sum of end - begin, kv_heads, head_dim] to write to, f32, f16 or bf16, where the cache
            lives. Without them new ones are made: numpy f32 on the CPU, torch f32 on a device. Returns (keys, values).
        """
    def memory(self) -> Memory:
        """Bytes by kind: codes, scales, exact pages, tables, and what was taken from the system."""
    def exact_ends(self) -> ExactEnds:
        """How many first and newest pages stay exact, and in which dtype."""
    def trim(self) -> int:
        """Gives memory that no page uses back to the system, after sequences went; returns how many bytes. 0 on a
        device.
        """
    def describe(self) -> str:
        """Geometry, formats, page bytes, exact ends, basis, capacity, and what is held; one line a fact."""

class ExactEnds:
    """The pages that a cache keeps exact, as kvant_exact_ends in kvant.h: first and newest full ones. dtype: None where
    there are none, and where the first write will decide.
    """
    sink_pages: int
    tail_pages: int
    dtype: str | None

class FileError(KvantError, OSError):
    """The operating system refused to open, read or write a file."""
    status: int

class InternalError(KvantError):
    """A defect in kvant."""
    status: int

class InvalidArgument(KvantError, ValueError):
    """A value outside what is allowed."""
    status: int

class KvantError(Exception):
    """Any failure that the library reports. `status` is the number of the C interface (kvant.h)."""
    status: int

class Loaded:
    """A cache that was loaded, and its sequences in the order of the file, or of the places that were given."""
    cache: Cache
    sequences: list[Sequence]

class Memory:
    """The contents of a cache, in bytes (tokens: a count). The fields are those of kvant_memory in kvant.h."""
    tokens: int
    encoded_bytes: int
    scale_bytes: int
    exact_bytes: int
    table_bytes: int
    total_bytes: int
    reserved_bytes: int

class NonFinite(KvantError, ValueError):
    """Keys or values hold NaN, an infinity, or a magnitude above 65504."""
    status: int

class OutOfCapacity(KvantError):
    """The capacity that the cache was created with is used up."""
    status: int

class OutOfMemory(KvantError, MemoryError):
    """An allocation failed."""
    status: int

class PageFacts:
    """The decisions of a plan over an engine's blocks. The fields are those of kvant_pages_plan_facts in kvant.h."""
    workspace_bytes: int
    isa: str
    kernel: str
    threads: int
    products: int

class Pages:
    """The geometry and formats of encoded pages in an engine's blocks. Holds no blocks.

    kv_heads, head_dim: heads of keys and values, and the numbers of a vector: required, but with latent. head_dim
        is 1 to 576 on the CPU, where sizes outside `kvant.info()["head_dims"]` are stored padded with zeros. On a
        device head_dim is 1 to 512, and 64, 96, 128, 192, 256 and 512 are stored as they are.
    v_head_dim: the numbers of a value, and of an output, where they are not as many as those of a key and a query;
        0: head_dim. On a device both are the same, or 192 and 128.
    latent, rope: a latent cache, of multi-head latent attention (on a device 512 and 64): the numbers of a token's
        latent and of its rotary key, which all query heads share. Calls take rotary keys as keys and latents as values,
        queries of latent + rope numbers in this order, and give outputs of `latent`; plans need the model's scale.
        kv_heads, head_dim and v_head_dim follow. 0: keys and values of heads.
    k, v: formats of keys and values; `kvant.formats()` lists them. k = None: tq6, about 5 bits a value with tq4;
        tq8 for the rotary keys of a latent cache.
    device: "cpu", "cuda", "cuda:1" or a torch.device. On a CUDA device all memory is taken at once, so a cache
        needs capacity_tokens, and tensors must be on that device; work is enqueued on torch's current stream (or
        `stream=`).
    k_centre: "page": encoded pages keep a mean of their keys and encode what is left, but of keys that are nearer
        to zero, for at most 0.125 bits a key value: tq and fp8 keys. "none". "automatic": "page" for these keys. With
        "page" over an engine's blocks, call begin_step once a step.
    v_centre: the same of latents. "automatic": "page" for tq and fp8 latents, but not beside k_centre="none", and
        not on a device.
    threads: workers that encode, 0: the processors that the process may use.
    isa: an instruction set to encode with, "scalar", "avx2", "avx512", "amx" or "neon" (all store the same bytes),
        None: the best.
    tail_pages: newest whole blocks of a sequence that are read exactly, beside the one that is being filled; 0:
        none. With tail_pages, call begin_step once a step, and give write and run the layer.
    sink_pages: with tail_pages: first blocks of a sequence that are read exactly.
    exact: "f32" (CPU only), "f16" or "bf16", the dtype of exact copies; None: f32 where a format is f32, else f16
        where one is, else bf16.
    layers, tail_sequences: sequences that run at the same time, at most. Each may have sink_pages + tail_pages + 2
        exact copies of a block in each of `layers` layers, and sixteen of them tail_pages more: tail_copies a layer,
        tail_bytes in all, taken here.
    exact_copies: with tail_pages: fewer copies a layer; None: as many. Where there are too few, blocks that are
        being written have them first, then first blocks and newest full ones. Blocks without a copy are read encoded.
    encode_at_once: with tail_pages: a write leaves the codes of its blocks complete, which takes longer. For an
        engine that may give the memory of a freed block to layers which kvant does not write, before a step begins.

    The lut formats are refused.
    A block is 64 tokens of one sequence; a (block, kv head) is block_bytes contiguous bytes. A block is filled from its
    first position on; the write that stores the first position clears those that it does not store. Tokens are encoded
    as they come. With tail_pages the tokens of a block that has an exact copy go to the copy alone, and begin_step
    encodes the block, in all layers, once it is full or its sequence is not in the step: so the pool that each layer
    was written to last must stay. Layers whose sequences have other block tables need Pages of their own, if there are
    centres or tail_pages.

    Errors: InvalidArgument, Unsupported, OutOfMemory.
    """
    block_tokens: int
    def __init__(self, *, kv_heads: int = 0, head_dim: int = 0, v_head_dim: int = 0, latent: int = 0, rope: int = 0, k: str | None = None, v: str = 'tq4', device: Any = 'cpu', k_centre: str = 'automatic', v_centre: str = 'automatic', threads: int = 0, isa: str | None = None, tail_pages: int = 0, sink_pages: int = 0, exact: str | None = None, layers: int = 1, tail_sequences: int = 0, exact_copies: int | None = None, encode_at_once: bool = False):
        ...
    def close(self) -> None:
        """Frees the exact copies now instead of when the object goes. The pages and their plans cannot be used any
        more.
        """
    def __enter__(self) -> Pages:
        ...
    def __exit__(self, *error) -> None:
        ...
    @property
    def handle(self) -> c_void_p:
        """The kvant_pages* of kvant.h."""
    def begin_step(self, block_table: Any, seq_lens: Any, query_start_loc: Any, stream: Any = None, max_query_len: int = 0) -> None:
        """With centres or a tail: once a step, before its writes and set_tables. The whole batch, with a tail up to
        tail_sequences.

        The tables are those of PagesPlan.set_tables; on a device they must stay as they are until the step's writes are
        done. Writes find there the block before a block that begins. Blocks that begin in this step and are in the tail
        get exact copies; what is written to them goes there, too. max_query_len: the most queries of a sequence; 0: not
        known; on a device 1 saves a launch a write. Errors: InvalidArgument.
        """
    def take_misses(self, stream: Any = None) -> int:
        """Waits for the stream. Since the last call: pages that a step was to read exactly, and that had no exact copy,
        as those of a prefix that was cached long ago. They are read encoded.
        """
    def write(self, pool: Any, keys: Any, values: Any, slot_mapping: Any, stream: Any = None, layer: int = 0) -> None:
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
    def decode(self, pool: Any, block_ids: Any, keys_out: Any, values_out: Any, stream: Any = None) -> None:
        """Decodes whole blocks. keys_out, values_out: [len(block_ids) * 64, kv_heads, head_dim] f32, f16 or bf16;
        either may be None. block_ids: int32, or a list.
        """
    def copy(self, pool: Any, from_ids: Any, to_ids: Any, stream: Any = None) -> None:
        """Copies blocks from_ids[i] to to_ids[i], all kv heads. int32, or lists. Blocks to_ids have no exact copy then,
        until they begin anew: plans whose tables have them need set_tables again.
        """
    def take_non_finite(self, stream: Any = None) -> bool:
        """Waits for the stream: True if a write since the last call met values that are not finite, or a slot outside
        the pool. On the CPU these are refused: False.
        """
    def plan(self, q_heads: int, *, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0, max_batch: int, max_blocks: int, max_query_len: int = 1, max_tokens: int | None = None, check_ids: bool = False, workspace: Any = None) -> PagesPlan:
        """A plan for all steps within its limits; see PagesPlan."""

class PagesPlan:
    """Attention over an engine's blocks. Made by Pages.plan for the largest step; gets the tables once a step, and runs
    once a layer.

    q_heads: query heads, a multiple of kv_heads; query head h reads kv head h // (q_heads // kv_heads).
    scale: None: 1 / sqrt(head_dim).
    softcap: t = cap * tanh(s / cap), 0: none.
    alibi_slopes: [q_heads] numbers.
    is_causal: False lets queries see later keys too. A window then bounds from below only.
    window: the last W keys, the query's own included; 0: no window. None: the cache's window and window_sinks; over
        an engine's blocks no window.
    window_sinks: the first tokens that stay visible beyond the window.
    threads, split_keys, isa: 0 and None let the plan choose. CPU only. isa: "scalar", "avx2", "avx512", "amx" or
        "neon"; "amx" multiplies many rows with products of bf16 terms: 4e-6 off, "avx512" 1e-6 (float formats).
    kernel: on a device "decode", "decode_sm90", "decode_sm80" or "prefill" ("prefill_sm90", "prefill_sm80" or
        "prefill_unpacked" for one kind of these; "prefill_fresh" with fresh_keys), or "generic", which takes any pair
        of formats in float32, and is the only one for f32 and imported formats; None: what takes the least time.
        decode_sm90, decode_sm80 and prefill kernels round weights to f16 or bf16, and "prefill_unpacked" what codes
        stand for.
    fresh_keys: True: each run is given the keys and values of the queries' own tokens and attends to these as they
        are; only older tokens are read encoded. On a device fresh keys take prefill kernels.
    products: bits of the numbers that are multiplied where many rows share a page of tq formats. 8 is faster and
        rounds queries, and on the CPU weights, to 8 bits; devices refuse 8 but at head_dim 256. 0: 8 on the CPU for
        pairs to whose own loss that adds at most a fifth, else 16; facts.products and explain() say which.
    max_batch, max_blocks, max_query_len, max_tokens: the largest step: sequences, blocks of one sequence, queries
        of one sequence, and queries in all with padding (None: max_batch * max_query_len).
    check_ids: on a device, each run looks at the block ids that it is to read; rows of a sequence with one outside
        the pool become NaN, and take_errors tells. The CPU always looks, and refuses.
    workspace: on a device, a uint8 tensor of facts.workspace_bytes; None: a torch buffer that the plans of these
        pages share, taken here. Plans that share one run one after another on a stream.

    A plan can be recorded in CUDA graphs: set_tables and run read lengths and tables on the device, and launches are
    made for the limits. Errors: InvalidArgument, Unsupported.
    """
    def __init__(self, pages: Pages, q_heads: int, *, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0, max_batch: int, max_blocks: int, max_query_len: int = 1, max_tokens: int | None = None, check_ids: bool = False, workspace: Any = None):
        ...
    @property
    def handle(self) -> c_void_p:
        """The kvant_pages_plan* of kvant.h."""
    def explain(self) -> str:
        """Kernels, splits, limits, and why."""
    def set_tables(self, block_table: Any, seq_lens: Any, query_start_loc: Any, stream: Any = None) -> None:
        """The batch of the runs that follow: once a step, for all layers.

        block_table: int32 [batch, columns], the blocks of each sequence; entries behind a sequence's length, and of
            pages that the window hides, are not read. seq_lens: int32 [batch], tokens with those of this step.
            query_start_loc: int32 [batch + 1]; sequence i has rows query_start_loc[i] to query_start_loc[i + 1] of q.
        A sequence may have no query, and with is_causal=False and fresh_keys=False fewer tokens than queries. On a
        device the tensors are read when the stream comes to it, and sequences that do not fit the limits get no query
        (take_errors tells); the CPU refuses them. Errors: InvalidArgument.
        """
    def run(self, pool: Any, q: Any, out: Any = None, lse: Any = None, sink_logits: Any = None, keys: Any = None, values: Any = None, stream: Any = None, layer: int = 0) -> Any:
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
    def take_errors(self, stream: Any = None) -> bool:
        """Waits for the stream: True if since the last call a sequence did not fit the limits, or (check_ids) had a
        block outside the pool. On the CPU these are refused: False.
        """

class Plan:
    """How attention of one step will be computed. Made by Cache.plan; runs once for each layer.

    q_heads: query heads, a multiple of kv_heads; query head h reads kv head h // (q_heads // kv_heads).
    q_len, q_lens: queries a sequence, its newest positions; q_lens: one count a sequence instead.
    scale: None: 1 / sqrt(head_dim).
    softcap: t = cap * tanh(s / cap), 0: none.
    alibi_slopes: [q_heads] numbers.
    is_causal: False lets queries see later keys too. A window then bounds from below only.
    window: the last W keys, the query's own included; 0: no window. None: the cache's window and window_sinks; over
        an engine's blocks no window.
    window_sinks: the first tokens that stay visible beyond the window.
    mask, mask_first_key: a mask [batch, q_heads, queries, keys], boolean (True: visible) or additive; dimensions of
        1 broadcast. Its key dimension begins at position mask_first_key.
    threads, split_keys, isa: 0 and None let the plan choose. CPU only. isa: "scalar", "avx2", "avx512", "amx" or
        "neon"; "amx" multiplies many rows with products of bf16 terms: 4e-6 off, "avx512" 1e-6 (float formats).
    kernel: on a device "decode", "decode_sm90", "decode_sm80" or "prefill" ("prefill_sm90", "prefill_sm80" or
        "prefill_unpacked" for one kind of these; "prefill_fresh" with fresh_keys), or "generic", which takes any pair
        of formats in float32, and is the only one for f32 and imported formats; None: what takes the least time.
        decode_sm90, decode_sm80 and prefill kernels round weights to f16 or bf16, and "prefill_unpacked" what codes
        stand for.
    fresh_keys: True: each run is given the keys and values of the queries' own tokens and attends to these as they
        are; only older tokens are read encoded. On a device fresh keys take prefill kernels.
    products: bits of the numbers that are multiplied where many rows share a page of tq formats. 8 is faster and
        rounds queries, and on the CPU weights, to 8 bits; devices refuse 8 but at head_dim 256. 0: 8 on the CPU for
        pairs to whose own loss that adds at most a fifth, else 16; facts.products and explain() say which.

    A plan is made after the reserve of a step. On the CPU it is for that step; on a device it follows sequences that
    grow. Errors: InvalidArgument, Unsupported.
    """
    def __init__(self, cache: Any, sequences: Any, *, q_heads: int, q_len: int = 1, q_lens: SequenceOf[int] | None = None, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, mask: Any = None, mask_first_key: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0):
        ...
    @property
    def handle(self) -> c_void_p:
        """The kvant_plan* of kvant.h."""
    def explain(self) -> str:
        """Kernels, tiles, splits, bytes, and why."""
    def run(self, layer: int, q: Any, out: Any = None, *, keys: Any = None, values: Any = None, lse: Any = None, sink_logits: Any = None, workspace: Any = None, stream: Any = None) -> Any:
        """out = softmax(transform(scale * q k^T) + masks) v in one layer.

        q, out: [total queries, q_heads, head_dim], the sequences' rows one after another, or [batch, q_len, q_heads,
        head_dim]. out None: a new tensor of q's dtype. keys, values: of a plan with fresh_keys=True the queries' own,
        [total queries, kv_heads, head_dim] or [batch, q_len, kv_heads, head_dim]. lse: True, or an f32 tensor
        [total queries, q_heads]: gets the natural log of each softmax denominator. sink_logits: [q_heads] f32, join the
        denominator only.
        workspace: on a device, memory of facts.workspace_bytes; None: a torch buffer that the cache keeps.
        Returns out, or (out, lse) if lse was requested. Errors: Stale, InvalidArgument.
        """

class PlanFacts:
    """The decisions of a plan, as numbers. The fields are those of kvant_plan_facts in kvant.h."""
    workspace_bytes: int
    total_queries: int
    kv_bytes: int
    threads: int
    splits: int
    isa: str
    kernel: str
    products: int

class Prefix:
    """A known prefix.

    length: its tokens. sequences: one for each that was inserted, of this length; they are the caller's.
    truncated: tokens that were cut off the longest of the stored sequences. 0: the sequences go on bit for bit as the
        inserted ones do. Up to 64: the same bytes are stored as if these tokens had never been. More: the newest pages,
        which a sequence of this length reads exactly, stay encoded.
    metadata: as it was given to insert.
    """
    length: int
    sequences: list[Sequence]
    truncated: int
    metadata: dict[str, str]

class PrefixIndex:
    """Sequences by their token ids, so that a prompt that begins as an earlier one need not be computed again.

    directory: a folder of snapshots, which is made if it is missing, and which processes may share: files are written
        beside and renamed, and an entry is known when all of its files are complete. A damaged entry is reported by a
        warning and in `problems`, and its files are removed. None: in memory.
    max_bytes: the entries that were used least recently go when all take more. None: 1e9, in a directory 1e10. On a
        full disk they go, too; a warning, once, says where that does not help. A limit of a file's size (ulimit -f)
        makes none of them go: a warning says once that larger prefixes are not kept.

    An entry is one sequence or several: one for each cache of a model whose layers differ in geometry. An entry that
    continues others takes their place, unless two texts continue the other. Where a window has released pages, a
    checkpoint of the turn before stays; what the newest entry has, too, is not kept twice.

    Any thread may make any call at any time. A call that an exception interrupts has been made, or has not.
    """
    def __init__(self, directory: str | Path | None = None, *, max_bytes: int | float | None = None):
        ...
    @property
    def stats(self) -> PrefixStats:
        """Counts of this object; entries and bytes are those of the directory."""
    @property
    def problems(self) -> list[str]:
        """The last damaged entries, a sentence each."""
    def find(self, tokens: SequenceOf[int], *, model: str = '', into: SequenceOf[Cache] | Callable[[int, dict[str, str]], Cache] | None = None) -> Prefix | None:
        """The longest known prefix of token ids, of 64 tokens or more; None if there is none.

        tokens: a model that must compute one token at least gives all but the last.
        model: as it was given to insert; entries of another are never found.
        into: where the sequences are made: a list of caches, one for each sequence, or a function of (place in the
            entry, metadata) that makes such a cache, on the CPU or on a device. None: in memory they are forks in the
            caches that were inserted, whose pages are shared; from a directory they have new caches on the CPU.

        An entry that cannot be had (a damaged file, a cache that was closed) goes, and the next best one serves.

        Errors: those of Snapshot.load that are of `into` or of its caches.
        """
    def insert(self, tokens: SequenceOf[int], sequences: Iterable[Sequence] | Sequence, *, model: str = '', metadata: Mapping[str, str] | None = None) -> bool:
        """Keeps sequences by their token ids. In memory forks are kept, which share pages with them.

        tokens: as many as the sequences have. Fewer than 64 are never kept.
        sequences: one, or one for each cache of a model.
        model: names all that the sequences depend on besides the ids: the model, its weights, how they are stored.
        metadata: the caller's own, a dict of str, which find returns; keys do not begin with "prefix." or "kvant.".

        Returns whether they are kept: False where these tokens are known already, alone exceed the budget, or find no
        room on a full disk. Errors: InvalidArgument, FileError, those of Sequence.fork.
        """
    def clear(self) -> None:
        """Removes all entries, in a directory the files, too."""

class PrefixStats:
    """entries, bytes: what is kept; in memory an estimate, in which pages that entries share count once. lookups, hits:
    calls of find, and those that found something. tokens: of all hits. evicted: entries that went to keep within the
    budget. refused: entries that were damaged.
    """
    entries: int
    bytes: int
    lookups: int
    hits: int
    tokens: int
    evicted: int
    refused: int

class Sequence:
    """One sequence of a cache. `len()` counts its tokens. Its pages are free again when the object goes, or by
    remove().
    """
    def __init__(self, cache: Cache, ids: Any, place: int):
        ...
    @property
    def id(self) -> int:
        """The library's number of the sequence; 0 after remove()."""
    @property
    def number(self) -> int:
        """The library's number of the sequence. Error: InvalidArgument after remove()."""
    def append(self, layer: int, keys: Any, values: Any, *, stream: Any = None) -> None:
        """Appends tokens to one layer: the first layer of a step reserves room in all, the others fill in.

        keys, values: [tokens, kv_heads, head_dim] or [1, tokens, kv_heads, head_dim], f32, f16 or bf16.
        Errors: NonFinite, OutOfCapacity, InvalidArgument.
        """
    def fork(self) -> Sequence:
        """A new sequence with the same tokens. Pages are shared until one side writes to them."""
    def truncate(self, tokens: int) -> None:
        """Forgets all tokens from position `tokens` on."""
    def __len__(self) -> int:
        ...
    def remove(self) -> None:
        """Frees the pages that no other sequence shares. The sequence cannot be used any more."""
    def __enter__(self) -> Sequence:
        ...
    def __exit__(self, *error) -> None:
        ...

class Snapshot:
    """A snapshot that is open. Its header and tables, and those of its bases, are read and checked.

    path: a file that kvant.save wrote. Errors: FileError, BadFile (what is wrong, and where), Unsupported (written by
    another version of the layout).
    """
    def __init__(self, path: str | Path):
        ...
    def tokens(self, place: int) -> list[int]:
        """Token ids of the sequence at a place of the file; empty: none were saved."""
    def load(self, *, sequences: SequenceOf[int] | None = None, model: str | None = None, metadata: Mapping[str, str] | None = None, tokens: SequenceOf[SequenceOf[int] | None] | None = None, into: Cache | None = None, device: Any = 'cpu', capacity_tokens: int | None = None, max_sequences: int = 0, max_sequence_tokens: int = 0, threads: int = 0, isa: str | None = None, progress: Callable[[int, int], Any] | None = None, stream: Any = None) -> Loaded:
        """Makes a cache of the snapshot's configuration with its sequences, or adds them to a cache.

        sequences: places in the file; None: all. model, metadata, tokens: the load is refused where the file has
            others; tokens: a list for each sequence that is loaded.
        into: a cache of the same configuration; after any error it has the sequences that it had. None: a new one, for
            which the next five are, as for Cache. capacity_tokens: None: as it was; 0: no limit.
        progress, stream: as for save; stream only with into.

        Errors: InvalidArgument (another configuration, or other than is required), OutOfCapacity, BadFile (names the
        first page that is not as it was saved), FileError, Unsupported.
        """
    def verify(self, *, progress: Callable[[int, int], Any] | None = None) -> None:
        """Reads all of the file and its bases, and compares every checksum.

        progress: as for save. Errors: BadFile (names the first bad part), FileError.
        """
    def copy(self, path: str | Path, *, progress: Callable[[int, int], Any] | None = None) -> None:
        """Writes the snapshot to another file, which needs no base.

        progress: as for save. Errors: InvalidArgument (a file that a snapshot needs), FileError, BadFile.
        """

class SnapshotInfo:
    """The facts of a snapshot.

    written_by: the version of kvant. name, model, metadata: as they were given to save. config: fields of the cache's
        configuration and their values. lengths: tokens of each sequence. has_tokens: of each sequence, whether its
        token ids were saved. encoded_pages, exact_pages: distinct pages of 64 tokens, for all layers and kv heads.
    page_bytes: bytes of all pages. file_bytes: bytes of this file. bases: files in the same folder that have some of
        the pages.
    """
    path: str
    written_by: str
    name: str
    model: str
    metadata: dict[str, str]
    config: dict[str, Any]
    lengths: tuple[int, ...]
    has_tokens: tuple[bool, ...]
    encoded_pages: int
    exact_pages: int
    page_bytes: int
    file_bytes: int
    bases: tuple[str, ...]

class Stale(KvantError):
    """A plan was made for an earlier state of one of its sequences."""
    status: int

class Step:
    """The tokens that Cache.step reserved: write and attend, layer after layer.

    As a context manager: if the block raises, the step's tokens are dropped again.
    """
    def __init__(self, cache: Any, sequences: list[Any], tokens: list[int], stream: Any, reservation: Reservation):
        ...
    def write(self, layer: int, keys: Any, values: Any) -> None:
        """Stores this step's keys and values of one layer; see Cache.write."""
    def attend(self, layer: int, q: Any, out: Any = None, *, keys: Any = None, values: Any = None, lse: Any = None, sink_logits: Any = None, scale: float | None = None, softcap: float = 0.0, alibi_slopes: SequenceOf[float] | None = None, is_causal: bool = True, window: int | None = None, window_sinks: int = 0, mask: Any = None, mask_first_key: int = 0, threads: int = 0, split_keys: int = 0, isa: str | None = None, kernel: str | None = None, fresh_keys: bool = False, products: int = 0) -> Any:
        """Attention of this step's queries; see Plan for the options. Layers with the same options share a plan.
        keys, values: this step's own, to be attended to as given (fresh_keys); write them before or after.
        """
    def __enter__(self) -> Step:
        ...
    def __exit__(self, error_type, error, traceback) -> None:
        ...

class Unsupported(KvantError):
    """A legal request that this build or this machine cannot serve. kvant never takes a slower substitute instead."""
    status: int

def bf16(bits: Any) -> Bf16Array:
    """Marks a numpy array of uint16 as bfloat16 bits, a dtype that numpy lacks."""

def build_info() -> dict[str, Any]:
    """Facts about this build alone: formats, head_dims, and what has kernels for devices. Starts no driver."""

def calibrate(captures: str | Path | SequenceOf[str | Path], path: str | Path, *, arguments: SequenceOf[str] = ()) -> None:
    """Estimates calibrated bases from captured tensors of other text than they will be used on (`kvant calibrate`).

    captures: safetensors files, as kvant.hf.capture writes them. path: the file to write, for
        kvant.hf.enable(bases=path) or kvant.Cache(bases=path, k_basis="calibrated", v_basis="calibrated").
    Errors: InvalidArgument, KvantError with the tool's sentence.
    """

def copy_sequences(sequences: Iterable[Sequence] | Sequence, to: Cache, *, progress: Callable[[int, int], Any] | None = None, stream: Any = None) -> list[Sequence]:
    """Copies sequences of a cache to another one, on the CPU or on a device, wherever the first is.

    The copies go on bit for bit, and pages that the sequences share are shared. The sequences stay: remove() frees
    their pages, and so a device's sequence waits in host memory.
    to: a cache whose configuration is that of the first in all that bytes and visibility depend on; after any error it
        has the sequences that it had. progress: as for save. stream: as for Cache.write, of those that are on a device.

    Errors: InvalidArgument (one cache twice, another configuration, a step that is not written in every layer),
    OutOfCapacity.
    """

def eval(captures: str | Path | SequenceOf[str | Path], formats: str | SequenceOf[str] = (), *, basis: str | Path | None = None, report: str | Path | None = None, arguments: SequenceOf[str] = ()) -> dict[str, Any]:
    """Replays decoding over captured queries, keys and values: error, memory and time of each format (`kvant eval`).

    captures: safetensors files, as kvant.hf.capture writes them. formats: "tq4", ["tq4", "tq6/tq4"], ...; empty: all.
    basis: a file of kvant.calibrate. report: writes an HTML page there. arguments: further ones of `kvant eval --help`.
    Returns {"rows": [...]}, one row for each layer and format, as `kvant eval --json` writes them.
    Errors: InvalidArgument, KvantError with the tool's sentence.
    """

def formats() -> list[dict[str, Any]]:
    """The storage formats: name, bits a value, whether they are dense, a summary."""

def info() -> dict[str, Any]:
    """Facts about this build and this machine: formats, head_dims, instruction sets, backends, threads."""

def load(path: str | Path, **options: Any) -> Loaded:
    """Loads a snapshot: Snapshot(path).load(...), whose options and errors it has."""

def merge(partials: Iterable[tuple[Any, Any]], *, stream: Any = None) -> tuple[Any, Any]:
    """Merges attention over disjoint sets of keys, in the order given, by the log-sum-exp rule.

    partials: (out, lse) pairs as Plan.run returns them with f32 outputs: out [..., head_dim], lse [...]. Torch tensors,
        all on one device, or arrays in host memory. Rows without keys (lse -inf) count for nothing.
    stream: CUDA tensors only: the stream to enqueue on, None: torch's current one. A merge is one launch, of 64
        partials at most, and a CUDA graph can record it; tensors whose rows are not evenly spaced are copied first.
    Returns (out, lse) of the same shapes in f32: torch tensors where there were such, else numpy. Where no partial has
        keys, out is 0 and lse is -inf.
    Errors: InvalidArgument; Unsupported for CUDA tensors without kvant's CUDA backend.
    """

def save(cache: Cache, path: str | Path, *, sequences: Iterable[Sequence] | Sequence | None = None, name: str = '', model: str = '', metadata: Mapping[str, str] | None = None, tokens: SequenceOf[SequenceOf[int] | None] | None = None, base: str | Path | None = None, progress: Callable[[int, int], Any] | None = None, stream: Any = None) -> None:
    """Writes sequences of a cache to a file. Loaded sequences go on bit for bit as these do.

    The file is a safetensors file that only its owner may read. It is written beside `path`, synced and renamed: if
    anything fails, an older file of that name stays as it is. Calls that change the cache wait meanwhile.

    sequences: None: all, in the order in which they were made.
    name: for people. model: the model that the cache belongs to, which load can require. metadata: the caller's own, a
        dict of str; keys do not begin with "kvant.".
    tokens: for each sequence a list of its token ids, ints [length], or None; load can require them.
    base: an earlier snapshot in the same folder. Pages that it has are not written again, and the new file needs it.
        With a base that needs 32 files already, all pages are written.
    progress: called in this thread with (done, total) bytes of pages; an exception that it raises stops the call. The
        caches of the call refuse every call that it makes, those that only read, too; use them when the call has
        returned. Other threads' calls wait for the work's end, and never for the function's return.
    stream: as for Cache.write.

    Ctrl-C, or an exception of another signal's handler, stops the call and arrives as itself: the file is the older one
    or whole.

    Errors: InvalidArgument (also a step that is not written in every layer, and a path to a file that a snapshot
    needs), FileError (also a path to a folder, pipe or device), BadFile (base).
    """

def version() -> str:
    """The library's version, for example "0.1.0"."""
