#!/usr/bin/env python3
"""Attention, kvant beside PyTorch and FlashAttention-3: one process, the same keys and values, runs taken in turns.

  python3 bench/compare_torch.py --library build/gpu/src/libkvant.so
  python3 bench/compare_torch.py --shapes 0,4 --formats tq6/tq4,tq4 --budget 60 --json rows.json
  python3 bench/compare_torch.py --shapes "" --shape "32/8 D128 1x131072 q2048 w4096" --formats tq4

A shape is query and kv heads, head_dim, sequences and keys of each; q: queries of a sequence, the newest of its
positions, which see older keys only (default: one); w: a sliding window. Where all keys have a query, it is a first
prompt, whose fresh keys kvant is given.

Each contestant's runs are recorded as a CUDA graph (of as many runs as take about a millisecond, rotating through
copies of the cache that make four times the L2 cache together), and the graphs are launched in turns; the figure is the
median. PyTorch runs on bf16 keys and values, each backend in every way it accepts: with enable_gqa, and with the query
heads of a kv head as query rows ("rows", which has the same result for one query without a mask). cuDNN has no causal
mask for chunks: there it works on all keys ("all keys"), and its TFLOP/s count them all. FA3 runs where the package of
the fa3-fwd wheel is importable: bf16, and fp8 with a scale for each sequence and kv head; keys by token or by head, and
for one query also with metadata made before. It has no window there, so that a window of one query is a slice. A
backend that refuses a shape is listed with its reason.

GB/s counts stored bytes: for bf16 all keys and values once that some query sees, for kvant what its plan says. TFLOP/s
counts a multiply and an add for each pair of a query and a key that it sees, twice. Errors are relative L2 against
float64 attention over the true keys, of the first and the last sequence and up to four queries of each. A contestant
whose error is above its limit gets no time. kvant's kernels are also checked against attention over the vectors that
the cache decodes.
"""
import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time

from contestants import (LIBRARY, Case, Filled, Shape, check, device_ns, fa3_contestants, kvant_contestant, open_kvant,
                         prepare, sample_in_turns, torch_contestants)

SHAPES = [Shape.of(text) for text in (
    "32/8 D128 16x32768",
    "32/8 D128 64x8192",
    "16/2 D256 16x32768",
    "16/2 D512 16x32768",
    "32/8 D128 1x131072",
    "16/2 D256 1x32768",
    "8/1 D512 1x32768",
    "8/8 D128 16x8192",
    "32/8 D128 1x2048",
    "32/8 D128 16x2048",
    "9/3 D64 1x2048",
    "9/3 D64 16x2048",
    # several queries
    "32/8 D128 16x32768 q2",
    "32/8 D128 16x32768 q4",
    "32/8 D128 16x32768 q8",
    "32/8 D128 16x32768 q16",
    # chunks of a long prompt
    "32/8 D64 1x32768 q2048",
    "32/8 D128 1x32768 q2048",
    "16/2 D256 1x32768 q2048",
    "8/1 D512 1x32768 q2048",
    # first prompts
    "32/8 D64 1x8192 q8192",
    "32/8 D128 1x8192 q8192",
    "16/2 D256 1x8192 q8192",
    "8/1 D512 1x8192 q8192",
    "32/8 D128 1x32768 q32768",
)]


