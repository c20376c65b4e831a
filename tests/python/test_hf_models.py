"""Many architectures, tiny and random, over kvant caches in f32 against transformers' own cache and eager attention.

Each model takes a padded batch of 2 in five forward passes (90, 1, 1, 40, 1 tokens). How kvant served it is part of
what is
tested: fused (its own attention over packed pages), proxy (decoded for a model that computes attention itself), left
    (the layers kept transformers' cache). `pytest -s` prints the table.
"""

from __future__ import annotations

import copy
import warnings

import models
import pytest
import torch
import zoo

import kvant
import kvant.hf
from hf_support import ISA
from kvant.hf import versions

FORWARDS = (90, 1, 1, 40, 1)
PADDING = 17  # tokens before the second row
TOLERANCE = 1e-4  # of the logits' standard deviation

table: dict[str, str] = {}


def run(model, cache, ids, real, **first) -> torch.Tensor:
    """Logits [2, tokens, vocabulary] of all forward passes."""
    outputs, at = [], 0
    with torch.no_grad():
        for n in FORWARDS:
            more = first if at == 0 else {}
            out = model(input_ids=ids[:, at : at + n], attention_mask=real[:, : at + n], use_cache=True,
                        **{versions.CACHE_NAME: cache}, **more)  # fmt: skip
            outputs.append(out.logits)
            at += n
    return torch.cat(outputs, 1)


def served(model, cache, messages: list[str]) -> str:
    """fused, proxy or left, by what the cache holds and what it warned of."""
    layers = [layer for layer in cache.layers if type(layer).__name__ == "KvantLayer"]
    if not layers:
        return "left"
    assert all(layer.length == sum(FORWARDS) for layer in layers)
    return "proxy" if any("decodes the whole cache" in text for text in messages) else "fused"


def compare(name: str, model, ids, real, tolerance: float, **first) -> str:
    """How the model was served; asserts that its logits are right."""
    exact = copy.deepcopy(model)
    exact.set_attn_implementation("eager")
    expected = run(exact, versions.DynamicCache(config=model.config.get_text_config(decoder=True)), ids, real, **first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kvant.hf.enable(model, k="f32", v="f32", short_windows=True, isa=ISA)
        except (ValueError, kvant.KvantError) as error:
            caught.append(error)
        cache = kvant.hf.cache(model, k="f32", v="f32", short_windows=True, isa=ISA)
        actual = run(model, cache, ids, real, **first)
    how = served(model, cache, [str(getattr(w, "message", w)) for w in caught])
    rows = real.bool()
    error = float((actual - expected)[rows].abs().max() / expected[rows].std())
    table[name] = f"{how:<8}{error:9.1e}  {'; '.join(sorted(set(cache.reasons.values())))}"
    assert error <= tolerance, f"{name}: {error:.1e} of the logits' standard deviation"
    # The comparison can fail: what came before the last pass is seen in its logits.
    with torch.no_grad():
        alone = exact(input_ids=ids[:, -1:], attention_mask=real[:, -1:]).logits
    assert float((alone[:, -1] - expected[:, -1]).abs().max() / expected[rows].std()) > 100 * tolerance
    return how


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 128, (2, sum(FORWARDS)), generator=torch.Generator().manual_seed(5))
    real = torch.ones_like(ids)
    real[1, :PADDING] = 0
    return ids * real, real


@pytest.mark.parametrize("entry", zoo.ZOO, ids=lambda entry: entry.name)
def test_a_model_computes_what_eager_attention_does(entry):
    torch.set_num_threads(1)
    model = zoo.build(entry)
    if model is None:
        pytest.skip("not in this version of transformers")
    assert compare(entry.name, model, *batch(), entry.tolerance) == entry.expected


def test_images_in_a_padded_batch():
    """Gemma 3 with a vision tower: an image's tokens see each other in both directions, also under a window."""
    torch.set_num_threads(1)
    model, ids, real, first = zoo.gemma3_with_images(sum(FORWARDS), FORWARDS[0], PADDING)
    assert compare("gemma3, images", model, ids, real, TOLERANCE, **first) == "fused"
    assert model.config.vision_config._attn_implementation != "kvant"


def test_most_models_are_fused():
    if len(table) < len(zoo.ZOO):
        pytest.skip("runs after the tests of all models")
    print("\n" + "\n".join(f"{name:<24}{line}" for name, line in table.items()))
    assert sum(line.startswith("fused") for line in table.values()) >= 20
