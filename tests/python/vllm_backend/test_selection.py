"""vLLM's gates: CUDA's own selector takes the backend, or refuses it with the reason."""

from __future__ import annotations

import sys
import types

import pytest

H100, A100, T4 = (9, 0), (8, 0), (7, 5)
KERNELS = {
    "name": "cuda",
    "architectures": "80;90a",
    "head_dims": [64, 96, 128, 192, 256, 512],
    "latents": [[512, 64]],
    "pairs": ["tq6/tq4", "tq4/tq4", "bf16/bf16", "f16/f16", "fp8/fp8"],
}


@pytest.fixture
def select(vllm, torch, monkeypatch):
    """select(...) -> the path of the class that vLLM's CUDA platform chooses for --attention-backend CUSTOM."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("_C_stable_libtorch"))
    from kvant.vllm import dtypes, versions
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    build = dict(dtypes.build())
    monkeypatch.setattr(dtypes, "build", lambda: build)
    monkeypatch.setattr(versions, "is_cuda", lambda: True)

    def choose(capability=H100, kernels=KERNELS, **options):
        build["device"] = kernels

        class Platform(CudaPlatformBase):
            @classmethod
            def get_device_capability(cls, device_id=0):
                return DeviceCapability(*capability)

        usual = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "kvant_tq6_tq4", "block_size": None}
        options = usual | options
        return Platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**options))

    return choose


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capability": A100},
        {"kv_cache_dtype": "kvant_tq4"},
        {"kv_cache_dtype": "auto"},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"head_size": 64},
        {"head_size": 512},
        {"block_size": 64},
        {"block_size": 256},
        {"use_kv_connector": True},
        {"use_adaptive_verification": True},
        {"use_dcp": True},
    ],
    ids=str,
)
def test_taken(select, options):
    assert select(**options) == "kvant.vllm.backend.KvantBackend"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not kvant's: choose one such as kvant_tq6_tq4"),
        ({"kv_cache_dtype": "kvant_tq2_tq8"}, "this build of kvant has no CUDA kernels for tq2/tq8: it has tq6/tq4, "),
        ({"head_size": 80}, "kvant has no CUDA kernels for head_size 80: it has 64, 96, 128"),
        ({"head_size": 1024}, "head_size not supported"),
        ({"kernels": None}, "this build of kvant has no CUDA kernels: install"),
        ({"capability": T4}, "compute capability not supported"),
        ({"block_size": 16}, "block_size not supported"),
        ({"block_size": 16}, "--block-size 16: kvant's blocks have 64 tokens: leave out --block-size, or give a multi"),
        ({"block_size": 96}, "--block-size 96: kvant's blocks have 64 tokens"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
    ],
    ids=str,
)
def test_refused(select, options, reason):
    with pytest.raises(ValueError) as error:
        select(**options)
    assert reason in str(error.value)


@pytest.fixture
def select_latents(select, vllm, torch):
    """`select` for a model with latent attention."""
    config = vllm.configuration(
        cache_dtype="auto", block_size=64, dtype=torch.bfloat16, max_requests=1, max_tokens=64, max_model_len=64
    )
    config.model_config.use_mla = True

    def choose(**options):
        with vllm.set_current_vllm_config(config):
            return select(**({"use_mla": True, "head_size": 576, "kv_cache_dtype": "kvant_tq4"} | options))

    return choose


@pytest.mark.parametrize(
    "options",
    [{}, {"capability": A100}, {"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "kvant_tq8_tq5"}, {"block_size": 128},
     {"use_kv_connector": True}],
    ids=str,
)  # fmt: skip
def test_latents_are_taken(select_latents, options):
    assert select_latents(**options) == "kvant.vllm.backend.LatentBackend"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"use_dcp": True}, "kvant: --decode-context-parallel-size is not supported with latent attention: leave it"),
        ({"use_sparse": True}, "kvant: sparse attention (an indexer, as in DeepSeek V3.2) is not supported: serve"),
        ({"use_mla": False}, "kvant: this layer has no latents in a server whose model has them (a draft model?)"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"head_size": 288}, "kvant has no CUDA kernels for 288 numbers of a latent and a rotary key: it has 512 + 64"),
        ({"kernels": KERNELS | {"latents": []}}, "of a latent and a rotary key: it has none"),
        ({"kernels": None}, "this build of kvant has no CUDA kernels: install"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not kvant's: choose one such as kvant_tq4"),
        ({"block_size": 16}, "--block-size 16: kvant's blocks have 64 tokens"),
        ({"capability": T4}, "compute capability not supported"),
    ],
    ids=str,
)
def test_latents_are_refused(select_latents, options, reason):
    with pytest.raises(ValueError) as error:
        select_latents(**options)
    assert reason in str(error.value)


def test_latents_in_float32(select_latents, torch):
    with pytest.raises(ValueError, match="prompts of latent attention take 16 bits: choose --dtype bfloat16 or float1"):
        select_latents(dtype=torch.float32)


def test_who_chose_a_cache_dtype(select, vllm, torch):
    """A checkpoint's quantization config may ask for fp8 where --kv-cache-dtype is absent: the refusal says so."""
    asks = "the checkpoint's quantization config asks for the cache dtype {}, which is not kvant's: give --kv-cache"
    flag = "--kv-cache-dtype {} is not kvant's: choose one such as kvant_tq6_tq4"
    modelopt = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    scheme = types.SimpleNamespace(kv_cache_scheme={"num_bits": 8, "type": "float"})
    for dtype, hf, quantization, text in (
        ("fp8_e4m3", modelopt, None, asks),
        ("fp8", None, scheme, asks),
        ("fp8", None, types.SimpleNamespace(kv_cache_scheme=None), flag),
        ("fp8", None, None, flag),
        ("nvfp4", modelopt, scheme, flag),  # neither asks for this one
    ):
        config = vllm.configuration(
            cache_dtype="auto", block_size=64, dtype=torch.float16, max_requests=1, max_tokens=64, max_model_len=64
        )
        config.quant_config = quantization
        if hf is not None:
            config.model_config.hf_config.quantization_config = hf
        with vllm.set_current_vllm_config(config), pytest.raises(ValueError) as error:
            select(kv_cache_dtype=dtype)
        assert text.format(dtype) in str(error.value)


def test_refused_layers(vllm, dense_pages, torch):
    from kvant.vllm.impl import KvantImpl

    with pytest.raises(NotImplementedError, match="chunk_lookback = 5"):
        KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="kvant_tq4", chunk_lookback=5)
    with pytest.raises(NotImplementedError, match="encoder_only"):
        KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="kvant_tq4", attn_type="encoder_only")
    with pytest.raises(ValueError, match="3 sinks for 4 heads"):
        KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="kvant_tq4", sinks=torch.zeros(3))
    impl = KvantImpl(4, 64, 0.125, 2, kv_cache_dtype="kvant_tq4", chunk_lookback=-1)
    assert not impl.fused_output_quant_supported(None) and not impl.supports_quant_query_input
    with pytest.raises(NotImplementedError, match="outputs quantized"):
        impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
