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
from kvant.hf import identity, weights  # noqa: E402
from kvant.hf.versions import CACHE_NAME  # noqa: E402
from models import sharpen, tiny_llama  # noqa: E402

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


def in_bfloat16(model):
    model.to(torch.bfloat16)


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


# --- adapters ---


def lora(**options):
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4, **options)


def draw(model, part, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if part in name:
            weight.data.normal_(0, 0.3, generator=generator)


@pytest.fixture
def adapted():
    """A model of peft with the adapters "one" and "two"."""
    config = lora()
    import peft

    model = peft.get_peft_model(tiny_llama(), config, adapter_name="one")
    model.add_adapter("two", lora())
    draw(model, ".one.", 1)
    draw(model, ".two.", 2)
    return model.eval()


def of(model):
    return identity.fingerprint(model.get_base_model())


def test_active_adapters_count_and_others_do_not(adapted):
    base = identity.fingerprint(tiny_llama())
    one = of(adapted)
    adapted.set_adapter("two")
    two = of(adapted)
    with adapted.disable_adapter():
        assert of(adapted) == base
    adapted.base_model.set_adapter(["one", "two"])
    both = of(adapted)
    adapted.base_model.set_adapter(["two", "one"])
    assert len({base, one, two, both, of(adapted)}) == 5
    adapted.set_adapter("one")
    assert of(adapted) == one
    draw(adapted, ".two.", 9)  # is not active
    adapted.add_adapter("three", lora())
    adapted.set_adapter("one")
    assert of(adapted.eval()) == one
    draw(adapted, ".one.", 9)
    assert of(adapted) != one


def test_names_of_adapters_do_not_count(adapted):
    draw(adapted, ".two.", 1)
    one = of(adapted)
    adapted.set_adapter("two")
    assert of(adapted) == one


@pytest.mark.parametrize("options", [dict(lora_alpha=32), dict(use_rslora=True), dict(use_dora=True)])
def test_how_an_adapter_is_applied_counts(adapted, options):
    adapted.add_adapter("other", lora(**options))
    draw(adapted, ".one.lora", 1)
    found = [of(adapted)]
    adapted.set_adapter("other")
    adapted.eval()
    for (_, one), (_, other) in zip(
        ((n, p) for n, p in adapted.named_parameters() if ".one." in n and "magnitude" not in n),
        ((n, p) for n, p in adapted.named_parameters() if ".other." in n and "magnitude" not in n), strict=True,
    ):
        other.data.copy_(one.data)
    assert of(adapted) not in found


def test_scales_of_adapters_count(adapted):
    before = of(adapted)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_scale("one", 2)
    assert of(adapted) != before
    layer.set_scale("one", 1)
    assert of(adapted) == before
    layer.set_scale("two", 2)
    assert of(adapted) == before


@pytest.mark.parametrize("name", ["fan_in_fan_out", "cast_input_dtype_enabled"])
def test_attributes_of_adapters_layers_are_looked_at(adapted, name):
    layer = adapted.get_base_model().model.layers[1].self_attn.k_proj
    before, found = of(adapted), getattr(layer, name)
    setattr(layer, name, not found)
    assert of(adapted) != before
    setattr(layer, name, found)
    assert of(adapted) == before


def test_merged_adapters_are_the_weights(adapted):
    base = identity.fingerprint(tiny_llama())
    one = of(adapted)
    adapted.merge_adapter()
    merged = of(adapted)
    draw(adapted, ".one.", 5)  # its weights are read no more
    assert merged == of(adapted) not in (base, one)
    assert identity.fingerprint(copy.deepcopy(adapted.get_base_model())) == merged  # which is looked at anew
    assert identity.fingerprint(adapted.merge_and_unload()) == merged


def test_modules_that_an_adapter_trains_whole():
    config = lora(modules_to_save=["embed_tokens"])
    import peft

    model = peft.get_peft_model(tiny_llama(), config).eval()
    base, first = identity.fingerprint(tiny_llama()), of(model)
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.modules_to_save["default"].weight[7] += 1
    assert len({base, first, of(model)}) == 3
    with model.disable_adapter():
        assert of(model) == base


def test_adapters_without_a_model_of_peft():
    """As transformers puts them into its own models: add_adapter(), load_adapter()."""
    config, model = lora(), tiny_llama()
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = identity.fingerprint(model)
    for number, name in enumerate(("one", "two")):
        peft.inject_adapter_in_model(config, model, name)
        draw(model, f".{name}.", number)
    layers, found = [x for x in model.eval().modules() if isinstance(x, BaseTunerLayer)], []
    for name in ("one", "two"):
        for layer in layers:
            layer.set_adapter(name)
        found.append(identity.fingerprint(model))
    for layer in layers:
        layer.enable_adapters(False)
    assert len({*found, base}) == 3 and identity.fingerprint(model) == base
    for layer in layers:
        layer.enable_adapters(True)
        layer.set_adapter("one")
    assert identity.fingerprint(model) == found[0]


def test_each_adapter_gets_its_own_answer(adapted, tmp_path):
    inner = kvant.hf.enable(adapted.get_base_model(), prefix_cache=tmp_path / "prefixes", **F32)
    twin = copy.deepcopy(adapted)
    kvant.hf.enable(twin.get_base_model(), **F32)
    for known in (0, 1):
        for number, name in enumerate(("one", "two", None), 1):
            with contextlib.ExitStack() as stack:
                for each in (adapted, twin):
                    each.set_adapter(name or "one")
                    if name is None:
                        stack.enter_context(each.disable_adapter())
                got, right = (each.generate(input_ids=ids(), **ANSWER) for each in (adapted, twin))
            assert torch.equal(got, right) and hits(inner) == known * number


def test_a_snapshot_is_of_an_adapter(adapted, tmp_path):
    inner = kvant.hf.enable(adapted.get_base_model())
    cache = kvant.hf.cache(inner)
    with torch.no_grad():
        adapted(input_ids=ids(), **{CACHE_NAME: cache})
    kvant.hf.save(cache, tmp_path / "one.kvs")
    adapted.set_adapter("two")
    with pytest.raises(kvant.InvalidArgument, match="is required"):
        kvant.hf.load(inner, tmp_path / "one.kvs")
    adapted.set_adapter("one")
    assert kvant.hf.load(inner, tmp_path / "one.kvs").get_seq_length() == 200


def passed(model, cache, tokens, adapter=None):
    """A forward pass of tokens over a cache, under an adapter."""
    if adapter is not None:
        model.set_adapter(adapter)
    with torch.no_grad():
        model(input_ids=ids()[:, :tokens], **{CACHE_NAME: cache})
    return cache


def refused(cache, path):
    with pytest.raises(ValueError, match="not those that computed the keys of the cache"):
        kvant.hf.save(cache, path)
    assert not path.exists()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cache_is_saved_under_the_adapter_that_computed_it(adapted, tmp_path, enabled):
    path, inner = tmp_path / "a.kvs", adapted.get_base_model()
    if enabled:
        kvant.hf.enable(inner)
    one, two = (passed(adapted, kvant.hf.cache(inner), 100, name) for name in ("one", "two"))
    for _ in range(3):  # conversations of both at the same time
        passed(adapted, one, 1, "one"), passed(adapted, two, 1, "two")
    refused(one, path)
    refused(copy.deepcopy(one), path)
    kvant.hf.save(two, tmp_path / "two.kvs")
    adapted.set_adapter("one")
    refused(two, path)
    kvant.hf.save(one, path)
    loaded = kvant.hf.load(inner, path)
    path.unlink()
    adapted.set_adapter("two")
    refused(loaded, path)
    passed(adapted, loaded, 1, "two")
    adapted.set_adapter("one")
    refused(loaded, path)  # for a single token
    passed(adapted, one, 20, "two")
    adapted.set_adapter("one")
    refused(one, path)
    one.reset()
    kvant.hf.save(passed(adapted, one, 20), path)


@pytest.mark.parametrize("way", ["off", "merged", "trained", "a scale", "behind autograd"])
def test_what_else_makes_a_cache_another_ones(adapted, tmp_path, way):
    path, inner = tmp_path / "a.kvs", adapted.get_base_model()
    cache = passed(adapted, kvant.hf.cache(inner), 100, "one")
    layer = inner.model.layers[0].self_attn.q_proj
    with contextlib.ExitStack() as stack:
        if way == "off":
            stack.enter_context(adapted.disable_adapter())
        elif way == "merged":
            adapted.merge_adapter()
        elif way == "trained":
            with torch.no_grad():
                layer.lora_A["one"].weight.add_(1)
        elif way == "a scale":
            layer.scaling["one"] *= 2
        else:
            layer.lora_A["one"].weight.data.add_(1)
        refused(cache, path)


def test_a_cache_is_saved_with_another_object_of_the_same_model(tmp_path):
    model = tiny_llama()
    twin = copy.deepcopy(model)
    cache = passed(model, kvant.hf.cache(model), 100)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    refused(cache, tmp_path / "a.kvs")
    kvant.hf.save(cache, tmp_path / "a.kvs", model=twin)
    assert kvant.hf.load(twin, tmp_path / "a.kvs").get_seq_length() == 100


def test_adapters_of_one_request_are_not_known(adapted):
    inner = kvant.hf.enable(adapted.get_base_model(), prefix_cache=100, **F32)
    adapted.generate(input_ids=ids(), **ANSWER)
    with pytest.warns(RuntimeWarning, match="forward hook peft"):
        adapted.generate(input_ids=ids(), adapter_names=["two"], **ANSWER)
    assert (hits(inner), entries(inner)) == (0, 1)


def test_soft_prompts_are_not_known():
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = peft.get_peft_model(tiny_llama(), config).eval()
    inner = kvant.hf.enable(model.get_base_model(), prefix_cache=100, **F32)
    inner.generate(ids(), **ANSWER)
    twin = copy.deepcopy(model)
    kvant.hf.enable(twin.get_base_model(), **F32)
    with pytest.warns(RuntimeWarning, match="soft prompt"):
        got = model.generate(input_ids=ids(), **ANSWER)
    assert torch.equal(got, twin.generate(input_ids=ids(), **ANSWER)) and (hits(inner), entries(inner)) == (0, 1)
    inner.generate(ids(), **ANSWER)
    assert hits(inner) == 1


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
