"""A report of where a cache stores its layers, in numbers and as a table."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from kvant import PrefixStats, formats

from . import versions
from .layers import KvantLayer


_EXPANDED = "latents, which the model expands in each step: kvant decodes them for it"


@dataclass(frozen=True)
class Row:
    """One layer. stored: by kvant; else `reason` says why not. Bytes are those of now."""

    layer: int
    stored: bool
    k: str
    v: str
    kv_heads: int
    head_dim: int
    window: int
    ends: str
    reason: str
    bytes: int
    bf16_bytes: int  # of a DynamicCache in bf16
    prompts: str = ""  # what computes the attention of prompts, and over what
    exact_tokens: int = 0  # that a query of the next step sees, over all rows of the batch: read as given
    encoded_tokens: int = 0  # and read from codes
    products: int = 0  # bits of what is multiplied for many queries: those that were asked for, or that plans chose
    v_head_dim: int = 0  # of values; that of keys is head_dim


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    batch: int
    tokens: int
    note: str = ""  # of a cache that is not kvant's
    products: int = 0  # bits of what is multiplied for many queries, if they were asked for
    prefixes: PrefixStats | None = None  # of the index of an enabled model; others may use that index, too

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def bf16_bytes(self) -> int:
        return sum(row.bf16_bytes for row in self.rows)

    def _alike(self) -> list[list[Row]]:
        """Neighbours that differ in their numbers alone."""
        groups: list[list[Row]] = []
        for row in self.rows:
            same = replace(row, layer=0, bytes=0, bf16_bytes=0)
            if groups and replace(groups[-1][-1], layer=0, bytes=0, bf16_bytes=0) == same:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def __str__(self) -> str:
        """One line for neighbouring layers that are alike; its megabytes are theirs together, its tokens those of one
        layer."""
        names = ("layers", "stored by", "format", "window", "heads x dim", "exact ends", "exact", "encoded", "MB")
        table = [(*names, "MB in bf16", "")]
        for alike in self._alike():
            r, last = alike[0], alike[-1]
            table.append(
                (
                    str(r.layer) if r is last else f"{r.layer}-{last.layer}",
                    "kvant" if r.stored else "transformers",
                    f"{r.k}/{r.v}" if r.stored else "-",
                    str(r.window or "-"),
                    f"{r.kv_heads} x {versions.dims(r.head_dim, r.v_head_dim)}" if r.head_dim else "-",
                    r.ends or "-",
                    *([str(r.exact_tokens), str(r.encoded_tokens)] if r.bytes and r.stored else "--"),
                    f"{sum(x.bytes for x in alike) / 1e6:.2f}",
                    f"{sum(x.bf16_bytes for x in alike) / 1e6:.2f}",
                    r.reason,
                )
            )
        total = ("all", *[""] * 7, f"{self.bytes / 1e6:.2f}", f"{self.bf16_bytes / 1e6:.2f}", "")
        table.append(total)
        widths = [max(len(line[i]) for line in table) for i in range(len(total))]
        right = (0, 3, 6, 7, 8, 9)
        lines = [
            "  ".join(x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths))).rstrip()
            for line in table
        ]
        head = self.note or (f"{self.batch} rows of {self.tokens} tokens" if self.tokens else "no tokens yet")
        prompts = "; ".join(dict.fromkeys(row.prompts for row in self.rows if row.prompts))
        if prompts:
            head = f"{head}; prompts {prompts}"
        if self.products:
            head = f"{head}; products of {self.products} bits for many queries"
        return "\n".join([head, *lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        return [*self._of_prefixes(), *self._of_sizes()]

    def _of_prefixes(self) -> list[str]:
        if self.prefixes is None:
            return []
        p = self.prefixes
        return [
            f"{p.hits} of {p.lookups} prompts that were looked up began with a known prefix, {p.tokens} tokens in all; "
            f"the index has {p.entries} entries, {p.bytes / 1e6:.2f} MB"
        ]

    def _of_sizes(self) -> list[str]:
        held = [row for row in self.rows if row.stored and row.bytes]
        if sum(row.bytes for row in held) <= sum(row.bf16_bytes for row in held):
            return []
        return [
            "kvant takes more than bf16 so far: a row takes whole pages of 64 tokens, and exact ends beside codes; "
            "only what is between them becomes smaller"
        ]


def _ends(cache: Any) -> str:
    ends = cache.exact_ends()
    if ends.sink_pages + ends.tail_pages == 0:
        return "none"
    dtype = ends.dtype or "bf16, or f16 if the first write is"
    return f"{ends.sink_pages} sink and {ends.tail_pages} tail pages, {dtype}"


def _tokens(group: Any) -> tuple[int, int]:
    """Tokens that the next query reads exactly and encoded; formats that are dense store all of them as given."""
    exact, encoded = group.tokens_read()
    return (exact + encoded, 0) if {group.cache.k, group.cache.v} <= _dense() else (exact, encoded)


@functools.cache
def _dense() -> set[str]:
    """Formats that store tokens as given."""
    return {f["name"] for f in formats() if f["dense"]}


def _prompts(cache: Any, layer: KvantLayer) -> str:
    """The way of a prompt's attention in a layer that kvant stores."""
    group = layer.group
    if group is None:
        return ""
    if layer.family.geometry is not None and layer.family.geometry.latent:
        return "by torch over expanded latents"
    if not cache.prefills_exactly(group):
        return "by kvant over what is stored"
    if group.own_refused is not None:
        return f"the first by torch over its own keys, later ones by kvant over what is stored ({group.own_refused})"
    if group.on_device:
        return "by kvant over their own keys as they are"
    return "the first by torch, later ones by kvant over their own keys as they are"


