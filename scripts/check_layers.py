#!/usr/bin/env python3
"""A layer includes only itself and lower layers (docs/design.md, "Layers"). Exits 1 with every offence.

Includes between quotes name files of ours, by layer: "kvant/...", "base/...", "codec/..." and so on. Public headers
may include the C++ standard library and other public headers only; base and codec are shared with device code and
with the ISA units, so they may include nothing that brings in foreign inline code.
"""
import pathlib
import re
import sys
from fnmatch import fnmatch

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORDER = ["kvant", "base", "codec", "core", "cpu", "cuda", "bench", ("capi", "io", "snapshot", "cli")]
RANK = {}
for rank, names in enumerate(ORDER):
    for name in (names,) if isinstance(names, str) else names:
        RANK[name] = rank

# The same for the folders of src/cuda. Of the files that lie in it itself, view.hpp, width.hpp and instances.hpp
# (which CMake makes) are the lowest, below all folders; others are the highest.
CUDA_ORDER = [
    ("view.hpp", "width.hpp", "instances.hpp"),
    "runtime",
    "tile",
    "schedule",
    ("append", "mask", "merge", "prefill", "read_back"),
    ("decode", "prefill_*"),
    "decode_*",
    "store",
    "plan",
    "blocks",
]

# What a layer may take from outside: None means anything.
C_HEADERS = {"cstddef", "cstdint", "cstring", "bit", "concepts", "limits", "type_traits"}
FOREIGN = {"base": C_HEADERS, "codec": C_HEADERS}
PUBLIC_FOREIGN = re.compile(r"^[a-z_]+(\.h)?$")  # standard headers have no directory part

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def cuda_rank(parts):
    """The rank of a file or an include, from its parts below src/."""
    return next((rank for rank, patterns in enumerate(CUDA_ORDER)
                 if any(fnmatch(parts[1], one) for one in ((patterns,) if isinstance(patterns, str) else patterns))),
                len(CUDA_ORDER))


def layer_of(path):
    parts = path.relative_to(ROOT).parts
    return "kvant" if parts[0] == "include" else parts[1]


def check(path):
    layer = layer_of(path)
    for kind, name in INCLUDE.findall(path.read_text()):
        where = f"{path.relative_to(ROOT)}: #include {'<' if kind == '<' else chr(34)}{name}"
        target = name.split("/")[0] if "/" in name else None
        if kind == '"' or target == "kvant":
            if target not in RANK:
                yield f"{where}: write our includes with their layer (known: {', '.join(RANK)})"
            elif RANK[target] > RANK[layer]:
                yield f"{where}: {layer} is below {target}, and a layer includes only lower layers"
            elif RANK[target] == RANK[layer] and target != layer and not (layer == "cli" or target == "io"):
                yield f"{where}: {layer} and {target} stand side by side"
            elif target == "cuda" and layer not in ("cuda", "bench") or target == "cpu" and layer == "cuda":
                yield f"{where}: backends are reached through core only"
            elif target == "bench" and layer not in ("bench", "cli"):
                yield f"{where}: what measures is not part of the library"
            elif target == "cuda" and layer == "cuda":
                mine, theirs = path.relative_to(ROOT / "src").parts, name.split("/")
                if cuda_rank(theirs) > cuda_rank(mine):
                    yield (
                        f"{where}: src/cuda/{mine[1]} is below src/cuda/{theirs[1]}, "
                        "and a folder includes only lower ones"
                    )
                elif cuda_rank(theirs) == cuda_rank(mine) < len(CUDA_ORDER) and theirs[1] != mine[1]:
                    yield f"{where}: src/cuda/{mine[1]} and src/cuda/{theirs[1]} stand side by side"
        elif layer == "kvant" and not PUBLIC_FOREIGN.match(name):
            yield f"{where}: public headers include the standard library only"
        elif layer in FOREIGN and name not in FOREIGN[layer]:
            yield f"{where}: {layer} may include only {', '.join(sorted(FOREIGN[layer]))}"


def main():
    files = [
        p
        for top in ("include", "src")
        for p in sorted((ROOT / top).rglob("*"))
        if p.suffix in (".hpp", ".h", ".cpp", ".cu", ".cuh")
    ]
    offences = [offence for path in files for offence in check(path)]
    print("\n".join(offences) if offences else f"layers: {len(files)} files, includes in order")
    return 1 if offences or not files else 0


if __name__ == "__main__":
    sys.exit(main())