# --- limits of the device -------------------------------------------------------------------------------------------

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
    """GB/s of the best of a few ways to read a buffer once. A first read keeps the device busy while the host enqueues
    the read that is timed: else the time between two calls of the host would count, 4 % of it."""
    ways = [lambda: torch.sum(buffer)]
    try:
        kernel = torch.cuda._compile_kernel(READ_KERNEL, "read_all")
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        for per in (2, 4, 8, 16):
            ways.append(lambda per=per: kernel((blocks * per, 1, 1), (512, 1, 1),
                                               (buffer, buffer.numel() // 4, sink)))
        ways[-1]()
    except Exception as error:  # noqa: BLE001: an internal of torch, which may be gone
        ways = ways[:1]
        notes.append(f"read bandwidth by torch.sum only: {error}")
    best = 0.0
    for way in ways:
        for _ in range(6):
            way()
            best = max(best, buffer.numel() * 4 / device_ns(torch, way))
    return best


def product_tflops(torch, size=8192):
    """TFLOP/s of a product of two bf16 matrices: the best of a few."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    best = 0.0
    for _ in range(8):
        torch.mm(a, b, out=out)
        best = max(best, 2 * size**3 / (device_ns(torch, lambda: torch.mm(a, b, out=out)) * 1e3))
    return best


# --- the table --------------------------------------------------------------------------------------------------------


def print_table(rows, bandwidth, product):
    header = ("shape", "contestant", "time us", "GB/s", "of read", "TFLOP/s", "vs bf16", "rel. L2", "own", "kernel")
    lines = [header]
    for r in rows:
        if "refused" in r:
            lines.append((r["shape"], r["name"], r["refused"]))
            continue
        lines.append((r["shape"], r["name"], f"{r['us']:.1f}", f"{r['gb_per_s']:.0f}", f"{100 * r['share']:.1f} %",
                      f"{r['tflops']:.1f}", f"{r['ratio']:.2f}x" if r["ratio"] else "-", f"{r['rel_l2']:.1e}",
                      "-" if r["own_l2"] is None else f"{r['own_l2']:.1e}", r["kernel"]))
    widths = [max(len(line[i]) for line in lines if len(line) == len(header) or i < 2) for i in range(len(header))]
    for i, line in enumerate(lines):
        cells = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        full = len(line) == len(header)
        cells += [line[j].rjust(widths[j]) for j in range(2, len(header) - 1)] if full else [line[2][:90]]
        if full:
            cells.append(line[-1])
        print("  ".join(cells).rstrip())
        if i == 0:
            print("  ".join("-" * w for w in widths))
    print(f"\nmeasured in this process: read bandwidth {bandwidth:.0f} GB/s, a product of bf16 matrices of 8192 x 8192 "
          f"{product:.0f} TFLOP/s. vs bf16: against the fastest bf16 kernel that is not kvant's. own: error over "
          "decoded keys")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=LIBRARY, help="libkvant.so built with CUDA")
    parser.add_argument("--shapes", help="numbers of the list, as 0,3 (default: all): "
                        + "; ".join(f"{i}: {s}" for i, s in enumerate(SHAPES)))
    parser.add_argument("--shape", action="append", default=[], help='a further one, as "32/8 D128 16x32768 q4 w4096"')
    parser.add_argument("--formats", default="tq6/tq4,tq4,tq8,bf16", help="kvant's (default: %(default)s)")
    parser.add_argument("--backends", default="cudnn,flash,efficient", help="PyTorch's (default: %(default)s)")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for each shape")
    parser.add_argument("--no-fa3", action="store_true", help="leave out FlashAttention-3")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contestant (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=150, help="seconds; what does not fit is listed as left out")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()

    torch, kvant = open_kvant("compare_torch.py", args.library)
    start = time.monotonic()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    device = torch.cuda.current_device()
    rows, notes = [], []
    bandwidth = product = 0.0

    def measure_limits():
        nonlocal bandwidth, product
        buffer = torch.ones(1 << 30, dtype=torch.int32, device="cuda")  # 4 GiB
        bandwidth = max(bandwidth, read_bandwidth(torch, buffer, notes if bandwidth == 0 else []))
        product = max(product, product_tflops(torch))

    measure_limits()
    shapes = [SHAPES[int(n)] for n in args.shapes.split(",") if n] if args.shapes is not None else list(SHAPES)
    shapes += [Shape.of(text) for text in args.shape]

    def left():
        return args.budget - (time.monotonic() - start)

    def save():
        if args.json:
            facts = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "read_gb_per_s": bandwidth,
                     "product_tflops": product}
            pathlib.Path(args.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")

    flex_seconds = 20.0  # that FlexAttention takes to compile for a shape: a guess, then the last one's
    for index, shape in enumerate(shapes):
        name = str(shape)
        if left() < 3:
            rows.append({"shape": name, "name": "all", "refused": "left out: the time budget is used up"})
            continue
        with contextlib.ExitStack() as stack:
            case = Case(torch, shape, l2_bytes)
            flex = not args.no_flex and left() > flex_seconds + 8 * (len(shapes) - index)
            if not args.no_flex and not flex:
                rows.append({"shape": name, "name": "torch flex", "refused": "left out: the time budget"})

            def kvant_made(formats, case=case, stack=stack):
                filled = Filled(torch, kvant, case, formats, device)
                stack.callback(filled.cache.close)
                return kvant_contestant(torch, case, filled, formats)

            made = [(f"kvant {f}", lambda f=f: kvant_made(f)) for f in args.formats.split(",") if f]
            made += torch_contestants(torch, case, [b for b in args.backends.split(",") if b], flex, notes)
            if not args.no_fa3:
                made += fa3_contestants(torch, case)
            running = []
            for label, make in made:
                begin, contestant = time.monotonic(), None
                try:
                    contestant = make()
                    label = contestant.name
                    check(torch, contestant, case)
                    copies = case.copies(shape.stored(16)) if shape.queries > 64 else max(
                        case.copies(shape.stored(16)), 8)  # whatever it rotates through, a few times
                    prepare(torch, contestant, copies)
                    running.append(contestant)
                except Exception as error:  # noqa: BLE001: a refusal is a row of the table
                    torch.cuda.synchronize()
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    rows.append({"shape": name, "name": label, "refused": f"refused: {reason[0]}"})
                if label == "torch flex":
                    flex_seconds = time.monotonic() - begin
            sample_in_turns(torch, running, args.rounds, left)
            bf16 = [statistics.median(x.samples) for x in running if x.is_bf16 and x.samples]
            for x in running:
                if not x.samples:
                    continue
                ns = statistics.median(x.samples)
                rows.append({"shape": name, "name": x.name, "us": ns / 1e3, "gb_per_s": x.stored_bytes / ns,
                             "tflops": x.flops / ns / 1e3, "ratio": min(bf16) / ns if bf16 else None,
                             "rel_l2": x.error, "own_l2": x.own_error, "kernel": x.kernel,
                             "spread": (max(x.samples) - min(x.samples)) / ns})
            for x in running:
                x.graph = None
            contestant = x = None
            del made, running, case
        torch.cuda.empty_cache()
        if index % 4 == 3 or index == len(shapes) - 1:
            measure_limits()
            torch.cuda.empty_cache()
        save()
        print(f"  {name}: done after {time.monotonic() - start:.0f} s", file=sys.stderr)
    for r in rows:
        if "us" in r:
            r["share"] = r["gb_per_s"] / bandwidth
    save()
    print_table(rows, bandwidth, product)
    for note in notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
