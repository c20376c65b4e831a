"""The options of kvant.hf, checked once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import field, make_dataclass
from typing import Any

import torch

import kvant
from kvant import _arguments, _options
from kvant._errors import InvalidArgument
from kvant._options import Option, Options

# Windows of so many tokens and fewer stay with transformers: the exact tail, and pages of 64 tokens, one of them partly
# filled and one partly out of sight, take about as much there as bf16 does.
SHORT_WINDOW = 384


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, int) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} = {value!r}: must be a list of layer numbers")
    return tuple(int(i) for i in value)


def _bases(name: str, value: Any) -> kvant.Bases:
    if isinstance(value, (str, os.PathLike)):
        return kvant.Bases(value)  # what is wrong with the file is said here
    if not isinstance(value, kvant.Bases):
        raise InvalidArgument(f"{name} is a {type(value).__name__}: must be a path or a kvant.Bases")
    return value


def _threads(name: str, value: Any) -> int:
    if _arguments.int32(name, value) < 1:
        raise InvalidArgument(f"{name} = {value}: must be 1 or more, or None for torch.get_num_threads()")
    return value


def _rollback(name: str, value: Any) -> int:
    if _arguments.int64(name, value) < 0:
        raise InvalidArgument(f"{name} = {value}: must be 0 or more")
    return value


def _format(name: str, value: Any) -> str:
    if isinstance(value, str) and value.startswith("lut"):
        raise InvalidArgument(
            f'{name} = "{value}": this format is for imported caches, whose tables of levels it needs; use a tq format '
            '("tq4", "tq6")'
        )
    kvant.Cache(kv_heads=1, head_dim=64, **{name: value})  # refuses other names, and says what to write
    return value


def _isa(name: str, value: Any) -> str:
    here = [i["name"] for i in kvant.info()["isas"] if i["available"]]
    if value not in here:
        raise InvalidArgument(f'{name} = "{value}": this machine has {", ".join(here)}; None is the best')
    return value


# Beside the options of caches and of plans. Where these have another default or another meaning here, they stand here.
_OWN = (
    Option(
        "skip_layers", "tuple[int, ...]", (), _numbers,
        "layers that keep transformers' own cache, by number; negative numbers count from the end.",
    ),
    Option(
        "bases", "Any", None, _bases,
        "calibrated bases: the file that `kvant calibrate` made of what kvant.hf.capture wrote, by its path or as a "
        "kvant.Bases. It must have all layers that kvant stores, in formats that are not dense.",
    ),
    Option(
        "fresh_keys", "bool | None", None, _arguments.flag,
        "True: prompts attend to their own keys and values as they were before compression: the first one, and later "
        "steps of more than 64 tokens. On a CUDA device kvant computes this, where it has prefill kernels for the "
        "cache; on the CPU torch computes a first prompt, and kvant the later ones. False: to what is stored, as all "
        "later tokens do. None: True on a CUDA device, False on the CPU. The report says which it is.",
    ),
    Option(
        "short_windows", "bool", False, _arguments.flag,
        "True: sliding windows of 384 tokens and fewer are stored by kvant, too.",
    ),
    Option(
        "strict", "bool", False, _arguments.flag,
        "True: an error instead of a layer left to transformers that skip_layers does not name, and instead of "
        "decoding a cache for other code.",
    ),
)  # fmt: skip
_HERE = {
    "k": dict(read=_format),
    "v": dict(read=_format),
    "rollback_tokens": dict(
        default=128, read=_rollback,
        text="with a sliding window, so many of the newest tokens can be taken back: drafts of assisted generation.",
    ),
    "exact": dict(
        text='"f32", "f16" or "bf16", the dtype of pages that stay exact. None: f16 for models in f16, else bf16.'
    ),
    "threads": dict(
        kind="int | None", default=None, read=_threads,
        text="for kvant on the CPU. None: torch.get_num_threads().",
    ),
    "isa": dict(
        read=_isa,
        text='for kvant on the CPU, an instruction set of kvant.info()["isas"]. None: the best of the machine. AMX '
        'multiplies softmax weights and values as two bf16 each, 4e-6 off; "avx512" is more exact (1e-6) and slower '
        "for prompts.",
    ),
    "products": dict(
        text="as for kvant.Plan: 16 or 8 bits of what kvant multiplies for many queries over tq formats. 0: plans "
        "choose, and the rows of report() have what they chose.",
    ),
}  # fmt: skip
OPTIONS = Options(
    "kvant.hf",
    *(o.changed(**_HERE.get(o.name, {})) for o in (*_options.HF_CACHE, *_options.HF_ATTENTION)),
    *_OWN,
)


class _Settings:
    """How a model's keys and values are stored.

    {options}
    """

    @classmethod
    def make(cls, base: Settings | None = None, **options: Any) -> Settings:
        """Settings from options, those not given from `base`. Errors: TypeError for other options, InvalidArgument."""
        OPTIONS.complete(options)
        values = {o.name: getattr(base, o.name) for o in OPTIONS} if base is not None else {}
        settings = cls(**{**values, **{name: cls._read(name, value) for name, value in options.items()}})
        if settings.products == 8 and not (settings.k.startswith("tq") and settings.v.startswith("tq")):
            raise InvalidArgument(
                f'products = 8: only tq formats are multiplied in 8 bits, and k is "{settings.k}", v "{settings.v}"; '
                "leave it 0"
            )
        return settings

    @staticmethod
    def _read(name: str, value: Any) -> Any:
        option = OPTIONS.by_name[name]
        if value is None and option.default is None:
            return None
        read = option.read(name, value)
        if option.kind.startswith("bool"):
            return bool(read)
        return read if name in ("skip_layers", "bases") else value  # of others the numbers of C are not the values

    @property
    def rotary(self) -> str:
        """The format of the rotary part of keys beside latents in `k`: an error there moves all scores of a token, and
        it is a ninth of the numbers (docs/measurements.md, Latents)."""
        return "tq8" if self.k.startswith("tq") else self.k

    def of_cache(self, on_device: bool, window: int) -> dict[str, Any]:
        """The options for kvant.Cache that are the same for all layers."""
        options = {option.name: getattr(self, option.name) for option in _options.HF_CACHE}
        options["threads"] = options["threads"] or torch.get_num_threads()
        if on_device:  # which has no threads and no instruction sets
            options.update(threads=0, isa=None)
        if not window:
            del options["rollback_tokens"]
        return options

    def of_plans(self) -> dict[str, Any]:
        """The options for plans."""
        return {option.name: getattr(self, option.name) for option in _options.HF_ATTENTION}

    def skipped(self, layers: int) -> set[int]:
        """The numbers of skip_layers as 0 .. layers - 1."""
        skipped = set()
        for i in self.skip_layers:
            if not -layers <= i < layers:
                raise kvant.InvalidArgument(f"skip_layers has {i}: the model's layers are 0 to {layers - 1}")
            skipped.add(i % layers)
        return skipped


Settings = make_dataclass(
    "Settings",
    [(option.name, option.kind, field(default=option.default)) for option in OPTIONS],
    bases=(_Settings,),
    namespace={"__doc__": _Settings.__doc__.replace("{options}", OPTIONS.sentences()), "__module__": __name__},
    frozen=True,
)
