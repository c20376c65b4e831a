"""Images for tiny models of any architecture: tried out, since each takes them in a form of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

ROWS = 2
AT = 8  # where an image's tokens begin in each row


def _vision(config: Any) -> Any:
    parts = (getattr(config, key) for key in config.sub_configs if "vision" in key)
    return next((part for part in parts if part is not None), config)


def _candidates(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments that models may take for one image in each row."""
    vision = _vision(config)
    patch = getattr(vision, "patch_size", 14)
    patch = patch if isinstance(patch, int) else patch[0]
    size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 4 * patch
    size = size if isinstance(size, int) else size[0]
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    depth = getattr(vision, "temporal_patch_size", 1)
    generator = torch.Generator().manual_seed(7)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sizes, grid = torch.tensor([[size, size]] * ROWS), torch.tensor([[1, 4, 4]] * ROWS)
    plain, tiles = pixels(ROWS, channels, size, size), pixels(ROWS, 1, channels, size, size)
    patches = {"pixel_values": pixels(ROWS * 16, channels * depth * patch * patch)}
    yield {"pixel_values": plain}
    yield patches | {"image_grid_thw": grid}
    yield patches | {"grid_thws": grid}
    yield {"pixel_values": plain, "image_sizes": sizes}
    yield {"pixel_values": tiles}
    yield {"pixel_values": tiles, "image_sizes": sizes}
    yield {"pixel_values": tiles, "pixel_attention_mask": torch.ones(ROWS, 1, size, size, dtype=torch.long)}
    yield patches | {"image_grid_hw": grid[:, 1:]}
    yield {"pixel_values": pixels(ROWS, 16, channels * patch * patch), "spatial_shapes": grid[:, 1:]} | {
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long)
    }
    yield {"pixel_values": pixels(ROWS, 16, channels * patch * patch)} | {
        "image_position_ids": torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
        .reshape(1, 16, 2)
        .expand(ROWS, -1, -1)
    }


def _token(config: Any) -> int:
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ValueError(f"{type(config).__name__} names no image token")


def _placed(ids: torch.Tensor, token: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with `count` image tokens in each row, and which they are."""
    ids, kinds = ids.clone(), torch.zeros_like(ids)
    ids[:, AT : AT + count] = token
    kinds[:, AT : AT + count] = 1
    return ids, kinds


def with_image(model: Any, ids: torch.Tensor, real: torch.Tensor, first: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids with image tokens, and the arguments of the first forward pass, of `first` tokens, that bring the image.

    A model that gets a wrong number of image tokens says how many features there are. Errors: ValueError.
    """
    token, known = _token(model.config), inspect.signature(model.forward).parameters
    hidden = model.config.get_text_config(decoder=True).hidden_size
    tried = []
    for candidate in _candidates(model.config):
        if not set(candidate) <= set(known):
            continue
        count = 1
        for _ in range(3):
            placed, kinds = _placed(ids, token, count)
            more = dict(candidate)
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in known:
                    more[name] = kinds[:, :first]
            try:
                with torch.no_grad():
                    call = dict(input_ids=placed[:, :first], attention_mask=real[:, :first])
                    seen = model(**call, **more).logits
                    other = model(**call, **more | {"pixel_values": -candidate["pixel_values"]}).logits
                if torch.equal(seen, other):
                    raise ValueError("the image changes nothing")
                return placed, more
            except Exception as error:
                tried.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
                match = re.search(r"features:? (?:torch\.Size\(\[)?(\d+)", str(error))
                if match is None or not 0 < (features := int(match[1])):
                    break
                if features % (ROWS * hidden) == 0 and features >= ROWS * hidden:
                    features //= hidden
                if features // ROWS in (0, count) or AT + features // ROWS > first:
                    break
                count = features // ROWS
    raise ValueError("; ".join(dict.fromkeys(tried)) or "forward takes images in no known form")
