"""Latent caches (multi-head latent attention) from numpy: attention, blocks of an engine, snapshots, prefixes."""

import numpy as np
import pytest
from reference import attention

import kvant

FORMATS = [(None, "tq4"), ("tq6", "tq6"), ("tq4", "tq8"), ("fp8", "fp8"), ("bf16", "bf16"), ("f32", "tq5")]
LATENT, ROPE, SCALE = 512, 64, 192**-0.5


@pytest.fixture
def rng():
    return np.random.default_rng(12)


def draw(rng, tokens, heads, dim):
    return rng.standard_normal((tokens, heads, dim), dtype=np.float32)


def normed(rng, tokens):
    """Latents as models have them: behind a normalisation."""
    x = draw(rng, tokens, 1, LATENT)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True))


def close(got, expected, bound=5e-5):
    """The bound of test_core: AMX multiplies in terms of bf16."""
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < bound, error


def expected_of(q, rope, latent, **options):
    return attention(q, np.concatenate([latent, rope], -1), latent, **options)


@pytest.mark.parametrize("k, v", FORMATS)
def test_attention_of_what_is_stored(rng, k, v):
    cache = kvant.Cache(latent=LATENT, rope=ROPE, k=k, v=v)
    assert (cache.latent, cache.rope, cache.kv_heads) == (LATENT, ROPE, 1)
    assert (cache.head_dim, cache.v_head_dim, cache.q_head_dim) == (ROPE, LATENT, LATENT + ROPE)
    assert repr(cache) == f"kvant.Cache(layers=1, latent=512, rope=64, k={k or 'tq8'!r}, v={v!r})"
    a, b = cache.sequence(), cache.sequence()
    rope, latent = draw(rng, 250, 1, ROPE), normed(rng, 250)
    for seq, tokens in ((a, 250), (b, 90)):
        seq.append(0, rope[:tokens], latent[:tokens])
    for queries in (1, 4, 20):
        q = draw(rng, 2 * queries, 16, LATENT + ROPE)
        out, lse = cache.attend([a, b], 0, q, lse=True, scale=SCALE)
        assert out.shape == (2 * queries, 16, LATENT)
        for i, seq in enumerate((a, b)):
            stored = cache.decode(seq, 0)
            assert [x.shape[2] for x in stored] == [ROPE, LATENT]
            expected, expected_lse = expected_of(q[i * queries : (i + 1) * queries], *stored, scale=SCALE)
            close(out[i * queries : (i + 1) * queries], expected)
            close(lse[i * queries : (i + 1) * queries], expected_lse)


def test_bytes_and_words(rng):
    cache = kvant.Cache(latent=LATENT, rope=ROPE)
    text = cache.describe()
    assert "latent 512, rope 64" in text and "k tq8, v tq4" in text
    assert int(text.split("page: 64 tokens, ")[1].split(" ")[0]) <= 340 * 64
    assert "centre: k page, v page; chosen: the default" in text


def test_centres(rng):
    assert kvant.Pages(latent=LATENT, rope=ROPE).block_bytes == 332 * 64
    assert kvant.Pages(latent=LATENT, rope=ROPE, v_centre="none").block_bytes == 325 * 64
    rope, latent = draw(rng, 256, 1, ROPE), normed(rng, 256) + 2 * draw(rng, 1, 1, LATENT)
    errors = []
    for centre in ("page", "none"):
        cache = kvant.Cache(latent=LATENT, rope=ROPE, v_centre=centre, sink_pages=0, tail_pages=0)
        assert f"centre: k page, v {centre}" in cache.describe()
        seq = cache.sequence()
        seq.append(0, rope, latent)
        stored = cache.decode(seq, 0)[1]
        errors.append(np.linalg.norm(stored - latent) / np.linalg.norm(latent))
        q = draw(rng, 1, 16, LATENT + ROPE)
        out = cache.attend(seq, 0, q, scale=SCALE)
        close(out, expected_of(q, *cache.decode(seq, 0), scale=SCALE)[0])
    assert errors[0] < errors[1] / 1.8


def test_fresh_tokens(rng):
    cache = kvant.Cache(latent=LATENT, rope=ROPE, sink_pages=0, tail_pages=0)
    seq = cache.sequence()
    rope, latent, q = draw(rng, 150, 1, ROPE), normed(rng, 150), draw(rng, 150, 4, LATENT + ROPE)
    out = np.full((150, 4, LATENT), np.nan, np.float32)
    assert cache.attend(seq, 0, q, rope, latent, out=out, fresh_keys=True, scale=SCALE) is out
    close(out, expected_of(q, rope, latent, scale=SCALE)[0])


