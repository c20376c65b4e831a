"""compare_torch.py and query_counts.py share this: shapes, contestants (kvant, PyTorch, FlashAttention-3), their
checks, and their times in turns. compare_torch.py says how these work."""

import copy
import os
import pathlib
import re
import sys
from dataclasses import dataclass, replace

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build/gpu/src/libkvant.so"


def open_kvant(program, library):
    """(torch, kvant) with this libkvant.so. Ends the program where torch finds no CUDA device."""
    import torch
    if not torch.cuda.is_available():
        sys.exit(f"{program}: torch finds no CUDA device")
    os.environ["KVANT_LIBRARY"] = str(library)
    sys.path.insert(0, str(ROOT / "python"))
    import kvant
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, kvant {kvant.__version__}")
    return torch, kvant


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    keys: int
    queries: int = 1
    window: int = 0  # 0: none

    @staticmethod
    def of(text):
        found = re.fullmatch(r"(\d+)/(\d+) D(\d+) (\d+)x(\d+)(?: q(\d+))?(?: w(\d+))?", text.strip())
        if not found:
            sys.exit(f'--shape "{text}": write query heads/kv heads, head_dim, sequences x keys, and perhaps queries '
                     'and window, as in "32/8 D128 16x32768 q4 w4096"')
        shape = Shape(*(int(n) if n else default for n, default in zip(found.groups(), (0, 0, 0, 0, 0, 1, 0))))
        if shape.queries > shape.keys:
            sys.exit(f'--shape "{text}": the queries are the newest of the keys: at most q{shape.keys}')
        return shape

    def __str__(self):
        text = f"{self.q_heads}/{self.kv_heads} D{self.head_dim} {self.batch}x{self.keys}"
        return text + (f" q{self.queries}" if self.queries > 1 else "") + (f" w{self.window}" if self.window else "")

    @property
    def group(self):
        return self.q_heads // self.kv_heads

    @property
    def is_prompt(self):
        return 1 < self.queries == self.keys

    @property
    def seen_keys(self):
        """That some query sees, of each sequence."""
        return min(self.keys, self.window + self.queries - 1) if self.window else self.keys

    @property
    def pairs(self):
        """Pairs of a query and a key that it sees, in each sequence."""
        first, end = self.keys - self.queries + 1, self.keys + 1
        return sum(min(seen, self.window or seen) for seen in range(first, end))

    @property
    def flops(self):
        return 4 * self.q_heads * self.head_dim * self.batch * self.pairs

    def stored(self, bits):
        return 2 * self.batch * self.seen_keys * self.kv_heads * self.head_dim * bits // 8


# The largest errors over true keys that are right: bf16 outputs; fp8 of unit normal values.
BF16_ERROR, FP8_ERROR = 1e-2, 1e-1
# kvant's over decoded keys, outputs in f32: prefill and decode_sm90 kernels round weights to f16 or bf16.
OWN_ERROR = 4e-3


# --- contestants ------------------------------------------------------------------------------------------------------


class Contestant:
    """enqueue(i) runs once on copy i of the keys, on torch's current stream; output(i) does so for the check, and
    returns [batch, queries, q_heads, head_dim]. own: keys and values of sequence 0 as the contestant has them. error is
    filled in by the caller."""

    def __init__(self, name, shape, stored_bytes, enqueue, output, *, is_bf16=False, limit=None, own=None, causal=True,
                 kernel="", close=lambda: None):
        self.name, self.stored_bytes, self.enqueue, self.output = name, stored_bytes, enqueue, output
        self.is_bf16, self.limit, self.own, self.causal, self.close = is_bf16, limit, own, causal, close
        self.kernel, self.flops = kernel, shape.flops
        if not causal:
            self.flops = 4 * shape.q_heads * shape.head_dim * shape.batch * shape.queries * shape.keys
        self.graph, self.runs, self.samples, self.error, self.own_error = None, 1, [], None, None


