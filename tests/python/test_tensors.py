"""Tensors at the boundary: every shape, stride and owner is read as numpy reads it, or refused."""

import sys

import numpy as np
import pytest
from boundary_memory import OldDlpack, OnlyDlpack

import kvant

D = 64


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def random(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def layouts(rng, batch, tokens, heads):
    """The same [batch, tokens, heads, D] contiguous, with room between the batch's rows, and heads first."""
    x = random(rng, batch, tokens, heads, D)
    apart = np.zeros((batch, tokens + 3, heads, D), np.float32)
    apart[:, :tokens] = x
    heads_first = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    return x, apart[:, :tokens], heads_first


@pytest.fixture
def three(rng):
    cache = kvant.Cache(kv_heads=2, head_dim=D, k="f32", v="f32")
    sequences = [cache.sequence() for _ in range(3)]
    for s in sequences:
        s.append(0, random(rng, 10, 2, D), random(rng, 10, 2, D))
    return cache, sequences


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [0, 1, 2], ids=["contiguous", "apart", "heads first"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_batch_is_that_of_the_sequences(rng, three, batch, layout):
    """Memory for more or fewer sequences than the call has is refused, however it lies."""
    cache, sequences = three
    of = lambda b, heads: layouts(rng, b, 2, heads)[layout]  # noqa: E731
    q, kv = of(3, 4), of(3, 2)
    calls = {
        "q": lambda: cache.attend(sequences, 0, of(batch, 4), q_len=2),
        "out": lambda: cache.attend(sequences, 0, q, out=of(batch, 4)),
        "keys": lambda: cache.write(sequences, 0, of(batch, 2), kv),
        "values": lambda: cache.write(sequences, 0, kv, of(batch, 2)),
    }
    cache.reserve(sequences, 2)
    for name, call in calls.items():
        with pytest.raises(kvant.InvalidArgument, match=rf"^{name} has shape \[{batch}, 2, .* must be 3, the seq"):
            call()
    cache.write(sequences, 0, kv, kv)
    with pytest.raises(kvant.InvalidArgument, match="^keys has shape"):
        cache.decode(sequences, 0, begin=10, keys=of(batch, 2))
    got = np.zeros_like(kv)
    cache.decode(sequences, 0, begin=10, keys=got)
    np.testing.assert_array_equal(got, kv)


@pytest.mark.parametrize("layout", [0, 1, 2], ids=["contiguous", "apart", "heads first"])
def test_append_takes_a_batch_of_one(rng, layout):
    cache = kvant.Cache(kv_heads=2, head_dim=D, k="f32", v="f32")
    sequence = cache.sequence()
    x = layouts(rng, 2, 3, 2)[layout]
    with pytest.raises(kvant.InvalidArgument, match="a batch of 2: must be 1"):
        sequence.append(0, x, x)
    assert len(sequence) == 0
    sequence.append(0, x[:1], x[:1])
    np.testing.assert_array_equal(cache.decode(sequence, 0)[0], x[0])


@pytest.mark.parametrize("layout", [0, 1, 2], ids=["contiguous", "apart", "heads first"])
def test_padded_batches_do_not_depend_on_strides(rng, three, layout):
    """A row of the batch for each sequence, of which the first rows count."""
    cache, sequences = three
    q = layouts(rng, 3, 2, 4)[layout]
    out = cache.attend(sequences, 0, q, q_lens=[2, 0, 1])
    packed = cache.attend(sequences, 0, np.concatenate([q[0], q[2, :1]]), q_lens=[2, 0, 1])
    np.testing.assert_array_equal(np.concatenate([out[0], out[2, :1]]), packed)


def test_a_repeated_row_of_a_batch_is_refused(rng, three):
    cache, sequences = three
    q = np.broadcast_to(random(rng, 1, 2, 4, D), (3, 2, 4, D))
    with pytest.raises(kvant.InvalidArgument, match="q has shape .* repeated for all sequences; copy the tensor"):
        cache.attend(sequences, 0, q)
    with pytest.raises(kvant.InvalidArgument, match="q has strides .* one number for many vectors"):
        cache.attend(sequences, 0, np.broadcast_to(random(rng, 3, 1, 1, 1), (3, 2, 4, D)))
    one = np.broadcast_to(random(rng, 1, 1, 4, D), (3, 1, 4, D))  # rows one after another, with a stride of 0
    np.testing.assert_array_equal(cache.attend(sequences, 0, one), cache.attend(sequences, 0, one.copy()))


# --- strides and dtypes -----------------------------------------------------------------------------------------------


def stored(x, **options):
    cache = kvant.Cache(kv_heads=2, head_dim=D, k="f32", v="f32", **options)
    sequence = cache.sequence()
    sequence.append(0, x, x)
    return cache.decode(sequence, 0)[0]


def test_repeated_numbers_are_read_as_numpy_reads_them(rng):
    memory = random(rng, 640)
    for x in (
        np.broadcast_to(memory[:1].reshape(1, 1, 1), (5, 2, D)),
        np.broadcast_to(memory[:D], (5, 2, D)),
        np.broadcast_to(memory[: 2 * D].reshape(2, D), (5, 2, D)),
        memory.reshape(5, 2, D)[::-1],
        memory.reshape(5, 2, D)[:, ::-1],
    ):
        np.testing.assert_array_equal(stored(x), x)
    torch = pytest.importorskip("torch")
    half = torch.full((1,), 0.3, dtype=torch.float16).expand(5, 2, D)
    np.testing.assert_array_equal(stored(half), half.float().numpy())


def test_numbers_of_a_vector_lie_side_by_side(rng):
    memory = random(rng, 1280)
    for x in (
        np.broadcast_to(memory[:2].reshape(1, 2, 1), (5, 2, D)),
        memory[:640].reshape(5, 2, D)[:, :, ::-1],
        memory.reshape(5, 2, 2 * D)[:, :, ::2],
    ):
        with pytest.raises(kvant.InvalidArgument, match="^keys.*side by side"):
            stored(x)


def test_doubles_are_refused_with_the_way_out(one):
    cache, sequence, _, _ = one
    with pytest.raises(kvant.InvalidArgument, match=r"^q has dtype float64: .*it by .astype\(numpy.float32\)$"):
        cache.attend(sequence, 0, np.ones((1, 4, D)))
    torch = pytest.importorskip("torch")
    with pytest.raises(kvant.InvalidArgument, match=r"^q has dtype torch.float64: .*; convert it by .float\(\)$"):
        cache.attend(sequence, 0, torch.ones(1, 4, D, dtype=torch.float64))


def test_other_dtypes_and_addresses_are_refused(rng):
    x = random(rng, 5, 2, D)
    for dtype in (np.float64, np.int32, np.uint16, np.bool_, ">f4", complex, object):
        with pytest.raises(kvant.InvalidArgument, match="^keys has dtype .*: must be f32 or f16 or bf16"):
            stored(x.astype(dtype))
    raw = np.zeros(x.nbytes + 4, np.uint8)
    with pytest.raises(kvant.InvalidArgument, match="^keys begins at address .* within an element"):
        stored(raw[1:-3].view(np.float32).reshape(x.shape))


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one(rng):
    """A cache, a sequence of 100 tokens, and what attends to its calls' outputs: name -> call(output)."""
    cache = kvant.Cache(kv_heads=2, head_dim=D)
    sequence = cache.sequence()
    sequence.append(0, random(rng, 100, 2, D), random(rng, 100, 2, D))
    q = random(rng, 3, 4, D)
    pages = kvant.Pages(kv_heads=2, head_dim=D, k_centre="none")
    calls = {
        "out": ((3, 4, D), lambda x: cache.attend(sequence, 0, q, out=x)),
        "lse": ((3, 4), lambda x: cache.attend(sequence, 0, q, lse=x)),
        "keys": ((100, 2, D), lambda x: cache.decode(sequence, 0, keys=x)),
        "values": ((100, 2, D), lambda x: cache.decode(sequence, 0, values=x)),
    }
    return cache, sequence, pages, calls


def test_read_only_memory_is_not_written(one, tmp_path):
    _, _, pages, calls = one
    for name, (shape, call) in calls.items():
        count = int(np.prod(shape))
        frozen = np.zeros(shape, np.float32)
        frozen.flags.writeable = False
        text = bytes(4 * count)
        path = tmp_path / name
        path.write_bytes(text)
        for x in (
            frozen,
            np.frombuffer(text, np.float32).reshape(shape),
            np.memmap(path, np.float32, "r", shape=shape),
            OnlyDlpack(frozen),
        ):
            with pytest.raises(kvant.InvalidArgument, match=f"^{name} is read-only"):
                call(x)
        assert not any(text) and path.read_bytes() == text and not frozen.any()
        call(np.zeros(shape, np.float32))
    pool = np.zeros((2, 2, pages.block_bytes), np.uint8)
    pool.flags.writeable = False
    x = np.zeros((1, 2, D), np.float32)
    with pytest.raises(kvant.InvalidArgument, match="^pool is read-only"):
        pages.write(pool, x, x, [0])
    with pytest.raises(kvant.InvalidArgument, match="^pool is read-only"):
        pages.copy(pool, [0], [1])


def test_read_only_inputs_are_taken(rng):
    x = random(rng, 5, 2, D)
    x.flags.writeable = False
    np.testing.assert_array_equal(stored(x), x)
    np.testing.assert_array_equal(stored(OnlyDlpack(x)), x)
    np.testing.assert_array_equal(stored(np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)), x)


def test_outputs_that_overlap_themselves_are_refused(one):
    cache, sequence, _, calls = one
    memory = np.zeros(1 << 16, np.float32)
    view = np.lib.stride_tricks.as_strided
    for name in ("out", "keys", "values"):
        (tokens, heads, _), call = calls[name]
        shape = (tokens, heads, D)
        for strides in ((256, 256, 4), (0, 256, 4), (256 * heads, 0, 4), (4, 4, 4), (0, 0, 0), (256 * heads, 128, 4)):
            with pytest.raises(kvant.InvalidArgument, match=f"^{name} .* its elements overlap"):
                call(view(memory, shape, strides))
        call(view(memory, shape, (256, 256 * tokens, 4)))
        call(view(memory[(tokens - 1) * 256 :], shape, (-256, 256 * tokens, 4)))


def test_outputs_that_share_memory_are_refused(rng, one):
    cache, sequence, pages, _ = one
    memory = random(rng, 4096)
    q = memory[: 3 * 4 * D].reshape(3, 4, D)
    for shift in (0, 1, D, 11 * D):
        out = memory[shift : shift + 3 * 4 * D].reshape(3, 4, D)
        with pytest.raises(kvant.InvalidArgument, match="^out shares memory with q"):
            cache.attend(sequence, 0, q, out=out)
    with pytest.raises(kvant.InvalidArgument, match="^lse shares memory with out"):
        cache.attend(sequence, 0, q.copy(), out=q, lse=memory[4:16].reshape(3, 4))
    with pytest.raises(kvant.InvalidArgument, match="^lse shares memory with q"):
        cache.attend(sequence, 0, q, lse=memory[:12].reshape(3, 4))
    both = np.zeros((100, 2, 2, D), np.float32)
    with pytest.raises(kvant.InvalidArgument, match="^values shares memory with keys"):
        cache.decode(sequence, 0, keys=both[:, 0], values=both[:, 0])
    cache.decode(sequence, 0, keys=both[:, 0], values=both[:, 1])  # neighbours
    np.testing.assert_array_equal(both.transpose(1, 0, 2, 3), cache.decode(sequence, 0))
    side = np.zeros((3, 2, 4, D), np.float32)
    side[:, 0] = q
    expected = cache.attend(sequence, 0, q)
    np.testing.assert_array_equal(cache.attend(sequence, 0, side[:, 0], out=side[:, 1]), expected)


# --- torch ------------------------------------------------------------------------------------------------------------


def test_views_that_torch_negates_later_are_refused(one):
    torch = pytest.importorskip("torch")
    cache, sequence, _, calls = one
    q = torch.randn(3, 4, D)
    plain, lazy = cache.attend(sequence, 0, q), torch._neg_view(q)
    assert lazy.is_neg()
    for call in (lambda: cache.attend(sequence, 0, lazy), lambda: calls["out"][1](lazy)):
        with pytest.raises(kvant.InvalidArgument, match="has not negated yet: use .resolve_neg()"):
            call()
    assert not torch.equal(cache.attend(sequence, 0, lazy.resolve_neg()), plain)
    partial = torch._neg_view(torch.ones(2, 4)), torch.zeros(2)
    assert torch.equal(kvant.merge([partial])[0], -torch.ones(2, 4))


def test_torch_tensors_without_memory_are_refused(one):
    torch = pytest.importorskip("torch")
    cache, sequence, _, _ = one
    q = torch.ones(1, 4, D)
    for x in (q.to_sparse(), q.to("meta"), q.requires_grad_()):
        with pytest.raises(kvant.InvalidArgument, match="^q "):
            cache.attend(sequence, 0, x)
    with pytest.raises(kvant.InvalidArgument, match="^q is a torch tensor without memory"):
        torch.func.vmap(lambda x: cache.attend(sequence, 0, x))(torch.ones(2, 1, 4, D))


def test_empty_tensors_are_not_left_out(one):
    """Their address is null in torch."""
    torch = pytest.importorskip("torch")
    cache, sequence, _, _ = one
    empty = torch.empty(0, 2, D)
    for name in ("keys", "values"):
        with pytest.raises(kvant.InvalidArgument, match=rf"^{name}.shape = \[0, 2, 64\]: must be \[100, 2, 64\]"):
            cache.decode(sequence, 0, **{name: empty})
    with pytest.raises(kvant.InvalidArgument, match=r"^mask has shape \[0\]"):
        cache.attend(sequence, 0, torch.ones(1, 4, D), mask=torch.empty(0))
    assert cache.decode(sequence, 0, 5, 5, keys=empty)[0] is empty
    sequence.append(0, empty, empty)
    assert cache.attend(sequence, 0, torch.empty(0, 4, D), q_lens=[0]).shape == (0, 4, D)


# --- DLPack -----------------------------------------------------------------------------------------------------------


class Copied(OnlyDlpack):
    def __dlpack__(self, max_version=None):
        return self.array.__dlpack__(max_version=max_version, copy=True)


def test_dlpack_of_all_versions(rng):
    x = random(rng, 5, 2, D)
    new = OnlyDlpack(x)
    np.testing.assert_array_equal(stored(new), x)
    assert new.options == {"max_version": (1, 0)}  # and no stream, which memory of the host has not
    np.testing.assert_array_equal(stored(OldDlpack(x)), x)
    np.testing.assert_array_equal(stored(OnlyDlpack(x[:, ::-1])), x[:, ::-1])


def test_dlpack_outputs(one):
    cache, sequence, _, calls = one
    for name in ("out", "keys"):
        shape, call = calls[name]
        x = np.zeros(shape, np.float32)
        call(OldDlpack(x))
        assert x.all()
        with pytest.raises(kvant.InvalidArgument, match=f"^{name} is read-only memory, or a copy"):
            call(Copied(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_outputs_for_jax_are_arrays_of_jax(rng, one, monkeypatch, dtype):
    """Its arrays never change: kvant writes to memory of its own, which becomes an array of JAX after the run. (This is
    a stand-in. With JAX itself bf16 queries give bf16 arrays, too, whose dtype numpy has from ml_dtypes.)"""
    cache, sequence, _, _ = one
    put = []

    class Array(OnlyDlpack):
        dtype = property(lambda self: self.array.dtype)
        sharding = "where q is"

    Array.__module__ = "jaxlib._jax"

    class Jax:
        @staticmethod
        def device_put(x, where):
            put.append((x, where))
            return Array(x)

    monkeypatch.setitem(sys.modules, "jax", Jax)
    q = random(rng, 1, 4, D).astype(dtype)
    expected, expected_lse = cache.attend(sequence, 0, q, lse=True)
    out, lse = cache.attend(sequence, 0, Array(q), lse=True)
    assert type(out) is type(lse) is Array and [where for _, where in put] == ["where q is"] * 2
    assert out.dtype == dtype and lse.dtype == np.float32
    np.testing.assert_array_equal(out.array, expected)
    np.testing.assert_array_equal(lse.array, expected_lse)
    mine = np.empty_like(q)  # what the caller gives stays the caller's
    given, lse = cache.attend(sequence, 0, Array(q), out=mine, lse=True)
    assert given is mine and type(lse) is Array and len(put) == 3
    assert cache.attend(sequence, 0, q) is not None and len(put) == 3


def test_dlpack_that_cannot_be_given(one):
    cache, sequence, _, _ = one

    class Fails:
        def __dlpack__(self, **options):
            raise BufferError("this buffer is busy")

    class Junk:
        def __dlpack__(self, **options):
            return 5

    for x in (Fails(), Junk(), OnlyDlpack(np.ones((1, 4, D))), OnlyDlpack(np.ones((1, 4, D), np.complex64))):
        with pytest.raises(kvant.InvalidArgument, match="^q "):
            cache.attend(sequence, 0, x)


class FakeDevice:
    """An array on a device, which nobody reads."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (1, 4, D),
            "typestr": "<f4",
            "data": (1 << 20, False),
            **interface,
        }


class FakeDlpack:
    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **options):
        self.options = options
        return np.ones((1, 4, D), np.float32).__dlpack__(max_version=(1, 0))


class FakeDriver:
    """libcuda as it is called, and what it answers."""

    def __init__(self, **answers):
        self.calls, self.answers = [], answers

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(a.value or 0 for a in arguments if hasattr(a, "value"))))
            return self.answers.get(name, 0)

        return call


DEVICE = kvant._tensors.Place("cuda", 0, 7)


def test_a_producers_stream_is_waited_for(monkeypatch):
    for stream, waits in ((None, False), (7, False), (9, True), (1, True), (2, True)):
        monkeypatch.setattr(kvant._streams, "_driver", lambda d=(driver := FakeDriver()): d)
        kvant._tensors.describe(FakeDevice(stream=stream), "q", DEVICE)
        names = [c[0] for c in driver.calls]
        if not waits:
            assert not names
            continue
        assert names.index("cuEventRecord") < names.index("cuStreamWaitEvent") < names.index("cuEventDestroy_v2")
        assert dict((c[0], c[1:]) for c in driver.calls)["cuEventRecord"][-1] == stream
        assert dict((c[0], c[1:]) for c in driver.calls)["cuStreamWaitEvent"][0] == 7
        assert names.count("cuCtxPushCurrent_v2") == names.count("cuCtxPopCurrent_v2") == 1
        assert names[-1] == "cuDevicePrimaryCtxRelease_v2"
    with pytest.raises(kvant.InvalidArgument, match="^q's stream is 0"):
        kvant._tensors.describe(FakeDevice(stream=0), "q", DEVICE)
    driver = FakeDriver(cuEventRecord=400)
    monkeypatch.setattr(kvant._streams, "_driver", lambda: driver)
    with pytest.raises(kvant.KvantError, match="cuEventRecord returned 400; synchronise that stream"):
        kvant._tensors.describe(FakeDevice(stream=9), "q", DEVICE)
    assert [c[0] for c in driver.calls][-3:] == [
        "cuEventDestroy_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]  # fmt: skip


def test_both_names_of_the_default_stream_are_one(monkeypatch):
    monkeypatch.setattr(kvant._streams, "_driver", lambda: pytest.fail("waited"))
    kvant._tensors.describe(FakeDevice(stream=1), "q", kvant._tensors.Place("cuda", 0, 0))


@pytest.mark.parametrize("stream, given", [(7, 7), (0, 1)])
def test_a_dlpack_producer_is_given_the_stream_of_the_call(stream, given):
    x = FakeDlpack()
    with pytest.raises(kvant.InvalidArgument, match="q is on cpu:0, but the cache is on cuda:0"):  # a fake, after all
        kvant._tensors.describe(x, "q", kvant._tensors.Place("cuda", 0, stream))
    assert x.options == {"max_version": (1, 0), "stream": given}


def test_interfaces_that_say_too_little_or_too_much():
    changes = [
        {"mask": np.ones(3)}, {"data": None}, {"shape": 5}, {"shape": (-1, 4, D)}, {"shape": (2**64 + 1, 4, D)},
        {"strides": (4, 2**63, 4)}, {"strides": (3, 3, 3)}, {"typestr": "<f8"},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(kvant.InvalidArgument, match="^q "):
            kvant._tensors.describe(FakeDevice(**change), "q", DEVICE)
    with pytest.raises(kvant.InvalidArgument, match="^q is read-only"):
        kvant._tensors.describe(FakeDevice(data=(1 << 20, True)), "q", DEVICE, mutable=True)
    kvant._tensors.describe(FakeDevice(data=(1 << 20, True)), "q", DEVICE)
