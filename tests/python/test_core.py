"""Caches, sequences, plans and steps from numpy, against attention in float64."""

import os
import threading

import numpy as np
import pytest
from reference import attention

import kvant

D = 64


def close(got, expected, bound=2e-5):
    """The bound is for many rows on AMX, which multiplies weights and values as two bf16 each (docs/lab/cpu.md)."""
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < bound, error


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def rows(rng, tokens, heads=2, dtype=np.float32):
    return rng.standard_normal((tokens, heads, D)).astype(dtype)


def exact_cache(**options):
    return kvant.Cache(kv_heads=2, head_dim=D, k="f32", v="f32", **options)


# --- attention --------------------------------------------------------------------------------------------------------


def test_decode_of_one_sequence(rng):
    k, v, q = rows(rng, 300), rows(rng, 300), rows(rng, 1, 4)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    assert len(seq) == 300
    out, lse = cache.attend(seq, 0, q, lse=True)
    expected, expected_lse = attention(q, k, v)
    close(out, expected)
    close(lse, expected_lse)


def test_the_default_formats_match_their_own_decoded_vectors(rng):
    k, v, q = rows(rng, 500), rows(rng, 500), rows(rng, 3, 6)
    cache = kvant.Cache(kv_heads=2, head_dim=D)
    seq = cache.sequence()
    seq.append(0, k, v)
    stored_k, stored_v = cache.decode(seq, 0)
    close(cache.attend(seq, 0, q), attention(q, stored_k, stored_v)[0], 5e-5)
    assert 0.001 < np.linalg.norm(stored_k - k) / np.linalg.norm(k) < 0.03  # 6 bits, some pages exact
    assert 0.01 < np.linalg.norm(stored_v - v) / np.linalg.norm(v) < 0.12  # 4 bits


@pytest.mark.parametrize("k", ["tq4", "fp8"])
def test_page_centred_keys(rng, k):
    """Keys with a large constant part are stored as well as others."""
    keys, v, q = rows(rng, 500) + np.float32(30), rows(rng, 500), rows(rng, 3, 6)
    errors = {}
    for centre in ("none", "page"):
        cache = kvant.Cache(kv_heads=2, head_dim=D, k=k, k_centre=centre, exact="f32")
        seq = cache.sequence()
        seq.append(0, keys, v)
        stored_k, stored_v = cache.decode(seq, 0)
        close(cache.attend(seq, 0, q), attention(q, stored_k, stored_v)[0], 2e-4)
        errors[centre] = np.linalg.norm(stored_k - keys)
        assert f"centre: k {centre}" in cache.describe()
    assert errors["page"] < 0.2 * errors["none"]


@pytest.mark.parametrize(
    "options",
    [
        dict(window=70),
        dict(softcap=3.0),
        dict(scale=0.3),
        dict(is_causal=False),
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_of_a_plan(rng, options):
    k, v, q = rows(rng, 200), rows(rng, 200), rows(rng, 5, 4)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    close(cache.attend(seq, 0, q, **options), attention(q, k, v, **options)[0])


def test_alibi(rng):
    k, v, q = rows(rng, 90), rows(rng, 90), rows(rng, 2, 4)
    slopes = [0.5, 0.25, 0.125, 0.0625]
    bias = -np.array(slopes)[:, None, None] * np.abs(np.arange(88, 90)[:, None] - np.arange(90)[None])
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    close(cache.attend(seq, 0, q, alibi_slopes=slopes), attention(q, k, v, mask=bias)[0])


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float16])
def test_mask_tensors_broadcast(rng, dtype):
    k, v, q = rows(rng, 200), rows(rng, 200), rows(rng, 3, 4)
    hidden = rng.random((3, 200)) < 0.4
    hidden[:, 0] = False
    mask = ~hidden if dtype is bool else np.where(hidden, -np.inf, 0).astype(dtype)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    expected = attention(q, k, v, mask=mask if dtype is bool else mask.astype(np.float64))[0]
    close(cache.attend(seq, 0, q, mask=mask), expected)
    close(cache.attend(seq, 0, q, mask=np.broadcast_to(mask, (1, 4, 3, 200))), expected)
    one = np.full(1, True if dtype is bool else 0, dtype)
    close(cache.attend(seq, 0, q, mask=np.broadcast_to(one, (1, 4, 3, 200))), attention(q, k, v)[0])


