#!/usr/bin/env python3
"""Attention of 1 to 4096 queries a sequence: the time of every kind of kernels, and which of them a plan takes.

  python3 bench/query_counts.py --library build/gpu/src/libkvant.so
  python3 bench/query_counts.py --formats tq4,bf16 --head-dims 128 --batches 1 --json counts.json

Each row is a number of queries, the newest positions of sequences of --keys keys. An asterisk marks what the plan
takes. loss: how much longer that takes than the fastest kind. cliff: its time over that of the next larger number of
queries, which should have more to do. Both are marked from 10 % on. --plan measures the plan's choice alone.

Times are medians of graph launches with a cold L2 cache, as in compare_torch.py. Each kind is first checked against
float64 attention over the decoded vectors. Decode kernels that took 1.6 times as long as the fastest for fewer queries,
and longer than for still fewer, are left out.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from dataclasses import replace

import contestants as ct

HEADS = {64: (32, 8), 96: (32, 8), 128: (32, 8), 192: (16, 4), 256: (16, 2), 512: (8, 1)}
COUNTS = [1 << i for i in range(13)]
LIMIT = 1.10


def measure(torch, contestants, rounds):
    """Median microseconds of each, in turns."""
    ct.sample_in_turns(torch, contestants, rounds)
    for c in contestants:
        c.graph = None
    return [statistics.median(c.samples) / 1e3 for c in contestants]


def of_count(torch, case, filled, formats, kinds, rounds):
    """A row: {kind: us}, the plan's kind, the largest error, reasons of those that are missing."""
    made, refused, chosen = [], {}, None
    for kind in [None, *kinds]:
        try:
            contestant = ct.kvant_contestant(torch, case, filled, formats, kind)
        except Exception as error:  # noqa: BLE001: kvant's refusals
            refused[kind or "plan"] = str(error).splitlines()[0]
            continue
        if kind is None:
            chosen = contestant.kernel
            if chosen in kinds:
                continue  # measured as that
        ct.check(torch, contestant, case, true_keys=False)
        ct.prepare(torch, contestant, max(1, min(filled.layers, 16)))
        made.append((kind or chosen, contestant))
    us = measure(torch, [c for _, c in made], rounds)
    return {"us": dict(zip([k for k, _ in made], us)), "plan": chosen, "refused": refused,
            "own_l2": max((c.own_error for _, c in made), default=None)}


def grows(rows, kind):
    """Whether the last row's time is longer than the row's before; while more queries share a read, it is not."""
    before = rows[-2]["us"].get(kind) if len(rows) > 1 else None
    return before is not None and rows[-1]["us"][kind] > 1.2 * before


def combination(torch, kvant, shape, formats, counts, args, left):
    counts = [n for n in counts if n <= shape.keys]
    case = ct.Case(torch, replace(shape, queries=counts[-1]), torch.cuda.get_device_properties(0).L2_cache_size)
    filled = ct.Filled(torch, kvant, case.with_queries(1), formats, torch.cuda.current_device())
    rows, kinds = [], [] if args.plan else list(args.kinds)
    try:
        for n in counts:
            if left() < 2:
                break
            row = of_count(torch, case.with_queries(n), filled, formats, kinds, args.rounds)
            rows.append({"queries": n, **row})
            best = min(row["us"].values(), default=0)
            # A kind of kernels that refuses this number of queries refuses larger ones, too.
            kinds = [k for k in kinds if k in row["us"] and not (
                k.startswith("decode") and row["us"][k] > 1.6 * best and grows(rows, k))]
    finally:
        filled.cache.close()
    return rows


def kinds_of(kvant):
    """The kinds of which each serves runs alone, and prefill_unpacked."""
    classes = [c for backend in kvant.info()["backends"] for c in backend.get("classes", ())]
    kinds = dict.fromkeys(k for c in sorted(classes, key=lambda c: -len(c["kernels"])) for k in c["kernels"])
    return [k for k in kinds if k not in ("prefill_fresh", "generic")]


def show(name, rows, kinds):
    print(f"== {name}")
    columns = [k for k in kinds if any(k in r["us"] for r in rows)]
    lines = [["queries", *columns, "loss", "cliff", "error"]]
    for i, r in enumerate(rows):
        plan, us = r["plan"], r["us"]
        cells = [f"{us[k]:.1f}{'*' if k == plan else ' '}" if k in us else "- " for k in columns]
        loss = us[plan] / min(us.values()) if plan in us else None
        after = rows[i + 1] if i + 1 < len(rows) else None
        cliff = us[plan] / after["us"][after["plan"]] if plan in us and after and after["plan"] in after["us"] else None
        for x in (loss, cliff):
            cells.append("-" if x is None else f"{x:.2f}{'!' if x > LIMIT else ' '}")
        lines.append([str(r["queries"]), *cells, "-" if r["own_l2"] is None else f"{r['own_l2']:.0e}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.rjust(w) for cell, w in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--library", default=ct.LIBRARY, help="libkvant.so built with CUDA")
    parser.add_argument("--formats", default="tq4,tq6/tq4,bf16,fp8", help="(default: %(default)s)")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256, 512],
                        help="with the heads " + ", ".join(f"{q}/{kv} at {d}" for d, (q, kv) in HEADS.items()))
    parser.add_argument("--batches", type=numbers, default=[1, 16], help="sequences (default: 1,16)")
    parser.add_argument("--keys", type=int, default=32768, help="of each sequence (default: %(default)s)")
    parser.add_argument("--counts", type=numbers, default=COUNTS, help="of queries (default: 1,2,4 .. 4096)")
    parser.add_argument("--most", type=int, default=65536, help="sequences x queries (default: %(default)s)")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="(default: all)")
    parser.add_argument("--plan", action="store_true", help="only what the plan takes")
    parser.add_argument("--rounds", type=int, default=5, help="samples (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=300, help="seconds; what does not fit is left out")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()

    torch, kvant = ct.open_kvant("query_counts.py", args.library)
    args.kinds = args.kinds or kinds_of(kvant)
    start = time.monotonic()
    results = []

    def left():
        return args.budget - (time.monotonic() - start)

    for head_dim in args.head_dims:
        for batch in args.batches:
            for formats in args.formats.split(","):
                shape = ct.Shape(*HEADS[head_dim], head_dim, batch, args.keys)
                name = f"{formats}, {shape}"
                if left() < 3:
                    print(f"== {name}: left out, the time budget is used up")
                    continue
                counts = [n for n in args.counts if n * batch <= args.most]
                rows = combination(torch, kvant, shape, formats, counts, args, left)
                torch.cuda.empty_cache()
                results.append({"formats": formats, "shape": str(shape), "rows": rows})
                show(name, rows, args.kinds)
                print(f"  {name}: done after {time.monotonic() - start:.0f} s", file=sys.stderr)
                if args.json:
                    facts = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
                    pathlib.Path(args.json).write_text(json.dumps({"machine": facts, "results": results}) + "\n")


if __name__ == "__main__":
    main()
