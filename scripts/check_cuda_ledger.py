#!/usr/bin/env python3
"""check_cuda_ledger.py BUILD_FOLDER [--write]: registers, spills and static shared memory of every kernel, against the
committed ledger docs/lab/cuda-ledger.txt.

Reads what ptxas said of each kernel (OBJECT.ptxas, kept by scripts/nvcc_logged.sh). A kernel that begins to spill, or
takes many more registers, has lost occupancy long before anyone measures it on a GPU; this shows it on any machine that
has nvcc. Architectures and units that the build left out are not compared (and --write keeps their lines), nor are
kernels that a build of some pairs of formats left out; those of 10.0 and 12.0 are compared in a build with
KVANT_CUDA_ARCHITECTURES="100;120". Fails when spills or shared memory grow,
registers grow by more than 8, or kernels come or go; --write accepts.

Fails, too, where a kernel has copies that ptxas assembled to what is no instruction (ptx::stream16 says when).
"""
import array
import json
import pathlib
import re
import shlex
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEDGER = ROOT / "docs" / "lab" / "cuda-ledger.txt"
MORE_REGISTERS = 8  # ptxas moves by a few between builds that differ in nothing that matters

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(.*)")
OBJECTS = re.compile(r"kvant_cuda(_hopper)?\.dir")
SHARED = re.compile(r"(\d+) bytes smem")


def setting(folder, name):
    """The value in the build's configuration; None: it has none of that name."""
    found = re.search(rf"^{name}:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.M)
    return found and found[1]


def nvcc_version(folder):
    nvcc = setting(folder, "CMAKE_CUDA_COMPILER")
    if not nvcc:
        sys.exit(f"{folder}: not configured with KVANT_CUDA=ON (./dev gpu-build)")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text)[1]


def parse(path):
    """Yields (mangled name, architecture, (registers, spill bytes, static shared bytes)). A function's own properties
    follow its entry line; properties of called functions that were not inlined count for the entry before them."""
    name = arch = None
    spills = 0
    for line in path.read_text().splitlines():
        if m := ENTRY.search(line):
            name, arch, spills = m[1], m[2], 0
        elif m := SPILLS.search(line):
            spills += int(m[2]) + int(m[3])
        elif (m := USED.search(line)) and name:
            shared = SHARED.search(m[2])
            yield name, arch, (int(m[1]), spills, int(shared[1]) if shared else 0)
            name = None


def readable(names):
    out = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names) + "\n", capture_output=True, text=True, check=True
    ).stdout
    for mangled, text in zip(names, out.splitlines()):
        text = re.sub(r"_GLOBAL__N__\w+|\(anonymous namespace\)", "", text)  # the former holds a hash of the path
        yield mangled, re.sub(r"kvant::(cuda::)?|(?<!\w)::| ", "", text).removeprefix("void")


def known_objects(folder):
    """The object files of the library's CUDA units that the build knows now: a removed .cu leaves its object behind."""
    units = json.loads((folder / "compile_commands.json").read_text())
    commands = [shlex.split(unit["command"]) for unit in units if unit["file"].endswith(".cu")]
    paths = [folder / command[command.index("-o") + 1] for command in commands]
    return sorted((path for path in paths if any(OBJECTS.fullmatch(part) for part in path.parts)),
                  key=lambda path: path.name)


def objects(folder):
    """Those that were compiled."""
    return [path for path in known_objects(folder) if path.exists()]


def unit_name(path):
    """Where a unit lies in src/cuda: "store/tables". Units of two folders may have one file name."""
    folder = next(i for i, part in enumerate(path.parts) if OBJECTS.fullmatch(part))
    return "/".join(path.parts[folder + 2 :]).removesuffix(".cu.o")


def measured(folder):
    rows = [(unit_name(f), *row) for f in objects(folder) for row in parse(f.with_name(f.name + ".ptxas"))
            if row[1] == "sm_90a" or "kvant_cuda_hopper.dir" not in f.parts]  # empty functions elsewhere
    names = dict(readable(sorted({name for _, name, _, _ in rows})))
    return {(unit, names[name], arch): facts for unit, name, arch, facts in rows}