def test_a_mask_that_begins_later(rng):
    k, v, q = rows(rng, 200), rows(rng, 200), rows(rng, 2, 4)
    visible = rng.random((2, 130)) < 0.5
    visible[:, -1] = True
    whole = np.concatenate([np.zeros((2, 70), bool), visible], 1)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    close(cache.attend(seq, 0, q, mask=visible, mask_first_key=70), attention(q, k, v, mask=whole)[0])


def test_sink_logits_join_the_denominator_only(rng):
    k, v, q = rows(rng, 100), rows(rng, 100), rows(rng, 1, 4)
    sinks = np.array([0.5, 2.0, -1.0, 4.0], np.float32)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    out, lse = cache.attend(seq, 0, q, sink_logits=sinks, lse=True)
    expected, expected_lse = attention(q, k, v, sinks=sinks)
    close(out, expected)
    close(lse, expected_lse)


# --- batches and layouts ----------------------------------------------------------------------------------------------


def test_ragged_batches(rng):
    lengths, q_lens = [130, 1, 70], [2, 1, 3]
    ks, vs, qs = ([rows(rng, n, h) for n in counts] for h, counts in ((2, lengths), (2, lengths), (4, q_lens)))
    cache = exact_cache()
    seqs = [cache.sequence() for _ in lengths]
    cache.reserve(seqs, lengths)
    cache.write(seqs, 0, np.concatenate(ks), np.concatenate(vs))
    out = cache.attend(seqs, 0, np.concatenate(qs), q_lens=q_lens)
    close(out, np.concatenate([attention(q, k, v)[0] for q, k, v in zip(qs, ks, vs)]))


@pytest.mark.parametrize("order", ["bthd", "bhtd"])
def test_batches_of_four_dimensions_are_taken_as_they_are(rng, order):
    B, T = 3, 80
    k, v, q = (
        rng.standard_normal((B, T, h, D) if order == "bthd" else (B, h, T, D)).astype(np.float32) for h in (2, 2, 4)
    )
    if order == "bhtd":
        k, v, q = (x.transpose(0, 2, 1, 3) for x in (k, v, q))
    cache = exact_cache()
    seqs = [cache.sequence() for _ in range(B)]
    out = cache.attend(seqs, 0, q, k, v)
    assert out.shape == q.shape
    for b in range(B):
        close(out[b], attention(q[b], k[b], v[b])[0])


def test_a_sequence_without_a_query(rng):
    cache = exact_cache()
    k, v, q = rows(rng, 50), rows(rng, 50), rows(rng, 1, 2)
    first, second = cache.sequence(), cache.sequence()
    first.append(0, k, v)
    second.append(0, k[:20], v[:20])
    close(cache.attend([first, second], 0, q, q_lens=[0, 1]), attention(q, k[:20], v[:20])[0])


def test_strided_inputs_are_not_copied_and_not_misread(rng):
    wide = rng.standard_normal((100, 5, 2 * D)).astype(np.float32)
    k, v = wide[:, 1:3, :D], wide[::-1, 2:4, D:]
    q = rows(rng, 1)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, k, v)
    close(cache.attend(seq, 0, q), attention(q, k, v)[0])


