#!/usr/bin/env python3
"""figure.py BENCH.json FIGURE.svg: what `kvant bench --json` measured: time, speed and error side by side.

Groups of bars are shapes (head_dim, query and kv heads), bars are format pairs: on the left the median time of a run in
microseconds, in the middle the share of the float32 FMA peak that was measured in the same run (2 * group operations
for each stored value; integer units can pass 100 %), on the right the relative L2 error of the attention kernel. Rows
of one operation, ISA and number of keys are drawn; the first of each in the file decides. Needs matplotlib (PyPI).

docs/cpu-decode.svg:
    kvant bench --suite cpu decode --isa avx2 --json bench.json && python3 bench/figure.py bench.json
    docs/cpu-decode.svg
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb"]


def pair(row):
    return row["k_format"] if row["k_format"] == row["v_format"] else f"{row['k_format']}/{row['v_format']}"


def shape(row):
    return f"{row['head_dim']}\n{row['q_heads']}/{row['kv_heads']}"


def main(source, target):
    with open(source) as file:
        result = json.load(file)
    first = result["rows"][0]
    same = ("op", "isa", "keys", "q_len", "threads")
    rows = [row for row in result["rows"] if all(row[key] == first[key] for key in same)]
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    pairs = list(dict.fromkeys(pair(row) for row in rows))
    if len(pairs) > len(COLORS):
        sys.exit(f"{source}: {len(pairs)} format pairs are more than a figure shows ({len(COLORS)})")
    cells = {(shape(row), pair(row)): row for row in rows}

    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "kvant", "svg.fonttype": "none"})
    figure, (time, speed, error) = plt.subplots(1, 3, figsize=(14, 3.6), width_ratios=(5, 5, 3))
    width = 0.8 / len(pairs)
    for i, name in enumerate(pairs):
        at = [s + (i - (len(pairs) - 1) / 2) * width for s in range(len(shapes))]
        found = [cells.get((s, name)) for s in shapes]
        for axes, key, unit in ((time, "median_ns", 1e-3), (speed, "share_of_fma_peak", 100)):
            heights = [unit * row[key] if row else 0 for row in found]
            bars = axes.bar(at, heights, width, label=name, color=COLORS[i])
            axes.bar_label(bars, [f"{x:.0f}" if x else "" for x in heights], fontsize=7 if axes is speed else 5.5)
        error.plot(range(len(shapes)), [row["rel_l2"] if row else None for row in found], "o", color=COLORS[i])
    for axes in (time, speed, error):
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_xlabel("head_dim, query/kv heads")
        axes.spines[["top", "right"]].set_visible(False)
    time.set_ylabel("microseconds")
    time.set_title("time of one token")
    time.legend(frameon=False, ncols=len(pairs))
    speed.set_ylabel("% of the float32 FMA peak")
    speed.set_title("speed")
    time.margins(y=0.18)
    speed.margins(y=0.18)
    error.set_yscale("log")
    error.set_title("relative L2 error of the kernel")
    machine = result["machine"]
    figure.suptitle(
        f"{first['op']}, {first['keys']} keys, {first['isa']}, {first['threads']} threads, {machine['cpu']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    main(*sys.argv[1:])
