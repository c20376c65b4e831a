"""The options of attention and of caches, once for every door: name, type, default, check, sentence, and field in C.

A door is what takes options: `plan` (kvant.Plan, Cache.attend, Step.attend), `pages_plan` (kvant.PagesPlan), `cache`
(kvant.Cache), `pages` (kvant.Pages), `hf` (kvant.hf.enable) and `vllm` (--additional-config). A new option is one entry
here, and a field of kvant.h.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import _arguments, _c_api
from ._errors import InvalidArgument

REQUIRED = inspect.Parameter.empty
FORMER = {"causal": "is_causal", "fresh": "fresh_keys", "exact_prefill": "fresh_keys", "tail": "tail_pages"}

_int32, _int64 = _arguments.int32, _arguments.int64
_count = partial(_arguments.int64, low=0)
_EXACT = {name: _c_api.DTYPE[name] for name in ("f32", "f16", "bf16")}


def _scale(name: str, value: Any) -> float:
    number = _arguments.real(name, value)
    if number == 0.0:  # to the library: the default
        raise InvalidArgument("scale = 0: must not be 0; None stands for 1 / sqrt(head_dim)")
    return number


def _kernel(name: str, value: Any) -> bytes | None:
    return None if isinstance(value, str) and value == "" else _arguments.name_or_none(name, value)


def _products(name: str, value: Any) -> int:
    number = _arguments.int32(name, value)
    if number not in (0, 8, 16):
        raise InvalidArgument(f"{name} = {number}: must be 8 or 16 bits, or 0 to let plans choose")
    return number


def _share(name: str, value: Any) -> float:
    share = _arguments.real(name, value)
    if not 0 < share <= 1000:
        raise InvalidArgument(
            f"{name} = {share}: must be a number above 0 and up to 1000, a share of the KV cache's memory (0.05: 5 %); "
            "tail_pages = 0 takes none"
        )
    return share


def _format(name: str, value: Any) -> bytes:
    return _arguments.text(name, value).encode()


def _one_of(allowed: dict[str, int]) -> Callable[[str, Any], int]:
    return partial(_arguments.choice, allowed=allowed)


class Option:
    """kind: the type, as signatures show it. default: REQUIRED, or a value; of None C has one of its own. read: gives
    the value for C, or raises InvalidArgument. text: sentences for people; "": the next option has those of both.
    field: in the struct of kvant.h; "": of the same name; None: code of the door reads the option."""

    def __init__(self, name: str, kind: str, default: Any, read: Callable[[str, Any], Any], text: str = "",
                 doors: str = "", field: str | None = ""):  # fmt: skip
        self.name, self.kind, self.default, self.read, self.text = name, kind, default, read, text
        self.doors, self.field = doors, field
        self.parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def changed(self, **new: Any) -> Option:
        names = ("kind", "default", "read", "text", "doors", "field")
        return Option(self.name, **{name: new.get(name, getattr(self, name)) for name in names}) if new else self


class Options:
    """The options of one door, in the order of its signature. owner: as errors name it."""

    def __init__(self, owner: str, *options: Option):
        self.owner, self.by_name = owner, {option.name: option for option in options}

    def __iter__(self) -> Iterator[Option]:
        return iter(self.by_name.values())

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """All values, those not given by default. Errors: TypeError for unknown options, and for required ones that are
        not given."""
        for name in given:
            if name not in self.by_name:
                raise TypeError(f"{name}: no such option of {self.owner}{self.hint(name)}")
        missing = [option.name for option in self if option.default is REQUIRED and option.name not in given]
        if missing:
            raise TypeError(f"{self.owner} needs {' and '.join(missing)}")
        return {option.name: given.get(option.name, option.default) for option in self}

    def hint(self, name: Any) -> str:
        """For the refusal of a name: its new name, or one that is near and all that there are."""
        import difflib

        new = FORMER.get(name)
        if new in self.by_name:
            return f": it is called {new}"
        close = difflib.get_close_matches(str(name), self.by_name, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        return f"{meant}; the options are {', '.join(self.by_name)}"

    def fill(self, struct: Any, values: dict[str, Any]) -> None:
        """Sets the fields of a struct of C, which has its defaults."""
        for name, option in self.by_name.items():
            value = values[name]
            if option.field is not None and not (value is None and option.default is None):
                setattr(struct, option.field or name, option.read(name, value))

    def without(self, *names: str) -> Options:
        return Options(self.owner, *(option for option in self if option.name not in names))

    def shown(self, function: Any) -> Any:
        """Decorates a function that takes **options: its signature names them."""
        own = inspect.signature(function)
        parameters = {p.name: p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD}
        for option in self:
            parameters.setdefault(option.name, option.parameter)
        function.__signature__ = own.replace(parameters=list(parameters.values()))
        return function

    def described(self, made: type) -> type:
        """Decorates a class: its __init__ takes these options, which its docstring tells at {options}."""
        self.shown(made.__init__)
        made.__doc__ = made.__doc__.replace("{options}", self.sentences())
        return made

    def sentences(self) -> str:
        """A paragraph for each option, for a docstring's indent of 4."""
        paragraphs, names = [], []
        for option in self:
            names.append(option.name)
            if option.text:
                lines = re.findall("(.{1,112})(?: |$)", f"{', '.join(names)}: {option.text}")
                paragraphs.append("\n        ".join(lines))
                names.clear()
        return "\n    ".join(paragraphs)


