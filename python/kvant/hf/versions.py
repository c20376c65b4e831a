"""All that depends on the version of transformers. Supported: 5.16 to 5.24; newer ones as far as these facts hold.

Nothing else in kvant.hf imports from transformers.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any, NamedTuple

try:
    import torch
    import transformers
except ImportError as error:  # pragma: no cover
    raise ImportError("kvant.hf needs torch and transformers: pip install torch 'transformers>=5.16'") from error


def parse(version: str) -> tuple[int, int]:
    """(5, 16) of "5.16.0.dev0"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def require(version: str) -> None:
    if parse(version) < (5, 16):
        raise ImportError(
            f"kvant.hf needs transformers 5.16 or newer, and this is {version}: pip install -U transformers"
        )


require(transformers.__version__)

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402
from transformers import cache_utils  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask  # noqa: E402

from kvant._signals import is_of_handler  # noqa: E402

__all__ = [
    "CACHE_NAME",
    "DECODING",
    "HARMLESS",
    "DIVIDED",
    "Geometry",
    "IMPLEMENTATION",
    "SDPA_ARGUMENTS",
    "Cache",
    "CacheLayerMixin",
    "PreTrainedModel",
    "attention_state",
    "by_name",
    "checked",
    "compute_device",
    "cross_attention_layers",
    "decoder_config",
    "dims",
    "drafts",
    "given_cache",
    "hf_layers",
    "is_default_cache",
    "kind_of_layer",
    "layer_devices",
    "makes_no_cache",
    "mask_kind",
    "placeholders",
    "predicted_geometry",
    "register",
    "restore_attention",
    "sdpa_attention_forward",
    "sdpa_mask",
    "set_attention",
    "takes_cache",
    "wrapper",
    "why_not_served",
]

# The attention's name. Names with "sdpa", "flash", "/" or "|" in them mean something to transformers.
IMPLEMENTATION = "kvant"

# Models call their cache argument "past_key_values" until 5.23 and "cache" from 5.24 on.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

# Arguments of an attention function that change nothing for kvant. Any other one that is set is refused.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        "token_type_ids",
        "mm_token_type_ids",
        "output_hidden_states",
        "output_router_logits",
        "return_shared_kv_states",
        "return_dict",
        "num_items_in_batch",
        "sliding_window",  # masks and caches say so themselves
    }
)

# What transformers' sdpa attention reads beside the arguments of all attention functions: position_bias, from 5.24 on.
SDPA_ARGUMENTS = frozenset(inspect.signature(sdpa_attention_forward).parameters) & {"position_bias"}

# Models that declare no sdpa because that has no sink logits and does not cap logits: tests/python/architectures.md.
WITHOUT_SDPA = frozenset(
    {"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"}
)


def register(attention, mask) -> None:
    """Makes the attention implementation "kvant" known to all models."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask)


# --- masks ---


def _leaves(function: Any, leaves: list) -> list:
    """The mask functions that are and-ed together."""
    if getattr(function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        for cell in function.__closure__:
            for inner in cell.cell_contents:
                _leaves(inner, leaves)
    else:
        leaves.append(function)
    return leaves


def mask_kind(arguments: dict[str, Any]) -> tuple[str, int]:
    """The kind of the requested mask: ("causal", 0), ("sliding", window), or ("overlay", 0) for anything else.

    arguments: those of the mask interface. A mask that is not recognised is an overlay: it is built and read, which is
    slower and as right.
    """
    if arguments.get("use_vmap"):
        return "overlay", 0
    causal, window = False, 0
    for leaf in _leaves(arguments.get("mask_function", causal_mask_function), []):
        if leaf is causal_mask_function:
            causal = True
        elif getattr(leaf, "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask":
            window = int(inspect.getclosurevars(leaf).nonlocals["sliding_window"])
        else:
            return "overlay", 0
    if not causal:
        return "overlay", 0
    return ("sliding", window) if window else ("causal", 0)


def checked(model: Any) -> PreTrainedModel:
    """A model, or TypeError."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}: must be a transformers model (PreTrainedModel)")
    return model


# --- configs and layers ---


def decoder_config(config: Any) -> Any:
    """The configuration of the text decoder, which may be a part of the model's."""
    return config.get_text_config(decoder=True)


def takes_cache(model: Any) -> bool:
    """Whether a model keeps keys and values of earlier tokens: not encoders, in which tokens see later ones, and not
    XLNet, RWKV, Mamba and others with states of their own."""
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)() or _has_states_alone(model.config):
        return False
    arguments = inspect.signature(type(model).forward).parameters
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    # PaliGemma's decoder is not causal either, but its configuration does not know the choice that BERT's has.
    encoder = causal and not any(causal) and getattr(decoder_config(model.config), "is_decoder", None) is False
    return bool({CACHE_NAME, "past_key_values", "cache_params"} & set(arguments)) and not encoder