def test_half_and_bfloat16(rng):
    k, v, q = rows(rng, 100), rows(rng, 100), rows(rng, 1)
    bits = lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)  # noqa: E731
    back = lambda b: (b.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
    seq = (cache := kvant.Cache(kv_heads=2, head_dim=D, k="bf16", v="f16")).sequence()
    seq.append(0, kvant.bf16(bits(k)), v.astype(np.float16))
    out = cache.attend(seq, 0, q)
    close(out, attention(q, back(bits(k)), v.astype(np.float16))[0])
    rounded = cache.attend(seq, 0, kvant.bf16(bits(q)))
    close(back(rounded.bits), attention(back(bits(q)), back(bits(k)), v.astype(np.float16))[0], 5e-3)


class OnlyDlpack:
    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(rng):
    k, v, q = rows(rng, 100), rows(rng, 100), rows(rng, 1)
    seq = (cache := exact_cache()).sequence()
    seq.append(0, OnlyDlpack(k), OnlyDlpack(v))
    close(cache.attend(seq, 0, OnlyDlpack(q)), attention(q, k, v)[0])


# --- sequences --------------------------------------------------------------------------------------------------------


def test_fork_truncate_and_reorder(rng):
    k, v, q = rows(rng, 150), rows(rng, 150), rows(rng, 1)
    cache = exact_cache()
    a = cache.sequence()
    a.append(0, k[:100], v[:100])
    b = a.fork()
    b.append(0, k[100:], v[100:])
    a.truncate(60)
    assert (len(a), len(b)) == (60, 150)
    close(cache.attend(a, 0, q), attention(q, k[:60], v[:60])[0])
    close(cache.attend(b, 0, q), attention(q, k, v)[0])
    c = cache.sequence()
    cache.reorder([a, b, c], [1, 0, 1])
    assert (len(a), len(b), len(c)) == (150, 60, 150)
    close(cache.attend(c, 0, q), attention(q, k, v)[0])
    c.append(0, k[:1], v[:1])  # shared pages are copied
    close(cache.attend(a, 0, q), attention(q, k, v)[0])


def test_sequences_give_their_pages_back(rng):
    cache = exact_cache(capacity_tokens=128)
    k = rows(rng, 128)
    for _ in range(3):
        with cache.sequence() as seq:
            seq.append(0, k, k)
    seq = cache.sequence()
    seq.append(0, k, k)
    with pytest.raises(kvant.OutOfCapacity, match="capacity_tokens"):
        cache.sequence().append(0, k[:1], k[:1])
    del seq
    cache.sequence().append(0, k, k)


def test_a_step_over_layers(rng):
    L, B = 3, 2
    cache = exact_cache(layers=L)
    seqs = [cache.sequence() for _ in range(B)]
    k, v = rng.standard_normal((2, L, B, 40, 2, D)).astype(np.float32)
    q = rng.standard_normal((L, B, 40, 4, D)).astype(np.float32)
    with cache.step(seqs, 40) as step:
        for layer in range(L):
            step.write(layer, k[layer], v[layer])
            out = step.attend(layer, q[layer])
            for b in range(B):
                close(out[b], attention(q[layer, b], k[layer, b], v[layer, b])[0])


@pytest.mark.parametrize("form", ["numpy", "torch", "dlpack"])
def test_fresh_keys_are_attended_to_as_given(rng, form):
    """Only older tokens are read from the cache; all of these were written by a first step."""
    cache = kvant.Cache(kv_heads=2, head_dim=D, k="tq3", v="tq3", sink_pages=0, tail_pages=0)
    seq = cache.sequence()
    k, v, q = rows(rng, 170), rows(rng, 170), rows(rng, 100, 4)
    seq.append(0, k[:70], v[:70])
    old_k, old_v = (x.copy() for x in cache.decode(seq, 0))
    expected = attention(q, np.concatenate([old_k, k[70:]]), np.concatenate([old_v, v[70:]]))[0]
    as_given = {
        "numpy": lambda x: x,
        "torch": lambda x: pytest.importorskip("torch").from_numpy(x),
        "dlpack": OnlyDlpack,
    }
    own = [as_given[form](x[70:]) for x in (k, v)]
    with cache.step(seq, 100) as step:
        before = step.attend(0, q, keys=own[0], values=own[1], products=16)
        step.write(0, k[70:], v[70:])
        after = step.attend(0, q, keys=own[0], values=own[1], products=16)
        stored = step.attend(0, q)
    close(before, expected)
    assert (before == after).all()
    assert np.linalg.norm(stored - expected) > 0.01 * np.linalg.norm(expected)
    plan = cache.plan([seq], q_heads=4, q_len=100, fresh_keys=True)
    assert "fresh" in plan.explain()
    with pytest.raises(kvant.InvalidArgument, match="keys.data is null"):
        plan.run(0, q)
    with pytest.raises(kvant.InvalidArgument, match="fresh_keys"):
        cache.plan([seq], q_heads=4, q_len=100).run(0, q, keys=own[0], values=own[1])


@pytest.mark.parametrize("k, v, bits", [("tq4", "tq4", 8), ("tq8", "tq8", 16), ("bf16", "bf16", 16)])
def test_products_that_plans_choose(k, v, bits):
    cache = kvant.Cache(kv_heads=2, head_dim=D, k=k, v=v)
    seq = cache.sequence()
    x = np.zeros((300, 2, D), np.float32)
    seq.append(0, x, x)
    few, many, forced = (cache.plan([seq], q_heads=4, q_len=n, products=p) for n, p in ((1, 0), (100, 0), (100, 16)))
    faster = many.facts.isa in ("avx2", "avx512", "amx")
    assert [plan.facts.products for plan in (few, many, forced)] == [16, bits if faster else 16, 16]


def test_attend_with_fresh_keys(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=D, k="tq3", v="tq3", sink_pages=0, tail_pages=0)
    seqs = [cache.sequence(), cache.sequence()]
    k, v = rng.standard_normal((2, 2, 90, 2, D)).astype(np.float32)
    q = rng.standard_normal((2, 90, 4, D)).astype(np.float32)
    out = cache.attend(seqs, 0, q, k, v, fresh_keys=True)
    for b in range(2):
        close(out[b], attention(q[b], k[b], v[b])[0])


def test_a_step_that_raises_leaves_no_tokens(rng):
    cache = exact_cache(layers=2)
    seq = cache.sequence()
    with pytest.raises(ZeroDivisionError):
        with cache.step(seq, 3) as step:
            step.write(0, rows(rng, 3), rows(rng, 3))
            1 / 0
    assert len(seq) == 0


def test_attend_opens_a_step_once_for_all_layers(rng):
    cache = exact_cache(layers=2)
    seqs = [cache.sequence(), cache.sequence()]
    k, v, q = rows(rng, 8), rows(rng, 8), rows(rng, 8)
    for length in (4, 8):
        for layer in range(2):
            cache.attend(seqs, layer, q, k, v)
        assert [len(s) for s in seqs] == [length, length]


@pytest.mark.parametrize("head_dim", [1, 40, 72, 100, 575])
def test_any_head_dim(rng, head_dim):
    """The scale is that of the true size, and no padding shows. Callers used to pad 72 to 80 themselves."""
    shapes = ((300, 2), (300, 2), (3, 4))
    k, v, q = (rng.standard_normal((n, heads, head_dim)).astype(np.float32) for n, heads in shapes)
    cache = kvant.Cache(kv_heads=2, head_dim=head_dim, k="f32", v="f32")
    seq = cache.sequence()
    seq.append(0, k, v)
    close(cache.attend(seq, 0, q), attention(q, k, v)[0])
    stored_k, stored_v = cache.decode(seq, 0)
    assert np.array_equal(stored_k, k) and np.array_equal(stored_v, v)
    assert f"head_dim {head_dim}, stored as" in cache.describe()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_carry_the_library_s_sentence(rng):
    with pytest.raises(kvant.InvalidArgument, match="head_dim = 999"):
        kvant.Cache(kv_heads=2, head_dim=999)
    with pytest.raises(kvant.InvalidArgument, match="tq7"):
        kvant.Cache(kv_heads=2, head_dim=D, k="tq7")
    with pytest.raises(kvant.InvalidArgument, match="k_centre = page with k = f16"):
        kvant.Cache(kv_heads=2, head_dim=D, k="f16", k_centre="page")
    with pytest.raises(kvant.InvalidArgument, match='k_centre = "pages": must be one of automatic, none, page'):
        kvant.Cache(kv_heads=2, head_dim=D, k_centre="pages")
    cache = exact_cache()
    seq = cache.sequence()
    bad = rows(rng, 2)
    bad[1, 0, 3] = np.nan
    with pytest.raises(kvant.NonFinite, match="channel 3"):
        seq.append(0, bad, bad)
    assert len(seq) == 0
    with pytest.raises(ValueError, match="float64"):
        seq.append(0, bad.astype(np.float64), bad)
    seq.append(0, bad[:1], bad[:1])
    with pytest.raises(kvant.InvalidArgument, match="q_heads is 3"):
        cache.plan(seq, q_heads=3)
    plan = cache.plan(seq, q_heads=2)
    seq.append(0, bad[:1], bad[:1])
    with pytest.raises(kvant.Stale):
        plan.run(0, bad[:1])
    with pytest.raises(kvant.InvalidArgument, match="sequences of this cache"):
        exact_cache().plan(seq, q_heads=2)
    for other in (plan, [plan], cache.step([seq]), [None]):  # what has the cache, too, or nothing
        with pytest.raises(kvant.InvalidArgument, match="sequences"):
            cache.plan(other, q_heads=2)
    cache.close()
    with pytest.raises(kvant.InvalidArgument, match="closed"):
        cache.sequence()


def test_a_device_without_a_backend_is_refused():
    if any(b["name"] == "cuda" and b["available"] for b in kvant.info()["backends"]):
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(kvant.Unsupported, match="CUDA|driver|device"):
        kvant.Cache(kv_heads=2, head_dim=D, device="cuda", capacity_tokens=1024)


# --- hosts ------------------------------------------------------------------------------------------------------------


def step_bits(cache, seq, rng):
    k, q = rows(rng, 1), rows(rng, 1, 4)
    seq.append(0, k, k)
    return cache.attend(seq, 0, q).tobytes()


def test_a_child_after_fork_computes_the_same_bits(rng):
    k = rows(rng, 3000)
    seq = (cache := kvant.Cache(kv_heads=2, head_dim=D)).sequence()
    seq.append(0, k, k)
    state = rng.bit_generator.state
    cache.attend(seq, 0, rows(rng, 1, 4))
    for _ in range(5):
        rng.bit_generator.state = state
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, step_bits(cache, seq, rng))
            os._exit(0)
        got = b""
        while len(got) < 4 * 4 * D:
            got += os.read(read, 4096)
        assert os.waitpid(child, 0)[1] == 0
        os.close(read), os.close(write)
        expected = step_bits(cache, seq, rng)
        seq.truncate(3000)
        assert got == expected