def complete_store(door: Options, given: dict[str, Any]) -> dict[str, Any]:
    """All values of the doors of caches and of pages, with what follows from latents."""
    values = door.complete(given)
    if values["latent"]:
        for name, following in (("kv_heads", 1), ("head_dim", values["rope"]), ("v_head_dim", values["latent"])):
            values[name] = values[name] or following
    else:
        missing = [name for name in ("kv_heads", "head_dim") if name not in given]
        if missing:
            raise TypeError(f"{door.owner} needs {' and '.join(missing)}")
    if values["k"] is None:
        values["k"] = "tq8" if values["latent"] else "tq6"
    return values


def _options_in(door: str, owner: str, options: tuple[Option, ...], **defaults: Any) -> Options:
    """Those of a door. defaults: of options whose default is another there, which is not None."""

    def of_door(option: Option) -> Option:
        if option.name not in defaults:
            return option
        return option.changed(default=defaults[option.name], kind=option.kind.removesuffix(" | None"))

    return Options(owner, *(of_door(option) for option in options if door in option.doors.split()))


_ATTENTION = (
    Option(
        "q_heads", "int", REQUIRED, _int32,
        "query heads, a multiple of kv_heads; query head h reads kv head h // (q_heads // kv_heads).",
        "plan pages_plan",
    ),
    Option("q_len", "int", 1, _int32, "", "plan", None),
    Option(
        "q_lens", "SequenceOf[int] | None", None, _int32,
        "queries a sequence, its newest positions; q_lens: one count a sequence instead.",
        "plan", None,
    ),
    Option(
        "scale", "float | None", None, _scale, "None: 1 / sqrt(head_dim).", "plan pages_plan",
    ),
    Option("softcap", "float", 0.0, _arguments.real, "t = cap * tanh(s / cap), 0: none.", "plan pages_plan"),
    Option(
        "alibi_slopes", "SequenceOf[float] | None", None, _arguments.slopes, "[q_heads] numbers.", "plan pages_plan",
        None,
    ),
    Option(
        "is_causal", "bool", True, _arguments.flag,
        "False lets queries see later keys too. A window then bounds from below only.",
        "plan pages_plan",
    ),
    Option(
        "window", "int | None", None, _int64,
        "the last W keys, the query's own included; 0: no window. None: the cache's window and window_sinks; over an "
        "engine's blocks no window.",
        "plan pages_plan",
    ),
    Option(
        "window_sinks", "int", 0, _int64, "the first tokens that stay visible beyond the window.", "plan pages_plan"
    ),
    Option("mask", "Any", None, _int64, "", "plan", None),
    Option(
        "mask_first_key", "int", 0, _int64,
        "a mask [batch, q_heads, queries, keys], boolean (True: visible) or additive; dimensions of 1 broadcast. "
        "Its key dimension begins at position mask_first_key.",
        "plan", None,
    ),
    Option("threads", "int", 0, _int32, "", "plan pages_plan"),
    Option("split_keys", "int", 0, _int64, "", "plan pages_plan"),
    Option(
        "isa", "str | None", None, _arguments.name_or_none,
        '0 and None let the plan choose. CPU only. isa: "scalar", "avx2", "avx512", "amx" or "neon"; "amx" multiplies '
        'many rows with products of bf16 terms: 4e-6 off, "avx512" 1e-6 (float formats).',
        "plan pages_plan",
    ),
    Option(
        "kernel", "str | None", None, _kernel,
        'on a device "decode", "decode_sm90", "decode_sm80" or "prefill" ("prefill_sm90", "prefill_sm80" or '
        '"prefill_unpacked" for one kind of these; "prefill_fresh" with fresh_keys), or "generic", which takes any '
        "pair of formats in float32, and is the only one for f32 and imported formats; None: what takes the least "
        "time. "
        'decode_sm90, decode_sm80 and prefill kernels round weights to f16 or bf16, and "prefill_unpacked" what codes '
        "stand for.",
        "plan pages_plan",
    ),
    Option(
        "fresh_keys", "bool", False, _arguments.flag,
        "True: each run is given the keys and values of the queries' own tokens and attends to these as they are; only "
        "older tokens are read encoded. On a device fresh keys take prefill kernels.",
        "plan pages_plan vllm",
    ),
    Option(
        "products", "int", 0, _products,
        "bits of the numbers that are multiplied where many rows share a page of tq formats. 8 is faster and rounds "
        "queries, and on the CPU weights, to 8 bits; devices refuse 8 but at head_dim 256. 0: 8 on the CPU for pairs "
        "to whose own loss that adds at most a fifth, else 16; facts.products and explain() say which.",
        "plan pages_plan hf vllm",
    ),
)  # fmt: skip

