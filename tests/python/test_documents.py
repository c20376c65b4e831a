"""The Python of README.md and docs/*.md runs as it stands, and what a page says is printed is printed.

The blocks of a page run in order in one namespace, in a folder that has the texts of FILES alone. A small model with
the geometry of the named one stands in for it. A block whose first line is `# needs ...` is compiled only; readers see
what it needs, too. A block marked `text` is what the Python block before it prints.
"""

from __future__ import annotations

import re
from pathlib import Path

import models
import pytest
import torch

from kvant._tools import tool

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = {"text.txt": 210, "other.txt": 300}  # characters
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"# needs [\w ]+\n")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(language, text, line) of each fenced block of Python or of what one prints."""
    text = page.read_text(encoding="utf-8")
    found = [(m[1], m[2], text.count("\n", 0, m.start(2))) for m in FENCE.finditer(text)]
    return [block for block in found if block[0] in ("python", "text")]


def smollm2_135m():
    """As many layers and kv heads as SmolLM2-135M has, and its head_dim: caches take what its caches take."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=18, intermediate_size=16, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, bos_token_id=None, eos_token_id=None, pad_token_id=256,
        max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def stand_ins(transformers, torch, monkeypatch, tmp_path):
    def named(make):
        def from_pretrained(name, **options):
            assert name == MODEL, f"no small model stands in for {name}"
            return make(**options)

        return from_pretrained

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", named(smollm2_135m))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", named(models.byte_tokenizer))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["page"])
    for name, size in FILES.items():
        Path(name).write_text(models.topics_text()[:size])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_of_a_page(page, stand_ins, capsys):
    found, namespace, printed = blocks(page), {"__name__": "page"}, None
    if any("calibrate(" in text for _, text, _ in found):
        try:
            tool()
        except Exception as error:
            pytest.skip(f"needs `kvant calibrate`: {error}")
    for language, text, line in found:
        if language == "text":
            assert printed == text, f"{page.name}, line {line}: what is printed is\n{printed}"
            continue
        code = compile("\n" * line + text, str(page), "exec")
        if NEEDS.match(text):
            printed = None
            continue
        exec(code, namespace)
        printed = capsys.readouterr().out


def figures(page: str, pattern: str) -> list[str]:
    found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page} has no {pattern}"
    return list(found.groups())


def test_two_pages_give_one_figure_for_one_measurement():
    """The README repeats figures of pages that say how they were measured."""
    number = r"(\d[\d.]*(?:e-\d+)?)"
    both = rf"{number}\s+\({number}\)"  # SmolLM2's and Qwen's
    readme = figures(
        "README.md", rf"the default moves predictions by a KL\s+divergence\s+of {both}, `tq4/tq4`\s+by\s+{both}, "
        rf"`fp8`\s+by\s+{both}",
    )  # fmt: skip
    smollm2 = [figures("docs/measurements.md", rf"\n\| {row} \| {number} \|")[0] for row in (
        r"\*\*tq6 / tq4\*\* \(default\)", "tq4 / tq4", "fp8 / fp8",
    )]  # fmt: skip
    qwen = figures(
        "docs/measurements.md", rf"Qwen2.5-Coder-1.5B-Instruct \(\d+ tokens\) {number}\s+with\s+tq6/tq4, "
        rf"{number}\s+with\s+tq4, {number}\s+with\s+fp8;",
    )  # fmt: skip
    assert list(map(float, readme[::2])) == list(map(float, smollm2))
    assert list(map(float, readme[1::2])) == list(map(float, qwen))
    readme = figures("README.md", rf"takes\s+{number}\s+us\s+as `tq4`\s+and\s+{number} as `tq6/tq4`.*?takes {number}")
    ours = rf"takes\s+{number}\s+us\s+as\s+tq6/tq4\s+and\s+{number}\s+us\s+as\s+tq4"
    page = figures("docs/cuda.md", rf"{ours},\s+where\s+Flash.*?takes\s+{number}")
    assert readme == [page[1], page[0], page[2]]


def test_speed_in_vllm_is_one_measurement_everywhere():
    number = r"(\d+\.\d+)"
    row = r"\n\| {} \| \d+(?:\.\d+)? \| [\d.]+ \({}\)"
    measured = [
        figures("docs/measurements.md", row.format(what, number))[0]
        for what in ("16 x 8192", "1 x 2048", r"128 requests of 4096 \+ 512, all output")
    ]
    many, one, throughput = measured
    of_8192 = r"16\s+requests\s+of\s+8192\s+tokens"
    readme = figures("README.md", rf"{of_8192}\s+{number}\s+times.*?2048\s+tokens\s+{number}\s+times")
    assert readme == [many, one]
    for page in ("docs/vllm.md", "CHANGELOG.md"):
        text = figures(page, rf"{of_8192}\s+decode\s+{number}\s+times.*?{number}\s+times")
        assert text == [many, throughput], page
        assert figures(page, rf"one\s+request\s+of\s+2048\s+tokens(?:\s+decodes)?\s+{number}\s+times") == [one], page


def test_the_prefix_of_the_snippet_is_longer_than_a_page_of_any_tokenizer():
    """Bytes stand in for tokens here; a real tokenizer makes at least one token of a word."""
    prompt, times = figures("docs/hugging-face.md", r'\nsystem_prompt = "([^"]*)" \* (\d+)\n')
    assert len(prompt.split()) * int(times) > 64
