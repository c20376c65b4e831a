#!/usr/bin/env python3
"""readme_table.py KVANT [--write]: the README's table of formats is what `kvant eval` measures.

Numbers may differ by 2 %, since the last digits depend on the machine's instruction set; --write replaces the table.
Times are not in it.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: scripts/readme_table.py --write -->\n", "<!-- end of table -->\n"


def measure(kvant):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        subprocess.run([kvant, "eval", str(ROOT / "data/gemma4-nano-qkv.safetensors"), "--json", str(path)],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.loads(path.read_text())["rows"]


def table(rows):
    """One line a format pair: means over the layers, with exact ends and without."""
    pairs = list(dict.fromkeys((row["k_format"], row["v_format"]) for row in rows))
    yield (
        "| keys / values | bits per value | error, exact ends | error, all encoded | KL of the weights | same top key |"
    )
    yield "|---|---|---|---|---|---|"
    for k, v in pairs:
        def mean(field, exact):
            found = [
                row[field] for row in rows if (row["k_format"], row["v_format"], row["exact_ends"]) == (k, v, exact)
            ]
            return sum(found) / len(found) if found else None
        if mean("rel_l2", False) is None:  # dense: there is nothing to leave out
            assert mean("rel_l2", True) < 1e-5 and mean("kl_mean", True) < 1e-9
            bits, top1 = mean("bits_per_value", True), 100 * mean("top1", True)
            yield f"| {k} / {v} | {bits:.2f} | < 1e-5 | | < 1e-9 | {top1:.1f} % |"
            continue
        name = f"**{k} / {v}** (default)" if (k, v) == ("tq6", "tq4") else f"{k} / {v}"
        yield (
            f"| {name} | {mean('bits_per_value', False):.2f} "
            f"| {mean('rel_l2', True):.4f} | {mean('rel_l2', False):.4f} "
            f"| {mean('kl_mean', True):.1e} | {100 * mean('top1', True):.1f} % |"
        )


def same(a, b):
    """The same text around numbers that are nearly the same."""
    number = re.compile(r"\d+\.\d+(?:e-\d+)?")
    if number.sub("#", a) != number.sub("#", b):
        return False
    return all(abs(float(x) - float(y)) <= 0.02 * abs(float(y)) for x, y in zip(number.findall(a), number.findall(b)))


def main():
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    now, after = rest.split(END)
    wanted = "\n".join(table(measure(sys.argv[1]))) + "\n"
    if "--write" in sys.argv:
        readme.write_text(before + BEGIN + wanted + END + after)
        return 0
    if same(now, wanted):
        print("README: the table of formats is what kvant eval measures")
        return 0
    print(
        "README.md's table of formats is not what kvant eval measures; run scripts/readme_table.py KVANT --write\n"
        + wanted
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
