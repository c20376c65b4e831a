#!/usr/bin/env python3
"""Decode attention, kvant beside PyTorch: one process, the same keys and values, runs taken in turns.

  python3 bench/compare_torch.py --library build/gpu/src/libkvant.so
  python3 bench/compare_torch.py --shapes 0,4 --formats tq6/tq4,tq4 --budget 60 --json rows.json

Each contestant's runs are recorded as a CUDA graph (of as many runs as take about a millisecond, rotating through
copies of the cache that make four times the L2 cache together), and the graphs are launched in turns; the figure is the
median. PyTorch runs on bf16 keys and values, each backend in every way it accepts: with enable_gqa, and with the query
heads of a kv head as query rows ("rows", which has the same result for one query without a mask). A backend that
refuses a shape is listed with its reason. GB/s counts stored bytes: for bf16 all keys and values once, for kvant what
its plan says. Errors are relative L2 against float64 attention over the true keys, of the first and the last sequence.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import time

# (q_heads, kv_heads, head_dim, batch, keys)
SHAPES = [
    (32, 8, 128, 16, 32768),
    (32, 8, 128, 64, 8192),
    (16, 2, 256, 16, 32768),
    (16, 2, 512, 16, 32768),
    (32, 8, 128, 1, 131072),
    (16, 2, 256, 1, 32768),
    (8, 1, 512, 1, 32768),
    (8, 8, 128, 16, 8192),
    (32, 8, 128, 1, 2048),
    (32, 8, 128, 16, 2048),
    (9, 3, 64, 1, 2048),
    (9, 3, 64, 16, 2048),
]
# --- contestants ------------------------------------------------------------------------------------------------------


class Contestant:
    """enqueue(i) runs once on copy i of the keys, on torch's current stream; error is filled in by the caller."""

    def __init__(self, name, stored_bytes, enqueue, output, is_bf16, close=lambda: None):
        self.name, self.stored_bytes, self.enqueue, self.output = name, stored_bytes, enqueue, output
        self.is_bf16, self.close = is_bf16, close
        self.graph, self.runs, self.samples, self.error = None, 1, [], None


