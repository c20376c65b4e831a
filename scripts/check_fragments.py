#!/usr/bin/env python3
"""check_fragments.py [COMPILER]: compiles the C++ fragments of README.md and docs/ against include/, syntax and types
alone. A fragment is the body of a function whose parameters are what such fragments take as given. Exits 1 with what
the compiler says of the fragments' own lines."""
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GIVEN = ("int layer", "kvant::TensorView keys", "kvant::TensorView values", "kvant::TensorView q",
         "kvant::MutableTensorView out", "kvant::Stream stream", "std::span<std::byte> workspace")


def unit_of(pages):
    """One unit of all fragments; #line directives name the pages."""
    includes, bodies = ["#include <cstdio>", "#include <span>", "#include <kvant/kvant.hpp>"], []
    for page in pages:
        text = page.read_text()
        for block in re.finditer(r"^```cpp\n(.*?)^```$", text, re.M | re.S):
            first = text[: block.start(1)].count("\n") + 1
            lines = block[1].splitlines()
            includes += [line for line in lines if line.startswith("#include")]
            body = "\n".join("" if line.startswith("#include") else line for line in lines)
            unused = " ".join(f"(void){given.split()[-1]};" for given in GIVEN)
            bodies.append(f"void fragment_{len(bodies)}({', '.join(GIVEN)}) {{\n{unused}\n"
                          f'#line {first} "{page.relative_to(ROOT)}"\n{body}\n}}')
    return "\n".join(includes + bodies) + "\n", len(bodies)


def main():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    unit, count = unit_of(pages)
    if count == 0:
        sys.exit("no fragment of C++ was found in README.md or docs/")
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(unit)
        file.flush()
        compiler = sys.argv[1] if len(sys.argv) > 1 else "g++"
        made = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'include'}", file.name], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    if made.returncode != 0:
        sys.exit(made.stdout)
    print(f"fragments of C++: {count}, all compile")


if __name__ == "__main__":
    main()
