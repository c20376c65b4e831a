"""Fixtures of the Python tests.

KVANT_TEST_DEVICE=cuda runs the tests that take `device` on a GPU, if torch sees one. Tests marked `slow` are left out
unless `-m slow` or `-m ""` asks for them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT.parent / "shared" / "models" / "gemma4-nano"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; left out unless asked for by -m")


def pytest_collection_modifyitems(config, items):
    given = config.invocation_params.args
    if any(a.startswith("-m") for a in given) or any("::" in a for a in config.args):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason='slow: run with -m slow or -m "slow or not slow"'))


@pytest.fixture(scope="session")
def torch():
    """torch, on one thread: with more, anything else that runs on the machine makes it wait for milliseconds."""
    module = pytest.importorskip("torch", reason="needs torch")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="session")
def transformers(torch):
    module = pytest.importorskip("transformers", reason="needs transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="session")
def device(torch):
    wanted = os.environ.get("KVANT_TEST_DEVICE", "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("KVANT_TEST_DEVICE=cuda, but torch sees no CUDA device")
    return wanted


@pytest.fixture(scope="session")
def nano_path():
    """A small trained model: five layers with a window of 512 and head_dim 256, one full layer with head_dim 512."""
    if not (NANO / "model.safetensors").exists():
        pytest.skip(f"{NANO} is absent: the trained test model is not part of the repository")
    return NANO


@pytest.fixture(scope="session")
def nano(transformers, torch, nano_path, device):
    return transformers.AutoModelForCausalLM.from_pretrained(nano_path, dtype=torch.float32).eval().to(device)


def _tiny(torch, model_class, config, seed=0):
    """A model of random weights, large enough that its logits differ."""
    torch.manual_seed(seed)
    config.initializer_range = 0.1
    return model_class(config).eval()


SIZES = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    vocab_size=256,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


@pytest.fixture(scope="session")
def llama(transformers, torch, device):
    """Four full layers, head_dim 64."""
    return _tiny(torch, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)).to(device)


@pytest.fixture(scope="session")
def sliding(transformers, torch, device):
    """Three layers with a window of 128, one full; head_dim 64."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=128, max_window_layers=0, layer_types=kinds
    )
    return _tiny(torch, transformers.Qwen3ForCausalLM, config).to(device)


@pytest.fixture(scope="session")
def small_llama(transformers, torch, device):
    """One layer: an assistant that guesses badly."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    return _tiny(torch, transformers.LlamaForCausalLM, config, seed=1).to(device)


@pytest.fixture(scope="session")
def text():
    """Some 30000 bytes of English and Python, one token each. Older pages of kvant's: what tests find must not depend
    on a change of the README."""
    return Path(__file__).with_name("text.txt").read_bytes()


@pytest.fixture(scope="session")
def prompts(torch, text, device):
    """prompts(600, 90) -> input_ids and attention_mask of different texts of so many tokens, padded on the left."""

    def make(*lengths, begin=0, left=True):
        longest = max(lengths)
        ids = torch.zeros(len(lengths), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, n in enumerate(lengths):
            at = begin + 4096 * i
            columns = slice(longest - n, longest) if left else slice(0, n)
            ids[i, columns] = torch.tensor(list(text[at : at + n]))
            mask[i, columns] = 1
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    return make
