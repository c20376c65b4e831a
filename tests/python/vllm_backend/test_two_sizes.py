"""MiMo V2 in vLLM's engine on the CPU: keys and values of different sizes, layers with windows and sinks."""

from __future__ import annotations

import json

import pytest
from .test_generate import engine

pytestmark = pytest.mark.slow

HEADS, WINDOW = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 192, "v_head_dim": 128}, 100
# vLLM reads these names too, which the model's published files have and Hugging Face's class does not write.
OF_VLLM = {
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 0, 0],
    "layernorm_epsilon": 1e-5,
    "sliding_window_size": WINDOW,
    "rope_theta": 5_000_000.0,
    "swa_rope_theta": 10_000.0,
    "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,  # Hugging Face has twice as many as in the other layers
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
}


@pytest.fixture(scope="module")
def model(torch, tmp_path_factory):
    """(Hugging Face's model, the folder that vLLM loads)"""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from safetensors.torch import load_file, save_file

    config = transformers.MiMoV2FlashConfig(
        **HEADS, vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=3, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], mlp_layer_types=["dense"] * 3,
        max_position_embeddings=4096, bos_token_id=None, initializer_range=0.3,
    )
    torch.manual_seed(5)
    made = transformers.MiMoV2FlashForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
    folder = tmp_path_factory.mktemp("mimo")
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = {name.replace(".sinks", ".attention_sink_bias"): x for name, x in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["MiMoV2FlashForCausalLM"]
    (folder / "config.json").write_text(json.dumps(written | OF_VLLM))
    return made, str(folder)


PROMPTS = [[(7 * i * i + 3 * i) % 251 for i in range(n)] for n in (300, 64, 1, 129)]


def tokens(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return [t for t, _ in json.loads(lines[0].removeprefix("RESULT "))["rounds"][0]]


def gaps(torch, made, folder, cache_dtype):
    """For each prompt: by how much the log probability of each token that vLLM chose is below the model's largest."""
    for prompt, got in zip(PROMPTS, tokens(engine(folder, cache_dtype, (PROMPTS, 12)))):
        with torch.no_grad():
            logits = made(torch.tensor([prompt + got[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        yield logits.max(dim=1).values - logits.gather(1, torch.tensor(got)[:, None])[:, 0]


def test_exact_pages_give_the_models_tokens(torch, model):
    for gap in gaps(torch, *model, "auto"):
        assert gap.max() < 1e-3


@pytest.mark.parametrize("cache_dtype, bound", [("kvant_tq8", 0.1), ("kvant_tq6_tq4", 0.6)])
def test_formats(torch, model, cache_dtype, bound):
    for gap in gaps(torch, *model, cache_dtype):
        assert gap.mean() < bound
