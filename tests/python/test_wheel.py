"""The built wheel (KVANT_WHEEL names its file; ./dev check builds one): what is in it, and that it works in clean
environments."""

import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHEEL = os.environ.get("KVANT_WHEEL")
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not WHEEL, reason="KVANT_WHEEL is not set (./dev check builds a wheel and sets it)")


def output(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    output(sys.executable, "-m", "zipfile", "-e", WHEEL, folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked):
    return next(unpacked.glob("kvant-*.dist-info/METADATA")).read_text()


def header_version():
    return re.search(r'define KVANT_VERSION "(.+)"', (ROOT / "include/kvant/version.hpp").read_text())[1]


def test_name_says_any_python_and_an_older_linux():
    name = pathlib.Path(WHEEL).name
    assert name.startswith(f"kvant-{header_version()}-py3-none-")
    assert re.search(r"manylinux_2_(\d+)_", name), "auditwheel gave no manylinux tag"
    assert min(int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", name)) <= 36


def test_contents():
    with zipfile.ZipFile(WHEEL) as wheel:
        names = wheel.namelist()
        assert "kvant/libkvant.so" in names
        assert "kvant/__init__.py" in names
        assert wheel.getinfo("kvant/bin/kvant").external_attr >> 16 & stat.S_IXUSR, "kvant/bin/kvant cannot be run"
        assert any(re.fullmatch(r"kvant-.*\.dist-info/licenses/LICENSE", name) for name in names)
        assert [n for n in names if ".so" in n] == ["kvant/libkvant.so"], "one library, once"
        foreign = [
            n
            for n in names
            if not n.startswith(("kvant/", "kvant-")) or "__pycache__" in n or n.endswith((".hpp", ".h", ".a"))
        ]
        assert not foreign


def test_size(unpacked):
    has_cuda = "nv_fatbin" in output("readelf", "-SW", unpacked / "kvant/libkvant.so")
    allowed = 28 * MIB if has_cuda else 4 * MIB
    size = pathlib.Path(WHEEL).stat().st_size
    assert size < allowed, f"{size} bytes"


def test_metadata(metadata):
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert [r for r in required if "extra" not in r] == ["numpy"], "kvant itself needs numpy only"
    assert any(r.startswith("torch") and "'hf'" in r.replace('"', "'") for r in required)
    assert f"\nVersion: {header_version()}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata


def test_only_c_functions_are_exported(unpacked):
    exported = {
        line.split()[-1] for line in output("nm", "-D", "--defined-only", unpacked / "kvant/libkvant.so").splitlines()
    }
    declared = set(re.findall(r"^KVANT_C_API [^(]*\b(kvant_\w+)\(", (ROOT / "include/kvant/kvant.h").read_text(), re.M))
    assert len(declared) > 20
    assert exported == declared | {"kvant_cli_main"}


def test_libraries_it_needs(unpacked):
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", unpacked / "kvant/libkvant.so")))
    assert "libstdc++.so.6" in needed, "a static libstdc++ asks for a newer glibc than Ubuntu 22.04 has"
    assert not {n for n in needed if n.startswith(("libgomp", "libcuda", "libcudart"))}


def python_of(minor):
    """A Python of this version: on the PATH, or where pyenv keeps them."""
    found = sorted(pathlib.Path.home().glob(f".pyenv/versions/{minor}.*/bin/python{minor}"))
    for candidate in [*found, shutil.which(f"python{minor}")]:
        if candidate and subprocess.run([candidate, "-m", "venv", "--help"], capture_output=True).returncode == 0:
            return str(candidate)
    pytest.skip(f"there is no python{minor} with venv on this machine")


@pytest.mark.parametrize("minor", PYTHONS)
def test_clean_environment(minor, tmp_path):
    """numpy and nothing else: the example runs, torch is not asked for, and the console command is the real tool."""
    folder = tmp_path / "venv"
    output(python_of(minor), "-m", "venv", folder)
    python = folder / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KVANT_LIBRARY", "KVANT_CLI")}
    options = {"env": environment, "cwd": tmp_path}
    output(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", WHEEL, **options)
    assert "torch" not in output(python, "-m", "pip", "list", **options)

    example = ROOT / "examples" / "python" / "quickstart.py"
    assert output(python, example, **options).strip(), "the example printed nothing"
    loaded = "import sys, kvant; print(kvant.__version__); sys.exit('torch' in sys.modules)"
    assert output(python, "-c", loaded, **options).strip() == header_version()

    tool = folder / "bin" / "kvant"
    assert output(tool, "--version", **options) == f"kvant {header_version()}\n"
    assert "tq6" in output(tool, "info", **options)
    assert "trial         right" in output(tool, "doctor", **options)
    wrong = subprocess.run([tool, "nonsense"], capture_output=True, text=True, **options)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no such command" in wrong.stderr
