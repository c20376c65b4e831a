"""Which model it is: the one definition of what keys and values depend on, beside the token ids.

It is a hash of
- every tensor of the model's state dict, by its place in the model and by all its bytes: parameters, persistent
  buffers, packed and quantised weights, extra state, and weights that accelerate keeps on the CPU or on disk;
- those adapters (peft's, also through transformers) that are active and not merged, in their order and without their
  names; a model without an active adapter is the model without adapters;
- the plain attributes of modules (epsilons, scales, windows, top_k), their classes, and a forward() that replaced the
  class's;
- the fields of the decoder's configuration whose names speak of how attention, positions, norms, activations or experts
  are computed. A model reads most fields when it is made and keeps them in its modules, which have the last word.

These do not count: names of files, adapters and versions, special tokens, fields that only training, losses or outputs
read, and buffers outside the state dict, which forward passes compute (inv_freq).

A field that is missing here is a wrong answer, and one too many is a prompt that is computed again. So the list of the
configuration is of wide patterns, and attributes of modules count unless they are named below.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from kvant import _locks

from . import versions
from .memo import Memo
from .weights import Contents, Sampler, Unreadable, Weight, describe, offloaded, plain, stamps

__all__ = ["State", "Unreadable", "adapters", "fingerprint", "moment", "state"]

_FIELDS = re.compile(
    "rope|rotary|theta|position|window|chunk|types$|layer_type|soft_?cap|scal|multiplier|eps|activation|act$|act_|"
    "hidden_size|intermediate|head|expert|router|moe|top_?k|norm|bias|alibi|clip|clamp|limit|sink|attn|attention|query|"
    "key|kv|qk|sparse|dense|gate|gating|swiglu|conv|causal|is_decoder|prefix_lm|pretraining_tp|quantiz|layers|residual|"
    "embed|group|block|local|index|loop|cycles|mup|lambda|ngram|compress|mem_|state|mamba|func|exact"
)
_OTHER_FIELDS = re.compile("drop|implementation|^output_|^_|loss|jitter|tie_|initializer|keys_to_ignore")
_OTHER_ATTRIBUTES = re.compile(
    "^_|drop|loss|jitter|^(training|padding_idx|gradient_checkpointing|name_or_path|vocab_size|num_labels)$|"
    "max_seq_len_cached$"  # with inv_freq
)
_SIMPLE = frozenset({int, float, bool, str})
_BARE = frozenset({torch.nn.Linear, torch.nn.Identity, torch.nn.ModuleList})  # their tensors and modules say all
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_TRUSTED = ("kvant.", "torch.", "transformers.", "accelerate.")  # whose hooks and forward() compute what modules say


@functools.lru_cache(maxsize=10000)
def _attributes(names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if not _OTHER_ATTRIBUTES.search(name))


@functools.lru_cache(maxsize=10000)
def _field(name: str) -> bool:
    return bool(_FIELDS.search(name)) and not _OTHER_FIELDS.search(name)


class _Kind:
    """Facts of a class of modules."""

    def __init__(self, of: type):
        self.name = of.__name__
        self.adapters = hasattr(of, "get_base_layer") and hasattr(of, "merged_adapters")  # peft's BaseTunerLayer
        # peft's AuxiliaryTrainingWrapper. A PreTrainedModel has a method of that name.
        self.copies = isinstance(getattr(of, "disable_adapters", None), property) and not self.adapters
        self.peft = self.adapters or self.copies
        self.peft_part = of.__module__.startswith("peft.")
        self.dropout = issubclass(of, torch.nn.modules.dropout._DropoutNd)
        self.packs = (
            of._save_to_state_dict is not torch.nn.Module._save_to_state_dict
            or of.get_extra_state is not torch.nn.Module.get_extra_state
            or (of.state_dict is not torch.nn.Module.state_dict and not issubclass(of, versions.PreTrainedModel))
        )
        self.bare = of in _BARE
        self.holds = hasattr(of, "__contains__")  # a container, by adapters' names


_kind = functools.cache(_Kind)


@dataclass
class _Seen:
    """A model as it is now."""

    weights: list[Weight] = field(default_factory=list)
    facts: list = field(default_factory=list)  # the same in every process
    marks: list = field(default_factory=list)  # of this process: what changes with an object that has no version
    packed: list[tuple[str, Any]] = field(default_factory=list)  # modules that say themselves what their state is
    random: str = ""  # why two forward passes may differ


def _look(model: Any) -> _Seen:
    seen, done = _Seen(), set()
    if model.training:
        seen.random = "the model is in training mode, in which dropout makes keys random: call model.eval()"
    stack: list[tuple[str, Any, Any, str]] = [("", model, None, "")]
    while stack:  # most of the time of a look-up: 420 modules in an 8B Llama
        path, module, source, inside = stack.pop()
        if module is None or id(module) in done:
            continue
        done.add(id(module))
        kind, own = _kind(type(module)), module.__dict__
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own:
            _look_at_functions(path, own, seen)
        if kind.peft:
            inner = list(_without_adapters(path, module, kind, seen))
            if inner:
                stack += [(name, one, source, inside) for name, one in inner]
                continue
        if "_hf_hook" in own:
            hook = _offloading_hook(own["_hf_hook"])
            if hook is not None:
                source, inside = hook.weights_map, ""
        if kind.dropout and own["training"] and own["p"] > 0:
            seen.random = f"{path} is in training mode, in which dropout makes keys random: call model.eval()"
        names = () if kind.bare else _attributes(tuple(own))
        seen.facts.append((path, kind.name, [(k, own[k]) for k in names if type(own[k]) in _SIMPLE]))
        for name, x in own["_parameters"].items():
            if x is not None:
                if type(x) in _PLAIN and not x.is_meta:
                    seen.weights.append(Weight(f"{path}.{name}", x))
                else:
                    _look_at_tensor(seen, f"{path}.{name}", f"{inside}{name}", x, source)
        if own["_buffers"]:
            volatile = () if kind.peft_part else own["_non_persistent_buffers_set"]
            for name, x in own["_buffers"].items():
                if x is not None and name not in volatile:
                    _look_at_tensor(seen, f"{path}.{name}", f"{inside}{name}", x, source)
        if kind.packs:
            seen.packed.append((path, module))
            seen.marks.append([id(v) for k, v in own.items() if k == "_packed_params" or not k.startswith("_")])
            for name, x in own.items():
                if isinstance(x, torch.Tensor):
                    _look_at_tensor(seen, f"{path}.{name}", f"{inside}{name}", x, source)
        if own["_modules"]:
            stack += [(f"{path}.{name}", one, source, f"{inside}{name}.") for name, one in own["_modules"].items()]
    config = versions.decoder_config(model.config)
    fields = [(k, v) for k, v in vars(config).items() if v is not None and _field(k)]
    seen.facts.append(sorted((k, v if type(v) in _SIMPLE else _text(v)) for k, v in fields))
    return seen


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_text_of_others)


def _text_of_others(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else str(value) if isinstance(value, torch.dtype) else (
        type(value).__name__
    )


def _look_at_tensor(seen: _Seen, name: str, key: str, x: torch.Tensor, source: Any) -> None:
    if x.device.type == "meta":
        weight = offloaded(name, key, source)
        if weight.tensor is None:
            seen.weights.append(weight)
            return
        x = weight.tensor
    seen.weights += [Weight(*pair) for pair in plain(name, x, seen.facts)]


def _look_at_functions(path: str, own: dict, seen: _Seen) -> None:
    """Functions of others in forward passes, of which nobody knows what they compute."""
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        for function in own[kind].values():
            name = _name(function)
            if not name.startswith(_TRUSTED):
                seen.random = (
                    f"{path or 'the model'} has the forward hook {name}, which may change keys and values in ways that "
                    "kvant cannot compare: remove the hook"
                )
    if "forward" in own and "_hf_hook" not in own:
        inner = getattr(own["forward"], "func", own["forward"])
        name, closed = _name(inner), getattr(getattr(inner, "__func__", inner), "__closure__", None)
        if closed and not name.startswith(_TRUSTED):
            seen.random = (
                f"forward() of {path or 'the model'} was replaced by {name}, which reads variables that kvant cannot "
                "compare: use a function without a closure"
            )
        seen.facts.append((path, "forward", name))


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    function = getattr(function, "__func__", function)
    of = function if hasattr(function, "__qualname__") else type(function)
    return f"{of.__module__}.{of.__qualname__}"


def _offloading_hook(hook: Any) -> Any:
    """accelerate's hook that fetches a module's weights for each forward pass. hook: all hooks of the module."""
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
            return one
    return None


def _without_adapters(path: str, module: Any, kind: _Kind, seen: _Seen) -> Iterator[tuple[str, Any]]:
    """The modules that a layer of peft stands for, and the facts of its active adapters."""
    off, active = module.disable_adapters, list(module.active_adapters)
    if kind.copies:  # a whole module, trained: one for each adapter
        copies = module._modules.get("modules_to_save")
        if copies is None or "original_module" not in module._modules:
            seen.facts.append((path, off, active))
            return
        used = [] if off else [name for name in active if name in copies]
        yield path, copies[used[0]] if used else module.original_module
        return
    base = module._modules.get("base_layer")
    if base is None:
        seen.facts.append((path, off, active))
        return
    yield path, base
    known = {name for layer in module.adapter_layer_names for name in getattr(module, layer, ())}
    used = [] if off or module.merged_adapters else [name for name in active if name in known]
    if not used:
        return
    own = module.__dict__
    names = _attributes(tuple(own))
    seen.facts.append((path, kind.name, [(k, own[k]) for k in names if type(own[k]) in _SIMPLE]))
    for number, adapter in enumerate(used):
        for name, values in own.items():
            if type(values) is dict and not name.startswith("_") and adapter in values:
                value = values[adapter]
                if isinstance(value, torch.Tensor):
                    seen.weights.append(Weight(f"{path}.{name}.{number}", value))
                else:
                    value = value if type(value) in _SIMPLE else _text(value)
                    seen.facts.append((path, number, name, value))
        for name, container in module._modules.items():
            if name == "base_layer" or container is None:
                continue
            if not hasattr(container, "__contains__"):
                yield f"{path}.{name}", container
            elif adapter in container:
                part = container[adapter]
                if isinstance(part, torch.nn.Module):
                    yield f"{path}.{name}.{number}", part
                else:
                    seen.weights += [Weight(*pair) for pair in plain(f"{path}.{name}.{number}", part, seen.facts)]


# --- the identity ---


def _signs(model: Any) -> tuple[list, list[torch.Tensor]] | None:
    """All that _look reads of a model of ordinary modules and of adapters, raw: a fourth of the time. None for others,
    with packed or offloaded weights."""
    found: list = [repr([v for v in vars(versions.decoder_config(model.config)).values()])]
    tensors: list[torch.Tensor] = []
    stack = [model]
    while stack:  # most of a look-up: 420 modules in an 8B Llama
        module = stack.pop()
        own = module.__dict__
        kind = _kind(type(module))
        if kind.packs or "_hf_hook" in own:
            return None
        found.append(weakref.ref(module))
        if kind.peft:
            if not (_signs_of_adapters if kind.adapters else _signs_of_copies)(own, found, tensors, stack):
                return None
        elif not kind.bare:
            found += [v for v in own.values() if type(v) in _SIMPLE]
        if own["_parameters"]:
            tensors += own["_parameters"].values()
        if own["_buffers"]:
            volatile = () if kind.peft_part else own["_non_persistent_buffers_set"]
            tensors += [x for name, x in own["_buffers"].items() if name not in volatile]
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own:
            hooks = (own["_forward_pre_hooks"], own["_forward_hooks"])
            found += [id(own.get("forward")), *(id(one) for each in hooks for one in each.values())]
        if own["_modules"] and not kind.peft:
            stack += [one for one in own["_modules"].values() if one is not None]
    tensors = [x for x in tensors if x is not None]
    if any(type(x) not in _PLAIN or x.is_meta for x in tensors):
        return None
    return found, tensors


def _signs_of_adapters(own: dict, found: list, tensors: list, stack: list) -> bool:
    """The same of a layer of peft, from its own attributes: properties and containers' methods take three times as
    long. False: it is not as expected here."""
    modules, active, off, merged = map(own.get, ("_modules", "_active_adapter", "_disable_adapters", "merged_adapters"))
    if active is None or off is None or merged is None or modules.get("base_layer") is None:
        return False
    stack.append(modules["base_layer"])
    names = (active,) if type(active) is str else tuple(active)
    found += [names, off, *merged]
    if off or merged:
        return True
    found += [x for x in own.values() if type(x) in _SIMPLE]
    for name in names:
        values = [x[name] for x in own.values() if type(x) is dict and name in x]
        if not _SIMPLE.issuperset(map(type, values)):
            return False
        found += values
        for container in modules.values():
            if container is None:
                continue
            held = container.__dict__
            if name in held["_modules"]:
                stack.append(held["_modules"][name])
            elif name in held["_parameters"]:
                tensors.append(held["_parameters"][name])
            elif name in held["_buffers"]:
                tensors.append(held["_buffers"][name])
            elif not _kind(type(container)).holds and container is not modules["base_layer"]:
                stack.append(container)
    return True


def _signs_of_copies(own: dict, found: list, tensors: list, stack: list) -> bool:
    """The same of peft's trained copies of a module."""
    modules, active, off = map(own.get, ("_modules", "_active_adapter", "_disable_adapters"))
    copies = modules.get("modules_to_save")
    if active is None or off is None or copies is None or modules.get("original_module") is None:
        return False
    names = (active,) if type(active) is str else tuple(active)
    found += [names, off]
    used = [] if off else [name for name in names if name in copies._modules]
    stack.append(copies._modules[used[0]] if used else modules["original_module"])
    return True