def test_the_gil_is_free_during_calls(rng):
    k = rows(rng, 60000)
    seq = (cache := kvant.Cache(kv_heads=2, head_dim=D, threads=1)).sequence()
    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = ticks[0]
        seq.append(0, k, k)
        during = ticks[0] - before
    finally:
        stop.set()
        thread.join()
    assert during > 100, during


def test_threads_on_one_cache_wait_for_each_other(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=D, threads=1)
    k, q = rows(rng, 40), rows(rng, 1)
    failures = []

    def work():
        try:
            for _ in range(20):
                with cache.sequence() as seq:
                    seq.append(0, k, k)
                    assert np.isfinite(cache.attend(seq, 0, q)).all()
        except BaseException as error:  # noqa: BLE001 (shown below)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_memory_and_texts(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=D)
    seq = cache.sequence()
    k = rows(rng, 1000)
    seq.append(0, k, k)
    m = cache.memory()
    assert m.tokens == 1000
    assert m.total_bytes == m.encoded_bytes + m.scale_bytes + m.exact_bytes + m.table_bytes
    assert m.total_bytes < 1000 * 2 * D * 2 * 4  # less than f32
    assert "tq6" in cache.describe()
    assert "keys" in cache.plan(seq, q_heads=2).explain()
    assert kvant.info()["version"] == kvant.__version__
    assert {"tq6", "tq4", "fp8"} <= {f["name"] for f in kvant.formats()}


