"""Partial results over disjoint keys: kvant.merge for numpy and torch, and the example that exchanges them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvant

ROOT = Path(__file__).resolve().parents[2]
D, HEADS, GROUP = 64, 2, 2


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def attention(q, k, v):
    """softmax(q k^T / sqrt(D)) v of one query in float64. Returns (out, lse)."""
    k, v = (np.repeat(x.astype(np.float64), GROUP, 1) for x in (k, v))
    s = np.einsum("qhd,khd->qhk", q.astype(np.float64), k) / np.sqrt(D)
    w = np.exp(s)
    return np.einsum("qhk,khd->qhd", w / w.sum(-1, keepdims=True), v), np.log(w.sum(-1))


def halves(rng):
    """Two partial results of kvant, and the float64 result over all keys."""
    k, v = (rng.standard_normal((200, HEADS, D), np.float32) for _ in range(2))
    q = rng.standard_normal((1, HEADS * GROUP, D), np.float32)
    parts = []
    for part in (slice(0, 120), slice(120, 200)):
        cache = kvant.Cache(kv_heads=HEADS, head_dim=D, k="f32", v="f32")
        seq = cache.sequence()
        seq.append(0, k[part], v[part])
        parts.append(cache.attend(seq, 0, q, lse=True))
    return parts, attention(q, k, v)


def close(got, expected):
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 2e-5, error


def test_two_halves_give_the_whole(rng):
    parts, (expected, expected_lse) = halves(rng)
    out, lse = kvant.merge(parts)
    assert isinstance(out, np.ndarray)
    close(out, expected)
    close(lse, expected_lse)


def test_torch_tensors_give_torch_tensors(rng, torch, device):
    parts, (expected, expected_lse) = halves(rng)
    # Strided: the lse of a row lies behind its output.
    packed = [torch.cat([torch.as_tensor(o), torch.as_tensor(l)[..., None]], -1).to(device) for o, l in parts]
    out, lse = kvant.merge([(x[..., :D], x[..., D]) for x in packed])
    assert isinstance(out, torch.Tensor) and out.device.type == device
    close(out.cpu(), expected)
    close(lse.cpu(), expected_lse)


def test_rows_without_keys(torch, device):
    none, one = torch.zeros(2, D, device=device), torch.ones(2, D, device=device)
    never = torch.full((2,), -torch.inf, device=device)
    lse = torch.tensor([3.0, -torch.inf], device=device)
    out, merged = kvant.merge([(none, never), (one * (lse > 0)[:, None], lse)])
    assert out.tolist() == [[1.0] * D, [0.0] * D]
    assert merged.tolist() == [3.0, -np.inf]


def test_refusals(torch):
    out, lse = torch.zeros(2, D), torch.zeros(2)
    with pytest.raises(kvant.InvalidArgument, match="partials is empty"):
        kvant.merge([])
    with pytest.raises(kvant.InvalidArgument, match=r"partials\[1\] has shapes"):
        kvant.merge([(out, lse), (out, torch.zeros(3))])
    with pytest.raises(kvant.InvalidArgument, match=r"partials\[0\]: lse must be an f32 tensor on cpu"):
        kvant.merge([(out, lse.double())])
    with pytest.raises(kvant.InvalidArgument, match=r"partials\[1\]: out must be an f32 tensor on cpu"):
        kvant.merge([(out, lse), (out.numpy(), lse)])


def test_context_parallel_example(torch):
    """Two processes with half of each sequence's blocks get what one process with all of them gets."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/python/context_parallel.py"), "--device", "cpu", "--shapes", "1x200,3x1000"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks; relative difference") == 2
