"""Which model it is: what keys and values depend on counts, as it is at this moment, and nothing else does."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import torch  # noqa: E402

import kvant.hf  # noqa: E402
from identity_support import (  # noqa: E402, F401
    ANSWER, F32, answer, entries, hits, ids, in_bfloat16, plain_answer, query, quiet,
)  # fmt: skip
from kvant.hf import identity, weights  # noqa: E402
from kvant.hf.versions import CACHE_NAME  # noqa: E402
from models import tiny_llama  # noqa: E402


def print_identity():
    return subprocess.run(
        [sys.executable, "-c", "import models\nfrom kvant.hf import identity\n"
         "print(identity.fingerprint(models.tiny_llama()))"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ).stdout.strip()


# --- what counts ---


def one_value(model):
    with torch.no_grad():
        query(model)[17, 93] += 1e-3


def bias_of_a_buffer(model):
    model.model.norm.register_buffer("shift", torch.zeros(70000))


def other_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def own_forward(model):
    model.model.norm.forward = layer_norm


def layer_norm(x):
    return x


ATTRIBUTES = {"epsilon": ("norm", "variance_epsilon", 1e-3), "scale": ("layers.1.self_attn", "scaling", 0.5),
              "window": ("layers.0.self_attn", "sliding_window", 64), "rope": ("rotary_emb", "attention_scaling", 1.1),
              "flag": ("layers.0.self_attn", "use_qk_norm", True)}


@pytest.mark.parametrize("change", [one_value, bias_of_a_buffer, in_bfloat16, other_activation, own_forward])
def test_what_a_model_is_made_of_counts(change):
    model = tiny_llama()
    before = identity.fingerprint(model)
    twin = copy.deepcopy(model)
    change(model)
    change(twin)
    assert identity.fingerprint(model) == identity.fingerprint(twin) != before


def test_each_value_of_a_buffer_counts():
    model = tiny_llama()
    bias_of_a_buffer(model)
    before = identity.fingerprint(model)
    model.model.norm.shift[69999] = 1
    assert identity.fingerprint(model) != before


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_plain_attributes_of_modules_count(name):
    model = tiny_llama()
    before = identity.fingerprint(model)
    module, attribute, value = ATTRIBUTES[name]
    setattr(model.model.get_submodule(module), attribute, value)
    assert identity.fingerprint(model) != before


FIELDS = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5, rope_scaling={"factor": 2.0},
    partial_rotary_factor=0.5, no_rope_layers=[1, 0], max_position_embeddings=17, sliding_window=100,
    layer_types=["full_attention", "sliding_attention"], attention_chunk_size=64, attention_multiplier=0.1,
    embedding_multiplier=2.0, residual_multiplier=0.3, query_pre_attn_scalar=99, attn_logit_softcapping=20.0,
    num_experts_per_tok=3, norm_topk_prob=True, n_group=2, scoring_func="sigmoid", rms_norm_eps=1e-3,
    hidden_act="gelu", activation_function="gelu", swiglu_limit=7.0, attention_bias=True, num_kv_shared_layers=1,
    use_qk_norm=True, clip_qkv=8.0, alibi=True, num_key_value_heads=1, head_dim=16, position_embedding_type="none",
    moe_layers=[1], first_k_dense_replace=1, logits_soft_cap=3.0, is_decoder=False,
)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_speak_of_keys_count(name):
    model = tiny_llama()
    before = identity.fingerprint(model)
    object.__setattr__(model.config, name, FIELDS[name])  # some are checked against each other
    assert identity.fingerprint(model) != before


OTHER = dict(
    pad_token_id=2, eos_token_id=7, bos_token_id=9, output_hidden_states=True, output_router_logits=True,
    problem_type="x",
    note_of_my_own=1, use_cache=False, id2label={0: "a"}, architectures=["Other"], transformers_version="4.0.0",
    _name_or_path="/elsewhere", name_or_path="/elsewhere", initializer_range=0.5, attention_dropout=0.1,
    hidden_dropout=0.1, router_aux_loss_coef=0.5, tie_word_embeddings=True, max_length=20, temperature=0.5,
)


@pytest.mark.parametrize("name", OTHER)
def test_fields_of_other_things_do_not(name):
    model = tiny_llama()
    before = identity.fingerprint(model)
    object.__setattr__(model.config, name, OTHER[name])
    assert identity.fingerprint(model) == before


def test_what_runs_and_names_leave_does_not_count():
    model = tiny_llama()
    before = identity.state(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2  # forward passes of dynamic RoPE write it
    model.model.rotary_emb.max_seq_len_cached = 9999
    model.model.embed_tokens.padding_idx = 3
    model.name_or_path = "/elsewhere"
    model.model.gradient_checkpointing = True
    kvant.hf.enable(model, prefix_cache=1)
    model.generate(ids(20), **ANSWER)
    assert identity.state(model).text == before.text
    assert identity.fingerprint(copy.deepcopy(model)) == before.text
    kvant.hf.disable(model)
    assert identity.fingerprint(model) == before.text


def test_another_process_finds_the_same():
    assert print_identity() == identity.fingerprint(tiny_llama())


# --- contents of tensors ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool,
                                   torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 7, 4096, 8 * 4096 + 3, 5 * 8 * 4096 + 11])
def test_each_byte_of_a_tensor_counts(dtype, count):
    """Sizes around what is hashed as it is, and whole rows of what is summed."""
    draw = random.Random(count)
    x = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    before = weights.checksum(x, "x")
    for place in {0, count - 1, *(draw.randrange(count) for _ in range(5))}:
        other = x.clone()
        other.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert weights.checksum(other, "x") != before
    assert weights.checksum(x.clone(), "x") == before


def test_orders_and_shapes_count_and_strides_do_not():
    x = torch.randn(300, 400)
    before = weights.checksum(x, "x")
    assert weights.checksum(x.t().contiguous().t(), "x") == before
    shifted = torch.empty(x.numel() + 1)[1:].view(300, 400).copy_(x)  # not where 64 bits begin
    assert shifted.data_ptr() % 8 and weights.checksum(shifted, "x") == before
    for other in (x.view(400, 300), x[torch.randperm(300)], x[:, torch.randperm(400)], x.to(torch.float64), -x):
        assert weights.checksum(other, "x") != before


def test_values_that_change_places_count():
    """In a row of the sums their sum stays, and so it does in a column."""
    x = torch.randint(-(1 << 62), 1 << 62, (8, 4096))
    in_row, in_column = x.clone(), x.clone()
    in_row[2, 5], in_row[2, 9] = x[2, 9], x[2, 5]
    in_column[1, 7], in_column[6, 7] = x[6, 7], x[1, 7]
    assert len({weights.checksum(each, "x") for each in (x, in_row, in_column)}) == 3


class Pair(torch.Tensor):
    """A tensor of two others, as torchao has them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"bits": 8}

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(function)
        return arguments[0]