def test_trim_gives_memory_of_removed_sequences_back(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=D)
    seq, other = cache.sequence(), cache.sequence()
    k = rows(rng, 20000)
    seq.append(0, k, k)
    other.append(0, k[:100], k[:100])
    before = cache.decode(other, 0)
    seq.remove()
    assert cache.trim() > 100_000
    np.testing.assert_array_equal(cache.decode(other, 0)[0], before[0])
    other.remove()
    assert cache.trim() > 0
    m = cache.memory()
    assert m.reserved_bytes == m.table_bytes


def test_a_plan_takes_the_caches_window(rng):
    cache = exact_cache(window=20, window_sinks=3)
    seq = cache.sequence()
    k, q = rows(rng, 60), rows(rng, 1, 4)
    seq.append(0, k, k)  # at once: nothing was released yet
    plan = cache.plan(seq, q_heads=4)
    assert "the cache's window" in plan.explain() and "the first 3" in plan.explain()
    none = cache.attend(seq, 0, q, window=0)
    whole = exact_cache().sequence()
    whole.append(0, k, k)
    np.testing.assert_array_equal(none, whole.cache.attend(whole, 0, q))
    np.testing.assert_array_equal(cache.attend(seq, 0, q), cache.attend(seq, 0, q, window=20, window_sinks=3))


