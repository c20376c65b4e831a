"""Registration: names, repeats, versions, processes that do not use it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_the_package_imports_neither_vllm_nor_torch():
    loaded = run("import kvant.vllm, sys; print('vllm' in sys.modules, 'torch' in sys.modules)")
    assert loaded.split() == ["False", "False"]


def test_names(registered, torch):
    from kvant.vllm import dtypes
    from vllm.config.cache import KV_CACHE_DTYPES, CacheConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode, is_quantized_kv_cache

    for name in ("kvant_tq6_tq4", "kvant_tq4_tq4", "kvant_tq8_tq4", "kvant_fp8_fp8", "kvant_tq4", "kvant_fp8"):
        assert name in KV_CACHE_DTYPES and STR_DTYPE_TO_TORCH_DTYPE[name] == torch.uint8
        assert get_kv_quant_mode(name) == KVQuantMode.CUSTOM and is_quantized_kv_cache(name)
        assert CacheConfig(cache_dtype=name).cache_dtype == name
    assert dtypes.parse("kvant_tq6_tq4", torch.bfloat16) == ("tq6", "tq4")
    assert dtypes.parse("kvant_tq4", torch.bfloat16) == ("tq4", "tq4")
    assert dtypes.parse("auto", torch.bfloat16) == ("bf16", "bf16")
    assert not any("lut" in name or "f32" in name for name in dtypes.names())
    with pytest.raises(ValueError, match="kvant_tq6_tq4"):
        dtypes.parse("kvant_tq6_tq9", torch.bfloat16)


def test_every_name_is_registered_once(registered):
    from vllm.config.cache import KV_CACHE_DTYPES

    before = list(KV_CACHE_DTYPES)
    registered.register()
    registered._registered = False  # as in a process that was forked
    registered.register()
    assert KV_CACHE_DTYPES == before and len(set(before)) == len(before)


def test_the_backend_is_custom(registered):
    from kvant.vllm.backend import KvantBackend
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum.CUSTOM.get_class() is KvantBackend
    assert AttentionBackendEnum[KvantBackend.get_name()] is AttentionBackendEnum.CUSTOM
    assert issubclass(KvantBackend.get_impl_cls(), AttentionImpl)
    assert issubclass(KvantBackend.get_builder_cls(), AttentionMetadataBuilder)


def test_configurations_reach_spawned_processes(registered):
    """They are unpickled there before plugins are loaded."""
    from vllm.config.attention import AttentionConfig
    from vllm.config.cache import CacheConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    sent = pickle.dumps((AttentionConfig(backend=AttentionBackendEnum.CUSTOM), CacheConfig(cache_dtype="kvant_tq4")))
    code = f"import pickle; a, c = pickle.loads({sent!r}); print(a.backend.name, c.cache_dtype)"
    assert run(code).split() == ["CUSTOM", "kvant_tq4"]


@pytest.mark.slow
def test_registering_starts_no_driver(registered):
    """vLLM may fork afterwards, and a driver does not survive that."""
    code = (
        "import kvant, kvant.vllm\n"
        "kvant._c.info = kvant.info = kvant.formats = lambda *a: 1 / 0\n"
        "kvant.vllm.register(); print(kvant.vllm._registered)"
    )
    assert run(code).split()[-1] == "True"


@pytest.mark.parametrize(
    "version, usable",
    [("0.32.0", False), ("0.31.1.post1", False), ("0.33.0", True), ("1.0.0", True), ("unknown", True)],
)
def test_versions(registered, monkeypatch, caplog, version, usable):
    """An older vLLM works as ever, without names that it could not use."""
    from kvant.vllm import versions

    monkeypatch.setattr(versions, "installed", lambda: version)
    assert (versions.unusable() == "") == usable
    monkeypatch.setattr(registered, "_registered", False)
    registered.register()
    assert ("0.33 or newer is needed" in caplog.text) != usable


def test_names_that_a_version_lacks(registered, monkeypatch):
    from kvant.vllm import versions

    monkeypatch.setitem(versions._PLACES, "Absent", "vllm.v1.attention.backend")
    with pytest.raises(ImportError, match="has no Absent in vllm.v1.attention.backend"):
        versions.Absent
    with pytest.raises(AttributeError):
        versions.Unheard


def test_the_entry_point():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"kvant": "kvant.vllm:register"}