def hf_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers would make for this decoder."""
    try:
        return DynamicCache(config=decoder_config(config)).layers
    except AttributeError as error:  # BLT: three decoders, none of them the model's
        raise ValueError(f"{type(config).__name__} does not say which layers a cache has: {error}") from error


def _has_states_alone(config: Any) -> bool:
    """Whether all layers of the cache are states of linear attention, as Mamba's."""
    try:
        layers = hf_layers(config)
    except ValueError:
        return False
    return bool(layers) and all(type(layer) is getattr(cache_utils, "LinearAttentionLayer", None) for layer in layers)


def kind_of_layer(layer: Any) -> tuple[str, int]:
    """("full", 0), ("sliding", window), ("none", 0) for a layer without a cache, or ("other", 0)."""
    if type(layer) is DynamicLayer:
        return "full", 0
    if type(layer) is DynamicSlidingWindowLayer:
        return "sliding", int(layer.sliding_window)
    dummy = getattr(cache_utils, "DummyLayer", None)  # new in 5.17; before, layers without a cache had no object
    return ("none", 0) if dummy is not None and type(layer) is dummy else ("other", 0)


def cross_attention_layers(config: Any) -> set[int]:
    """The layers of the decoder whose keys and values are those of an image (Mllama): never tokens of the text."""
    return set(getattr(decoder_config(config), "cross_attention_layers", None) or ())


class Geometry(NamedTuple):
    """Heads and numbers of what a layer stores for a token. latent: not keys and values, but the latents that the model
    makes both of (of head_dim numbers), and the rotated part of keys (of v_head_dim)."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool = False

    def __str__(self) -> str:
        return f"{self.kv_heads} x {dims(self.head_dim, self.v_head_dim)}"


def dims(head_dim: int, v_head_dim: int) -> str:
    return str(head_dim) if head_dim == v_head_dim else f"{head_dim}/{v_head_dim}"


# Models whose layers with a window have twice the kv heads, which their configurations do not say.
_TWICE_IN_WINDOWS = {"mimo_v2_flash"}


def predicted_geometry(config: Any, layer: int) -> Geometry | None:
    """That of a layer as its configuration has it, None if it does not say. Tensors have the last word."""
    try:
        own = decoder_config(config).per_layer_config[layer]
        latent, rotated = getattr(own, "kv_lora_rank", None), getattr(own, "qk_rope_head_dim", None)
        if latent and rotated:
            return Geometry(1, int(latent), int(rotated), True)
        heads = getattr(own, "num_attention_heads", None)
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        if getattr(own, "multi_query", False) and not getattr(own, "new_decoder_architecture", False):
            kv_heads = 1  # Falcon, GPT-BigCode
        if own.model_type in _TWICE_IN_WINDOWS and own.layer_types[layer] == "sliding_attention":
            kv_heads *= 2
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
        return Geometry(int(kv_heads), int(head_dim), int(getattr(own, "v_head_dim", None) or head_dim))
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


def placeholders(config: Any) -> list[int]:
    """Ids that stand for a part of an image, a video or a sound."""
    found = set()
    for each in {id(c): c for c in (config, decoder_config(config))}.values():
        for name, value in vars(each).items():
            if _PLACEHOLDER.search(name) and isinstance(value, int) and not isinstance(value, bool):
                found.add(value)
    return sorted(found)


_PLACEHOLDER = re.compile(r"^(?!num_)\w*(image|img|video|audio|speech|vision|boi|eoi|boa|eoa)\w*_(id|index)$")


def wrapper(model: Any) -> Any:
    """The object, as of peft, that has replaced how a model prepares inputs during a generate(), or None."""
    replaced = model.__dict__.get("prepare_inputs_for_generation")
    owner = getattr(replaced, "__self__", replaced)
    return None if owner is model else owner


# Models whose logits depend on how a prompt is divided into forward passes, also with transformers' own cache.
DIVIDED = {
    "doge": "it chooses keys anew in each forward pass, by all keys that there are then",
    "moshi": "its cache has a sliding window, and its masks have none",
}


@functools.cache
def _parameters(of: type) -> tuple[str, ...]:
    return tuple(inspect.signature(of.forward).parameters)[1:]


def by_name(model: Any, positional: tuple) -> dict[str, Any]:
    """The positional arguments of a forward pass by their names."""
    return dict(zip(_parameters(type(model)), positional)) if positional else {}


def _execution_device(module: Any) -> torch.device | None:
    """The device on which accelerate's hook computes a module, None without one."""
    hook = module.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            return _with_index(torch.device(device))
    return None


def _with_index(device: torch.device) -> torch.device:
    return device if device.type in ("cpu", "meta") or device.index is not None else torch.device(device.type, 0)


def compute_device(model: Any) -> torch.device:
    """The device on which a model computes. model.device says where its first weight is, which is torch's meta device
    where accelerate keeps weights elsewhere between forward passes."""
    device = model.device
    if device.type == "meta":
        found = (_execution_device(module) for module in model.modules())
        device = next((one for one in found if one is not None), device)
    return _with_index(device)


