#!/usr/bin/env python3
"""places.py [--list]: in how many places a fact stands. Exits 1 if a count is above its maximum.

Tests, documents and generated files are not counted, apart from the lengths of lines. A maximum may only fall: a change
that needs another place mends the design first. --list prints every place.
"""
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ME = "scripts/places.py"

# Most places each fact may stand in; a comment says where a maximum is to go.
MAXIMA = {
    "files that name tq5": 5,  # one lists the rows of a comparison
    "files with softcap arithmetic": 2,  # 1 in src; Python has the definition for torch
    "files that mention softcap": 19,  # 9; one is a second plan in Python
    "files to edit for a CUDA head_dim": 1,
    "files to edit for a CUDA width": 1,  # keys and values of two head_dims
    "files to edit for a CUDA pair": 1,
    "files that list kinds of CUDA kernels": 1,  # words for users apart
    "device branches in src/core": 0,  # outside the stores
    "void* callbacks from kernels": 0,
    "rings of stages in shared memory": 1,
    "registers and fences in assembly outside runtime": 0,
    "files with the softmax of CUDA prefill": 1,
    "Python modules that import each other in a circle": 0,
    "lines over 120 columns": 0,
}
COLUMNS = 120

SIZE = "(?:64|96|128|192|256|512)"
FORMAT = r"(?:f32|f16|bf16|fp8|tq\d|lut\d)"
GENERATED = re.compile(r"(^|/)(corpus|golden|frozen)/|^data/|\.(svg|png|pyi|safetensors)$|cuda-ledger\.txt$"
                       r"|^tests/cuda_choices\.txt$")


def tracked():
    """Files that git has; outside a git checkout (a source package) all files but those of builds."""
    try:
        out = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
        names = out.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
        names = [n for n in names if not re.match(r"(build|dist|third_party|\.git)(/|$)", n)]
    return sorted(n for n in names if n and (ROOT / n).is_file() and not GENERATED.search(n))


def text_of(name):
    try:
        return (ROOT / name).read_text()
    except UnicodeDecodeError:
        return ""


def is_code(name):
    return not name.startswith(("tests/", "docs/")) and not name.endswith(".md") and name not in (ME, "LICENSE")


def without_strings(text):
    return re.sub(r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"', '""', text)


def files_with(files, pattern, change=lambda text: text):
    return [name for name, text in files.items() if re.search(pattern, change(text), re.I)]


def lines_with(files, pattern):
    return [f"{name}:{i}: {line.strip()}" for name, text in files.items() for i, line in enumerate(text.splitlines(), 1)
            if re.search(pattern, line)]


def names_two_kinds(line):
    code = re.sub(r"(^|\s)(//|#) .*", "", line)
    return len({"".join(found).lower() for found in re.findall(r"(decode|prefill)_?sm(80|90)", code, re.I)}) > 1


def long_lines(name, text):
    for i, line in enumerate(text.splitlines(), 1):
        table = name.endswith(".md") and line.lstrip().startswith("|")
        if len(line) > COLUMNS and not table:
            yield f"{name}:{i}: {len(line)} columns"


def imports_of(name, text, modules):
    """The package's modules that a file imports, wherever in the file; a submodule needs its package in any case."""
    package = name.rpartition("/")[0].removeprefix("python/").replace("/", ".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(parents + ([node.module] if node.module else []))
            for alias in node.names:
                module = f"{base}.{alias.name}"
                if module in modules or base in modules:
                    yield module if module in modules else base


def in_circles(files):
    names = {n: n.removeprefix("python/").removesuffix(".py").removesuffix("/__init__") for n in files}
    modules = {name.replace("/", "."): n for n, name in names.items()}
    direct = {m: {i for i in imports_of(n, files[n], modules) if i != m} for m, n in modules.items()}

    def reached(module):
        found, left = set(), [module]
        while left:
            left += [m for m in direct[left.pop()] if m not in found and not found.add(m)]
        return found

    return [modules[m] for m in direct if m in reached(m)]


def places(files):
    code = {n: t for n, t in files.items() if is_code(n)}

    def under(*folders):
        return {n: t for n, t in code.items() if n.startswith(folders)}

    cuda = under("src/cuda/", "src/CMakeLists.txt", "cmake/", "CMakeLists.txt")
    core = {n: t for n, t in under("src/core/").items() if "store" not in n and not n.endswith("/device.hpp")}
    # Sizes as a list or a dispatch names them: `(192 few)`, `case 192:`, `<192>`, `_d192`, `64, 96, 128`. Widths of
    # instructions and tiles are others.
    size = rf"case {SIZE}:|\w<(?:192|512)>|_d{SIZE}\b|\({SIZE} (?:most|few)\)|\b64, 96, 128\b"
    width = rf"\({SIZE}/{SIZE} (?:most|few)\)|_d{SIZE}v{SIZE}\b|<{SIZE}{{2}}>"
    pair = rf"\b{FORMAT}/{FORMAT} (?:default|named)|(?<!page_layout\()Format::{FORMAT}, *Format::{FORMAT}\b"
    device = (r"(?<!config\.)\b(?:device_|on_device|device)(?: \?| &&|\))(?!\)|;| return device\.status)|"
              r"device\(\) [!=]= nullptr")
    return {
        "files that name tq5": files_with(code, r"\btq5\b"),
        "files with softcap arithmetic": files_with(under("src/", "python/"), r"\w*tanh", without_strings),
        "files that mention softcap": files_with(code, "softcap"),
        "files to edit for a CUDA head_dim": files_with(cuda, size),
        "files to edit for a CUDA width": files_with(cuda, width),
        "files to edit for a CUDA pair": files_with(cuda, pair),
        "files that list kinds of CUDA kernels": [
            n for n, t in under("src/", "cmake/", "scripts/", "bench/").items()
            if re.search(r"^kvant_cuda_(decode|tile)_kind\(", t, re.M) or any(map(names_two_kinds, t.splitlines()))],
        "device branches in src/core": lines_with(core, device),
        # The pointer to a function is a callback if its first argument is what it is called for.
        "void* callbacks from kernels": lines_with(under("src/core/plan/attend.hpp", "src/core/backend.hpp"),
                                                   r"\(\*\w+\)\((?:const )?void\*"),
        "rings of stages in shared memory": lines_with(under("src/cuda/"), r"^struct Ring\b"),
        "registers and fences in assembly outside runtime": lines_with(
            {n: t for n, t in under("src/cuda/").items() if not n.startswith("src/cuda/runtime/")},
            r"asm.*(?:setmaxnreg|\bfence\.)"),
        "files with the softmax of CUDA prefill": files_with(under("src/cuda/prefill"), r"ptx::ex2\("),
        "Python modules that import each other in a circle": in_circles(
            {n: t for n, t in under("python/kvant/").items() if n.endswith(".py")}),
        "lines over 120 columns": [place for name, text in files.items() for place in long_lines(name, text)],
    }


def main():
    found = places({name: text_of(name) for name in tracked()})
    width = max(map(len, found))
    print(f"{'fact':{width}}  places  allowed")
    above = []
    for fact, where in found.items():
        print(f"{fact:{width}}  {len(where):6}  {MAXIMA[fact]:7}{'  TOO MANY' if len(where) > MAXIMA[fact] else ''}")
        if len(where) > MAXIMA[fact]:
            above.append(fact)
        if "--list" in sys.argv:
            print("\n".join(f"  {place}" for place in where))
    if above and "--list" not in sys.argv:
        print("scripts/places.py --list prints the places")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
