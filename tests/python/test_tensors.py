"""Tensors at the boundary: every shape, stride and owner is read as numpy reads it, or refused."""

import numpy as np
import pytest

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
        with pytest.raises(kvant.InvalidArgument, match=rf"^{name} has shape \[{batch}, 2, .* must be 3, the sequences"):
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
    one = np.broadcast_to(random(rng, 1, 1, 4, D), (3, 1, 4, D))  # rows one after another, with a stride of 0
    np.testing.assert_array_equal(cache.attend(sequences, 0, one), cache.attend(sequences, 0, one.copy()))
