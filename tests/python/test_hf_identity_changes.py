"""Which model it is: weights that change in place, or that are elsewhere."""

from __future__ import annotations

import copy
import os
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from identity_support import (  # noqa: E402, F401
    F32, answer, entries, hits, ids, in_bfloat16, noise, plain_answer, query, quiet,
)  # fmt: skip
from kvant.hf import identity, weights  # noqa: E402
from kvant.hf.versions import CACHE_NAME  # noqa: E402
from models import tiny_llama  # noqa: E402


# --- changes in place ---


def through_data(model):
    query(model).data.copy_(noise(query(model)))


def with_other_data(model):
    query(model).data = noise(query(model))


def in_inference_mode(model):
    with torch.inference_mode():
        query(model).copy_(noise(query(model)))


def data_in_inference_mode(model):
    with torch.inference_mode():
        query(model).data.mul_(1.5)


def load_state(model):
    model.load_state_dict({name: x + 0.01 * noise(x) for name, x in model.state_dict().items()})


def assign_state(model):
    model.load_state_dict({name: x + 0.01 * noise(x) for name, x in model.state_dict().items()}, assign=True)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=ids(20), labels=ids(20), use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def one_row(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[200] += 1


def transposed_data(model):
    query(model).data = query(model).data.t()


def other_module(model):
    model.model.layers[0].self_attn.q_proj = copy.deepcopy(model.model.layers[1].self_attn.q_proj)


def other_epsilon(model):
    model.model.norm.variance_epsilon *= 2
    model.model.norm.variance_epsilon *= 2  # the second object may be where the first one was


WAYS = [through_data, with_other_data, in_inference_mode, data_in_inference_mode, load_state, assign_state, train,
        one_row, transposed_data, other_module, other_epsilon, in_bfloat16]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_is_noticed_at_the_next_look_up(way):
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    answer(model)
    before = identity.state(model)
    assert identity.state(model) is before
    way(model)
    assert torch.equal(answer(model), plain_answer(model)) and hits(model) == 0
    after = identity.state(model)
    assert after.text != before.text and after.text == identity.fingerprint(copy.deepcopy(model))
    answer(model)
    assert hits(model) == 1


def test_old_weights_that_come_back_find_their_entries():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    old, first = query(model).detach().clone(), answer(model)
    through_data(model)
    answer(model)
    query(model).data.copy_(old)
    assert torch.equal(answer(model), first) and hits(model) == 1


def test_tensors_of_inference_mode():
    """They count no versions."""
    with torch.inference_mode():
        model = tiny_llama()
    kvant.hf.enable(model, prefix_cache=100, **F32)
    answer(model)
    with torch.inference_mode():
        query(model).mul_(2)
    answer(model)
    assert hits(model) == 0 and entries(model) == 2


def test_another_tensor_in_the_same_place_is_read_again():
    """Its version and its samples may be those of the older one."""
    model = tiny_llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.data)
    before = identity.fingerprint(model)
    for place in range(100):  # until a value is between the samples
        layer.weight.data.view(-1)[place] += 1
        if identity.fingerprint(model) == before:
            break
        layer.weight.data.view(-1)[place] -= 1
        before = identity.fingerprint(model)
    layer.weight = torch.nn.Parameter(layer.weight.data)
    assert identity.fingerprint(model) != before


def test_samples_are_of_all_of_a_tensor():
    """A tenth of the values of a large tensor, written past its version, wherever they are."""
    x = torch.zeros(1000, 1000)
    for begin in range(0, 1000, 100):
        for axis in (0, 1):
            sampler = weights.Sampler()
            now = weights.stamps([x])
            before = sampler.read([x], now)
            part = x.data.narrow(axis, begin, 100)
            part += 1
            assert weights.stamps([x]) == now and sampler.read([x], now) != before
            part -= 1
            assert sampler.read([x], now) == before


def test_many_kinds_of_tensors_are_sampled():
    tensors = [torch.zeros(60, 50), torch.zeros(60, 50).t(), torch.zeros(60, 50)[::2, ::3], torch.zeros(3),
               torch.zeros(9, dtype=torch.float8_e5m2), torch.zeros(4, 5, dtype=torch.bool), torch.zeros(()),
               torch.zeros(0), torch.zeros(20, 30, 40).permute(2, 0, 1), torch.zeros(70, dtype=torch.float64)]
    for x in tensors:
        if not x.numel():
            continue
        sampler, now = weights.Sampler(), weights.stamps(tensors)
        before = sampler.read(tensors, now)
        kept = x.clone()
        x.data.copy_(torch.ones(x.shape).to(x.dtype))
        assert sampler.read(tensors, now) != before
        x.data.copy_(kept)


# --- weights that are elsewhere ---


def offload(model, way, folder):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    if way == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif way == "disk":
        accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    else:
        model.save_pretrained(folder / "model")
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
        places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
        model = type(model).from_pretrained(folder / "model", device_map=places, offload_folder=folder / "offloaded")
    return model


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_offloaded_weights_are_read_where_they_are(way, tmp_path):
    before, expected = identity.fingerprint(tiny_llama()), answer(tiny_llama())
    model = offload(tiny_llama(), way, tmp_path)
    assert identity.fingerprint(model) == before
    kvant.hf.enable(model, prefix_cache=100, **F32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for number in range(2):
            assert torch.equal(answer(model), expected) and hits(model) == number
    cache = kvant.hf.cache(model)
    with torch.no_grad():
        model(ids(), **{CACHE_NAME: cache})
    kvant.hf.save(cache, tmp_path / "chat.kvs")
    assert kvant.hf.load(model, tmp_path / "chat.kvs").get_seq_length() == 200
    other = tiny_llama()
    with torch.no_grad():
        query(other)[5, 5] += 1
    other = offload(other, way, tmp_path / "other")
    assert identity.fingerprint(other) != before
    with pytest.raises(kvant.InvalidArgument, match="is required"):
        kvant.hf.load(other, tmp_path / "chat.kvs")


def test_offloaded_weights_that_change(tmp_path):
    for way in ("cpu", "disk"):
        model = offload(tiny_llama(), way, tmp_path)
        before, layer = identity.fingerprint(model), model.model.layers[0].self_attn.q_proj
        source = layer._hf_hook.weights_map
        if way == "cpu":
            source[("weight")].add_(1)
        else:
            path = tmp_path / "model.layers.0.self_attn.q_proj.weight.dat"
            data = bytearray(path.read_bytes())
            data[77] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(1, 1))
        assert identity.fingerprint(model) != before


def test_weights_that_nobody_has_are_refused(tmp_path):
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(ValueError, match="is on the meta device, and no hook of accelerate says where its values are"):
        identity.fingerprint(model)


# --- two processes ---


@pytest.mark.parametrize("prompts", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_while_adapters_and_weights_change(prompts):
    pytest.importorskip("peft", reason="needs peft")
    import adapters_bar

    counts = adapters_bar.run(prompts, 2, seed=1)
    print(counts)
    assert counts["equal"] == counts["prompts"] == counts["look-ups"] == prompts
    assert counts["hits"] and counts["adapters changed"] and counts["updates in place"]
