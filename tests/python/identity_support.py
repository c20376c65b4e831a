"""Models and prompts that tests of a model's identity have in common."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import kvant.hf

ANSWER = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
F32 = dict(k="f32", v="f32")


@pytest.fixture(autouse=True)
def quiet():
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft and transformers
        yield


def ids(n=200, seed=1):
    return torch.randint(3, 250, (1, n), generator=torch.Generator().manual_seed(seed))


def noise(x, seed=3):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype) * 0.2


def query(model, layer=0):
    return model.model.layers[layer].self_attn.q_proj.weight


def hits(model):
    return model._kvant.prefixes.index.stats.hits


def entries(model):
    return model._kvant.prefixes.index.stats.entries


def answer(model, n=200):
    return model.generate(input_ids=ids(n), **ANSWER)


def plain_answer(model, n=200):
    """The answer of a copy without known prefixes."""
    other = copy.deepcopy(model)
    kvant.hf.enable(other, **F32)
    return answer(other, n)


def in_bfloat16(model):
    model.to(torch.bfloat16)
