"""The options of kvant.hf, checked once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import kvant

# Windows of so many tokens and fewer stay with transformers: the exact tail, and pages of 64 tokens, one of them partly
# filled and one partly out of sight, take about as much there as bf16 does.
SHORT_WINDOW = 384


@dataclass(frozen=True)
class Settings:
    """How a model's keys and values are stored.

    k, v: formats of keys and values; kvant.formats() lists them.
    skip_layers: layers that keep transformers' own cache, by number; negative numbers count from the end.
    bases: calibrated bases: the file that `kvant calibrate` made of what kvant.hf.capture wrote, by its path or as a
        kvant.Bases. It must have all layers that kvant stores, in formats that are not dense.
    k_centre: "page": encoded pages keep a mean of their keys and encode what is left, which makes keys of 3 to 5 bits
        much more exact for 0.125 bits a value. "none". "automatic": as kvant.Cache has it.
    exact: "f32", "f16" or "bf16", the dtype of pages that stay exact. None: f16 for models in f16,
        else bf16.
    sink_pages, tail_pages: first and newest full pages of 64 tokens that stay exact, the first while a window covers
        them. None: one each.
    exact_prefill: True: prompts attend to their own keys and values as they were before compression: the first one, and
        later steps of more than 64 tokens. On a CUDA device kvant computes this (fresh keys), where it has prefill
        kernels for the cache; on the CPU torch computes a first prompt, and kvant the later ones. False: to what is
        stored, as all later tokens do. None: True on a CUDA device, False on the CPU. The report says which it is.
    short_windows: True: sliding windows of 384 tokens and fewer are stored by kvant, too.
    rollback_tokens: with a sliding window, so many of the newest tokens can be taken back: drafts of assisted
        generation.
    strict: True: an error instead of a layer left to transformers that skip_layers does not name, and instead of
        decoding a cache for other code.
    threads: for kvant on the CPU. None: torch.get_num_threads().
    isa: for kvant on the CPU, an instruction set of kvant.info()["isas"]. None: the best of the machine. AMX multiplies
        softmax weights and values as two bf16 each, 4e-6 off; "avx512" is more exact (1e-6) and slower for prompts.
    products: as for kvant.Plan: 16 or 8 bits of what kvant multiplies for many queries over tq formats. 0: plans
        choose, and the rows of report() have what they chose.
    """

    k: str = "tq6"
    v: str = "tq4"
    skip_layers: tuple[int, ...] = ()
    bases: Any = None
    k_centre: str = "automatic"
    exact: str | None = None
    sink_pages: int | None = None
    tail_pages: int | None = None
    exact_prefill: bool | None = None
    short_windows: bool = False
    rollback_tokens: int = 128
    strict: bool = False
    threads: int | None = None
    isa: str | None = None
    products: int = 0

    @classmethod
    def make(cls, base: Settings | None = None, **options: Any) -> Settings:
        """Settings from options, those not given from `base`. Errors: TypeError for other options, InvalidArgument."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: no such option; the options are {', '.join(names)}")
        values = {name: getattr(base, name) for name in names} if base is not None else {}
        values.update(options)
        layers = values.get("skip_layers", ())
        if isinstance(layers, int) or not isinstance(layers, Iterable):
            raise kvant.InvalidArgument(f"skip_layers = {layers!r}: must be a list of layer numbers")
        values["skip_layers"] = tuple(int(i) for i in layers)
        if isinstance(values.get("bases"), (str, os.PathLike)):
            values["bases"] = kvant.Bases(values["bases"])  # what is wrong with the file is said here
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        for name in ("k", "v"):
            if isinstance(getattr(self, name), str) and getattr(self, name).startswith("lut"):
                raise kvant.InvalidArgument(
                    f'{name} = "{getattr(self, name)}": this format is for imported caches, whose tables of levels it '
                    'needs; use a tq format ("tq4", "tq6")'
                )
        kvant.Cache(kv_heads=1, head_dim=64, k=self.k, v=self.v)  # refuses other names, and says what to write
        if self.bases is not None and not isinstance(self.bases, kvant.Bases):
            raise kvant.InvalidArgument(f"bases is a {type(self.bases).__name__}: must be a path or a kvant.Bases")
        if self.exact not in (None, "f32", "f16", "bf16"):
            raise kvant.InvalidArgument(f'exact = "{self.exact}": must be "f32", "f16", "bf16" or None')
        if self.k_centre not in ("automatic", "none", "page"):
            raise kvant.InvalidArgument(f'k_centre = "{self.k_centre}": must be "page", "none" or "automatic"')
        if self.rollback_tokens < 0:
            raise kvant.InvalidArgument(f"rollback_tokens = {self.rollback_tokens}: must be 0 or more")
        if self.threads is not None and self.threads < 1:
            raise kvant.InvalidArgument(
                f"threads = {self.threads}: must be 1 or more, or None for torch.get_num_threads()"
            )
        if self.isa is not None:
            here = [i["name"] for i in kvant.info()["isas"] if i["available"]]
            if self.isa not in here:
                raise kvant.InvalidArgument(f'isa = "{self.isa}": this machine has {", ".join(here)}; None is the best')
        if self.products not in (0, 8, 16) or isinstance(self.products, bool):
            raise kvant.InvalidArgument(f"products = {self.products!r}: must be 8 or 16 bits, or 0 to let plans choose")
        if self.products == 8 and not (self.k.startswith("tq") and self.v.startswith("tq")):
            raise kvant.InvalidArgument(
                f'products = 8: only tq formats are multiplied in 8 bits, and k is "{self.k}", v "{self.v}"; leave it 0'
            )

    def skipped(self, layers: int) -> set[int]:
        """The numbers of skip_layers as 0 .. layers - 1."""
        skipped = set()
        for i in self.skip_layers:
            if not -layers <= i < layers:
                raise kvant.InvalidArgument(f"skip_layers has {i}: the model's layers are 0 to {layers - 1}")
            skipped.add(i % layers)
        return skipped
