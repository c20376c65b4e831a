#!/usr/bin/env python3
"""check_your_model.py KVANT: docs/your-model.md does what it says, with the given tool.

The page's writer must be examples/python/write_capture.py, letter by letter. The lines of its ```sh blocks that
begin with `kvant` or `python3` run one after another in a temporary folder, where the writer lies as write_capture.py;
other lines (./dev, pip) are left out. Files that a line names behind --report, --json or -o must exist afterwards. The
writer needs numpy: where no Python at hand has it (this one, build/venv), the writer does not run, and a capture of
data/ stands for each of its files.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, WRITER = ROOT / "docs/your-model.md", ROOT / "examples/python/write_capture.py"
CAPTURE = ROOT / "data/gemma4-nano-qkv.safetensors"


def blocks_of(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def python_with_numpy():
    for python in (sys.executable, *sorted(map(str, ROOT.glob("build/venv/*/bin/python")))):
        if subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0:
            return python
    return None


def check_writer(blocks):
    quoted = [block for block in blocks if "def write_capture" in block]
    if len(quoted) != 1:
        yield f"the page has {len(quoted)} blocks with write_capture, not 1"
    elif quoted[0] != WRITER.read_text():
        yield f"the page's writer is not {WRITER.relative_to(ROOT)}: copy the file into the page"
    for block in blocks:
        try:
            compile(block, str(PAGE), "exec")
        except SyntaxError as error:
            yield f"a Python block does not compile: {error}"


def run(line, folder, python):
    """Errors of one line; nothing if it did what it says."""
    words = line.split("#")[0].split()
    if words[0] == "python3" and python is None:
        shutil.copyfile(CAPTURE, folder / words[2])
        return
    path = f"{folder}/bin:{pathlib.Path(python or sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(words, cwd=folder, env={**os.environ, "PATH": path}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        yield f"`{line}`: exit status {done.returncode}:\n{done.stdout[-2000:]}"
        return
    if python and "warning:" in done.stdout:  # the capture of data/ has too few queries for a basis
        yield f"`{line}` warns:\n{done.stdout[-2000:]}"
    for name in re.findall(r"(?:--report|--json|-o) (\S+)", line):
        if not (folder / name).is_file() or not (folder / name).stat().st_size:
            yield f"`{line}`: {name} was not written"


def main():
    kvant = pathlib.Path(sys.argv[1]).resolve()
    text = PAGE.read_text()
    shell = "".join(blocks_of("sh", text)).splitlines()
    lines = [line for line in shell if line.startswith(("kvant ", "python3 "))]
    offences = list(check_writer(blocks_of("python", text)))
    for tool in ("kvant eval", "kvant calibrate", "python3 write_capture.py"):
        if not any(line.startswith(tool) for line in lines):
            offences.append(f"no command block runs `{tool}`")
    python = python_with_numpy()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "bin").mkdir()
        (folder / "bin/kvant").symlink_to(kvant)
        shutil.copyfile(WRITER, folder / "write_capture.py")  # the page's own, as was checked above
        for line in lines:
            offences += [] if offences else run(line, folder, python)
    left_out = 0 if python else sum(line.startswith("python3") for line in lines)
    print("\n".join(offences) if offences else f"docs/your-model.md: the writer is the example; "
          f"{len(lines) - left_out} commands ran" + f", {left_out} skipped: no numpy" * bool(left_out))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