def test_tensors_of_tensors():
    model = tiny_llama()
    plain = identity.fingerprint(model)
    codes, scale = torch.randint(0, 255, (128, 128), dtype=torch.uint8), torch.ones(128)
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(Pair(codes, scale), requires_grad=False)
    first = identity.fingerprint(model)
    scale[5] = 2
    second = identity.fingerprint(model)
    codes[5, 7] ^= 1
    assert len({plain, first, second, identity.fingerprint(model)}) == 4


def quantized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def test_packed_weights_that_are_no_parameters():
    model = tiny_llama()
    a, b = (quantized(copy.deepcopy(model)) for _ in range(2))
    assert identity.fingerprint(a) == identity.fingerprint(b) != identity.fingerprint(model)
    before = identity.fingerprint(b)
    layer = b.model.layers[1].self_attn.k_proj
    weight, bias = layer._weight_bias()
    layer.set_weight_bias(torch.quantize_per_tensor(weight.dequantize() * 1.1, 0.01, 0, torch.qint8), bias)
    assert identity.fingerprint(b) != before


class Extra(torch.nn.Linear):
    note = 1

    def get_extra_state(self):
        return {"scale": torch.tensor([self.note]), "kind": torch.float16}

    def set_extra_state(self, state):
        pass


def test_extra_state_counts():
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.__class__ = Extra
    before = identity.fingerprint(model)
    model.model.layers[0].mlp.up_proj.note = 2
    assert identity.fingerprint(model) != before


def test_state_that_cannot_be_compared_is_refused():
    class Unknown(Extra):
        def get_extra_state(self):
            return (x for x in ())

    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.__class__ = Unknown
    with pytest.raises(ValueError, match="model.layers.0.mlp.up_proj holds a generator, which kvant cannot compare"):
        identity.fingerprint(model)
    kvant.hf.enable(model, prefix_cache=10)
    with pytest.warns(RuntimeWarning, match="no prefix is used for this prompt: .*holds a generator"):
        answer(model)
    assert not entries(model)


# --- what is random, or not known ---


