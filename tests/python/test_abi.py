"""The ctypes mirror in kvant._c against include/kvant/kvant.h: a C compiler says what sizes and offsets really are."""
import ctypes
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "kvant" / "kvant.h"


def header_structs():
    """{struct: [field]} of kvant.h, in order. A declaration's name comes last, before an array's length, or in
    (*name)(...)."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    structs = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}\s*\w+;", text, re.S):
        fields = structs[name] = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            pointer = re.search(r"\(\*(\w+)\)", declaration)
            parts = [pointer[1]] if pointer else re.findall(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:,|$)", declaration)
            fields += parts
    return structs


def mirrors():
    from kvant import _c

    found = [
        c
        for c in vars(_c).values()
        if isinstance(c, type) and issubclass(c, ctypes.Structure) and hasattr(c, "_c_name_")
    ]
    return {c._c_name_: c for c in found}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """{(struct, field or "."): (offset, size)} as the C compiler has them."""
    folder = tmp_path_factory.mktemp("abi")
    lines = ['#include <stdio.h>', '#include "kvant/kvant.h"', "int main(void) {"]
    for struct, fields in header_structs().items():
        lines.append(f'  printf("{struct} . 0 %zu\\n", sizeof({struct}));')
        for field in fields:
            lines.append(
                f'  printf("{struct} {field} %zu %zu\\n", offsetof({struct}, {field}), '
                f'sizeof((({struct}*)0)->{field}));'
            )
    lines += ["  return 0;", "}", ""]
    (folder / "facts.c").write_text("\n".join(lines))
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-std=c11", "-I", ROOT / "include", folder / "facts.c", "-o", folder / "facts"], check=True
    )
    out = {}
    for line in subprocess.run([folder / "facts"], check=True, capture_output=True, text=True).stdout.splitlines():
        struct, field, offset, size = line.split()
        out[struct, field] = (int(offset), int(size))
    return out


def test_the_header_is_understood():
    structs = header_structs()
    assert structs["kvant_tensor"][:4] == ["data", "dtype", "shape", "stride"]
    assert structs["kvant_cache_config"][:4] == ["struct_size", "layers", "kv_heads", "head_dim"]
    assert len(structs) == HEADER.read_text().count("\n} kvant_")


def test_every_struct_is_mirrored():
    assert set(mirrors()) == set(header_structs())


@pytest.mark.parametrize("struct", header_structs())
def test_sizes_and_offsets(struct, facts):
    mirror = mirrors()[struct]
    fields = header_structs()[struct]
    assert [name for name, *_ in mirror._fields_] == fields
    assert {name: (getattr(mirror, name).offset, getattr(mirror, name).size) for name in fields} == {
        name: facts[struct, name] for name in fields
    }
    assert ctypes.sizeof(mirror) == facts[struct, "."][1]
