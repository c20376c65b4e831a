"""The attention function that transformers calls for the implementation "kvant"."""

from __future__ import annotations

from typing import Any

import torch

from . import placing, versions
from .groups import Group
from .masks import LazyMask
from .proxies import KVProxy


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the query heads [batch, q_heads, queries, head_dim]: ([batch, queries, q_heads, v_head_dim], None).

    Over packed keys and values by kvant, over plain ones (no cache, a layer left to transformers) by torch.
    """
    if type(key) is not KVProxy or type(value) is not KVProxy or (key.fresh is not None and key.own is None):
        if isinstance(key, KVProxy):
            key = key.dense()
        if isinstance(value, KVProxy):
            value = value.dense()
        return _plain(module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux, others)
    layer = key.layer
    group: Group = layer.group
    if dropout or others or query.requires_grad or key.step is not group.step or value.layer is not layer:
        _refuse(layer, query, key, value, dropout, others)
    given_causal = is_causal
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window, mask = group.window, None
    if type(attention_mask) is LazyMask:
        is_causal = True
        # A mask that shows more than the layer's window is the model's word: the keys that the step brought are there.
        wider = group.window and not 0 < attention_mask.window <= group.window
        if attention_mask.kind == "overlay" or wider:
            is_causal, mask = False, _overlay(layer, attention_mask, query.shape[2], key.shape[2])
        else:
            window = attention_mask.window
    elif attention_mask is not None:
        is_causal, mask = False, _overlay(layer, attention_mask, query.shape[2], key.shape[2])
    if key.own is not None and value.own is not None:
        out = group.attend_own(
            layer.slot, query, scaling, softcap or 0.0, is_causal, window, s_aux, mask, (key.own, value.own)
        )
        if out is not None:
            return out, None
        if key.fresh is not None:
            return _plain(
                module,
                query,
                key.fresh,
                value.fresh,
                attention_mask,
                dropout,
                scaling,
                given_causal,
                softcap,
                s_aux,
                others,
            )
    return group.attend(layer.slot, query, scaling, softcap or 0.0, is_causal, window, s_aux, mask), None


def _refuse(
    layer: Any, query: torch.Tensor, key: KVProxy, value: KVProxy, dropout: float, others: dict[str, Any]
) -> None:
    """Raises for what kvant does not compute. `others` that change nothing pass."""
    if dropout:
        raise RuntimeError(f"dropout = {dropout}: kvant has no dropout; call model.eval()")
    if query.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("kvant has no backward pass: call the model under torch.no_grad(), or without a cache")
    if key.step is not layer.group.step or value.step is not layer.group.step:
        raise RuntimeError(f"keys or values of layer {layer.index} are used after the step they belong to")
    if value.layer is not layer or key.which != 0 or value.which != 1:
        raise RuntimeError(f"keys of layer {layer.index} are used with values of layer {value.layer.index}")
    _refuse_unknown(others)


def _refuse_unknown(others: dict[str, Any], known: frozenset[str] = frozenset()) -> None:
    """Raises for attention arguments that could change the result, `known` ones aside. Those that are not set pass."""
    if others.get("output_attentions"):
        raise RuntimeError(
            'output_attentions=True: kvant never forms attention weights; call model.set_attn_implementation("eager")'
        )
    for name, x in others.items():
        if x is not None and x is not False and name not in versions.HARMLESS and name not in known:
            raise RuntimeError(
                f"attention argument {name} is set, which kvant does not know: it could change the result. "
                "Call kvant.hf.disable(model); a kvant.hf.cache(model) still compresses, and decodes in each step"
            )


def _overlay(layer: Any, mask: torch.Tensor, queries: int, keys: int) -> tuple[torch.Tensor, Any]:
    """The mask argument of Group.attend for a mask [batch or 1, heads or 1, queries, keys] over what update()
    returned."""

    def make() -> tuple[torch.Tensor, int, int]:
        dense = mask.dense() if isinstance(mask, LazyMask) else mask
        if dense.ndim != 4 or dense.shape[2] not in (1, queries) or dense.shape[3] not in (keys, layer.length):
            raise ValueError(
                f"attention_mask has shape {list(dense.shape)}: "
                f"layer {layer.index} has {queries} queries and {keys} keys, "
                f"so that it must be [batch, heads, {queries}, {keys}], where batch and heads may be 1"
            )
        owner, newest = layer.owner, dense[..., dense.shape[3] - keys :]
        return placing.place_mask(owner.stored, owner.length, layer.group, newest, queries)

    return mask, make


def _plain(
    module, query, key, value, mask, dropout, scaling, is_causal, softcap, sinks, others
) -> tuple[torch.Tensor, None]:
    """Attention over tensors. Arguments that torch's attention would drop are refused."""
    if softcap is None and sinks is None:
        _refuse_unknown(others, versions.SDPA_ARGUMENTS)
        if isinstance(mask, LazyMask):
            mask = mask.dense(may_skip=True)
        return versions.sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    _refuse_unknown(others)
    if isinstance(mask, LazyMask):
        mask = mask.dense()
    batch, heads, queries, dim = query.shape
    if sinks is not None and sinks.shape != (heads,):
        raise RuntimeError(
            f"s_aux has shape {list(sinks.shape)}: kvant takes one sink logit for each of the {heads} query heads"
        )
    kv_heads = key.shape[1]
    if mask is None and queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - queries)
    q = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    scores = (q @ key.transpose(2, 3)).float().view(batch, heads, queries, -1)
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(batch, -1, queries, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = torch.nn.functional.dropout(weights, dropout, training=module.training).to(value.dtype)
    out = weights.view(batch, kv_heads, -1, weights.shape[-1]) @ value
    return out.view(batch, heads, queries, -1).transpose(1, 2).contiguous(), None