_CACHE = (
    Option(
        "layers", "int", 1, _int32,
        "all of one geometry: layers that differ in kv_heads, head_dim or window are another cache.", "cache",
    ),
    Option("kv_heads", "int", 0, _int32, "", "cache pages"),
    Option(
        "head_dim", "int", 0, _int32,
        "heads of keys and values, and the numbers of a vector: required, but with latent. head_dim is 1 to 576 on the "
        'CPU, where sizes outside `kvant.info()["head_dims"]` are stored padded with zeros. On a device head_dim is 1 '
        "to 512, and 64, 96, 128, 192, 256 and 512 are stored as they are.",
        "cache pages",
    ),
    Option(
        "v_head_dim", "int", 0, partial(_int32, low=0),
        "the numbers of a value, and of an output, where they are not as many as those of a key and a query; 0: "
        "head_dim. On a device both are the same, or 192 and 128.",
        "cache pages",
    ),
    Option("latent", "int", 0, partial(_int32, low=0), "", "cache pages"),
    Option(
        "rope", "int", 0, partial(_int32, low=0),
        "a latent cache, of multi-head latent attention (on a device 512 and 64): the numbers of a token's latent and "
        "of its rotary key, which all query heads share. Calls take rotary keys as keys and latents as values, queries "
        "of latent + rope numbers in this order, and give outputs of `latent`; plans need the model's scale. kv_heads, "
        "head_dim and v_head_dim follow. 0: keys and values of heads.",
        "cache pages",
    ),
    Option("k", "str | None", None, _format, "", "cache pages hf"),
    Option(
        "v", "str", "tq4", _format,
        "formats of keys and values; `kvant.formats()` lists them. k = None: tq6, about 5 bits a value with tq4; tq8 "
        "for the rotary keys of a latent cache.",
        "cache pages hf",
    ),
    Option(
        "device", "Any", "cpu", _arguments.text,
        '"cpu", "cuda", "cuda:1" or a torch.device. On a CUDA device all memory is taken at once, so a cache needs '
        "capacity_tokens, and tensors must be on that device; work is enqueued on torch's current stream (or "
        "`stream=`).",
        "cache pages", None,
    ),
    Option("sink_pages", "int | None", None, partial(_int32, low=0), "", "cache hf"),
    Option(
        "tail_pages", "int | None", None, partial(_int32, low=0),
        "first and newest full pages of 64 tokens that stay exact, the first while a window covers them. None: one "
        "each.",
        "cache hf",
    ),
    Option(
        "exact", "str | None", None, _one_of(_EXACT),
        '"f32", "f16" or "bf16", the dtype of exact pages. None: f16 where the first write is f16, f32 where a format '
        "is f32, else bf16.",
        "cache hf", "exact_dtype",
    ),
    Option("window", "int", 0, _int64, "", "cache"),
    Option(
        "window_sinks", "int", 0, _int64,
        "tokens. Pages that no query of a sliding window can see any more are freed; the first window_sinks tokens "
        "stay.",
        "cache",
    ),
    Option(
        "rollback_tokens", "int", 0, _int64,
        "with a window, so many of the newest tokens can always be truncated: drafts of assisted generation. 0: 64.",
        "cache hf",
    ),
    Option("capacity_tokens", "int", 0, _count, "at most so many tokens in pages, 0: no limit.", "cache"),
    Option("max_sequences", "int", 0, _count, "", "cache"),
    Option(
        "max_sequence_tokens", "int", 0, _count,
        "on a device: sequences alive at once, 0: 256; tokens of the longest, 0: capacity_tokens.",
        "cache",
    ),
    Option(
        "pinned", "bool", False, _arguments.flag,
        "on the CPU, pages are in pinned memory: copies to and from a device (kvant.copy_sequences) go at the speed of "
        "the link and take no processor. Needs CUDA; taking memory is slower.",
        "cache",
    ),
    Option("k_basis", "str", "automatic", _one_of(_c_api.BASIS_KIND), "", "cache"),
    Option(
        "v_basis", "str", "automatic", _one_of(_c_api.BASIS_KIND),
        '"automatic", "hadamard", "none" or "calibrated".',
        "cache",
    ),
    Option("bases", "Bases | str | Path | None", None, _arguments.path, "", "cache", None),
    Option(
        "basis_layers", "SequenceOf[int] | None", None, _int32,
        'a kvant.Bases or its path, for "calibrated"; basis_layers: the file\'s layer number of each layer of the '
        "cache.",
        "cache", None,
    ),
    Option(
        "k_centre", "str", "automatic", _one_of(_c_api.KEY_CENTRE),
        '"page": encoded pages keep a mean of their keys and encode what is left, but of keys that are nearer to zero, '
        'for at most 0.125 bits a key value: tq and fp8 keys. "none". "automatic": "page" for these keys. With "page" '
        "over an engine's blocks, call begin_step once a step.",
        "cache pages hf vllm",
    ),
    Option(
        "v_centre", "str", "automatic", _one_of(_c_api.KEY_CENTRE),
        'the same of latents. "automatic": "page" for tq and fp8 latents, but not beside k_centre="none", and not on a '
        "device.",
        "cache pages",
    ),
    Option("threads", "int", 0, _int32, "workers that encode, 0: the processors that the process may use.",
           "cache pages hf"),
    Option(
        "isa", "str | None", None, _arguments.name_or_none,
        'an instruction set to encode with, "scalar", "avx2", "avx512", "amx" or "neon" (all store the same bytes), '
        "None: the best.",
        "cache pages hf",
    ),
)  # fmt: skip

