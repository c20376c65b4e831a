"""The values of --kv-cache-dtype that are kvant's, and how many bytes a token takes in each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

import kvant

PREFIX = "kvant_"
# vLLM's names of exact caches. Layers that --kv-cache-dtype-skip-layers names have the first.
EXACT = ("auto", "float16", "bfloat16")
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
# The version of the bytes in a page. A change to encoders after which older pages are read wrongly raises this number:
# blocks in files and on other servers outlive a version of kvant, and vLLM names them by the cache dtype alone.
PAGE_FORMAT = 1


class Pair(NamedTuple):
    """Formats of keys and of values."""

    k: str
    v: str

    def is_exact(self) -> bool:
        return self.k in NAMES.values() and self.v in NAMES.values()

    def __str__(self) -> str:
        return f"{self.k}/{self.v}"


@lru_cache(maxsize=1)
def build() -> dict:
    """kvant.build_info(): unlike kvant.info() it starts no driver, since vLLM may still fork."""
    return kvant.build_info()


@lru_cache(maxsize=1)
def names() -> dict[str, Pair]:
    """Every name and its pair: kvant_tq6_tq4, and kvant_tq4 for kvant_tq4_tq4.

    All pairs of formats have a name, also those without kernels for devices: their refusal says what there is, vLLM's
    for an unknown name does not.
    """
    # Dense pages are vLLM's exact dtypes, and the tables of lut formats come with imported caches only.
    formats = [f["name"] for f in build()["formats"] if not f["dense"] and not f["name"].startswith("lut")]
    pairs = {f"{PREFIX}{k}_{v}": Pair(k, v) for k in formats for v in formats}
    return pairs | {f"{PREFIX}{f}": Pair(f, f) for f in formats}


def parse(name: str | None, model_dtype: torch.dtype) -> Pair:
    """The formats of a cache dtype. An exact cache has the model's dtype: vLLM refuses others itself."""
    if name is None or name in EXACT:
        return Pair(NAMES[model_dtype], NAMES[model_dtype])
    pair = names().get(name)
    if pair is None:
        raise ValueError(f"kvant: --kv-cache-dtype {name} is not kvant's: one of {', '.join(sorted(names()))}")
    return pair


@lru_cache(maxsize=None)
def token_bytes(pair: Pair, head_dim: int, k_centre: str = "automatic", v_head_dim: int = 0) -> int:
    """Bytes that a token takes in one kv head, a 64th of a block: vLLM's state_content_bytes. v_head_dim: of values; 0:
    head_dim.

    Exactly so, since on a device the heads of a block follow one another. A block is a multiple of 64 bytes.
    """
    centre = "none" if pair.is_exact() else k_centre
    pages = kvant.Pages(
        kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim, k=pair.k, v=pair.v, device="cpu", k_centre=centre
    )
    return pages.block_bytes // pages.block_tokens


def parse_latent(name: str | None, model_dtype: torch.dtype) -> Pair:
    """The formats of rotary keys and of latents. A name of one format is the latents', and rotary keys, which are a
    ninth of a token's numbers, have tq8 beside every tq format."""
    pair = parse(name, model_dtype)
    is_one = name == f"{PREFIX}{pair.v}"
    return pair._replace(k="tq8") if is_one and pair.v.startswith("tq") else pair


@lru_cache(maxsize=None)
def latent_geometry(latent: int, rope: int) -> dict[str, Any]:
    """As kvant.Pages takes it. Latents are without centres, which kernels of devices do not read."""
    return {"latent": latent, "rope": rope, "v_centre": "none"}


def latent_token_bytes(pair: Pair, rope: int, k_centre: str, latent: int) -> int:
    """token_bytes of a latent and its rotary key."""
    centre = "none" if pair.is_exact() else k_centre
    pages = kvant.Pages(**latent_geometry(latent, rope), k=pair.k, v=pair.v, device="cpu", k_centre=centre)
    return pages.block_bytes // pages.block_tokens


_latents: dict[int, tuple[int, int]] = {}


def note_latent(latent: int, rope: int) -> None:
    """Remembers the sizes of this process's latents and rotary keys: specs have their sum."""
    _latents[latent + rope] = latent, rope


def latent_of(head_size: int) -> tuple[int, int] | None:
    """The noted sizes whose sum is `head_size`."""
    return _latents.get(head_size)


_of_layers: tuple[str | None, str] = None, "automatic"


def note_layer(name: str, k_centre: str = "automatic") -> None:
    """Remembers the cache dtype and the centres of this process's layers: specs carry neither, see
    KvantBackend.customize_spec."""
    global _of_layers
    if name in names():
        _of_layers = name, k_centre


def of_layers() -> tuple[str | None, str]:
    """The cache dtype of the newest layer with a format, and its centres; None: there was none."""
    return _of_layers


def own_size(head_size: int, head_size_v: int) -> int:
    """v_head_dim for values of `head_size_v` beside keys of `head_size`."""
    return 0 if head_size_v == head_size else head_size_v


_head_size_v = 0


def note_head_size_v(head_size_v: int) -> None:
    """Remembers the size of values in the layer that vLLM makes next: layers are not given it."""
    global _head_size_v
    _head_size_v = head_size_v


def take_head_size_v(head_size: int) -> int:
    """The noted size, for the layer that is being made; 0: `head_size`."""
    global _head_size_v
    size, _head_size_v = _head_size_v, 0
    return own_size(head_size, size)