def layer_devices(model: Any) -> dict[int, str]:
    """The device of each decoder layer of a model that is spread over several; empty if it is not."""
    devices = {}
    for name, device in (getattr(model, "hf_device_map", None) or {}).items():
        number = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$", name)
        if number:  # "cpu" and "disk" say where weights wait
            devices[int(number[1])] = str(_execution_device(model.get_submodule(name)) or device)
    return devices if len(set(devices.values())) > 1 else {}


# --- the attention implementation of a model ---


def _configs(model: Any) -> list[Any]:
    """Every configuration that a part of the model reads its attention implementation from."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in found:
            return
        found[id(config)] = config
        for key in getattr(config, "sub_configs", {}):
            add(getattr(config, key, None))

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            add(module.config)
    return list(found.values())


def attention_state(model: Any) -> list[tuple[Any, Any]]:
    """The argument of restore_attention: every configuration of the model with its attention implementation."""
    return [(config, config._attn_implementation_internal) for config in _configs(model)]


def restore_attention(state: list[tuple[Any, Any]], only: str | None = None) -> None:
    """only: where this implementation still is; one that was chosen since stays."""
    for config, implementation in state:
        if only in (None, config._attn_implementation_internal):
            config._attn_implementation_internal = implementation


def _path(config: Any, wanted: Any) -> list[str] | None:
    """The keys that lead from a configuration to a part of it; [] for itself."""
    if config is wanted:
        return []
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        rest = _path(inner, wanted) if inner is not None else None
        if rest is not None:
            return [key, *rest]
    return None


def why_not_served(model: Any) -> str | None:
    """Why kvant's attention cannot serve a model whose attention can be chosen; None if it can.

    kvant gives masks and takes arguments as torch's attention (sdpa) does. A model that is kept from sdpa may read a
    mask as numbers to add, or need an argument that sdpa does not have.
    """
    decoder = decoder_config(model.config)
    alone = "kvant.hf.cache(model) still compresses, but decodes the whole cache in each step"
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module.config is not decoder:
            continue
        name = type(module).__name__
        if not module._supports_sdpa and decoder.model_type not in WITHOUT_SDPA:
            return (
                f"{name} declares that torch's attention cannot serve it (_supports_sdpa = False), "
                f"so that kvant's may not either: its masks or arguments may mean what kvant does not know; {alone}"
            )
        if _MASKS_FOR_TWO.search(_source(type(module))):
            return (
                f"{name} chooses keys by an index of its own, and makes a mask of this choice for the attention "
                f'implementations "eager" and "sdpa" alone; {alone}'
            )
    return None


# How models with sparse attention (DeepSeek V3.2 and its kin) tell attention functions that read masks from their own.
_MASKS_FOR_TWO = re.compile(r"_attn_implementation\s+in\s+\(\"eager\", \"sdpa\"\)")


def _source(of: type) -> str:
    """The source of a class's module, which transformers reads to the same end (_can_set_attn_implementation)."""
    try:
        return inspect.getsource(sys.modules[of.__module__])
    except (KeyError, OSError, TypeError) as error:
        if is_of_handler(error):
            raise
        return ""


def set_attention(model: Any) -> None:
    """Gives the text decoder of a model kvant's attention, and leaves other parts (vision towers) theirs."""
    decoder = decoder_config(model.config)
    path = _path(model.config, decoder)
    if path is None:
        raise ValueError(f"the decoder's configuration is not a part of {type(model.config).__name__}")
    wanted: Any = IMPLEMENTATION
    for key in reversed(path):
        wanted = {key: wanted}
    model.set_attn_implementation(wanted)
    if decoder._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"{type(model).__name__} computes attention itself and not through transformers' AttentionInterface, "
            'so kvant cannot take its place; kvant.hf.cache(model) still compresses, '
            'but decodes the whole cache in each step'
        )
    reason = why_not_served(model)
    if reason is not None:
        raise ValueError(reason)


def is_default_cache(cache: Any, generation_config: Any) -> bool:
    """Whether generate() made this cache because nobody asked for another."""
    return type(cache) is DynamicCache and generation_config.cache_implementation is None


def drafts(generation_mode: Any) -> bool:
    """Whether generate() checks drafts of several tokens: it then begins with the whole prompt over any cache."""
    return getattr(generation_mode, "value", None) == "assisted_generation"


def makes_no_cache(arguments: dict[str, Any]) -> bool:
    """Whether a call of a model asks for a cache, has none, and so gets one that the model makes."""
    return arguments.get("use_cache") is True and given_cache(arguments) is None


# The decoding methods of generate(), and whether they give the model only what a cache lacks. Assisted generation gives
# it the whole prompt. generate() takes the method of the model's class.
DECODING = {"_sample": True, "_beam_search": True, "_assisted_decoding": False}


def given_cache(arguments: dict[str, Any]) -> Any:
    """The cache among the arguments of a model, or None. A cache of an encoder-decoder stands for its decoder's."""
    found = arguments.get(CACHE_NAME)
    if found is None:
        found = arguments.get("past_key_values")
    return getattr(found, "self_attention_cache", found)
