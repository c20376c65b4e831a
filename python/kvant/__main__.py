"""`kvant` and `python -m kvant`: the command line tool, and `doctor`, which says what this installation can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ._installation import refuse_words_of_doctor, versions


def _hugging_face() -> str:
    from importlib import metadata

    try:
        metadata.version("torch"), metadata.version("transformers")
    except metadata.PackageNotFoundError as missing:
        return f"not available: {missing.name} is not installed (pip install 'kvant[hf]')"
    try:
        import kvant.hf  # noqa: F401
    except Exception as error:  # whatever keeps it from being imported is the answer
        return f"not available: {error}"
    return "available (kvant.hf.enable(model))"


def _trial() -> str:
    """One small step through the library, against float64 arithmetic."""
    import numpy as np

    import kvant

    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal((100 if i < 2 else 1, 2, 64)).astype(np.float32) for i in range(3))
    cache = kvant.Cache(kv_heads=2, head_dim=64, k="f32", v="f32")
    seq = cache.sequence()
    seq.append(0, k, v)
    plan = cache.plan(seq, q_heads=2)
    out = plan.run(0, q)
    s = np.einsum("qhd,khd->hqk", q, k, dtype=np.float64) / 8
    w = np.exp(s - s.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", w / w.sum(-1, keepdims=True), v, dtype=np.float64)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    verdict = "right" if error < 1e-5 else "WRONG"
    return f"{verdict}: a step of 100 keys, relative error {error:.1e}, instruction set {plan.facts.isa}"


def doctor() -> int:
    """Prints versions, what was compiled in, what this machine has, what is chosen and why; 0 if kvant works here."""
    import kvant
    from kvant import _c

    facts = kvant.info()
    print(f"kvant         {facts['version']}, {_c.library_path}")
    print("\n".join(versions()))
    print(f"threads       {facts['threads']['runtime']}, {facts['threads']['hardware']} usable")
    chosen = next((i["name"] for i in facts["isas"] if i["available"]), "none")
    for i in facts["isas"]:
        mark = "chosen: the best that is here" if i["name"] == chosen else ("here" if i["available"] else "not here")
        print(f"isa {i['name']:<9} {mark} ({i['detail']})")
    names = [b["name"] for b in facts["backends"]]
    for b in facts["backends"]:
        available = "available" if b["available"] else "not available"
        print(f"{b['name']:<13} {available}{': ' + b['detail'] if b['detail'] else ''}")
        for c in b.get("classes", ()):
            print(f"  {c['capability']:<11} {c['state']}: {c['cards']}; {c['code']}; {' '.join(c['kernels'])}")
    if "cuda" not in names:
        print("cuda          not compiled into this library")
    print(f"hugging face  {_hugging_face()}")
    try:
        trial = _trial()
    except Exception as error:  # whatever keeps it from being done is the answer
        trial = f"not possible: {error}"
    print(f"trial         {trial}")
    return 0 if trial.startswith("right") else 1


def _help(tool: str) -> int:
    """The tool's help with `doctor` among its commands."""
    done = subprocess.run([tool, "--help"], stdout=subprocess.PIPE, text=True)
    before, heading, after = done.stdout.partition("Subcommands:\n")
    if heading:
        after = f"  {'doctor':<30}  What this installation can do: versions, what is chosen, a trial\n{after}"
    print(f"{before}{heading}{after}", end="")
    return done.returncode


def cli() -> None:
    """The `kvant` command: `doctor` here, everything else by the tool."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and the tool inherits: `kvant ... | head`
    arguments = sys.argv[1:]
    if arguments[:1] == ["doctor"]:
        refuse_words_of_doctor(arguments[1:])
        sys.exit(doctor())
    from kvant import Unsupported
    from kvant._tools import tool

    try:
        path = tool()
    except Unsupported as error:
        sys.exit(f"kvant: {error}")
    if arguments in (["-h"], ["--help"]):
        sys.exit(_help(path))
    os.execv(path, ["kvant", *arguments])


if __name__ == "__main__":
    cli()