def test_the_stub_is_what_the_package_has():
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).resolve().parents[2] / "scripts" / "python_stub.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_number_a_sequence_or_one_for_all():
    cache = exact_cache()
    seqs = [cache.sequence(), cache.sequence()]
    for call in (cache.reserve, cache.advance, cache.reserve_ahead):
        with pytest.raises(kvant.InvalidArgument, match="tokens has 1 numbers for 2 sequences"):
            call(seqs, [1])
    assert [len(s) for s in seqs] == [0, 0]


# --- messages of the first hour ---


def test_a_removed_sequence_is_named(rng):
    cache = kvant.Cache(kv_heads=1, head_dim=64)
    seq, other = cache.sequence(), cache.sequence()
    keys, q = np.zeros((1, 1, 64), np.float32), np.zeros((1, 1, 64), np.float32)
    seq.append(0, keys, keys)
    seq.remove()
    seq.remove()  # nothing is left to do
    for call in (
        lambda: len(seq),
        lambda: seq.append(0, keys, keys),
        lambda: seq.fork(),
        lambda: seq.truncate(0),
        lambda: cache.attend(seq, 0, q),
        lambda: cache.reorder([other, seq], [0, 0]),
    ):
        with pytest.raises(kvant.InvalidArgument, match="^this sequence was removed: cache.sequence"):
            call()


def test_formats_of_imported_caches_are_named():
    for options in ({"k": "lut4"}, {"v": "lut8"}):
        with pytest.raises(kvant.InvalidArgument, match='^[kv] = "lut[48]": this format is for imported caches'):
            kvant.Cache(kv_heads=1, head_dim=64, **options)


def test_the_command_lists_doctor_and_ends_with_its_reader():
    import os
    import subprocess
    import sys

    from kvant._tools import tool

    try:
        subprocess.run([tool(), "--version"], capture_output=True, check=True)
    except (kvant.Unsupported, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no command line tool: {error}")
    command = [sys.executable, "-m", "kvant"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True)
    commands = shown.stdout.partition("Subcommands:")[2].partition("\n\n")[0].split("\n")
    assert shown.returncode == 0 and {"doctor", "eval"} <= {line.split()[0] for line in commands if line.strip()}
    for word, code in (("extra", 2), ("--json", 2), ("--help", 0)):
        refused = subprocess.run([*command, "doctor", word], capture_output=True, text=True)
        assert refused.returncode == code, word
        assert (f"{word}: not expected; kvant doctor takes no more words" in refused.stderr) == (code == 2), word
        assert refused.stdout.startswith("usage: kvant doctor\n" if code == 0 else ""), word
        assert "trial   " not in refused.stdout, word
    for name in ("doctor", "formats"):  # into a pipe that nobody reads, as of `kvant doctor | head` when head is done
        reader, writer = os.pipe()
        os.close(reader)
        assert subprocess.run([*command, name], stdout=writer, stderr=subprocess.PIPE).stderr == b"", name
        os.close(writer)
