"""A server without a model: vLLM's own configuration, layers, cache planning and metadata around random tensors.

Its requests have keys, values and queries of their own for each position, and what the layers return is compared with
float64 attention over all of a request's keys and values.
"""

from __future__ import annotations

import os
import random
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch

from . import dense


DEVICE = torch.device(os.environ.get("KVANT_TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"


class Request:
    def __init__(self, engine, seed):
        self.seed = seed
        self.length = 0  # tokens in the cache
        self.salts: list[int] = []  # its tokens: each is the seed of its numbers
        self.blocks: list[list[int]] = [[] for _ in engine.groups]  # of each group; 0: given back


@lru_cache(maxsize=256)
def _numbers(token, layer, which, heads, head_dim):
    return np.random.default_rng([token, layer, which]).standard_normal((1024, heads, head_dim))

class Engine:
    ranks = 1  # that share the tokens of a request

    def __init__(
        self,
        vllm,
        layers=({},),
        *,
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        cache_dtype="kvant_tq8",
        dtype=None,
        block_size=64,
        layout=None,
        max_requests=8,
        max_tokens=256,
        max_model_len=1024,
        drafts=0,
        blocks=48,
        skip_layers=(),
        tail_pages=None,
        fresh_keys=None,
        k_centre=None,
        exact_memory=None,
        products=None,
        key_offsets=(),
        parallel=(),
    ):
        if dtype is None:
            dtype = torch.float32 if ON_CPU else torch.bfloat16  # kernels of devices have no exact float32 pages
        self.vllm, self.dtype = vllm, dtype
        self.max_tokens, self.drafts = max_tokens, drafts
        self.config = vllm.configuration(
            cache_dtype=cache_dtype,
            block_size=block_size,
            dtype=dtype,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            drafts=drafts,
            skip_layers=skip_layers,
        )
        self.config.cache_config.num_gpu_blocks_override = blocks
        for name, x in dict(parallel).items():
            setattr(self.config.parallel_config, name, x)
        options = {"tail_pages": tail_pages, "fresh_keys": fresh_keys, "k_centre": k_centre, "products": products}
        options["exact_memory"] = exact_memory
        self.key_offsets = dict(key_offsets)  # by layer: what all of its keys have in common
        self.config.additional_config = {"kvant": {name: x for name, x in options.items() if x is not None}}
        self.configure()
        self.layers = []
        torch.manual_seed(5)
        with vllm.set_current_vllm_config(self.config), vllm.default_dtype(dtype):
            for i, options in enumerate(layers):
                options = dict(options)
                if "sinks" in options:
                    options["sinks"] = options["sinks"].to(DEVICE)
                heads = options.pop("q_heads", q_heads), options.pop("kv_heads", kv_heads)
                size = options.pop("head_dim", head_dim)
                made = self.make(i, heads, size, options)
                made.process_weights_after_loading(dtype)
                made.use_direct_call = True  # vLLM's operators are registered for its platform's device, the CPU
                self.layers.append(SimpleNamespace(made=made, options=options, heads=heads, head_dim=size))
        # A worker and the engine core do these, in this order.
        self.specs = vllm.get_kv_cache_spec(self.config)
        self.config.cache_config.kv_cache_layout = layout
        vllm.resolve_layout(self.config, [layer.made.get_attn_backend() for layer in self.layers], self.specs)
        groups = vllm.get_kv_cache_groups(self.config, self.specs)
        self.cache = vllm.get_kv_cache_config_from_groups(self.config, groups, 1 << 40)
        self.groups = self.cache.kv_cache_groups
        forward = self.config.compilation_config.static_forward_context
        self.attn_groups, self.cudagraphs, sizes = vllm.init_attn_backend(self.cache, self.config, DEVICE)
        vllm.init_kv_cache(forward, self.cache, DEVICE, sizes, self.config, attn_groups=self.all_groups())
        for layer in self.layers:
            dirty = layer.made.kv_cache.view(torch.uint8)
            dirty.copy_(torch.randint(0, 255, dirty.shape, dtype=torch.uint8))  # what other requests left
        self.free = list(range(1, self.cache.num_blocks))
        random.Random(3).shuffle(self.free)
        self.worst = 0.0
        self.kept = {}  # tensors by name

    def configure(self):
        """Changes to the configuration, before layers are made."""

    def make(self, i, heads, size, options):
        return self.vllm.Attention(
            heads[0],
            size,
            options.pop("scale", size**-0.5),
            heads[1],
            alibi_slopes=options.get("alibi_slopes"),
            cache_config=self.config.cache_config,
            logits_soft_cap=options.get("softcap"),
            per_layer_sliding_window=options.get("window"),
            prefix=f"model.layers.{i}.attn",
            **({"sinks": options["sinks"]} if "sinks" in options else {}),
        )

    def all_groups(self):
        return [group for groups in self.attn_groups for group in groups]

    def builder(self, group=0):
        return self.attn_groups[group][0].get_metadata_builder(0)

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, seed, prefix_of=None, prefix_blocks=0):
        """A new request; its first blocks may be those of another (a prefix cache's hit)."""
        r = Request(self, seed)
        if prefix_of is not None:
            for group in range(len(self.groups)):
                r.blocks[group] = list(prefix_of.blocks[group][:prefix_blocks])
            tokens = prefix_blocks * self.block_size(0) * self.ranks
            r.length, r.salts = tokens, list(prefix_of.salts[:tokens])
        return r

    def preempt(self, r):
        """Takes its blocks away. The bytes in them stay as dirt."""
        for blocks in r.blocks:
            self.free = [b for b in blocks if b] + self.free
            blocks.clear()
        r.length = 0

    def rewind(self, r, tokens):
        """Drops rejected drafts: later tokens overwrite them."""
        r.length -= tokens
        del r.salts[r.length :]

    def block_size(self, group):
        return self.groups[group].kv_cache_spec.block_size

    def tensors(self, r, layer, positions, which, heads):
        """Queries (0), keys (1) or values (2) of a layer. They depend on the token and its position."""
        made = np.stack([_numbers(r.salts[p], layer, which, heads, self.layers[layer].head_dim)[p] for p in positions])
        if which == 1:
            made = made + self.key_offsets.get(layer, 0.0)
        return torch.from_numpy(made).to(DEVICE, self.dtype)

    def dummy_step(self, counts, length, capture):
        """A step of vLLM's that only warms up or is recorded: blocks of nobody, and slots of no request."""
        padded, rows = len(counts), sum(counts)
        begins = np.cumsum([0, *counts]).astype(np.int32)
        lengths = torch.full((padded,), max(length, *counts), dtype=torch.int32)
        slots = torch.full((len(self.groups), rows), -1, dtype=torch.int64)
        tables = [torch.zeros(padded, self.columns(group), dtype=torch.int32) for group in range(len(self.groups))]
        made, by_layer = self.build(begins, max(counts), lengths, tables, slots, for_cudagraph_capture=capture)
        self.forward(made, by_layer, self.dummy_inputs(rows))

    def dummy_inputs(self, rows):
        inputs = []
        for layer in self.layers:
            sizes = (heads * layer.head_dim for heads in (*layer.heads, layer.heads[1]))
            inputs.append([torch.ones(rows, n, dtype=self.dtype, device=DEVICE) for n in sizes])
        return inputs

    def columns(self, group):
        return self.builder(group).capacity.blocks * 64 // self.block_size(group)

    # --- a step -------------------------------------------------------------------------------------------------------

    def metadata(self, batch, pad_to=None):
        """vLLM's metadata of a batch [(request, new tokens)] in vLLM's order; takes the blocks that it needs.

        pad_to: (requests, tokens) of a CUDA graph.
        """
        for r, new in batch:
            for p in range(r.length, r.length + new):
                if p >= len(r.salts):
                    r.salts.append(r.seed)
            for group, blocks in enumerate(r.blocks):
                while len(blocks) * self.block_size(group) * self.ranks < r.length + new:
                    blocks.append(self.free.pop())
                window = getattr(self.groups[group].kv_cache_spec, "sliding_window", None)
                if window and type(self.groups[group].kv_cache_spec).__name__ == "SlidingWindowSpec":
                    for i in range(max(0, r.length + 1 - window) // self.block_size(group)):
                        if blocks[i]:
                            self.free.insert(0, blocks[i])
                            blocks[i] = 0  # vLLM's null block
        requests = len(batch)
        tokens = sum(new for _, new in batch)
        padded, rows = pad_to or (requests, tokens)
        begins = np.zeros(padded + 1, np.int32)
        begins[1 : requests + 1] = np.cumsum([new for _, new in batch])
        begins[requests + 1 :] = tokens
        lengths = torch.zeros(padded, dtype=torch.int32)
        lengths[:requests] = torch.tensor([r.length + new for r, new in batch])
        tables, slots = [], torch.full((len(self.groups), rows), -1, dtype=torch.int64)
        for group in range(len(self.groups)):
            size = self.block_size(group)  # of the cache manager; vLLM makes tables of kernel blocks from these
            table = torch.full((padded, self.columns(group)), 7, dtype=torch.int32)  # ids beyond a length are arbitrary
            for i, (r, new) in enumerate(batch):
                ids = torch.tensor(r.blocks[group], dtype=torch.int32)
                table[i, : len(ids)] = ids
                for j in range(new):
                    slots[group, begins[i] + j] = self.slot(ids, r.length + j, size)
            tables.append(table)
        made, by_layer = self.build(begins, max(new for _, new in batch), lengths, tables, slots)
        return made, by_layer, rows

    def slot(self, ids, position, size):
        return int(ids[position // size]) * size + position % size

    def build(self, begins, most, lengths, tables, slots, **options):
        """The metadata. Tables lie where those of other steps lay: graphs that were recorded read them there."""
        host = torch.from_numpy(begins)
        begins, longest, rows = self.keep("begins", host), int(lengths.max()), slots.shape[1]
        lengths = self.keep("lengths", lengths)
        tables = [self.keep(f"table {group}", table) for group, table in enumerate(tables)]
        slots = [self.keep(f"slots {group}", x) for group, x in enumerate(slots)]
        made = self.vllm.build_attn_metadata(
            self.attn_groups,
            len(lengths),
            rows,
            begins,
            host,
            most,
            lengths,
            longest,
            tables,
            slots,
            self.cache,
            is_prefilling=torch.zeros(len(lengths), dtype=torch.bool),
            **self.build_options(lengths),
            **options,
        )
        return made, {name: slots[g] for g, group in enumerate(self.groups) for name in group.layer_names}

    def build_options(self, lengths):
        return {}

    def keep(self, name, x):
        if name not in self.kept:
            self.kept[name] = torch.zeros(4096, *x.shape[1:], dtype=x.dtype, device=DEVICE)
        self.kept[name][: len(x)].copy_(x)
        return self.kept[name][: len(x)]

    def step(self, batch, pad_to=None, tolerance=2e-5, keep_order=False):
        """Runs all layers over the batch and checks every row. [(request, new tokens)], brought into vLLM's order."""
        width = 1 + self.drafts
        if not keep_order:
            batch = sorted(batch, key=lambda b: (b[1] > width, b[1] != width, b[1]))
        made, slots, rows = self.metadata(batch, pad_to)
        self.finish(batch, self.forward(made, slots, self.inputs(batch, rows)), tolerance)

    def inputs(self, batch, rows):
        """Queries, keys and values of each layer, [rows, heads * head_dim]; rows of padding have numbers, too."""
        inputs = []
        for i, layer in enumerate(self.layers):
            heads = layer.heads[0], layer.heads[1], layer.heads[1]
            parts = [
                torch.cat([self.tensors(r, i, range(r.length, r.length + n), which, heads[which]) for r, n in batch])
                for which in range(3)
            ]
            pad = rows - parts[0].shape[0]
            inputs.append([torch.cat([x, x.new_full((pad, *x.shape[1:]), 3.0)]).flatten(1) for x in parts])
        return inputs

    def forward(self, made, slots, inputs):
        vllm = self.vllm
        with vllm.set_current_vllm_config(self.config), vllm.set_forward_context(made, self.config, slot_mapping=slots):
            return [self.call(layer, *x) for layer, x in zip(self.layers, inputs)]

    def call(self, layer, *inputs):
        return layer.made(*inputs)

    def finish(self, batch, outputs, tolerance):
        """Compares, and counts the new tokens as stored."""
        for i, (layer, out) in enumerate(zip(self.layers, outputs)):
            out, row = out.view(-1, layer.heads[0], layer.head_dim), 0
            for r, new in batch:
                self.check(i, r, new, out[row : row + new], tolerance)
                row += new
        for r, new in batch:
            r.length += new

    def check(self, i, r, new, out, tolerance):
        layer, end = self.layers[i], r.length + new
        if self.dtype != torch.float32:
            tolerance = max(tolerance, 1e-2)  # of the result's dtype
        keys, values = (self.tensors(r, i, range(end), w, layer.heads[1]).double().cpu().numpy() for w in (1, 2))
        q = self.tensors(r, i, range(r.length, end), 0, layer.heads[0]).double().cpu().numpy()
        sinks = layer.options.get("sinks")
        wanted, _ = dense.attention(
            q,
            keys,
            values,
            scale=layer.made.impl.scale,
            window=layer.options.get("window") or 0,
            softcap=layer.options.get("softcap") or 0.0,
            alibi_slopes=layer.options.get("alibi_slopes"),
            sink_logits=None if sinks is None else sinks.double().cpu().numpy(),
        )
        error = np.linalg.norm(out.double().cpu().numpy() - wanted) / np.linalg.norm(wanted)
        self.worst = max(self.worst, error)
        assert error < tolerance, f"layer {i}, request {r.seed}, {new} new of {end} tokens: relative error {error:.2e}"
