"""vLLM for these tests: its Python files, on its CPU platform.

KVANT_TEST_DEVICE=cuda puts layers, caches and metadata on a GPU; vLLM itself is still told that it runs on a CPU. Needs
vLLM 0.33 or newer without its compiled libraries: ./dev vllm-test makes such an environment. Elsewhere all tests
of this folder are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from types import SimpleNamespace

import pytest

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read when vLLM is imported: no device is looked for
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_PLUGINS"] = ""  # entry points of an installed kvant would register first

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def registered(torch):
    """kvant registered, as vLLM does it."""
    import kvant.vllm

    kvant.vllm.register()
    return kvant.vllm


def _configuration(
    *, cache_dtype, block_size, dtype, max_requests, max_tokens, max_model_len, drafts=0, skip_layers=()
):
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = VllmConfig(
        cache_config=CacheConfig(
            block_size=block_size, cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skip_layers)
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
        ),
    )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len,
        dtype=dtype,
        rswa_window=None,
        is_mm_prefix_lm=False,
        hf_config=SimpleNamespace(model_type="llama"),
    )
    if drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False, method="ngram"
        )
    return config


@pytest.fixture(scope="session")
def vllm(registered, torch):
    """The parts of vLLM that the tests call, in a process whose platform chooses backends as CUDA's does."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, get_kv_cache_spec, init_attn_backend, init_kv_cache

    def choose(cls, selected, attn_selector_config, num_heads=None):  # its own choice is always CPU_ATTN
        backend = selected.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"{selected.name}: {reasons}")
        return selected.get_path()

    type(current_platform).get_attn_backend_cls = classmethod(choose)

    @contextlib.contextmanager
    def default_dtype(dtype):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    def resolve_layout(config, backends, specs):
        names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        return resolve_kv_cache_layout(config, [names], specs.values())

    return SimpleNamespace(
        configuration=_configuration,
        resolve_layout=resolve_layout,
        set_current_vllm_config=set_current_vllm_config,
        set_forward_context=set_forward_context,
        Attention=Attention,
        get_kv_cache_config_from_groups=get_kv_cache_config_from_groups,
        get_kv_cache_groups=get_kv_cache_groups,
        build_attn_metadata=build_attn_metadata,
        get_kv_cache_spec=get_kv_cache_spec,
        init_attn_backend=init_attn_backend,
        init_kv_cache=init_kv_cache,
        default_dtype=default_dtype,
    )


@pytest.fixture
def dense_pages(monkeypatch):
    """kvant.Pages replaced by float64 attention: the plugin's use of it remains."""
    import kvant
    from kvant.vllm import dtypes, layer

    from . import dense, engine

    if not engine.ON_CPU:
        pytest.skip("the float64 pages are on the CPU")
    monkeypatch.setattr(kvant, "Pages", dense.Pages)
    forget = dtypes.token_bytes.cache_clear, layer._pages.cache_clear
    for f in forget:
        f()
    yield "kvant_tq8"
    for f in forget:
        f()


@pytest.fixture(params=["float64", "kvant"])
def pages(request):
    """The cache dtype of an exact cache: in float64 behind the interface of kvant.Pages, and in float32 by kvant."""
    return request.getfixturevalue("dense_pages") if request.param == "float64" else "auto"
