"""Models, prompts and caches that tests of conversations have in common."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import kvant.hf
import models
from hf_support import ISA, forward

EXACT = dict(k="f32", v="f32", isa=ISA)
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


def ids_of(tokens, seed=5, rows=1):
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def plain():
    return models.sharpen(models.tiny_llama())


@pytest.fixture(scope="module")
def model(plain):
    return kvant.hf.enable(copy.deepcopy(plain), **EXACT)


def answer(model, ids, **options):
    """The new tokens."""
    out = model.generate(ids, **GREEDY | options)
    return getattr(out, "sequences", out)[:, ids.shape[1] :]


def filled(model, ids, **options):
    cache = kvant.hf.cache(model)
    forward(model, cache, ids, **options)
    return cache


def restored(model, cache, folder):
    kvant.hf.save(cache, folder / "chat.kvs")
    return kvant.hf.load(model, folder / "chat.kvs")


MEDIA, SHIFT = 290, -12  # the token of an image, and how far one of 16 tokens shifts what comes after


@pytest.fixture(scope="module")
def seeing():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = models.TINY | {"vocab_size": 300, "rope_parameters": rope}
    text.pop("head_dim")
    vision = dict(depth=1, embed_dim=32, hidden_size=128, num_heads=2, mlp_ratio=2, patch_size=4)
    vision |= dict(spatial_merge_size=2, temporal_patch_size=1)
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=MEDIA, video_token_id=291, vision_start_token_id=292,
        vision_end_token_id=293,
    )  # fmt: skip
    return models.sharpen(transformers.Qwen2VLForConditionalGeneration(config).eval(), 4.0)


def picture(seed=3, rows=1):
    """Ids with an image in their middle, and what else a first pass takes."""
    words = ids_of(80, seed, rows)
    image = torch.tensor([[292] + [MEDIA] * 16 + [293]]).expand(rows, -1)
    ids = torch.cat([words[:, :20], image, words[:, 20:]], 1)
    pixels = torch.randn(64 * rows, 48, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, 8, 8]] * rows)
    return ids, dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == MEDIA).long())


def longer_frequencies(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    return models.sharpen(models.tiny_llama(rope_parameters=rope, max_position_embeddings=128))


def longrope():
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    config = transformers.Phi3Config(
        **models.TINY | {"max_position_embeddings": 1024}, original_max_position_embeddings=128, pad_token_id=0,
        rope_parameters=rope | {"original_max_position_embeddings": 128},
    )  # fmt: skip
    return models.sharpen(transformers.Phi3ForCausalLM(config).eval())
