"""kvant.hf.evaluate: its statistics against their definitions, and its runs against what they must find."""

from __future__ import annotations

import json
import math

import models
import numpy as np
import pytest
import torch

import kvant
import kvant.hf
from kvant.hf import _evaluate as evaluation


def test_statistics_of_one_position():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), in numbers."""
    exact, other = torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([[1.0, 2.0, 1.0]])
    found = evaluation.compare(exact * math.log(2), other * math.log(2), torch.tensor([1]))
    # sum p log(p / q) = 1/2 log 2 - 1/4 log 2; half of (1/4 + 1/4 + 0); favourites differ; log(p / q) = log(1/4 / 1/2)
    expected = [math.log(2) / 4, 0.25, 0.0, -math.log(2), 0.5]
    assert found.dtype == torch.float64
    assert torch.allclose(found[0], torch.tensor(expected, dtype=torch.float64), atol=1e-7)


def test_tokens_that_are_ruled_out_add_nothing():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    found = evaluation.compare(logits, torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([0]))
    assert abs(float(found[0, 0]) - math.log((2 + math.exp(-1)) / 2)) < 1e-7  # both p are 1/2, q = 1 / (2 + e^-1)


def test_divergences_near_zero_are_not_noise():
    """A float32 softmax has errors of 1e-7; a change of the logits by 1e-6 must still be seen as what it is."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(8, 5000, generator=generator, dtype=torch.float64)
    change = 1e-3 * torch.randn(8, 5000, generator=generator, dtype=torch.float64)
    found = evaluation.compare(exact, exact + change, torch.zeros(8, dtype=torch.long))[:, 0]
    p = exact.softmax(-1)
    second_order = (
        (p * change**2).sum(-1) - (p * change).sum(-1) ** 2
    ) / 2  # KL(p, p + dp) = var_p(change) / 2 + O(change^3)
    assert torch.allclose(found, second_order, rtol=1e-2)


def test_the_interval_is_that_of_a_mean():
    """Blocks that are independent and alike: the bootstrap must give mean +- 1.96 standard errors."""
    values = torch.randn(64 * 400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = evaluation.interval(values)
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(low - (float(values.mean()) - 1.96 * error)) < 0.15 * error
    assert abs(high - (float(values.mean()) + 1.96 * error)) < 0.15 * error


def test_neighbours_that_are_alike_widen_the_interval():
    """64 equal neighbours are one observation, not 64."""
    blocks = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = evaluation.interval(blocks.repeat_interleave(64))
    assert abs((high - low) - 2 * 1.96 * float(blocks.std()) / 20) < 0.03
    assert evaluation.interval(blocks[:64]) is None


def test_buckets_hold_every_position_once():
    found = torch.zeros(6, 5, dtype=torch.float64)
    found[:, 4] = torch.tensor([0.1, 0.5, 0.89, 0.9, 0.99, 1.0], dtype=torch.float64)
    found[:, 0] = torch.arange(6.0, dtype=torch.float64)
    row = evaluation.summary("tq6", "tq4", True, found)
    assert [(b.low, b.positions) for b in row.buckets] == [(0.0, 1), (0.5, 2), (0.9, 1), (0.99, 2)]
    assert [b.kl for b in row.buckets] == [0.0, 1.5, 3.0, 4.5]


def test_weights_that_are_packed_are_refused():
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    with pytest.raises(kvant.Unsupported, match="Packed has quantized weights .*uint8.*dtype=torch.float32"):
        evaluation.in_float32(Packed())


def test_arguments():
    model = models.tiny_llama()
    with pytest.raises(kvant.InvalidArgument, match="first = 20"):
        evaluation.evaluate(model, [1] * 30, positions=20, first=20)
    with pytest.raises(kvant.InvalidArgument, match="has 1 tokens"):
        evaluation.evaluate(model, [1])
    with pytest.raises(kvant.InvalidArgument, match="exact_ends"):
        evaluation.evaluate(model, [1] * 30, exact_ends="some")


@pytest.fixture(scope="module")
def llama_evaluation():
    torch.set_num_threads(1)
    model = models.sharpen(models.tiny_llama(), 20.0)
    before = model.config._attn_implementation
    found = evaluation.evaluate(
        model, models.topics_bytes(700), ("f32", "fp8", "tq8", "tq3"), positions=600, progress=False
    )
    assert model.config._attn_implementation == before
    return found


def test_better_formats_move_the_model_less(llama_evaluation):
    rows = {row.name: row for row in llama_evaluation.rows}
    assert list(rows) == ["f32", "fp8", "fp8, all encoded", "tq8", "tq3"]
    assert rows["f32"].kl < 1e-10 < rows["tq8"].kl < rows["fp8"].kl < rows["tq3"].kl
    assert rows["fp8"].kl < rows["fp8, all encoded"].kl
    assert rows["tq3"].bytes < rows["tq8"].bytes < rows["f32"].bytes
    assert rows["f32"].top1 == 1.0 and abs(rows["f32"].perplexity_ratio - 1) < 1e-6
    for row in rows.values():
        assert row.bf16_bytes == 600 * 2 * 2 * 2 * 32 * 2  # tokens, layers, keys and values, heads, head_dim, bytes
        assert row.positions == 600 and row.kl_interval[0] <= row.kl <= row.kl_interval[1]


def test_the_result_as_a_table_and_as_json(llama_evaluation, tmp_path):
    lines = str(llama_evaluation).splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert sum(line.startswith("fp8, all encoded") for line in lines) == 2
    read = json.loads(llama_evaluation.to_json(tmp_path / "e.json"))
    assert read == json.loads((tmp_path / "e.json").read_text())
    assert [row["kl"] for row in read["rows"]] == [row.kl for row in llama_evaluation.rows]


def test_a_bf16_model_is_measured_in_float32():
    model = models.sharpen(models.tiny_llama(), 20.0).bfloat16()
    found = evaluation.evaluate(model, models.topics_bytes(200), ("f32",), positions=150, first=10, progress=False)
    assert model.dtype == torch.bfloat16
    assert found.rows[0].kl < 1e-10 and found.rows[0].positions == 140


def test_positions_that_read_codes_are_counted():
    """Steps of 4: the first query that reads codes has the page behind the sink page out of the tail, at 192 tokens."""
    model, ids = models.sharpen(models.tiny_llama(), 20.0), models.topics_bytes(301)
    found = evaluation.evaluate(model, ids, ("tq4", "fp8"), exact_ends="both", first=8, progress=False)
    # 64 (p + 1 + T) = 192 for p = 1; a step of 4 queries at n tokens reads as its first one would.
    first = next(n for n in range(4, 301, 4) if n - 3 >= 192) - 4
    assert [row.from_codes for row in found.rows] == [300 - first, 292, 300 - first, 292]
    line = next(line for line in str(found).splitlines() if line.startswith("tq4 "))
    assert line.split()[2] == str(300 - first) and "encoded: positions at which" in str(found)


def test_texts_too_short_for_any_code_are_told():
    model, ids = models.tiny_llama(), models.topics_bytes(150)
    with pytest.warns(UserWarning, match="tq4, tq8: none of the 149 positions read encoded tokens.*longer text"):
        found = evaluation.evaluate(model, ids, ("tq4", "tq8", "f32"), progress=False)
    assert [row.from_codes for row in found.rows] == [0, 0, 149] and found.rows[0].kl < 1e-4


def test_the_exact_perplexity_is_that_of_the_text():
    model, ids = models.tiny_llama(), models.topics_bytes(301)
    found = evaluation.evaluate(model, ids, ("f32",), progress=False)
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss.exp())
    assert np.isclose(found.reference_perplexity, expected, rtol=1e-4)


