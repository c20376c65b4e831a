"""Captures: the queries, keys and values of a model's attention layers, in the files that `kvant eval` and
`kvant calibrate` read.

    kvant.hf.capture(model, text, "qkv.safetensors", tokenizer=tokenizer)
    for row in kvant.eval("qkv.safetensors", ["tq6/tq4", "tq4", "fp8"])["rows"]: print(row)

The model runs once. For the time of the call its attention goes through a function that records what it is given, after
RoPE and norms, and then computes exactly what the model would have computed.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _arguments
from .._errors import InvalidArgument, Unsupported
from .._tools import info, version
from . import versions

_calls = itertools.count()
_FILE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class _Layer:
    q: torch.Tensor  # [q_heads, queries, head_dim], the last positions
    k: torch.Tensor  # [kv_heads, positions, head_dim]
    v: torch.Tensor  # [kv_heads, positions, v_head_dim]
    scale: float
    window: int  # tokens, 0: none
    softcap: float
    sinks: bool
    kv_of: int  # the layer whose keys and values these are; its own number if it has its own


def token_ids(text_or_ids: Any, tokenizer: Any, max_tokens: int) -> torch.Tensor:
    """The first max_tokens token ids [1, tokens] of a text or of ids ([tokens] or [1, tokens])."""
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise InvalidArgument(
                "text_or_ids is a text and tokenizer is None: pass tokenizer=, or token ids instead of a text"
            )
        text_or_ids = tokenizer(text_or_ids)["input_ids"]
    ids = torch.as_tensor(text_or_ids)
    if ids.numel() == 0:
        raise InvalidArgument("text_or_ids is empty: give a text, or the ids, of at least two tokens")
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1 or ids.is_floating_point():
        raise InvalidArgument(
            f"text_or_ids has shape {list(ids.shape)} of {ids.dtype}: must be one sequence of whole numbers"
        )
    if max_tokens < 1:
        raise InvalidArgument(f"max_tokens = {max_tokens}: must be at least 1")
    return ids[:, :max_tokens].long()


@contextlib.contextmanager
def attention_of(model: Any, name: str):
    """The model's text part uses the attention function `name` inside the block. A vision tower keeps its own."""
    config, text = model.config, model.config.get_text_config(decoder=True)
    part = next((key for key in config.sub_configs if getattr(config, key) is text), None)
    before = text._attn_implementation
    if name == versions.IMPLEMENTATION and (reason := versions.why_not_served(model)) is not None:
        raise Unsupported(reason)

    def use(chosen: str) -> None:
        model.set_attn_implementation(chosen if part is None else {part: chosen})
        if text._attn_implementation != chosen:
            raise Unsupported(
                f"{type(model).__name__} does not let its attention function be chosen "
                "(it is not written for transformers' AttentionInterface): "
                "kvant cannot see its queries, keys and values"
            )

    try:
        use(name)
        yield
    finally:
        use(before)


def _visible(mask: torch.Tensor | None, queries: int, keys: int, window: int | None, where: str) -> int:
    """The window (0: none) under which causal attention sees what `mask` shows; refuses what is not a causal mask."""
    if mask is None:
        return window or 0
    if mask.dtype != torch.bool:
        mask = mask == 0
    seen = mask[0, 0]
    row, column = torch.arange(queries, device=seen.device)[:, None], torch.arange(keys, device=seen.device)[None]
    shown = int(seen[-1].sum())
    for candidate in (window or 0, shown if shown < keys else 0):
        expected = column <= row
        if candidate:
            expected &= row - column < candidate
        if mask.shape[1] == 1 and torch.equal(seen, expected):
            return candidate
    raise Unsupported(
        f"{where} is under a mask that is neither causal nor a sliding window (chunks, images, or an own mask): "
        "`kvant eval` cannot replay it; leave it out with layers="
    )


class _Recorder:
    def __init__(self, layers: set[int] | None, queries: int, approximate: bool):
        self.layers, self.queries, self.approximate = layers, queries, approximate
        self.seen: dict[int, _Layer] = {}
        self.refused: dict[int, str] = {}
        self.owner: dict[int, int] = {}  # of keys by their address, which stay alive in `alive`
        self.alive: list[torch.Tensor] = []

    def attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kw):
        number = getattr(module, "layer_idx", len(self.seen) + len(self.refused))
        if self.layers is None or number in self.layers:
            try:
                self.seen[number] = self.record(
                    module, number, query, key, value, attention_mask, scaling, is_causal, kw
                )
            except Unsupported as error:
                self.refused[number] = str(error)
        if kw.get("softcap") is None and kw.get("s_aux") is None:
            return versions.sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kw
            )
        # torch's attention has neither softcap nor sinks: the model's own definition computes them.
        if attention_mask is None:
            n, m = query.shape[2], key.shape[2]
            attention_mask = torch.ones(1, 1, n, m, dtype=torch.bool, device=query.device).tril(m - n)
        if attention_mask.dtype == torch.bool:
            hidden = torch.finfo(query.dtype).min
            attention_mask = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
                ~attention_mask, hidden
            )
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kw)

    def record(self, module, number, query, key, value, mask, scaling, is_causal, kw) -> _Layer:
        where = f"layer {number} ({type(module).__name__})"
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise Unsupported(
                f"{where} has queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}: "
                "captures need as many values as keys, and keys as wide as queries"
            )
        if query.dtype not in _FILE_DTYPES or not query.dtype == key.dtype == value.dtype:
            raise Unsupported(
                f"{where} attends in {query.dtype}, {key.dtype}, {value.dtype}: must be one of f32, f16, bf16"
            )
        widest = max(query.shape[-1], value.shape[-1])
        if widest > info()["largest_head_dim"]:
            raise Unsupported(f"{where} has head_dim {widest}: kvant has 1 to {info()['largest_head_dim']}")
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if query.shape[2] != key.shape[2] or (mask is None and not causal) or kw.get("position_bias") is not None:
            raise Unsupported(
                f"{where} is not causal self-attention: `kvant eval` cannot replay it; leave it out with layers="
            )
        softcap, sinks = kw.get("softcap"), kw.get("s_aux")
        if (softcap is not None or sinks is not None) and not self.approximate:
            what = "caps its logits" if softcap is not None else "has sink logits"
            raise Unsupported(
                f"{where} {what}, which `kvant eval` leaves out: "
                "pass approximate=True for a file whose errors are those of "
                "plain attention (calibration is not affected)"
            )
        window = _visible(mask, query.shape[2], key.shape[2], kw.get("sliding_window"), where)
        self.alive.append(key)
        return _Layer(
            *(x[0].detach().to("cpu", copy=True).contiguous() for x in (query[:, :, -self.queries :], key, value)),
            scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            window=int(window),
            softcap=float(softcap or 0),
            sinks=sinks is not None,
            kv_of=self.owner.setdefault(key.data_ptr(), number),
        )