class Case:
    """One shape: keys and values, copies of them, and the float64 answer."""

    def __init__(self, torch, shape, l2_bytes):
        self.torch = torch
        self.q_heads, self.kv_heads, self.head_dim, self.batch, self.keys = shape
        self.group = self.q_heads // self.kv_heads
        size = (self.batch, self.kv_heads, self.keys, self.head_dim)
        generator = torch.Generator(device="cuda").manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.k, self.v = normal(*size), normal(*size)
        self.q = normal(self.batch, self.q_heads, 1, self.head_dim)
        self.bf16_bytes = 2 * self.k.numel() * 2
        self.copies = max(1, -(-4 * l2_bytes // self.bf16_bytes))
        self.sets = [(self.k, self.v)] + [(self.k.clone(), self.v.clone()) for _ in range(self.copies - 1)]
        self.samples = sorted({0, self.batch - 1})
        self.truth = torch.stack([self.attend64(b) for b in self.samples])

    def attend64(self, b):
        torch = self.torch
        q = self.q[b].view(self.kv_heads, self.group, self.head_dim).double()
        out = []
        for h in range(self.kv_heads):
            p = torch.softmax(q[h] @ self.k[b, h].double().T / self.head_dim**0.5, -1)
            out.append(p @ self.v[b, h].double())
        return torch.cat(out)

    def error(self, out):  # out: [batch, q_heads, head_dim]
        got = out.reshape(self.batch, self.q_heads, self.head_dim)[self.samples].double()
        return float((got - self.truth).norm() / self.truth.norm())


def torch_contestants(torch, case, backends, flex, notes):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
             "efficient": SDPBackend.EFFICIENT_ATTENTION}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    as_rows = case.q.view(case.batch, case.kv_heads, case.group, case.head_dim)
    for name in backends:
        for way in ("gqa", "rows") if case.group > 1 else ("rows",):
            q = case.q if way == "gqa" else as_rows

            def enqueue(i, kind=kinds[name], way=way, q=q):
                k, v = case.sets[i % case.copies]
                with sdpa_kernel(kind):
                    return sdpa(q, k, v, enable_gqa=way == "gqa")

            yield Contestant(f"torch {name} ({way})", case.bf16_bytes, enqueue, enqueue, True)
    if flex:
        try:
            from torch.nn.attention.flex_attention import flex_attention
            compiled = torch.compile(flex_attention, dynamic=False)
        except Exception as error:  # noqa: BLE001: whatever it is, the table says it
            notes.append(f"torch flex: {error}")
            return

        def enqueue_flex(i):
            k, v = case.sets[i % case.copies]
            return compiled(case.q, k, v, enable_gqa=case.group > 1)

        yield Contestant("torch flex", case.bf16_bytes, enqueue_flex, enqueue_flex, True)


def kvant_contestant(torch, kvant, case, formats, l2_bytes, device):
    k_format, _, v_format = formats.partition("/")
    v_format = v_format or k_format
    bits = {"f16": 16, "bf16": 16, "fp8": 8}
    mean_bits = sum(bits.get(f) or int(f[2:]) for f in (k_format, v_format)) / 2
    layers = max(1, int(-(-4 * l2_bytes // (case.bf16_bytes * mean_bits / 16))))
    pages = (case.keys + 63) // 64
    cache = kvant.Cache(layers=layers, kv_heads=case.kv_heads, head_dim=case.head_dim, k=k_format, v=v_format,
                        exact="bf16", device=f"cuda:{device}", capacity_tokens=pages * 64 * case.batch,
                        max_sequences=case.batch, max_sequence_tokens=pages * 64)
    sequences = [cache.sequence() for _ in range(case.batch)]
    chunk = max(64, (64 << 20) // (case.batch * case.kv_heads * case.head_dim) // 64 * 64)
    for begin in range(0, case.keys, chunk):
        end = min(case.keys, begin + chunk)
        keys, values = (x[:, :, begin:end].transpose(1, 2).contiguous() for x in (case.k, case.v))
        cache.reserve(sequences, end - begin)
        for layer in range(layers):
            cache.write(sequences, layer, keys, values)
    torch.cuda.synchronize()
    plan = cache.plan(sequences, q_heads=case.q_heads)
    workspace = torch.empty(max(1, plan.facts.workspace_bytes), dtype=torch.uint8, device="cuda")
    q = case.q.view(case.batch, case.q_heads, case.head_dim)
    out16, out32 = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)

    def enqueue(i):
        plan.run(i % layers, q, out16, workspace=workspace)

    def output(i):
        return plan.run(i % layers, q, out32, workspace=workspace)

    contestant = Contestant(f"kvant {formats}", plan.facts.kv_bytes, enqueue, output, False, cache.close)
    contestant.keep = (workspace, out16, sequences)
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


def launch_ns(torch, graph, runs):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6 / runs


def prepare(torch, contestant, case):
    """Checks, then records a graph of about a millisecond."""
    out = contestant.output(0)
    torch.cuda.synchronize()
    contestant.error = case.error(out)
    copies = max(case.copies, 8)  # whatever a contestant rotates through, a few times
    trial = record(torch, contestant, copies)
    launch_ns(torch, trial, copies)
    estimate = launch_ns(torch, trial, copies)
    contestant.runs = max(1, min(512, round(1e6 / estimate)))
    contestant.runs = -(-contestant.runs // case.copies) * case.copies
    contestant.graph = record(torch, contestant, contestant.runs)
    launch_ns(torch, contestant.graph, contestant.runs)


READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4* data, long long count, unsigned* sink) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 0x5EEDF00D) *sink = sum;
}
"""


def read_bandwidth(torch, buffer, notes):
    """GB/s of the best of a few ways to read a buffer once."""
    ways = [lambda: torch.sum(buffer)]
    try:
        kernel = torch.cuda._compile_kernel(READ_KERNEL, "read_all")
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        for per in (2, 4, 8):
            ways.append(lambda per=per: kernel((blocks * per, 1, 1), (512, 1, 1),
                                               (buffer, buffer.numel() // 4, sink)))
        ways[-1]()
    except Exception as error:  # noqa: BLE001: an internal of torch, which may be gone
        ways = ways[:1]
        notes.append(f"read bandwidth by torch.sum only: {error}")
    best = 0.0
    for way in ways:
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            way()
            end.record()
            end.synchronize()
            best = max(best, buffer.numel() * 4 / (begin.elapsed_time(end) * 1e6))
    return best


# --- the table --------------------------------------------------------------------------------------------------------


def shape_name(shape):
    q_heads, kv_heads, head_dim, batch, keys = shape
    return f"{q_heads}/{kv_heads} D{head_dim} {batch}x{keys}"


def print_table(rows, bandwidth):
    header = ("shape", "contestant", "time us", "GB/s", "of read", "vs bf16", "rel. L2")
    lines = [header]
    for r in rows:
        if "refused" in r:
            lines.append((r["shape"], r["name"], r["refused"], "", "", "", ""))
            continue
        lines.append((r["shape"], r["name"], f"{r['us']:.1f}", f"{r['gb_per_s']:.0f}", f"{100 * r['share']:.1f} %",
                      f"{r['ratio']:.2f}x" if r["ratio"] else "-", f"{r['rel_l2']:.1e}"))
    widths = [max(len(line[i]) for line in lines if line[3] or i < 2) for i in range(len(header))]
    for i, line in enumerate(lines):
        cells = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        cells += [line[2][:90]] if i and not line[3] else [line[j].rjust(widths[j]) for j in range(2, len(header))]
        print("  ".join(cells))
        if i == 0:
            print("  ".join("-" * w for w in widths))
    print(
        f"\nread bandwidth, measured in this process: {bandwidth:.0f} GB/s. "
        "vs bf16: against the fastest PyTorch backend."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--library", default=root / "build/gpu/src/libkvant.so", help="libkvant.so built with CUDA")
    parser.add_argument("--shapes", help="numbers of the list, as 0,3 (default: all): "
                        + "; ".join(f"{i}: {shape_name(s)}" for i, s in enumerate(SHAPES)))
    parser.add_argument("--formats", default="tq6/tq4,tq4,tq8,bf16", help="kvant's (default: %(default)s)")
    parser.add_argument("--backends", default="cudnn,flash,efficient", help="PyTorch's (default: %(default)s)")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for each shape")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contestant (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=150, help="seconds; what does not fit is listed as left out")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()

    import torch
    if not torch.cuda.is_available():
        sys.exit("compare_torch.py: torch finds no CUDA device")
    start = time.monotonic()
    os.environ["KVANT_LIBRARY"] = str(args.library)
    sys.path.insert(0, str(root / "python"))
    import kvant
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, kvant {kvant.__version__}")
    rows, notes = [], []
    buffer = torch.ones(1 << 30, dtype=torch.int32, device="cuda")  # 4 GiB
    bandwidth = read_bandwidth(torch, buffer, notes)
    numbers = range(len(SHAPES)) if args.shapes is None else [int(n) for n in args.shapes.split(",")]

    def left():
        return args.budget - (time.monotonic() - start)

    flex_seconds = 20.0  # that FlexAttention takes to compile for a shape: a guess, then the last one's
    for index, number in enumerate(numbers):
        shape = SHAPES[number]
        name = shape_name(shape)
        if left() < 3:
            rows.append({"shape": name, "name": "all", "refused": "left out: the time budget is used up"})
            continue
        with contextlib.ExitStack() as stack:
            case = Case(torch, shape, l2_bytes)
            flex = not args.no_flex and left() > flex_seconds + 8 * (len(numbers) - index)
            if not args.no_flex and not flex:
                rows.append({"shape": name, "name": "torch flex", "refused": "left out: the time budget"})
            made = [lambda f=f: kvant_contestant(torch, kvant, case, f, l2_bytes, torch.cuda.current_device())
                    for f in args.formats.split(",")]
            made += [lambda t=t: t for t in torch_contestants(torch, case, args.backends.split(","), flex, notes)]
            running = []
            for make in made:
                begin, label, contestant = time.monotonic(), "kvant", None
                try:
                    contestant = make()
                    label = contestant.name
                    stack.callback(contestant.close)
                    prepare(torch, contestant, case)
                    running.append(contestant)
                except Exception as error:  # noqa: BLE001: a refusal is a row of the table
                    torch.cuda.synchronize()
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    rows.append({"shape": name, "name": label, "refused": f"refused: {reason[0]}"})
                if label == "torch flex":
                    flex_seconds = time.monotonic() - begin
            for _ in range(args.rounds):
                for contestant in running:
                    contestant.samples.append(launch_ns(torch, contestant.graph, contestant.runs))
                if left() < 0:
                    break
            bandwidth = max(bandwidth, read_bandwidth(torch, buffer, []))
            bf16 = [statistics.median(x.samples) for x in running if x.is_bf16 and x.samples]
            for x in running:
                if not x.samples:
                    continue
                ns = statistics.median(x.samples)
                rows.append({"shape": name, "name": x.name, "us": ns / 1e3, "gb_per_s": x.stored_bytes / ns,
                             "ratio": min(bf16) / ns if bf16 else None, "rel_l2": x.error,
                             "spread": (max(x.samples) - min(x.samples)) / ns})
            for x in running:
                x.graph = None
        del case, running
        torch.cuda.empty_cache()
        print(f"  {name}: done after {time.monotonic() - start:.0f} s", file=sys.stderr)
    for r in rows:
        if "us" in r:
            r["share"] = r["gb_per_s"] / bandwidth
    print_table(rows, bandwidth)
    for note in notes:
        print(f"note: {note}")
    if args.json:
        facts = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "read_gb_per_s": bandwidth}
        pathlib.Path(args.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
