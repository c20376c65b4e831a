#!/usr/bin/env python3
"""Writes python/kvant/__init__.pyi, the surface of the package for type checkers and editors, from the package itself.

usage: python_stub.py           compares, and says what differs (exit code 1)
       python_stub.py --write   writes the stub
"""

from __future__ import annotations

import difflib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "kvant" / "__init__.pyi"
sys.path.insert(0, str(ROOT / "python"))

HEADER = '''# Made by scripts/python_stub.py --write from the package; a test compares the two.
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from ctypes import c_void_p
from pathlib import Path
from typing import Any

__version__: str

class Bf16Array:
    bits: Any

__all__: list[str]
'''


PRIVATE = ("Facts", "Member", "NotCopied")  # bases


def signature(function) -> str:
    """As in the source: annotations are texts there, defaults are written as they are typed."""
    parts, keyword_only = [], False
    given = inspect.signature(function)
    for p in given.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only = keyword_only or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        if p.annotation is not p.empty:
            text += f": {p.annotation}".replace("_tensors.", "")
        if p.default is not p.empty:
            text += f" = {p.default!r}" if p.annotation is not p.empty else f"={p.default!r}"
        parts.append(text)
    result = "" if given.return_annotation is given.empty else f" -> {given.return_annotation}".replace("_tensors.", "")
    return f"({', '.join(parts)}){result}"


def doc(thing, indent: str) -> list[str]:
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text:
        return []
    lines = text.splitlines()
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}".rstrip() for line in lines[1:]), f'{indent}"""']


def function_lines(name: str, function, indent: str) -> list[str]:
    body = doc(function, indent + "    ") or [f"{indent}    ..."]
    return [f"{indent}def {name}{signature(function)}:", *body]


def class_lines(name: str, cls) -> list[str]:
    bases = [b.__name__ for b in cls.__bases__ if b is not object and b.__name__ not in PRIVATE]
    lines = [f"class {name}({', '.join(bases)}):" if bases else f"class {name}:"]
    lines += doc(cls, "    ") if not hasattr(cls, "__dataclass_fields__") or cls.__doc__ else []
    for field, annotation in getattr(cls, "__annotations__", {}).items():
        lines.append(f"    {field}: {annotation}")
    for member, value in vars(cls).items():
        if member.startswith("_") and member not in ("__init__", "__len__", "__enter__", "__exit__"):
            continue
        if isinstance(value, property) and member == "__enter__":  # that gives a callable of C
            lines += [f"    def __enter__(self) -> {name}:", "        ..."]
        elif isinstance(value, property):
            lines += ["    @property", *function_lines(member, value.fget, "    ")]
        elif inspect.isfunction(value) and not (member == "__init__" and hasattr(cls, "__dataclass_fields__")):
            lines += function_lines(member, value, "    ")
        elif isinstance(value, int) and not member.startswith("_"):
            lines.append(f"    {member}: int")
    return lines


def stub() -> str:
    import kvant

    lines = [HEADER]
    for name in kvant.__all__:
        thing = getattr(kvant, name)
        lines += class_lines(name, thing) if inspect.isclass(thing) else function_lines(name, thing, "")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = stub()
    if sys.argv[1:] == ["--write"]:
        STUB.write_text(text)
        return 0
    old = STUB.read_text() if STUB.exists() else ""
    difference = list(
        difflib.unified_diff(old.splitlines(), text.splitlines(), str(STUB.name), "the package", lineterm="")
    )
    print("\n".join(difference) or f"{STUB.name} is what the package has")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
