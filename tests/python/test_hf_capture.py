"""kvant.hf.capture: what is in the file is what the model attended over, and the tools read it."""

from __future__ import annotations

import contextlib
import subprocess

import models
import pytest
import torch
from safetensors import safe_open

import kvant
import kvant.hf
from kvant._tools import tool
from kvant.hf import capture


@contextlib.contextmanager
def attention_outputs(model):
    """The input of each attention layer's output projection, by layer number, from the model's own arithmetic."""
    found, hooks = {}, []
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            hooks.append(
                module.o_proj.register_forward_pre_hook(lambda m, x, n=module.layer_idx: found.update({n: x[0][0]}))
            )
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def recomputed(file, layer: int) -> torch.Tensor:
    """Attention of a captured layer in float64 by its definition: [queries, q_heads, head_dim]."""
    meta = file.metadata()
    q, k, v = (file.get_tensor(f"layer{layer}.{part}").double() for part in "qkv")
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * float(meta[f"layer{layer}.scale"])
    position = torch.arange(k.shape[1])
    back = position[-q.shape[1] :, None] - position[None]
    window = int(meta[f"layer{layer}.sliding_window"])
    hidden = (back < 0) | (back >= (window or k.shape[1]))
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def check_against_model(model, ids, path, tolerance: float, **options) -> list[int]:
    with attention_outputs(model) as outputs:
        layers = capture(model, ids, path, **options)
    with safe_open(str(path), "pt") as file:
        for n in layers:
            expected = recomputed(file, n).flatten(1)
            actual = outputs[n][-expected.shape[0] :].double()
            assert (actual - expected).norm() <= tolerance * expected.norm(), f"layer {n}"
    return layers


def test_a_capture_holds_what_the_model_attended_over(tmp_path):
    model = models.sharpen(models.tiny_llama())
    path = tmp_path / "qkv.safetensors"
    before = model.config._attn_implementation
    assert check_against_model(model, models.topics_bytes(150), path, 1e-5, queries=40) == [0, 1]
    assert model.config._attn_implementation == before
    with safe_open(str(path), "pt") as file:
        assert file.get_slice("layer0.q").get_shape() == [4, 40, 32]
        assert file.get_slice("layer1.k").get_shape() == [2, 150, 32]
        assert file.metadata()["layer0.sliding_window"] == "0"


@pytest.mark.parametrize("tokens", [60, 64, 65, 200])
def test_a_window_is_in_the_file(tmp_path, tokens):
    path = tmp_path / "qkv.safetensors"
    check_against_model(models.sharpen(models.tiny_mistral(64)), models.topics_bytes(tokens), path, 1e-5)
    with safe_open(str(path), "pt") as file:
        assert file.metadata()["layer0.sliding_window"] == "64"


def test_chosen_layers_and_first_tokens(tmp_path):
    path = tmp_path / "qkv.safetensors"
    assert capture(models.tiny_llama(), list(range(100)), path, layers=[1], max_tokens=70, queries=500) == [1]
    with safe_open(str(path), "pt") as file:
        assert sorted(file.keys()) == ["layer1.k", "layer1.q", "layer1.v"]
        assert file.get_slice("layer1.q").get_shape() == [4, 70, 32]


def test_it_can_be_called_twice(tmp_path):
    """A module of the same name would take the function's place in kvant.hf when it is imported."""
    assert [kvant.hf.capture(models.tiny_llama(), [1, 2, 3], tmp_path / "x.safetensors") for _ in range(2)] == [
        [0, 1]
    ] * 2


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(kvant.InvalidArgument, match="pass tokenizer="):
        capture(models.tiny_llama(), "text", tmp_path / "x.safetensors")


def test_no_such_layer(tmp_path):
    with pytest.raises(kvant.InvalidArgument, match=r"layers = \[1, 7\]: \[7\]"):
        capture(models.tiny_llama(), [1, 2, 3], tmp_path / "x.safetensors", layers=[1, 7])


def test_capped_logits_are_written_only_on_request(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=64, attn_logit_softcapping=20.0,
    )  # fmt: skip
    model, path = Gemma2ForCausalLM(config).eval(), tmp_path / "x.safetensors"
    with pytest.raises(kvant.Unsupported, match="caps its logits.*approximate=True"):
        capture(model, list(range(100)), path)
    assert not path.exists()
    # The model itself still computes with its cap: its output is that of its own attention function.
    with attention_outputs(model) as outputs:
        capture(model, list(range(100)), path, approximate=True)
        captured = dict(outputs)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(torch.arange(100)[None])
    assert all(torch.allclose(captured[n], outputs[n], atol=1e-6) for n in (0, 1))
    with safe_open(str(path), "pt") as file:
        assert file.metadata()["layer1.softcap"] == "20.0"


