"""Attention of one sequence in float64, with which tests judge kvant's."""

from __future__ import annotations

import numpy as np


def attention(q, k, v, *, scale=None, is_causal=True, window=0, softcap=0.0, mask=None, sinks=None, alibi=None):
    """softmax(scale * q k^T) v. q: [queries, q_heads, D], k, v: [keys, kv_heads, D]. Returns (out, lse); a query that
    sees no key has 0 and -inf."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    position, key = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))[None]
    if alibi is not None:
        s = s - np.asarray(alibi)[:, None, None] * np.abs(position - key)
    seen = np.ones((len(q), len(k)), bool)
    if is_causal:
        seen &= key <= position
    if window:
        seen &= key > position - window
    s = np.where(seen, s, -np.inf)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    with np.errstate(all="ignore"):
        lse = np.logaddexp.reduce(s, -1)[..., None]
        if sinks is not None:
            lse = np.logaddexp(lse, np.asarray(sinks, np.float64)[:, None, None])
        weights = np.where(np.isneginf(s), 0, np.exp(s - lse))
        return np.einsum("hqk,khd->qhd", weights, v), lse[..., 0].T
