"""The facts of an installation, also where kvant's library cannot be loaded."""

from __future__ import annotations

import os
import platform
import sys


def versions() -> list[str]:
    from importlib import metadata

    lines = [f"python        {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for name in ("numpy", "torch", "transformers", "safetensors"):
        try:
            lines.append(f"{name:<13} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name:<13} not installed")
    return lines


DOCTOR = (
    "usage: kvant doctor\n\n"
    "Says what this installation can do: versions, what was compiled in, what this machine has, what is chosen\n"
    "and why, and whether a small trial is right. Exit codes: 0 kvant works here, 1 it does not, 2 wrong usage."
)


def refuse_words_of_doctor(words: list[str]) -> None:
    """Ends the `kvant doctor` command where words follow it: with its help, or as wrong usage."""
    if words and words[0] in ("-h", "--help"):
        print(DOCTOR)
        sys.exit(0)
    if words:
        print(
            f"kvant: {words[0]}: not expected; kvant doctor takes no more words\n"
            "Run `kvant doctor --help` for what it says; `kvant info --json` has facts for programs.",
            file=sys.stderr,
        )
        sys.exit(2)


def say_without_library(error: ImportError) -> None:
    """Ends the `kvant` command, whose package cannot be imported, with the reason. Elsewhere: does nothing."""
    asked = sys.orig_argv
    as_module = sys.argv[:1] == ["-m"] and any(asked[i : i + 2] == ["-m", "kvant"] for i in range(1, len(asked)))
    if not as_module and os.path.basename(sys.argv[0] if sys.argv else "") != "kvant":
        return
    if sys.argv[1:2] == ["doctor"]:
        refuse_words_of_doctor(sys.argv[2:])
        print(f"kvant         not available: {error}")
        print("\n".join(versions()))
        sys.exit(1)
    sys.exit(f"kvant: {error}")
