"""scripts/touched.py: which checks `./dev check` runs for a change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "touched.py"
HOST = {"tidy", "install", "python", "vllm", "wheel", "sanitizers"}


@pytest.fixture
def checkout(tmp_path):
    """A repository with that script and one commit; commit(path) adds a file and another commit."""

    def git(*arguments):
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, env=os.environ | own | who, capture_output=True)

    def commit(path):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("text")
        git("add", "-A")
        git("commit", "-qm", "change")

    def run(*arguments, base="HEAD~1"):
        done = subprocess.run(
            [sys.executable, tmp_path / "scripts/touched.py", *arguments], capture_output=True, text=True,
            env={k: v for k, v in os.environ.items() if k != "KVANT_BASE"} | ({"KVANT_BASE": base} if base else {}),
        )  # fmt: skip
        assert done.returncode == 0 or base, done.stderr
        return done

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/touched.py").write_text(SCRIPT.read_text())
    git("init", "-q")
    commit("README.md")
    return commit, run, git


def checks(done):
    return {line for line in done.stdout.splitlines() if not line.startswith("left ")}


@pytest.mark.parametrize(
    "path, expected",
    [
        ("docs/cuda.md", {"python"}),  # whose tests run the documents' snippets
        ("CHANGELOG.md", set()),
        ("src/cuda/decode/kernel.cuh", {"cuda"}),
        ("src/cuda/prefill_sm90/attend.cuh", {"cuda"}),
        ("python/kvant/_cache.py", {"python", "vllm", "wheel"}),
        ("src/cpu/attend/scores.hpp", HOST | {"arm"}),
        ("src/codec/pack.hpp", HOST | {"arm", "cuda"}),
        ("src/cli/main.cpp", HOST),
        ("tests/pack_test.cpp", {"sanitizers", "arm"}),
        ("tests/gpu/decode_gpu_test.cpp", set()),
        ("dev", HOST | {"arm", "cuda"}),
    ],
)
def test_a_change_runs_what_it_can_fail(checkout, path, expected):
    commit, run, _ = checkout
    commit(path)
    assert checks(run()) == expected
    assert run("--files").stdout.split() == [path]


def test_where_the_change_begins(checkout):
    commit, run, git = checkout
    commit("src/cuda/a.cuh")
    everything = checks(run("--all"))
    assert everything == HOST | {"arm", "cuda"}
    assert checks(run(base=None)) == everything  # no commit is a day old
    assert "must be a commit" in run(base="nowhere").stderr
    git("checkout", "-q", "-b", "topic", "--track")
    commit("CHANGELOG.md")
    assert checks(run(base=None)) == set()  # since the branch that this one follows