_PAGES = (
    Option(
        "tail_pages", "int", 0, partial(_arguments.integer, low=0, high=64),
        "newest whole blocks of a sequence that are read exactly, beside the one that is being filled; 0: none. With "
        "tail_pages, call begin_step once a step, and give write and run the layer.",
        "pages vllm",
    ),
    Option(
        "sink_pages", "int", 0, _int32, "with tail_pages: first blocks of a sequence that are read exactly.", "pages"
    ),
    Option(
        "exact", "str | None", None, _one_of(_EXACT),
        '"f32" (CPU only), "f16" or "bf16", the dtype of exact copies; None: f32 where a format is f32, else f16 where '
        "one is, else bf16.",
        "pages", "exact_dtype",
    ),
    Option("layers", "int", 1, _int32, "", "pages"),
    Option(
        "tail_sequences", "int", 0, _int32,
        "sequences that run at the same time, at most. Each may have sink_pages + tail_pages + 2 exact copies of a "
        "block in each of `layers` layers, and sixteen of them tail_pages more: tail_copies a layer, tail_bytes in "
        "all, taken here.",
        "pages",
    ),
    Option(
        "exact_copies", "int | None", None, _int32,
        "with tail_pages: fewer copies a layer; None: as many. Where there are too few, blocks that are being written "
        "have them first, then first blocks and newest full ones. Blocks without a copy are read encoded.",
        "pages",
    ),
    Option(
        "encode_at_once", "bool", False, _arguments.flag,
        "with tail_pages: a write leaves the codes of its blocks complete, which takes longer. For an engine that may "
        "give the memory of a freed block to layers which kvant does not write, before a step begins.",
        "pages",
    ),
)  # fmt: skip