def _metadata(model: Any, ids: torch.Tensor, layers: dict[int, _Layer]) -> dict[str, str]:
    metadata = {
        "model": str(getattr(model.config, "name_or_path", "") or model.config.model_type),
        "layout": "q [heads,queries,head_dim] are the last positions; k,v [kv_heads,positions,head_dim]; "
        "all after RoPE and norms",
        "tokens": str(ids.shape[1]),
        "writer": f"kvant {version()}",
    }
    for number, layer in layers.items():
        name = f"layer{number}"
        metadata[f"{name}.scale"] = repr(layer.scale)
        metadata[f"{name}.sliding_window"] = str(layer.window)
        if layer.softcap:
            metadata[f"{name}.softcap"] = repr(layer.softcap)
        if layer.sinks:
            metadata[f"{name}.sinks"] = "left out"
        if layer.kv_of != number:
            metadata[f"{name}.kv_of"] = str(layer.kv_of)
    return metadata


@torch.no_grad()
def capture(
    model: Any,
    text_or_ids: Any,
    path: str | Path,
    *,
    tokenizer: Any = None,
    layers: Iterable[int] | None = None,
    max_tokens: int = 2048,
    queries: int = 128,
    approximate: bool = False,
) -> list[int]:
    """Runs the model once and writes queries, keys and values of its attention layers, after RoPE and norms.

    text_or_ids: a text (with tokenizer=) or the token ids of one sequence; the first max_tokens of them are used.
    path: the safetensors file, for kvant.eval and kvant.calibrate. It takes 2 * positions * kv_heads * head_dim values
        a layer.
    layers: numbers of the layers to write; None: all.
    queries: how many of the last positions' queries are kept. 128 are enough for kvant.eval. kvant.calibrate needs some
        times head_dim of them: with 128 its bases are worse than none. Give it queries=max_tokens.
    approximate: also write layers with softcap or sink logits; `kvant eval` replays them without. Layers that read
        another layer's keys (Gemma 3n, Gemma 4) are written with them, and marked in the metadata (kv_of). Returns the
        numbers of the layers written. Errors: InvalidArgument; Unsupported, if a layer is not causal self-attention
        that `kvant eval` can replay. An error leaves no file.
    """
    from safetensors.torch import save_file

    where = _arguments.path("path", path)
    ids = token_ids(text_or_ids, tokenizer, max_tokens)
    if queries < 1:
        raise InvalidArgument(f"queries = {queries}: must be at least 1")
    wanted = None if layers is None else {int(n) for n in layers}
    count = len(versions.hf_layers(model.config))
    outside = sorted((wanted or set()) - set(range(count)))
    if outside or wanted == set():
        raise InvalidArgument(
            f"layers = {sorted(wanted)}: {outside or 'nothing'} is not in the model, whose layers are 0 to {count - 1}"
        )
    recorder = _Recorder(wanted, queries, approximate)
    name = f"kvant_capture_{next(_calls)}"
    versions.AttentionInterface.register(name, recorder.attention)
    versions.AttentionMaskInterface.register(name, versions.sdpa_mask)
    try:
        with attention_of(model, name):
            # The body alone: the logits of all positions would be the largest tensor, and are not needed.
            model.base_model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        versions.AttentionInterface._global_mapping.pop(name, None)
        versions.AttentionMaskInterface._global_mapping.pop(name, None)
    if recorder.refused:
        raise Unsupported("; ".join(recorder.refused.values()))
    missing = sorted((wanted or set()) - recorder.seen.keys())
    if missing or not recorder.seen:
        raise InvalidArgument(
            f"layers {missing} do not attend through transformers' AttentionInterface: leave them out of layers="
            if missing
            else f"no layer of {type(model).__name__} attends "
            "through transformers' AttentionInterface: nothing to capture"
        )
    found = dict(sorted(recorder.seen.items()))
    tensors = {f"layer{n}.{part}": getattr(layer, part) for n, layer in found.items() for part in "qkv"}
    save_file(tensors, where, metadata=_metadata(model, ids, found))
    return list(found)
