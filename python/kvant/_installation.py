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


def say_without_library(error: ImportError) -> None:
    """Ends the `kvant` command, whose package cannot be imported, with the reason. Elsewhere: does nothing."""
    asked = sys.orig_argv
    as_module = sys.argv[:1] == ["-m"] and any(asked[i : i + 2] == ["-m", "kvant"] for i in range(1, len(asked)))
    if not as_module and os.path.basename(sys.argv[0] if sys.argv else "") != "kvant":
        return
    if sys.argv[1:2] == ["doctor"]:
        print(f"kvant         not available: {error}")
        print("\n".join(versions()))
        sys.exit(1)
    sys.exit(f"kvant: {error}")