_LIMITS = (
    Option("max_batch", "int", REQUIRED, _int32),
    Option("max_blocks", "int", REQUIRED, _int64),
    Option("max_query_len", "int", 1, _int32),
    Option(
        "max_tokens", "int | None", None, _int64,
        "the largest step: sequences, blocks of one sequence, queries of one sequence, and queries in all with padding "
        "(None: max_batch * max_query_len).",
    ),
    Option(
        "check_ids", "bool", False, _arguments.flag,
        "on a device, each run looks at the block ids that it is to read; rows of a sequence with one outside the pool "
        "become NaN, and take_errors tells. The CPU always looks, and refuses.",
    ),
    Option(
        "workspace", "Any", None, _int64,
        "on a device, a uint8 tensor of facts.workspace_bytes; None: a torch buffer that the plans of these pages "
        "share, taken here. Plans that share one run one after another on a stream.",
        "", None,
    ),
)  # fmt: skip

PLAN = _options_in("plan", "kvant.Plan", _ATTENTION)
PAGES_ATTENTION = _options_in("pages_plan", "kvant.PagesPlan", _ATTENTION)
LIMITS = Options("kvant.PagesPlan", *_LIMITS)
PAGES_PLAN = Options("kvant.PagesPlan", *PAGES_ATTENTION, *LIMITS)
CACHE = _options_in("cache", "kvant.Cache", _CACHE)
PAGES = _options_in("pages", "kvant.Pages", (*_CACHE, *_PAGES))
HF_CACHE = _options_in("hf", "kvant.hf", _CACHE, k="tq6")
HF_ATTENTION = _options_in("hf", "kvant.hf", _ATTENTION)
VLLM_ATTENTION = _options_in("vllm", "kvant.vllm", _ATTENTION, fresh_keys=True)
VLLM = Options(
    "kvant.vllm",
    *_options_in("vllm", "", (*_CACHE, *_PAGES), tail_pages=1),
    Option(
        "exact_memory", "float", 0.05, _share,
        "the memory of exact copies, as a share of that of the KV cache.",
    ),
    *VLLM_ATTENTION,
)  # fmt: skip
