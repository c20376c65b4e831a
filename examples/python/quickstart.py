"""A decoding loop over a compressed cache, with numpy alone: one prompt, then token after token.

    python examples/python/quickstart.py
"""

import numpy as np

import kvant

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 128
rng = np.random.default_rng(0)


def tokens(count):  # stands for a model's projections of `count` tokens in one layer
    q, k, v = (rng.standard_normal((count, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


cache = kvant.Cache(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, k="tq6", v="tq4", exact="bf16")
exact = kvant.Cache(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, k="f32", v="f32")
seq, exact_seq = cache.sequence(), exact.sequence()

for step in [1024] + 100 * [1]:  # the prompt, then one token at a time
    for layer in range(LAYERS):
        q, k, v = tokens(step)
        out = cache.attend(seq, layer, q, k, v)  # [step, Q_HEADS, HEAD_DIM]
        expected = exact.attend(exact_seq, layer, q, k, v)

error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
compressed, full = cache.memory().total_bytes, exact.memory().total_bytes
print(f"{len(seq)} tokens in {compressed / 1e6:.2f} MB; as f32 {full / 1e6:.2f} MB, as bf16 {full / 2e6:.2f} MB")
print(f"relative error of the last output: {error:.4f} (random keys are the worst case; README.md has a model's)")
fork = seq.fork()  # shares all pages: a second answer to the same prompt
fork.truncate(1024)
print(f"a fork of the prompt: {len(fork)} tokens, {(cache.memory().total_bytes - compressed) / 1e3:.1f} kB more")
print(cache.plan(seq, q_heads=Q_HEADS).explain())