def device_code(data):
    """Yields the sections of machine code in an object's uncompressed device images: 64-bit ELF, machine 190."""
    at = data.find(b"\x7fELF\x02")
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == 190:
            (headers,) = struct.unpack_from("<Q", data, at + 40)
            size, count = struct.unpack_from("<HH", data, at + 58)
            for i in range(count):
                kind, flags, _, begin, length = struct.unpack_from("<IQQQQ", data, at + headers + i * size + 4)
                if kind == 1 and flags & 4:  # PROGBITS, executable
                    yield data[at + begin : at + begin + length]
        at = data.find(b"\x7fELF\x02", at + 4)


def broken_copies(code):
    """Counts LDGSTS with 128 bytes of prefetch (bit 8 of the upper word) whose address has a uniform register."""
    words = array.array("Q", code)
    return sum(1 for low, high in zip(words[::2], words[1::2]) if low & 0xFFF == 0xDAE and high & 0x100)


def find_broken_copies(folder):
    """A message for each object of `folder` that has broken copies, and the bytes of code that were searched."""
    found, seen = [], 0
    for path in objects(folder):
        broken = 0
        for code in device_code(path.read_bytes()):
            broken, seen = broken + broken_copies(code), seen + len(code)
        if broken > 0:
            found.append(f"{path.name}: {broken} copies that are no instruction")
    return found, seen


def text_of(rows, version):
    lines = [f"# nvcc {version}. Written by scripts/check_cuda_ledger.py --write; compared by ./dev check.",
             "# registers  spill bytes  static shared bytes  architecture  unit:kernel"]
    for (unit, name, arch), (registers, spills, shared) in sorted(rows.items()):
        lines.append(f"{registers:4} {spills:6} {shared:7}  {arch:7} {unit}:{name}")
    return "\n".join(lines) + "\n"


def read_ledger():
    text = LEDGER.read_text()
    version = re.search(r"nvcc (\S+)\. ", text)[1]
    rows = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        registers, spills, shared, arch, rest = line.split(None, 4)
        unit, name = rest.split(":", 1)
        rows[unit, name, arch] = (int(registers), int(spills), int(shared))
    return rows, version


def differences(old, new):
    for key in sorted(old.keys() | new.keys()):
        unit, name, arch = key
        what = f"{arch} {unit}:{name}"
        if key not in new:
            yield f"gone: {what}"
        elif key not in old:
            yield f"new: {what} {new[key]}"
        else:
            (r0, s0, m0), (r1, s1, m1) = old[key], new[key]
            if s1 > s0:
                yield f"spills {s0} -> {s1} bytes: {what}"
            if r1 > r0 + MORE_REGISTERS:
                yield f"registers {r0} -> {r1}: {what}"
            if m1 > m0:
                yield f"shared memory {m0} -> {m1} bytes: {what}"


def main():
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    folder = pathlib.Path(arguments[0])
    version = nvcc_version(folder)
    rows = measured(folder)
    if not rows:
        sys.exit(f"{folder}: no kernels were compiled there (./dev gpu-build)")
    broken, seen = find_broken_copies(folder)
    if broken or seen == 0:
        sys.exit("\n".join(broken) or f"{folder}: no machine code was found in the objects")
    spilling = sum(1 for facts in rows.values() if facts[1] > 0)
    summary = f"{len(rows)} kernels over {len({arch for _, _, arch in rows})} architectures, {spilling} spill"
    built = {arch for _, _, arch in rows}
    left_out = {unit_name(path) for path in known_objects(folder) if not path.exists()}
    has_all_pairs = setting(folder, "KVANT_CUDA_PAIRS") == "default"

    def is_built(key):
        return key[2] in built and key[0] not in left_out and (has_all_pairs or key in rows)

    if "--write" in sys.argv:
        LEDGER.parent.mkdir(exist_ok=True)
        if LEDGER.exists() and read_ledger()[1] == version:
            rows = {k: v for k, v in read_ledger()[0].items() if not is_built(k)} | rows
        LEDGER.write_text(text_of(rows, version))
        print(f"wrote {LEDGER.relative_to(ROOT)}: {summary}")
        return 0
    old, old_version = read_ledger()
    if old_version != version:
        print(f"not compared: the ledger is of nvcc {old_version}, this is {version}; all {len(rows)} kernels compile")
        return 0
    found = list(differences({k: v for k, v in old.items() if is_built(k)}, rows))
    print("\n".join(found) if found else f"as in the ledger: {summary}")
    if found:
        print("if that is meant: scripts/check_cuda_ledger.py BUILD_FOLDER --write, and say why in the commit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