def report_of_another(kind: str, layers: int) -> Report:
    """The report of a cache of transformers', in whose layers kvant has no part."""
    rows = tuple(Row(i, False, "", "", 0, 0, 0, "", kind, 0, 0) for i in range(layers))
    return Report(rows, 0, 0, f"the last tokens went to {kind}: kvant stored none of them")


def make_report(cache: Any) -> Report:
    """The report of a KvantCache."""
    rows = []
    batch, tokens = cache.rows or 0, cache.length or cache.get_seq_length()
    shared = {id(group): (group.memory(), _ends(group.cache), *_tokens(group)) for group in cache.groups}
    for i, layer in enumerate(cache.layers):
        stored = isinstance(layer, KvantLayer)
        heads = dim = v_dim = held = plain = exact = encoded = products = 0
        k, v = cache.settings.k, cache.settings.v
        ends, reason, window = "", cache.reasons.get(i, ""), getattr(layer, "sliding_window", 0)
        if stored:
            heads, dim, v_dim, latent = layer.family.geometry or (0, 0, 0, False)
            if latent:
                v, reason = cache.settings.rotary, _EXPANDED
            products = cache.settings.products
            if layer.group is not None:
                products = layer.group.products or products
                heads, dim, v_dim = layer.group.cache.kv_heads, layer.group.cache.head_dim, layer.group.cache.v_head_dim
                held, ends, exact, encoded = shared[id(layer.group)]
            kept = min(layer.length, window - 1) if window else layer.length
            plain = batch * kept * heads * (dim + v_dim) * 2
        else:
            for x in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if x is not None and x.ndim == 4:
                    heads, dim, v_dim = heads or x.shape[1], dim or x.shape[3], x.shape[3]
                    batch = batch or x.shape[0]
                    held, plain = held + x.numel() * x.element_size(), plain + x.numel() * 2
        if not stored and versions.kind_of_layer(layer)[0] == "none":
            window = 0
        rows.append(
            Row(
                i,
                stored,
                k,
                v,
                heads,
                dim,
                int(window),
                ends,
                reason,
                held,
                plain,
                _prompts(cache, layer) if stored else "",
                exact,
                encoded,
                products,
                v_dim,
            )
        )
    return Report(tuple(rows), batch, tokens, products=cache.settings.products)
