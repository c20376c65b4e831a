"""Attention in float64, the reference of these tests, and a kvant.Pages that computes with it."""

from __future__ import annotations

import types

import numpy as np
import torch


def attention(q, keys, values, *, scale, causal=True, window=0, softcap=0.0, alibi_slopes=None, sink_logits=None):
    """out [queries, q_heads, head_dim] and lse [queries, q_heads], of the newest positions' queries.

    q: [queries, q_heads, head_dim]; keys, values: [tokens, kv_heads, head_dim]; all float64 numpy arrays.
    """
    queries, q_heads, _ = q.shape
    tokens, kv_heads, _ = keys.shape
    group = q_heads // kv_heads
    position = tokens - queries + np.arange(queries)[:, None]
    key = np.arange(tokens)[None, :]
    seen = np.ones((queries, tokens), bool)
    if causal:
        seen &= key <= position
    if window > 0:
        seen &= key > position - window
    out = np.zeros((queries, q_heads, values.shape[2]))
    lse = np.full((queries, q_heads), -np.inf)
    for h in range(q_heads):
        s = scale * (q[:, h] @ keys[:, h // group].T)
        if softcap > 0:
            s = softcap * np.tanh(s / softcap)
        if alibi_slopes is not None:
            s = s + alibi_slopes[h] * (key - position)
        s = np.where(seen, s, -np.inf)
        most = s.max(axis=1, initial=-np.inf)
        if sink_logits is not None:
            most = np.maximum(most, sink_logits[h])
        most = np.where(np.isfinite(most), most, 0.0)
        weights = np.exp(s - most[:, None])
        total = weights.sum(axis=1)
        if sink_logits is not None:
            total = total + np.exp(sink_logits[h] - most)
        with np.errstate(divide="ignore", invalid="ignore"):
            out[:, h] = np.where(total[:, None] > 0, (weights @ values[:, h // group]) / total[:, None], 0.0)
            lse[:, h] = np.log(total) + most
    return out, lse


def correct_attn_out(out, lses, cp_rank, ctx, is_lse_base_on_e=True):
    """vLLM's function of this name: a rank's part of the result of all ranks."""
    assert is_lse_base_on_e
    lse = lses.logsumexp(0)
    return out * torch.exp(lses[cp_rank] - lse).nan_to_num(0.0)[..., None], lse


class Pages:
    """The interface of kvant.Pages over blocks of float64 numbers, on the CPU."""

    block_tokens = 64

    owner = types.SimpleNamespace(share_workspace=lambda other: None)
    device = ("cpu", 0)
    tail_bytes = 0

    def __init__(
        self,
        *,
        kv_heads,
        head_dim,
        v_head_dim=0,
        k="tq6",
        v="tq4",
        device="cpu",
        tail_pages=0,
        tail_sequences=0,
        layers=1,
        exact=None,
        k_centre="automatic",
        sink_pages=0,
        exact_copies=None,
        encode_at_once=False,  # blocks of float64 numbers are never encoded
    ):
        assert device == "cpu"
        self.tail_pages, self.tail_sequences, self.layers = tail_pages, tail_sequences, layers
        self.tail_copies = tail_sequences * (tail_pages + 2)  # they take no memory
        self.begun = None  # with a tail: the blocks whose first position is still to be written
        assert v_head_dim in (0, head_dim)
        self.kv_heads, self.head_dim, self.pair = kv_heads, head_dim, (k, v)
        self.block_bytes = 2 * self.block_tokens * head_dim * 8

    def block(self, pool, block, head):
        """[2, tokens, head_dim], keys and values, a view of the pool."""
        data = pool[block, head, : self.block_bytes].view(torch.float64)
        return data.view(2, self.block_tokens, self.head_dim)

    def begin_step(self, block_table, seq_lens, query_start_loc, stream=None, max_query_len=0):
        """Blocks that begin are to be written by every layer, before anybody attends."""
        assert max_query_len >= int((query_start_loc[1:] - query_start_loc[:-1]).max())
        assert self.tail_pages == 0 or seq_lens.shape[0] <= self.tail_sequences
        self.begun = set()
        for i, length in enumerate(seq_lens.tolist()):
            queries = int(query_start_loc[i + 1] - query_start_loc[i])
            first, end = -(-(length - queries) // self.block_tokens), -(-length // self.block_tokens)
            self.begun |= {(int(b), layer) for b in block_table[i, first:end] for layer in range(self.layers)}

    def write(self, pool, keys, values, slot_mapping, stream=None, layer=0):
        assert layer < self.layers and (self.tail_pages == 0 or self.begun is not None)
        if self.tail_pages > 0:
            self.begun -= {(s // self.block_tokens, layer) for s in slot_mapping.tolist() if s >= 0}
        assert keys.shape == values.shape == (slot_mapping.shape[0], self.kv_heads, self.head_dim)
        assert slot_mapping.dtype == torch.int64
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            for head in range(self.kv_heads):
                block = self.block(pool, slot // self.block_tokens, head)
                block[0, slot % self.block_tokens] = keys[row, head].double()
                block[1, slot % self.block_tokens] = values[row, head].double()

    def decode(self, pool, block_ids, keys_out, values_out):
        assert values_out is None
        for i, block in enumerate(block_ids.tolist()):
            for head in range(self.kv_heads):
                here = slice(i * self.block_tokens, (i + 1) * self.block_tokens)
                keys_out[here, head] = self.block(pool, block, head)[0].float()

    def plan(self, q_heads, **options):
        return Plan(self, q_heads, **options)


class Plan:
    def __init__(
        self,
        pages,
        q_heads,
        *,
        max_batch,
        max_blocks,
        max_query_len,
        max_tokens,
        scale,
        is_causal=True,
        window=0,
        softcap=0.0,
        alibi_slopes=None,
        check_ids=False,
        fresh_keys=False,
        products=0,
    ):
        self.pages, self.q_heads, self.fresh_keys = pages, q_heads, fresh_keys
        self.limits = dict(batch=max_batch, blocks=max_blocks, query_len=max_query_len, tokens=max_tokens)
        self.rule = dict(scale=scale, causal=is_causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes)
        self.facts = types.SimpleNamespace(products=products or 16)
        self.workspace_bytes = 0
        self.runs = self.steps = 0

    def set_tables(self, block_table, seq_lens, query_start_loc, stream=None):
        batch = seq_lens.shape[0]
        assert block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
        assert block_table.shape[0] == batch and query_start_loc.shape[0] == batch + 1
        counts = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
        most = dict(batch=batch, blocks=block_table.shape[1], query_len=max(counts), tokens=int(query_start_loc[-1]))
        for name, limit in self.limits.items():
            assert most[name] <= limit, f"{name} {most[name]} is above the plan's {limit}"
        self.tables = block_table.clone(), seq_lens.tolist(), query_start_loc.tolist()  # as a device would copy them
        self.steps += 1

    def run(self, pool, q, out=None, lse=None, sink_logits=None, keys=None, values=None, stream=None, layer=0):
        assert (keys is not None) == (values is not None) == self.fresh_keys
        if self.pages.tail_pages > 0:
            assert not [b for b, of in self.pages.begun if of == layer], "blocks began, and were not written"
        assert q.shape[0] <= self.limits["tokens"] and q.shape[1:] == (self.q_heads, self.pages.head_dim)
        if sink_logits is not None:
            assert sink_logits.dtype == torch.float32
            sink_logits = sink_logits.double().numpy()
        out = torch.empty_like(q) if out is None else out
        table, lengths, begins = self.tables
        for i, length in enumerate(lengths):
            rows = slice(begins[i], begins[i + 1])
            if rows.start == rows.stop:
                continue
            window, tokens = self.rule["window"], self.pages.block_tokens
            first = max(0, length - (rows.stop - rows.start) + 1 - window) // tokens * tokens if window else 0
            ids = table[i, first // tokens : -(-length // tokens)].tolist()
            blocks = [[self.pages.block(pool, b, h) for h in range(self.pages.kv_heads)] for b in ids]
            both = torch.stack([torch.cat([b[h] for b in blocks], dim=1) for h in range(self.pages.kv_heads)], dim=2)
            k, v = both[:, : length - first].numpy()
            if self.fresh_keys:
                older = length - (rows.stop - rows.start) - first
                given = (x[rows].double().numpy() for x in (keys, values))
                k, v = (np.concatenate([old[:older], new]) for old, new in zip((k, v), given))
            result, sums = attention(q[rows].double().numpy(), k, v, sink_logits=sink_logits, **self.rule)
            out[rows] = torch.from_numpy(result).to(out.dtype)
            if lse is not None:
                lse[rows] = torch.from_numpy(sums).to(lse.dtype)
        self.runs += 1
        return out
