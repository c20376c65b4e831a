"""Values of a size of their own: caches, plans, blocks of an engine, snapshots and prefixes, from numpy."""

import numpy as np
import pytest
from reference import attention

import kvant

FORMATS = [("f32", "f32"), ("bf16", "tq4"), ("fp8", "fp8"), ("tq6", "tq4"), ("tq8", "f16"), ("tq4", "tq8")]
DIMS = [(192, 128), (40, 72), (32, 256)]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def draw(rng, tokens, heads, dim):
    return rng.standard_normal((tokens, heads, dim), dtype=np.float32)


def close(got, expected, bound=5e-5):
    """The bound of test_core: AMX multiplies in terms of bf16."""
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < bound, error


@pytest.mark.parametrize("dim, v_dim", DIMS)
@pytest.mark.parametrize("k, v", FORMATS)
def test_attention_of_what_is_stored(rng, k, v, dim, v_dim):
    cache = kvant.Cache(kv_heads=2, head_dim=dim, v_head_dim=v_dim, k=k, v=v)
    assert (cache.head_dim, cache.v_head_dim) == (dim, v_dim) and f"v_head_dim={v_dim}, " in repr(cache)
    a, b = cache.sequence(), cache.sequence()
    keys, values = draw(rng, 250, 2, dim), draw(rng, 250, 2, v_dim)
    for seq, tokens in ((a, 250), (b, 90)):
        seq.append(0, keys[:tokens], values[:tokens])
    for queries in (1, 20):  # the path of few rows, and of many
        q = draw(rng, 2 * queries, 6, dim)
        out, lse = cache.attend([a, b], 0, q, lse=True, products=16)
        assert out.shape == (2 * queries, 6, v_dim)
        for i, seq in enumerate((a, b)):
            stored = cache.decode(seq, 0)
            assert [x.shape[2] for x in stored] == [dim, v_dim]
            expected, expected_lse = attention(q[i * queries : (i + 1) * queries], *stored)
            close(out[i * queries : (i + 1) * queries], expected)
            close(lse[i * queries : (i + 1) * queries], expected_lse)


def test_fresh_keys_and_outputs_given(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=96, v_head_dim=64, k="tq6", v="tq4", sink_pages=0, tail_pages=0)
    seq = cache.sequence()
    keys, values, q = draw(rng, 150, 2, 96), draw(rng, 150, 2, 64), draw(rng, 150, 4, 96)
    out = np.full((150, 4, 64), np.nan, np.float32)
    assert cache.attend(seq, 0, q, keys, values, out=out, fresh_keys=True) is out
    close(out, attention(q, keys, values)[0])
    wrong = np.empty_like(q)
    with pytest.raises(kvant.InvalidArgument, match=r"out has shape \[150, 4, 96\]: must be \[150, 4, 64\]"):
        cache.attend(seq, 0, q, out=wrong)
    with pytest.raises(kvant.InvalidArgument, match=r"values.shape = \[3, 2, 96\]: must be \[3, 2, 64\].*v_head_dim"):
        seq.append(0, keys[:3], keys[:3])


def test_blocks_of_an_engine(rng):
    pages = kvant.Pages(kv_heads=2, head_dim=96, v_head_dim=40, k="tq6", v="tq4", k_centre="none")
    one = kvant.Pages(kv_heads=2, head_dim=96, k="tq6", v="tq4", k_centre="none")
    assert pages.block_bytes < one.block_bytes and (pages.v_head_dim, one.v_head_dim) == (40, 96)
    assert "v_head_dim=40" in repr(pages) and "v_head_dim" not in repr(one)
    memory = np.zeros(8 * pages.block_bytes + 64, np.uint8)
    at = -memory.ctypes.data % 64
    pool = memory[at : at + 8 * pages.block_bytes].reshape(4, 2, pages.block_bytes)
    keys, values, q = draw(rng, 100, 2, 96), draw(rng, 100, 2, 40), draw(rng, 1, 4, 96)
    pages.write(pool, keys, values, np.concatenate([np.arange(64) + 128, np.arange(36)]))
    plan = pages.plan(q_heads=4, max_batch=1, max_blocks=2)
    plan.set_tables(np.array([[2, 0]], np.int32), np.array([100], np.int32), np.array([0, 1], np.int32))
    stored = np.empty((128, 2, 96), np.float32), np.empty((128, 2, 40), np.float32)
    pages.decode(pool, np.array([2, 0], np.int32), *stored)
    out = plan.run(pool, q)
    assert out.shape == (1, 4, 40)
    close(out, attention(q, stored[0][:100], stored[1][:100])[0])


def test_snapshots_and_prefixes(rng, tmp_path):
    cache = kvant.Cache(kv_heads=2, head_dim=96, v_head_dim=40)
    seq = cache.sequence()
    keys, values, q = draw(rng, 200, 2, 96), draw(rng, 200, 2, 40), draw(rng, 1, 4, 96)
    seq.append(0, keys, values)
    kvant.save(cache, tmp_path / "a.kvs")
    info = kvant.Snapshot(tmp_path / "a.kvs").info
    assert (info.config["head_dim"], info.config["v_head_dim"], info.config["stored_v_head_dim"]) == (96, 40, 64)
    loaded = kvant.load(tmp_path / "a.kvs")
    assert loaded.cache.v_head_dim == 40
    assert np.array_equal(loaded.cache.attend(loaded.sequences[0], 0, q), cache.attend(seq, 0, q))
    for index in (kvant.PrefixIndex(), kvant.PrefixIndex(tmp_path / "prefixes")):
        assert index.insert(list(range(200)), seq)
        found = index.find([*range(200), 7])
        assert found.length == 200
        there = found.sequences[0]
        assert np.array_equal(there.cache.attend(there, 0, q), cache.attend(seq, 0, q))


def test_files_of_one_size_do_not_name_another(rng, tmp_path):
    for v_head_dim in (0, 64):
        cache = kvant.Cache(kv_heads=2, head_dim=64, v_head_dim=v_head_dim)
        (seq := cache.sequence()).append(0, draw(rng, 70, 2, 64), draw(rng, 70, 2, 64))
        kvant.save(cache, tmp_path / "a.kvs")
        assert "v_head_dim" not in kvant.Snapshot(tmp_path / "a.kvs").info.config
        assert kvant.load(tmp_path / "a.kvs").cache.v_head_dim == 64


@pytest.mark.parametrize("size", [-1, 577, 1 << 31])
def test_sizes_that_no_vector_has(size):
    for make in (kvant.Cache, kvant.Pages):
        with pytest.raises(kvant.InvalidArgument, match="v_head_dim"):
            make(kv_heads=1, head_dim=64, v_head_dim=size)