def test_training_mode_is_not_kept_and_said():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    model.train()
    with pytest.warns(RuntimeWarning, match="training mode, in which dropout makes keys random: call model.eval()"):
        answer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        answer(model)
    assert (hits(model), entries(model)) == (0, 0)
    model.eval()
    answer(model)
    drop = torch.nn.Dropout(0.1)
    model.model.layers[1].mlp.add_module("drop", drop.eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer(model)
    drop.train()
    with pytest.warns(RuntimeWarning, match="mlp.drop is in training mode"):
        answer(model)
    drop.p = 0.0
    assert not identity.state(model).random
    assert (hits(model), entries(model)) == (0, 2)


def steer(module, arguments, output):
    return output + 1


def test_hooks_of_others_are_not_known():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    answer(model)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        function = steer if register == "register_forward_hook" else lambda module, arguments: None
        with contextlib.closing(Removing(getattr(model.model.layers[0].mlp, register)(function))):
            with pytest.warns(RuntimeWarning, match="mlp has the forward hook test_hf_identity.*remove the hook"):
                got = answer(model)
            assert torch.equal(got, plain_answer(model))
    assert (hits(model), entries(model)) == (0, 1)
    answer(model)
    assert hits(model) == 1


class Removing:
    def __init__(self, handle):
        self.close = handle.remove


def test_a_forward_with_variables_of_its_own_is_not_known():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    mlp, shift = model.model.layers[0].mlp, torch.ones(128)
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) + shift
    with pytest.warns(RuntimeWarning, match="reads variables that kvant cannot compare"):
        answer(model)
    assert entries(model) == 0


def test_autocast_is_told_apart():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100)
    answer(model)
    with torch.autocast("cpu", torch.bfloat16):
        answer(model)
        assert (hits(model), entries(model)) == (0, 2)
        answer(model)
    assert hits(model) == 1


def test_weights_that_change_within_an_answer_are_not_kept():
    from transformers import StoppingCriteria

    class Trainer(StoppingCriteria):
        def __init__(self, back):
            self.back = back

        def __call__(self, input_ids, scores, **named):
            query(model).data.mul_(2)
            if self.back:
                with torch.no_grad():
                    query(model).mul_(0.5)  # the values are as before, and the keys between are not known
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    for back in (False, True):
        kvant.hf.enable(model, prefix_cache=100, **F32)
        with pytest.warns(RuntimeWarning, match="changed while the answer was computed"):
            model.generate(ids(), stopping_criteria=[Trainer(back)], **ANSWER)
        assert entries(model) == 0


def test_positions_of_the_caller_are_not_those_of_ids():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    positions = torch.arange(200)[None]
    model.generate(ids(), position_ids=positions + 5, **ANSWER)
    assert entries(model) == 0
    model.generate(ids(), position_ids=positions, **ANSWER)
    assert entries(model) == 1


def test_rows_of_several_texts_find_nothing():
    model = kvant.hf.enable(tiny_llama(), prefix_cache=100, **F32)
    answer(model)
    model.generate(torch.cat([ids(), ids(seed=2)]), **ANSWER)
    assert model._kvant.prefixes.index.stats.lookups == 1
    alike = model.generate(torch.cat([ids(), ids()]), **ANSWER)  # equal texts are one
    assert hits(model) == 1 and torch.equal(alike[0], answer(model)[0])


def test_a_longer_cache_than_the_answer_is_cropped_before_it_is_kept():
    """Drafts leave tokens that the answer does not have. The caller's cache keeps them."""
    from transformers import LlamaForCausalLM

    class Longer(LlamaForCausalLM):
        def _sample(self, input_ids, **named):
            output = super()._sample(input_ids, **named)
            output.sequences = output.sequences[:, :-40]
            return output

    model = tiny_llama()
    model.__class__ = Longer
    kvant.hf.enable(model, prefix_cache=100, **F32)
    output = model.generate(ids(), return_dict_in_generate=True, **ANSWER | {"max_new_tokens": 60})
    assert output.sequences.shape[1] == 220 and output[CACHE_NAME].get_seq_length() == 259
    (entry,) = model._kvant.prefixes.index._table.entries.values()
    assert entry.length == 220 == len(entry.parts[0])
    kvant.hf.disable(model)
    model.__class__ = LlamaForCausalLM
    kvant.hf.enable(model, prefix_cache=100, **F32)
    model.generate(ids(), prompt_lookup_num_tokens=5, **ANSWER)
    assert entries(model) == 1
    assert torch.equal(answer(model), plain_answer(model)) and hits(model) == 1


# --- tenants ---


def test_salts_keep_tenants_apart():
    index, model = kvant.PrefixIndex(), tiny_llama()
    for salt, expected in [("a", 0), ("b", 0), ("", 0), ("a", 1), ("b", 2), ("", 3)]:
        kvant.hf.enable(model, prefix_cache=index, prefix_salt=salt)
        answer(model)
        assert index.stats.hits == expected
    with pytest.raises(TypeError, match="prefix_salt is a int: must be a str"):
        kvant.hf.enable(model, prefix_cache=index, prefix_salt=5)
    with pytest.raises(kvant.InvalidArgument, match="there are none without prefix_cache="):
        kvant.hf.enable(model, prefix_salt="a")
