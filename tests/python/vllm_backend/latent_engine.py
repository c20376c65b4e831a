"""engine.py with layers of latent attention: what they return is compared with float64 attention over the keys and
values that latents expand to."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from . import dense
from .engine import DEVICE, Engine, _numbers


class Expand(torch.nn.Module):
    """kv_b_proj: the keys and values of all heads."""

    quant_method = None

    def __init__(self, latent, heads, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(heads * size, latent) / latent**0.5, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.T, None


class LatentEngine(Engine):
    def __init__(self, vllm, layers=({},), *, latent=512, rope=64, nope=32, values=32, **options):
        self.sizes = SimpleNamespace(latent=latent, rope=rope, nope=nope, values=values)
        super().__init__(vllm, layers, kv_heads=1, head_dim=values, **options)

    def configure(self):
        model, sizes = self.config.model_config, self.sizes
        model.use_mla = True
        model.get_head_size = lambda: sizes.latent + sizes.rope
        model.hf_text_config = SimpleNamespace(
            kv_lora_rank=sizes.latent, qk_rope_head_dim=sizes.rope, qk_nope_head_dim=sizes.nope,
            v_head_dim=sizes.values,
        )  # fmt: skip

    def make(self, i, heads, size, options):
        from vllm.model_executor.layers.attention import MLAAttention

        s = self.sizes
        return MLAAttention(
            num_heads=heads[0],
            scale=(s.nope + s.rope) ** -0.5,
            qk_nope_head_dim=s.nope,
            qk_rope_head_dim=s.rope,
            v_head_dim=s.values,
            q_lora_rank=None,
            kv_lora_rank=s.latent,
            kv_b_proj=Expand(s.latent, heads[0], s.nope + s.values).to(DEVICE),
            cache_config=self.config.cache_config,
            prefix=f"model.layers.{i}.attn",
            **options,
        )

    def build_options(self, lengths):
        return {"seq_lens_cpu_upper_bound": lengths.cpu()}

    def tensors(self, r, layer, positions, which, heads):
        """Queries (0), latents (1) or rotary keys (2)."""
        size = (self.sizes.nope + self.sizes.rope, self.sizes.latent, self.sizes.rope)[which]
        made = np.stack([_numbers(r.salts[p], layer, which, heads, size)[p] for p in positions])
        return torch.from_numpy(made).to(DEVICE, self.dtype)

    def inputs(self, batch, rows):
        inputs = super().inputs(batch, rows)
        return [[q.unflatten(1, (layer.heads[0], -1)), latents, rotary.unsqueeze(1)]
                for layer, (q, latents, rotary) in zip(self.layers, inputs)]  # fmt: skip

    def dummy_inputs(self, rows):
        ones = {"dtype": self.dtype, "device": DEVICE}
        return [[torch.ones(rows, layer.heads[0], self.sizes.nope + self.sizes.rope, **ones),
                 torch.ones(rows, self.sizes.latent, **ones), torch.ones(rows, 1, self.sizes.rope, **ones)]
                for layer in self.layers]  # fmt: skip

    def call(self, layer, q, latents, rotary):
        return layer.made(q, latents, rotary, output_shape=(len(q), layer.heads[0] * self.sizes.values))

    def check(self, i, r, new, out, tolerance):
        layer, s, end = self.layers[i], self.sizes, r.length + new
        if self.dtype != torch.float32:
            tolerance = max(tolerance, 1.5e-2)  # of the result's dtype, and of queries and outputs as latents
        q, latents, rotary = (
            self.tensors(r, i, positions, which, heads).double().cpu()
            for which, (positions, heads) in enumerate(
                ((range(r.length, end), layer.heads[0]), (range(end), 1), (range(end), 1))
            )
        )
        expanded = latents[:, 0] @ layer.made.impl.kv_b_proj.weight.T.double().cpu()
        keys, values = expanded.unflatten(1, (layer.heads[0], -1)).split([s.nope, s.values], dim=-1)
        keys = torch.cat([keys, rotary.expand(-1, layer.heads[0], -1)], dim=-1)
        wanted, _ = dense.attention(q.numpy(), keys.numpy(), values.numpy(), scale=layer.made.impl.scale)
        error = np.linalg.norm(out.double().cpu().numpy() - wanted) / np.linalg.norm(wanted)
        self.worst = max(self.worst, error)
        assert error < tolerance, f"layer {i}, request {r.seed}, {new} new of {end} tokens: relative error {error:.2e}"