class Case:
    """One shape: keys and values, copies of them, and the float64 answer."""

    def __init__(self, torch, shape, l2_bytes):
        self.torch, self.shape = torch, shape
        self.q_heads, self.kv_heads, self.head_dim = shape.q_heads, shape.kv_heads, shape.head_dim
        self.batch, self.keys, self.queries, self.group = shape.batch, shape.keys, shape.queries, shape.group
        self.l2_bytes = l2_bytes
        generator = torch.Generator(device="cuda").manual_seed(1)

        def normal(*size):
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        size = (self.batch, self.keys, self.kv_heads, self.head_dim)
        self.k, self.v = normal(*size), normal(*size)
        self.q = normal(self.batch, self.queries, self.q_heads, self.head_dim)
        self.by_token, self.by_head = None, None
        self.batch_samples = sorted({0, self.batch - 1})
        self.sample_queries()

    def sample_queries(self):
        last = self.queries - 1
        self.query_samples = sorted({0, last // 3, 2 * last // 3, last})
        self.truths = {}

    def with_queries(self, count):
        """The same keys and values with the newest queries alone."""
        case = copy.copy(self)
        case.shape, case.queries = replace(self.shape, queries=count), count
        case.q = self.q[:, self.queries - count:].contiguous()
        case.sample_queries()
        return case

    def copies(self, stored_bytes):
        return max(1, -(-4 * self.l2_bytes // stored_bytes))

    def sets_by_token(self):
        """Copies of keys and values, [batch, keys, kv_heads, head_dim]."""
        if self.by_token is None:
            self.by_token = [(self.k, self.v)]
            for _ in range(self.copies(self.shape.stored(16)) - 1):
                self.by_token.append((self.k.clone(), self.v.clone()))
        return self.by_token

    def sets_by_head(self):
        """[batch, kv_heads, keys, head_dim]"""
        if self.by_head is None:
            self.by_head = [tuple(x.transpose(1, 2).contiguous() for x in pair) for pair in self.sets_by_token()]
        return self.by_head

    def attend64(self, b, keys, values, causal=True):
        """The sampled queries of sequence b: [samples, q_heads, head_dim]."""
        torch = self.torch
        at = torch.tensor(self.query_samples, device="cuda")
        q = self.q[b][at].double()
        position = (self.keys - self.queries + at)[:, None, None]
        key = torch.arange(self.keys, device="cuda")[None, None]
        out = torch.empty_like(q)
        for h in range(self.kv_heads):
            heads = slice(h * self.group, (h + 1) * self.group)
            scores = q[:, heads] @ keys[:, h].double().T / self.head_dim**0.5
            if causal:
                scores.masked_fill_(key > position, float("-inf"))
            if self.shape.window:
                scores.masked_fill_(key <= position - self.shape.window, float("-inf"))
            out[:, heads] = torch.softmax(scores, -1) @ values[:, h].double()
        return out

    def picked(self, out, batches):
        out = out.reshape(self.batch, self.queries, self.q_heads, self.head_dim)
        return out[batches][:, self.query_samples].double()

    def error(self, out, causal=True):
        if causal not in self.truths:
            self.truths[causal] = self.torch.stack(
                [self.attend64(b, self.k[b], self.v[b], causal) for b in self.batch_samples])
        truth = self.truths[causal]
        return float((self.picked(out, self.batch_samples) - truth).norm() / truth.norm())

    def own_error(self, out, own):
        truth = self.attend64(0, *own)[None]
        return float((self.picked(out, [0]) - truth).norm() / truth.norm())


def torch_contestants(torch, case, backends, flex, notes):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
             "efficient": SDPBackend.EFFICIENT_ATTENTION}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    shape = case.shape
    single, grouped = shape.queries == 1, case.group > 1
    first = case.keys - shape.seen_keys if single else 0  # a window of one query is a slice
    by_query = case.q.transpose(1, 2).contiguous()
    # [batch, kv_heads, group, head_dim], for one query
    as_rows = case.q.view(case.batch, case.kv_heads, -1, case.head_dim) if single else None

    def sets():
        return case.sets_by_head()

    def sdp(name, way):
        pairs = sets()
        options, causal = {}, True
        if not single and name == "cudnn" and shape.queries > 64 and not shape.is_prompt:
            causal = False
        elif shape.is_prompt:
            options["is_causal"] = True
        elif not single and name == "flash":
            options["attn_mask"] = causal_lower_right(shape.queries, shape.keys)
        elif not single:
            last = torch.arange(shape.keys - shape.queries, shape.keys, device="cuda")[:, None]
            options["attn_mask"] = (torch.arange(shape.keys, device="cuda")[None] <= last)[None, None]
        if way == "gqa" and grouped:
            options["enable_gqa"] = True
        q = by_query if way == "gqa" else as_rows

        def enqueue(i):
            k, v = (x[:, :, first:] for x in pairs[i % len(pairs)])
            with sdpa_kernel(kinds[name]):
                return sdpa(q, k, v, **options)

        def output(i):
            out = enqueue(i)
            return out.transpose(1, 2) if way == "gqa" else out

        return Contestant(f"torch {name} ({'all keys' if not causal else way})", shape, shape.stored(16), enqueue,
                          output, is_bf16=causal, limit=BF16_ERROR, causal=causal)

    if shape.window and not single:
        return
    for name in backends:
        for way in ("gqa", "rows") if single and grouped else ("rows",) if single else ("gqa",):
            yield f"torch {name} ({way})", lambda name=name, way=way: sdp(name, way)

    def compiled():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        run = torch.compile(flex_attention, dynamic=False)
        pairs, offset, mask = sets(), shape.keys - shape.queries, None
        if not single:
            mask = create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, shape.queries, shape.keys,
                                     device="cuda")

        def enqueue(i):
            k, v = (x[:, :, first:] for x in pairs[i % len(pairs)])
            return run(by_query, k, v, block_mask=mask, enable_gqa=grouped)

        return Contestant("torch flex", shape, shape.stored(16), enqueue, lambda i: enqueue(i).transpose(1, 2),
                          is_bf16=True, limit=BF16_ERROR)

    if flex:
        yield "torch flex", compiled


def to_fp8(torch, x, dims):
    """e4m3 numbers, and a scale for each index of the dimensions that are not in dims."""
    scale = x.abs().amax(dim=dims).float() / 448
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return (x.float() / scale.view(shape)).to(torch.float8_e4m3fn), scale


def fa3_contestants(torch, case):
    """FlashAttention-3 of the fa3-fwd wheel, where it is installed."""
    shape = case.shape
    if shape.window and shape.queries > 1:
        return
    try:
        import fa3_fwd_interface as fa3
    except ImportError:
        return
    first, seen, causal = case.keys - shape.seen_keys if shape.window else 0, shape.seen_keys, shape.queries > 1
    lengths = torch.full((case.batch,), seen, dtype=torch.int32, device="cuda")
    many = shape.queries > 64
    shared = {}

    def fp8():
        if not shared:
            pairs = [to_fp8(torch, x[b], (0, 2)) for x in (case.k, case.v) for b in range(case.batch)]
            k, v = (torch.stack([y for y, _ in part]) for part in (pairs[:case.batch], pairs[case.batch:]))
            ks, vs = (torch.stack([s for _, s in part]) for part in (pairs[:case.batch], pairs[case.batch:]))
            q = case.q.view(case.batch, case.queries, case.kv_heads, case.group, case.head_dim)
            q, qs = to_fp8(torch, q, (1, 3, 4))
            shared["q"], shared["scales"] = q.view(case.q.shape), dict(q_descale=qs, k_descale=ks, v_descale=vs)
            shared["tokens"] = [(k, v)]
            for _ in range(case.copies(shape.stored(8)) - 1):
                shared["tokens"].append((k.clone(), v.clone()))
        return shared

    def contestant(kind, layout, mode):
        is_fp8 = kind == "fp8"
        q, scales = (fp8()["q"], fp8()["scales"]) if is_fp8 else (case.q, {})
        if is_fp8 and layout not in shared:
            shared[layout] = [tuple(x.transpose(1, 2).contiguous() for x in pair) for pair in shared["tokens"]]
        pairs = shared[layout] if is_fp8 else case.sets_by_token() if layout == "tokens" else case.sets_by_head()
        meta = None
        if mode == "metadata":
            meta = fa3.get_scheduler_metadata(case.batch, case.queries, seen, case.q_heads, case.kv_heads,
                                              case.head_dim, lengths, qkv_dtype=q.dtype, causal=causal)

        def enqueue(i):
            k, v = pairs[i % len(pairs)]
            if layout == "heads":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            if many:
                out = fa3.flash_attn_func(q, k, v, causal=True, num_splits=1, **scales)
                return out[0] if isinstance(out, tuple) else out
            return fa3.flash_attn_with_kvcache(q, k[:, first:], v[:, first:], causal=causal, scheduler_metadata=meta,
                                               cache_seqlens=lengths if meta is not None else None, **scales)

        return Contestant(f"FA3 {kind} ({layout}{', ' + mode if mode else ''})", shape,
                          shape.stored(8 if is_fp8 else 16), enqueue, enqueue, is_bf16=not is_fp8,
                          limit=FP8_ERROR if is_fp8 else BF16_ERROR)

    for kind in ("bf16", "fp8"):
        for layout, mode in (("tokens", ""),) if many else (("tokens", ""), ("heads", ""), ("tokens", "metadata")):
            yield f"FA3 {kind}", lambda a=kind, b=layout, c=mode: contestant(a, b, c)


def mean_bits(formats):
    k, _, v = formats.partition("/")
    return sum({"f16": 16, "bf16": 16, "fp8": 8}.get(f) or int(f[2:]) for f in (k, v or k)) / 2


class Filled:
    """A cache with the keys and values of a case in every layer."""

    def __init__(self, torch, kvant, case, formats, device):
        k_format, _, v_format = formats.partition("/")
        bytes_of_layer = 2 * case.k.numel() * mean_bits(formats) / 8
        self.layers = max(1, int(-(-4 * case.l2_bytes // bytes_of_layer)))
        pages = (case.keys + 63) // 64
        self.cache = kvant.Cache(layers=self.layers, kv_heads=case.kv_heads, head_dim=case.head_dim, k=k_format,
                                 v=v_format or k_format, exact="bf16", device=f"cuda:{device}",
                                 capacity_tokens=pages * 64 * case.batch, max_sequences=case.batch,
                                 max_sequence_tokens=pages * 64)
        self.sequences = [self.cache.sequence() for _ in range(case.batch)]
        chunk = max(64, (64 << 20) // (case.batch * case.kv_heads * case.head_dim) // 64 * 64)
        self.decoded = None
        # The newest queries' own tokens are one step, as in a model.
        steps = list(range(0, case.keys - case.queries, chunk)) + [case.keys - case.queries, case.keys]
        for begin, end in zip(steps, steps[1:]):
            if begin == end:
                continue
            keys, values = (x[:, begin:end].contiguous() for x in (case.k, case.v))
            self.cache.reserve(self.sequences, end - begin)
            for layer in range(self.layers):
                self.cache.write(self.sequences, layer, keys, values)
        torch.cuda.synchronize()
        self.is_dense = k_format in ("f16", "bf16")

    def own(self, case):
        """Keys and values of sequence 0 as attention of the case's queries has them. Beside the newest full page, it
        reads that one exactly which left the tail with the last 64 of them (base/pages.hpp, exact_length)."""
        if self.decoded is None:
            self.decoded = self.cache.decode(self.sequences[:1], 0)
        if self.is_dense or case.queries == 1:
            return self.decoded
        tail = max(1, (case.keys - min(case.queries - 1, 64)) // 64 - 1) * 64
        keys, values = (x.clone() for x in self.decoded)
        keys[tail:], values[tail:] = case.k[0, tail:], case.v[0, tail:]
        return keys, values


def kernel_of(plan):
    """The kind of kernels, as the option names it; of prefill kernels which of the two."""
    if plan.facts.kernel != "prefill":
        return plan.facts.kernel
    return re.search(r"^kernel +(\S+)", plan.explain(), re.MULTILINE)[1]


def kvant_contestant(torch, case, filled, formats, kernel=None):
    """kernel: the kind that the plan has to take."""
    cache, sequences, layers, shape = filled.cache, filled.sequences, filled.layers, case.shape
    fresh = shape.is_prompt
    plan = cache.plan(sequences, q_heads=case.q_heads, q_len=case.queries, window=shape.window or None, kernel=kernel,
                      fresh_keys=fresh)
    workspace = torch.empty(max(1, plan.facts.workspace_bytes), dtype=torch.uint8, device="cuda")
    q = case.q.view(-1, case.q_heads, case.head_dim)
    out16 = torch.empty_like(q)
    own_rows = {}
    if fresh:
        own_rows = {name: x.reshape(-1, case.kv_heads, case.head_dim)
                    for name, x in (("keys", case.k), ("values", case.v))}

    def enqueue(i):
        plan.run(i % layers, q, out16, workspace=workspace, **own_rows)

    def output(i):
        return plan.run(i % layers, q, torch.empty_like(q, dtype=torch.float32), workspace=workspace, **own_rows)

    def own():
        return (case.k[0], case.v[0]) if fresh else filled.own(case)

    name = f"kvant {formats}" + (" fresh" if fresh else "")
    contestant = Contestant(name, shape, plan.facts.kv_bytes, enqueue, output, own=own, kernel=kernel_of(plan))
    contestant.keep = (workspace, out16, filled, plan)
    return contestant


# --- time -------------------------------------------------------------------------------------------------------------


def record(torch, contestant, runs):
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        contestant.enqueue(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(runs):
            contestant.enqueue(i)
    return graph


def device_ns(torch, call):
    """The device's time from before the call to its end."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6


def launch_ns(torch, graph, runs):
    return device_ns(torch, graph.replay) / runs


def check(torch, contestant, case, true_keys=True):
    out = contestant.output(0)
    torch.cuda.synchronize()
    if true_keys:
        contestant.error = case.error(out, contestant.causal)
    if contestant.own:
        contestant.own_error = case.own_error(out, contestant.own())
    for error, limit, what in ((contestant.error, contestant.limit, "true keys"),
                               (contestant.own_error, OWN_ERROR, "decoded keys")):
        if error is not None and limit is not None and not error <= limit:
            raise RuntimeError(f"the error over {what}, {error:.1e}, is above {limit:.0e}: no speed for wrong results")


def prepare(torch, contestant, copies, graph_ns=1e6):
    """Records a graph of about a millisecond."""
    trial = record(torch, contestant, copies)
    launch_ns(torch, trial, copies)
    estimate = launch_ns(torch, trial, copies)
    runs = max(1, min(512, round(graph_ns / estimate)))
    contestant.runs = -(-runs // copies) * copies
    contestant.graph = trial if contestant.runs == copies else record(torch, contestant, contestant.runs)
    launch_ns(torch, contestant.graph, contestant.runs)


def sample_in_turns(torch, contestants, rounds, left=lambda: 0.0):
    """Every other round goes backwards. left: seconds of the budget, which ends the rounds when they are below zero."""
    for turn in range(rounds):
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            contestant.samples.append(launch_ns(torch, contestant.graph, contestant.runs))
        if left() < 0:
            break
