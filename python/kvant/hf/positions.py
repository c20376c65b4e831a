"""What models keep of the conversation at hand in themselves, where another conversation overwrites it."""

from __future__ import annotations

from typing import Any

import torch

from .memo import Memo

# Modules keep a state of the conversation under these names, outside its cache: the shift between tokens and positions
# that images make (Qwen-VL, GLM-V and others), and the positions of an image that is being generated (GLM-Image).
_POSITIONS = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")


def _ropes(module: Any) -> dict[str, Any]:
    """The types of a module's rotary frequencies, by the kind of layer; the kind "" is that of all layers."""
    types = getattr(module, "rope_type", None)
    return types if isinstance(types, dict) else {} if types is None else {"": types}


def _find(model: Any) -> list[tuple[str, bool, tuple[str, ...]]]:
    """The modules of a model that keep something of the conversation at hand: names, whether it is one value for all
    rows, and attributes.

    Rotary embeddings with "dynamic" frequencies keep those of the longest text that they have met.
    """
    found: list[tuple[str, bool, tuple[str, ...]]] = []
    for name, module in model.named_modules():
        own = tuple(a for a in _POSITIONS if a in module.__dict__)
        if own:
            found.append((name, False, own))
        if hasattr(module, "max_seq_len_cached"):
            prefixes = [f"{kind}_" if kind else "" for kind, rope in _ropes(module).items() if "dynamic" in str(rope)]
            parts = [f"{p}{a}" for p in prefixes for a in ("inv_freq", "max_seq_len_cached")]
            if parts:
                found.append((name, True, tuple(a for a in parts if hasattr(module, a))))
    return found


def frequencies_change(model: Any) -> int | None:
    """From how many tokens on a model's rotary frequencies depend on the length of the text (rope_type "dynamic" and
    "longrope"), so that keys of the same tokens differ; None: they never do."""
    found = []
    for module in model.modules():
        for kind, rope in _ropes(module).items():
            if rope == "longrope":
                parameters = module.config.rope_parameters
                found.append((parameters[kind] if kind else parameters)["original_max_position_embeddings"])
            elif isinstance(rope, str) and "dynamic" in rope:
                found.append(module.original_max_seq_len)
    return min(found, default=None)


_holders = Memo()


def read(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a model keeps of a conversation: of its rows, and of all rows. Names are "module.attribute"."""
    holders = _holders.get(model)
    if holders is None:
        holders = _holders.put(model, _find(model))
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, shared, attributes in holders:
        module = model.get_submodule(name)
        for attribute in attributes:
            found[shared][f"{name}.{attribute}"] = getattr(module, attribute)
    return found


def write(model: Any, name: str, value: Any) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if getattr(module, attribute) is not value:
        setattr(module, attribute, value)


def unshifted(value: Any) -> Any:
    """Returns the value that text has: no shift, where there is one; else nothing."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) and value.ndim == 2 else None


def shifts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.any())


def rows_of(value: Any, batch: int) -> Any:
    """Returns the rows of prompts from those of a beam search."""
    if not isinstance(value, torch.Tensor) or not value.ndim or len(value) <= batch or len(value) % batch:
        return value
    return value[:: len(value) // batch]


def picked(value: Any, parents: list[int], rows: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.ndim or not len(value) or rows % len(value):
        return value
    return value.repeat_interleave(rows // len(value), 0)[torch.tensor(parents, device=value.device)]


_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "float64": torch.float64}


def encode(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        if value is None or type(value) is int:
            return value
        raise ValueError(f"the model keeps a {type(value).__name__} of the conversation, which a file cannot")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        name, value = ("float32", value.float()) if value.is_floating_point() else ("int64", value.long())
    return [name, list(value.shape), value.detach().cpu().flatten().tolist()]


def decode(value: Any, rows: int | None) -> Any:
    if value is None or type(value) is int:
        return value
    name, shape, numbers = value
    made = torch.tensor(numbers, dtype=_DTYPES[name]).reshape([int(n) for n in shape])
    if rows is not None and made.ndim and (not len(made) or rows % len(made)):
        raise ValueError(f"{len(made)} rows of {rows}")
    return made