def test_blocks_of_an_engine(rng):
    pages = kvant.Pages(latent=LATENT, rope=ROPE, k_centre="none")
    assert (pages.latent, pages.rope, pages.kv_heads, pages.block_bytes) == (LATENT, ROPE, 1, 324 * 64)
    assert "kvant.Pages(latent=512, rope=64, k='tq8', v='tq4'" in repr(pages)
    memory = np.zeros(4 * pages.block_bytes + 64, np.uint8)
    at = -memory.ctypes.data % 64
    pool = memory[at : at + 4 * pages.block_bytes].reshape(4, 1, pages.block_bytes)
    rope, latent, q = draw(rng, 100, 1, ROPE), normed(rng, 100), draw(rng, 2, 16, LATENT + ROPE)
    pages.write(pool, rope, latent, np.concatenate([np.arange(64) + 128, np.arange(36)]))
    plan = pages.plan(q_heads=16, max_batch=1, max_blocks=2, max_query_len=2, scale=SCALE)
    plan.set_tables(np.array([[2, 0]], np.int32), np.array([100], np.int32), np.array([0, 2], np.int32))
    stored = np.empty((128, 1, ROPE), np.float32), np.empty((128, 1, LATENT), np.float32)
    pages.decode(pool, np.array([2, 0], np.int32), *stored)
    out = plan.run(pool, q)
    assert out.shape == (2, 16, LATENT)
    close(out, expected_of(q, stored[0][:100], stored[1][:100], scale=SCALE)[0])


def test_forks_snapshots_and_prefixes(rng, tmp_path):
    cache = kvant.Cache(latent=256, rope=32)
    seq = cache.sequence()
    rope, latent, q = draw(rng, 200, 1, 32), draw(rng, 200, 1, 256), draw(rng, 1, 16, 288)
    seq.append(0, rope, latent)
    expected = cache.attend(seq, 0, q, scale=SCALE)
    child = seq.fork()
    child.append(0, rope[:70], latent[:70])
    child.truncate(200)
    assert np.array_equal(cache.attend(child, 0, q, scale=SCALE), expected)
    kvant.save(cache, tmp_path / "a.kvs", sequences=[seq])
    info = kvant.Snapshot(tmp_path / "a.kvs").info
    assert (info.config["latent"], info.config["rope"]) == (256, 32)
    loaded = kvant.load(tmp_path / "a.kvs")
    assert (loaded.cache.latent, loaded.cache.rope, loaded.cache.q_head_dim) == (256, 32, 288)
    assert np.array_equal(loaded.cache.attend(loaded.sequences[0], 0, q, scale=SCALE), expected)
    for index in (kvant.PrefixIndex(), kvant.PrefixIndex(tmp_path / "prefixes")):
        assert index.insert(list(range(200)), seq)
        there = index.find([*range(200), 7]).sequences[0]
        assert np.array_equal(there.cache.attend(there, 0, q, scale=SCALE), expected)


def test_what_is_refused(rng):
    with pytest.raises(kvant.InvalidArgument, match="rope = 0: must be 1 to 576 with latent"):
        kvant.Cache(latent=512)
    with pytest.raises(kvant.InvalidArgument, match="v_centre = page with latent = 0: values have no centres"):
        kvant.Cache(kv_heads=1, head_dim=64, v_centre="page")
    with pytest.raises(kvant.InvalidArgument, match="kv_heads = 2 with latent = 512"):
        kvant.Cache(latent=512, rope=64, kv_heads=2)
    with pytest.raises(TypeError, match="^kvant.Pages needs kv_heads and head_dim$"):
        kvant.Pages(rope=64)
    with pytest.raises(kvant.Unsupported, match='use device = "cpu"'):
        kvant.Cache(latent=500, rope=64, device="cuda", capacity_tokens=64)
    cache = kvant.Cache(latent=LATENT, rope=ROPE)
    seq = cache.sequence()
    seq.append(0, draw(rng, 3, 1, ROPE), normed(rng, 3))
    with pytest.raises(kvant.InvalidArgument, match="scale is 0: .*qk_nope_head_dim"):
        cache.attend(seq, 0, draw(rng, 1, 16, LATENT + ROPE))
    with pytest.raises(kvant.InvalidArgument, match=r"q has shape \[1, 16, 512\]: must be \[1, 16, 576\]"):
        cache.attend(seq, 0, draw(rng, 1, 16, LATENT), scale=SCALE)
