"""Calls of kvant with tensors of every shape, stride, dtype and owner and with arguments of every type, against numpy.

    boundary_fuzz.py [--seed S] [--calls N]     N calls from seed S, in processes of their own
    boundary_fuzz.py --seed S --only I          call I alone, with its arguments

A call is right, or refused with kvant's sentence; a refused one changes nothing. All tensors lie in guarded memory, so
that a byte read or written beside them ends the process. Prints what was found, and exits 1 if something was.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from boundary_world import CALLS, World, Wrong

SECONDS = 120  # that a call may take
worlds: list[Any] = []  # the one that some calls share; each leaves it as it was


def one_call(seed: int, number: int) -> dict[str, Any]:
    group, rng = number // 20, np.random.default_rng((seed, number))
    if worlds[:1] != [(seed, group)]:
        worlds[:] = (seed, group), World(np.random.default_rng((seed, group, 0)))
    world = worlds[1]
    world.rng, world.what = rng, {}
    call = CALLS[int(rng.integers(0, len(CALLS)))]
    try:
        return {"call": call.__name__, "state": call(world)}
    except Wrong as error:
        return {"call": call.__name__, "state": "WRONG", "error": str(error), "arguments": world.what}
    except Exception:  # of this script itself
        return {"call": call.__name__, "state": "WRONG", "error": traceback.format_exc()[-800:], "arguments": {}}


def child(seed: int, first: int, last: int) -> None:
    import torch  # noqa: F401 (seconds that are no call's)

    faulthandler.enable()
    for number in range(first, last):
        print(json.dumps({"begin": number}), flush=True)
        signal.alarm(SECONDS)  # ends the process
        print(json.dumps({"number": number, **one_call(seed, number)}), flush=True)
        signal.alarm(0)


def parent(seed: int, calls: int) -> int:
    counts: dict[str, int] = {}
    found, first = 0, 0

    def tell(finding: dict[str, Any]) -> None:
        nonlocal found
        found += 1
        print(json.dumps(finding, indent=1), flush=True)

    while first < calls:
        last = min(calls, first + 500)
        done = subprocess.run(
            [sys.executable, __file__, "--seed", str(seed), "--child", str(first), str(last)],
            capture_output=True, text=True,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            if "state" in line:
                counts[line["state"]] = counts.get(line["state"], 0) + 1
                if line["state"] == "WRONG":
                    tell(line)
        first = last
        if done.returncode != 0:
            number = max((line["begin"] for line in lines if "begin" in line), default=last)
            how = f"ended with {done.returncode}"
            tell({"number": number, "state": how, "error": done.stderr[-1500:]})
            counts["crashed"] = counts.get("crashed", 0) + 1
            first = number + 1
    print(f"seed {seed}, {calls} calls: " + ", ".join(f"{n} {state}" for state, n in sorted(counts.items())))
    return 1 if found or sum(counts.values()) != calls else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--only", type=int)
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.seed, *options.child)
        return 0
    if options.only is not None:
        print(json.dumps(one_call(options.seed, options.only), indent=1))
        return 0
    return parent(options.seed, options.calls)


if __name__ == "__main__":
    sys.exit(main())
