"""kvant._c_api, which scripts/c_api.py makes of include/kvant/kvant.h: a C compiler says what sizes and offsets are."""
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvant import _c, _c_api

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import c_api  # noqa: E402

TEXT = c_api.HEADER.read_text()
HEADER = c_api.Header(TEXT)
MIRRORS = {c._c_name_: c for c in vars(_c_api).values() if hasattr(c, "_c_name_")}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """{(struct, field or "."): (offset, size)} as the C compiler has them, and {name of an enumeration: number}."""
    folder = tmp_path_factory.mktemp("abi")
    lines = ['#include <stdio.h>', '#include "kvant/kvant.h"', "int main(void) {"]
    for struct, fields in HEADER.structs.items():
        lines.append(f'  printf("{struct} . 0 %zu\\n", sizeof({struct}));')
        for field, _ in fields:
            lines.append(
                f'  printf("{struct} {field} %zu %zu\\n", offsetof({struct}, {field}), '
                f'sizeof((({struct}*)0)->{field}));'
            )
    for enum, values in HEADER.enums.items():
        lines += [f'  printf("{enum} {name} %d 0\\n", {name});' for name in values]
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


def test_nothing_of_the_header_is_left_out():
    assert len(MIRRORS) == len(HEADER.structs) == TEXT.count("\n} kvant_")
    assert len(HEADER.enums) == TEXT.count("\nenum {")
    assert len(_c_api.FUNCTIONS) == len(HEADER.functions) == TEXT.count("\nKVANT_C_API ")
    assert all(getattr(_c, name).argtypes == types[1:] for name, types in _c_api.FUNCTIONS.items())


@pytest.mark.parametrize("struct", HEADER.structs)
def test_sizes_and_offsets(struct, facts):
    mirror = MIRRORS[struct]
    fields = [name for name, _ in mirror._fields_]
    assert fields == [name for name, _ in HEADER.structs[struct]]
    assert {name: (getattr(mirror, name).offset, getattr(mirror, name).size) for name in fields} == {
        name: facts[struct, name] for name in fields
    }
    assert ctypes.sizeof(mirror) == facts[struct, "."][1]


def test_numbers_of_enumerations(facts):
    for enum, values in HEADER.enums.items():
        assert values == {name: facts[enum, name][0] for name in values}
        assert list(getattr(_c_api, enum.removeprefix("kvant_").upper()).values()) == list(values.values())
    assert _c_api.KEY_CENTRE == {"automatic": 0, "none": 1, "page": 2}


CHANGES = {
    "a new field": ("  int32_t tail_pages;  ", "  int32_t colour;\n  int32_t tail_pages;  "),
    "a field of another type": ("int32_t max_query_len; /* queries", "int64_t max_query_len; /* queries"),
    "a new value": ("KVANT_CENTRE_PAGE = 2", "KVANT_CENTRE_BLOCK = 3, KVANT_CENTRE_PAGE = 2"),
    "another argument": ("int64_t* bytes);\n\n/* Geometry", "int32_t* bytes);\n\n/* Geometry"),
    "another result": ("KVANT_C_API const char* kvant_version(void)", "KVANT_C_API int32_t kvant_version(void)"),
    "a new function": ("\n/* An empty", "\nKVANT_C_API void kvant_f(void);\n/* An empty"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_header_is_noticed(change, tmp_path, monkeypatch, capsys):
    old, new = CHANGES[change]
    assert TEXT.count(old) == 1
    changed = tmp_path / "kvant.h"
    changed.write_text(TEXT.replace(old, new))
    monkeypatch.setattr(sys, "argv", ["c_api.py"])
    assert c_api.main() == 0
    monkeypatch.setattr(c_api, "HEADER", changed)
    assert c_api.main() == 1
    assert "run scripts/c_api.py --write" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("typedef struct kvant_bases kvant_bases;", "typedef union kvant_bases kvant_bases;", "unknown form"),
        ("int32_t k_level_count;", "short k_level_count;", "type short"),
        ("const float* k_levels;", "const float*** k_levels;", "unknown form"),
        ("  const float* lse;\n", "  const float* logsum;\n", "ADDRESSES"),
    ],
)
def test_a_header_of_unknown_form_is_refused(old, new, error):
    assert TEXT.count(old) == 1
    with pytest.raises(SystemExit, match=error):
        c_api.mirror(TEXT.replace(old, new))