def test_chunked_attention_is_refused(tmp_path):
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_local_experts=2, attention_chunk_size=32,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    model = Llama4ForCausalLM(config).eval()
    with pytest.raises(kvant.Unsupported, match="layer 0 .* neither causal nor a sliding window"):
        capture(model, list(range(100)), tmp_path / "x.safetensors")
    assert check_against_model(model, list(range(100)), tmp_path / "x.safetensors", 1e-5, layers=[1]) == [1]


def test_models_off_the_attention_interface_are_refused(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=2))
    with pytest.raises((kvant.Unsupported, kvant.InvalidArgument), match="AttentionInterface"):
        capture(model, [1, 2, 3], tmp_path / "x.safetensors")


def need_tool() -> None:
    try:
        subprocess.run([tool(), "--version"], capture_output=True, check=True)
    except (kvant.Unsupported, OSError) as error:
        pytest.skip(f"no command line tool: {error}")


def test_the_tools_read_a_capture(tmp_path):
    need_tool()
    path, bases = tmp_path / "qkv.safetensors", tmp_path / "bases.safetensors"
    capture(models.sharpen(models.tiny_llama()), models.topics_bytes(400), path, queries=50)
    result = kvant.eval(path, ["f32", "tq4"], arguments=["--exact-ends", "without"])
    rows = {(row["layer"], row["k_format"]): row for row in result["rows"]}
    assert {layer for layer, _ in rows} == {0, 1}
    assert all(rows[n, "f32"]["rel_l2"] < 1e-5 < rows[n, "tq4"]["rel_l2"] < 0.3 for n in (0, 1))
    kvant.calibrate(path, bases)
    assert kvant.Bases(bases)


def test_gemma4_nano(tmp_path, nano_path):
    """A trained model with both kinds of layers and two head_dims."""
    need_tool()
    model, path = models.gemma4_nano(nano_path), tmp_path / "qkv.safetensors"
    assert check_against_model(model, models.topics_bytes(1100), path, 1e-5) == list(range(6))
    with safe_open(str(path), "pt") as file:
        assert [file.metadata()[f"layer{n}.sliding_window"] for n in range(6)] == ["512"] * 5 + ["0"]
        assert file.get_slice("layer5.k").get_shape() == [2, 1100, 512]
    result = kvant.eval(path, ["f32", "tq6/tq4"])
    errors = {row["k_format"]: row["rel_l2"] for row in result["rows"] if row["layer"] == 5}
    assert errors["f32"] < 1e-5 < errors["tq6"] < 0.1


def test_a_basis_of_captured_tensors_helps_on_other_text(tmp_path, nano_path):
    need_tool()
    model, text = models.gemma4_nano(nano_path), models.topics_bytes(6000)
    other, here, bases = (tmp_path / f"{name}.safetensors" for name in ("other", "here", "bases"))
    kvant.hf.capture(model, text[:, 3000:], other, max_tokens=2500, queries=2500)
    kvant.hf.capture(model, text, here, max_tokens=1200)
    kvant.calibrate(other, bases)
    plain, own = (
        kvant.eval(here, ["tq4/tq8"], basis=basis, arguments=["--exact-ends", "without", "--k-centre", "none"])["rows"]
        for basis in (None, bases)
    )
    assert sum(row["kl_mean"] for row in own) < 0.8 * sum(row["kl_mean"] for row in plain)


def test_a_model_with_a_vision_tower(tmp_path):
    import zoo

    model, ids, *_ = zoo.gemma3_with_images(120, 90, 0)
    assert check_against_model(model, ids[:1].clamp(3, 119), tmp_path / "x.safetensors", 1e-5) == [0, 1]


def test_layers_that_read_the_keys_of_others_are_marked(tmp_path):
    import zoo

    model = zoo.build(next(e for e in zoo.ZOO if e.name == "gemma4, shared layers"))
    path = tmp_path / "x.safetensors"
    assert check_against_model(model, models.topics_bytes(120) % 128, path, 1e-5) == [0, 1, 2, 3]
    with safe_open(str(path), "pt") as file:
        assert [file.metadata().get(f"layer{n}.kv_of") for n in range(4)] == [None, None, "0", "1"]