@dataclass(frozen=True)
class State:
    """A model at a moment. text: its identity. number: another one after each change of weights or active adapters,
    also where they came back. random: why keys are not the same each time; empty where they are."""

    text: str
    number: int
    random: str


class _Watch:
    """The identity of one model, which is computed anew where something has changed. Holds no part of the model."""

    def __init__(self) -> None:
        self._lock = _locks.new("the identity of a model")
        self._contents, self._sampler = Contents(), Sampler()
        self._signs: Any = None
        self._tensors: list[weakref.ref] = []
        self._stamps: list = []
        self._samples: list[bytes] = []
        self._facts = ""
        self._moment, self._number = 0, 0
        self._state: State | None = None  # None: the text is not known
        self._adapters: weakref.ref | None = None  # a layer of peft, of which all layers have the same adapters

    def now(self, model: Any) -> State:
        with self._lock:
            seen = self._notice(model)
            if self._state is None:
                seen = seen or _look(model)
                self._state = State(self._text(model, seen), self._number, seen.random)
            return self._state

    def moment(self, model: Any) -> int:
        with self._lock:
            self._notice(model)
            return self._moment

    def adapters(self) -> tuple | None:
        layer = None if self._adapters is None else self._adapters()
        return None if layer is None else _adapters_of(layer)

    def _notice(self, model: Any) -> _Seen | None:
        """Looks whether something has changed. Returns what was seen of the model, if _look was needed."""
        signs = _signs(model)
        seen = None
        if signs is None:
            seen = _look(model)
            signs = (
                [seen.facts, seen.marks, seen.random, [(one.name, one.file) for one in seen.weights]],
                [one.tensor for one in seen.weights if one.tensor is not None],
            )
        found, tensors = signs
        now = stamps(tensors)
        read = self._sampler.read(tensors, now)
        refs = [weakref.ref(x) for x in tensors]  # of a living tensor always the same object
        same = now == self._stamps and read == self._samples and all(map(operator.is_, refs, self._tensors))
        if same and found == self._signs:
            return seen
        self._signs = self._state = None  # an error leaves nothing half known
        seen = seen or _look(model)
        facts = _text(sorted(map(_text, seen.facts)))
        if not same or facts != self._facts:
            self._number += 1
            self._moment = hash((facts, *now, *read, *map(id, tensors), *(one.file for one in seen.weights)))
        self._adapters = next((weakref.ref(x) for x in model.modules() if _kind(type(x)).peft), None)
        self._facts, self._tensors, self._stamps, self._samples, self._signs = facts, refs, now, read, found
        return seen

    def _text(self, model: Any, seen: _Seen) -> str:
        digest = blake2b(self._facts.encode(), digest_size=16)
        self._contents.forget_the_dead()
        for name, found in sorted((one.name, self._contents.of(one)) for one in seen.weights):
            digest.update(name.encode() + b"\0" + found)
        for path, module in seen.packed:
            held: dict[str, Any] = {}
            module._save_to_state_dict(held, "", True)
            if type(module).state_dict is not torch.nn.Module.state_dict:
                held.update(module.state_dict())
            digest.update(_text([path, describe(held, path)]).encode())
        return f"{type(model).__name__} {digest.hexdigest()}"


_watches = Memo()
_lock = _locks.new("the identity of models")


def _watch_of(model: Any) -> _Watch:
    with _lock:
        watch = _watches.get(model)
        return _watches.put(model, _Watch()) if watch is None else watch


def state(model: Any) -> State:
    """The model as it is now. Errors: Unreadable."""
    return _watch_of(model).now(model)


def moment(model: Any) -> int:
    """A number of the model as it is now, in this process: of its configuration, its active adapters and its weights,
    by the signs that changes leave. Their bytes are not read. Errors: Unreadable."""
    return _watch_of(model).moment(model)


def adapters(model: Any) -> tuple | None:
    """The active adapters of a layer of peft that moment() has met last, in less than a microsecond."""
    return _watch_of(model).adapters()


def _adapters_of(layer: Any) -> tuple:
    active, merged = layer._active_adapter, getattr(layer, "merged_adapters", ())
    return active if type(active) is str else tuple(active), layer._disable_adapters, tuple(merged)


def fingerprint(model: Any) -> str:
    """A text that is the same for two models whose keys and values are the same, in every process. Errors:
    Unreadable."""
    return state(model).text