def test_layers_that_kvant_does_not_store_are_named():
    """Without that, a model that is left to transformers would seem to be stored without loss."""
    model = models.tiny_mistral(128)
    with pytest.raises(kvant.Unsupported, match="stores no layer of MistralForCausalLM.*short_windows=True"):
        evaluation.evaluate(model, models.topics_bytes(100), ("tq4",), progress=False)
    found = evaluation.evaluate(
        model, models.topics_bytes(300), ("tq4",), short_windows=True, skip_layers=[1], progress=False
    )
    assert found.rows[0].layers_left == (1,) and "so exact: layers 1 (" in str(found)
    assert all(len(line) <= 120 for line in str(found).splitlines())


def test_a_model_on_a_device(device):
    """The same figures where the model is: kernels of another kind over the same bytes."""
    if device == "cpu":
        pytest.skip("runs with KVANT_TEST_DEVICE=cuda")
    ids, formats = models.topics_bytes(600), ("bf16", "tq6/tq4", "tq4")
    rows = {}
    for where, options in (("cpu", {"exact": "bf16"}), (device, {})):
        model = models.sharpen(models.tiny_llama(hidden_size=256, head_dim=64), 20.0).to(where)
        found = evaluation.evaluate(model, ids, formats, progress=False, **options)
        assert found.device.startswith(where)
        rows[where] = found.rows
    for here, there in zip(rows["cpu"], rows[device]):
        assert there.layers_left == () and 0.7 < there.kl / here.kl < 1.4, (there.name, here.kl, there.kl)


def test_a_model_with_a_vision_tower():
    """The text decoder is what is measured; the tower keeps its attention."""
    import zoo

    model, ids, *_ = zoo.gemma3_with_images(300, 90, 0)
    towers = model.config.vision_config._attn_implementation
    found = evaluation.evaluate(model, ids[:1].clamp(3, 119), ("f32", "tq3"), short_windows=True, progress=False)
    assert found.rows[0].kl < 1e-10 < found.rows[1].kl and found.rows[0].layers_left == ()
    assert model.config.vision_config._attn_implementation == towers


def test_an_enabled_model_stays_enabled():
    model = models.tiny_llama().bfloat16()
    kvant.hf.enable(model, k="tq4", v="tq4")
    evaluation.evaluate(model, models.topics_bytes(150), ("tq8",), progress=False)
    assert model.config._attn_implementation == "kvant"
    out = model.generate(models.topics_bytes(150), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 153) and kvant.hf.report(model).rows[0].k == "tq4"
