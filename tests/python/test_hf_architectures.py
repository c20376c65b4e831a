"""Architectures of transformers are right under kvant, left to transformers, or refused with a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import architectures  # noqa: E402
import torch  # noqa: E402

# One of each kind: the whole list takes minutes and is tests/python/architectures.md.
QUICK = {
    "flint": "attention",  # sinks, without sdpa
    "vaultgemma": "attention",  # softcap, without sdpa
    "moshi": "attention",  # a window of its cache, not of its masks
    "mllama": "attention",
    "hrm_text": "attention",  # reads is_initialized
    "jamba": "partly",
    "deepseek_v3": "decoded",
    "mimo_v2_flash": "attention",  # values of a size of their own
    "zaya": "left",
    "bloom": "decoded",
    "deepseek_v4": "refused",  # additive masks
    "deepseek_v32": "refused",  # masks for sdpa by its name
    "inkling2_text": "refused",  # sinks for each query
    "openai-gpt": "refused",  # no cache
    "blt": "refused",
}
IMAGES = {"paligemma": "attention", "qwen3_vl": "attention", "gemma3": "attention"}


def here(names, table):
    return {name for name in names if name in table}


@pytest.mark.parametrize("name", sorted(here(QUICK, architectures.CAUSAL)))
def test_an_architecture(name):
    torch.set_num_threads(1)
    result = architectures.examine(name)
    if result.verdict == "not made":
        pytest.skip(f"not in this version of transformers: {result.why}")
    assert result.verdict == QUICK[name], str(result)
    assert result.verdict == "attention" or result.why, str(result)


def test_a_model_of_states_alone_has_nothing_to_store():
    result = architectures.examine("mamba")
    assert result.verdict == "refused" and "keeps no keys and values of earlier tokens" in result.why, str(result)


@pytest.mark.parametrize("name", sorted(here(IMAGES, architectures.WITH_IMAGES)))
def test_an_architecture_with_an_image(name):
    torch.set_num_threads(1)
    result = architectures.examine_with_image(name)
    if not result.image:
        pytest.skip(result.why)
    assert result.verdict == IMAGES[name], str(result)


@pytest.mark.slow
@pytest.mark.parametrize("images", [False, True])
def test_all_architectures(images, tmp_path):
    """None is wrong, and the page tells them all, if it is of this version of transformers."""
    file = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, architectures.__file__, "--json", file, *(["--images"] if images else [])],
        capture_output=True,
        text=True,
    )
    results = [architectures.Result(**r) for r in json.loads(file.read_text())]
    wrong = [str(r) for r in results if r.verdict == "wrong"]
    assert done.returncode == 0 and not wrong, "\n".join(wrong) or done.stderr[-2000:]
    page = Path(architectures.PAGE).read_text(encoding="utf-8")
    if architectures.version() in page:
        titles = ["Images and text, an image in each row", "Images and text, tried with text alone"]
        for i, title in enumerate(titles if images else ["Causal language models"]):
            part = [r for r in results if not images or r.image == (i == 0)]
            for line in architectures.section(title, part):
                assert line in page, "python tests/python/architectures.py --write makes the page again"
