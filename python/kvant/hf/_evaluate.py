"""What a format costs a model: how far its next-token distributions move when its cache is stored by kvant.

    print(kvant.hf.evaluate(model, text, tokenizer=tokenizer))

Captured tensors (kvant.hf.capture, kvant.eval) show the error of one layer for its true input. Here the whole model
runs over the cache, token by token as it does while generating, so that errors of one layer reach the next and later
tokens.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import _arguments
from .._errors import InvalidArgument, Unsupported
from .._tools import version
from . import versions
from ._capture import attention_of, token_ids
from .report import Report, make_report

REFERENCE_TOKENS = 256  # of one forward of the exact model; bounds the logits that are held: 256 x the vocabulary
BLOCK = 64  # neighbouring positions share their keys and so their errors; the bootstrap draws blocks of them
RESAMPLES = 2000
FLOATS = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
CONFIDENCE = (0.0, 0.5, 0.9, 0.99, 1.0)  # edges of the buckets of the exact model's largest probability


@dataclass(frozen=True)
class Bucket:
    """Positions at which the exact model's largest probability is in [low, high)."""

    low: float
    high: float
    positions: int
    kl: float | None
    tv: float | None
    top1: float | None


@dataclass(frozen=True)
class Row:
    """One format against the exact model. Intervals hold 95 % and come from a bootstrap over blocks of 64 positions."""

    k: str
    v: str
    exact_ends: bool
    positions: int
    kl: float  # mean KL divergence of the exact distribution from this one, in nats
    kl_interval: tuple[float, float] | None  # None: fewer than two blocks of positions
    kl_p99: float
    kl_max: float
    tv: float  # mean total variation: the largest difference in the probability of any set of tokens
    top1: float  # share of positions at which both models like the same token best
    perplexity_ratio: float  # of this model to the exact model, on the text's own tokens
    perplexity_ratio_interval: tuple[float, float] | None
    bytes: int  # of the cache at the end
    bf16_bytes: int  # of transformers' own in bf16
    layers_left: tuple[int, ...]  # that transformers stored: kvant.hf.report says why
    buckets: tuple[Bucket, ...]
    from_codes: int = 0  # positions whose queries read tokens in this format; the others saw exact tokens alone

    @property
    def name(self) -> str:
        return (self.k if self.k == self.v else f"{self.k}/{self.v}") + ("" if self.exact_ends else ", all encoded")


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: `rows`, `to_json()`, and a table as its text."""

    model: str
    device: str
    tokens: int
    first: int
    step: int
    reference_perplexity: float
    rows: tuple[Row, ...]
    versions: dict[str, str]

    def to_json(self, path: str | Path | None = None) -> str:
        """All figures as JSON; also written to `path` if that is given."""
        text = json.dumps(asdict(self), indent=1)
        if path is not None:
            Path(_arguments.path("path", path)).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        first = f", the first {self.first} not counted" if self.first else ""
        lines = [
            f"{self.model} in float32 on {self.device}: {self.tokens} tokens in steps of {self.step}{first}; "
            f"exact perplexity {self.reference_perplexity:.3f}",
            f"{'format':<20}{'MB':>7}{'encoded':>9}{'KL divergence':>14}  {'95 % interval':<18}{'99 %':>8}{'TV':>8}"
            f"{'top-1 %':>8}  perplexity ratio",
        ]
        for r in self.rows:
            within = "[{:.1e}, {:.1e}]".format(*r.kl_interval) if r.kl_interval else "-"
            ratio = "[{:.4f}, {:.4f}]".format(*r.perplexity_ratio_interval) if r.perplexity_ratio_interval else ""
            lines.append(
                f"{r.name:<20}{r.bytes / 1e6:>7.1f}{r.from_codes:>9}{r.kl:>14.2e}  {within:<18}{r.kl_p99:>8.1e}"
                f"{r.tv:>8.1e}{100 * r.top1:>8.2f}  {r.perplexity_ratio:.4f} {ratio}"
            )
        if self.rows:
            lines.append(f"{'in bf16':<20}{self.rows[0].bf16_bytes / 1e6:>7.1f}")
            lines.append("encoded: positions at which encoded tokens were read; all others saw exact tokens alone")
        left = {r.layers_left for r in self.rows} - {()}
        for layers in left:
            which = f"layers {', '.join(map(str, layers))}" if len(layers) <= 12 else f"{len(layers)} layers"
            lines.append(f"not stored by kvant, so exact: {which} (kvant.hf.report says why)")
        lines.append("")
        lines.append("KL divergence (top-1 %) where the exact model's largest probability is in")
        buckets = self.rows[0].buckets if self.rows else ()
        lines.append(f"{'':<24}" + "".join(f"{f'[{b.low:g}, {b.high:g})':>20}" for b in buckets))
        lines.append(f"{'positions':<24}" + "".join(f"{b.positions:>20}" for b in buckets))
        for r in self.rows:
            cells = ("-" if b.kl is None else f"{b.kl:.1e} ({100 * b.top1:.1f})" for b in r.buckets)
            lines.append(f"{r.name:<24}" + "".join(f"{cell:>20}" for cell in cells))
        return "\n".join(line.rstrip() for line in lines)


# --- statistics -------------------------------------------------------------------------------------------------------


def compare(exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per position [n, 5] in float64: KL divergence, total variation, same favourite, log(p / q) of the target, largest
    p.

    exact, other: logits [n, vocabulary] of the distributions p and q. targets: [n] the tokens that the text has next.
    """
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    p = log_p.exp()
    # A token that the model rules out (logit -inf) has p = 0 and adds nothing; 0 * -inf would be NaN.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    tv = (p - log_q.exp()).abs().sum(-1) / 2
    same = (exact.argmax(-1) == other.argmax(-1)).double()
    pick = targets[:, None]
    return torch.stack([kl, tv, same, (log_p.gather(1, pick) - log_q.gather(1, pick))[:, 0], p.amax(-1)], -1)


def interval(values: torch.Tensor) -> tuple[float, float] | None:
    """Holds 95 % of the means [n] -> [] of resampled blocks of neighbouring positions; None if there are fewer than 2
    blocks."""
    blocks = values.split(BLOCK)
    if len(blocks) < 2:
        return None
    sums = torch.stack([b.sum() for b in blocks])
    sizes = torch.tensor([len(b) for b in blocks], dtype=values.dtype)
    drawn = torch.randint(len(blocks), (RESAMPLES, len(blocks)), generator=torch.Generator().manual_seed(0))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype))
    return float(low), float(high)


def summary(
    k: str, v: str, exact_ends: bool, found: torch.Tensor, report: Report | None = None, from_codes: int = 0
) -> Row:
    """A row from what `compare` gave at all positions, [positions, 5], and from the report of its cache."""
    kl, tv, same, log_ratio, confidence = found.unbind(-1)
    buckets = []
    for low, high in zip(CONFIDENCE, CONFIDENCE[1:]):
        here = (confidence >= low) & ((confidence < high) | (high == 1.0))
        mean = lambda x: float(x[here].mean()) if here.any() else None  # noqa: E731
        buckets.append(Bucket(low, high, int(here.sum()), mean(kl), mean(tv), mean(same)))
    ratio = interval(log_ratio)
    return Row(
        k=k,
        v=v,
        exact_ends=exact_ends,
        positions=len(found),
        kl=float(kl.mean()),
        kl_interval=interval(kl),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        tv=float(tv.mean()),
        top1=float(same.mean()),
        perplexity_ratio=float(log_ratio.mean().exp()),
        perplexity_ratio_interval=ratio and (math.exp(ratio[0]), math.exp(ratio[1])),
        bytes=report.bytes if report else 0,
        bf16_bytes=report.bf16_bytes if report else 0,
        layers_left=tuple(r.layer for r in report.rows if r.bytes and not r.stored) if report else (),
        buckets=tuple(buckets),
        from_codes=from_codes,
    )


# --- the runs ---------------------------------------------------------------------------------------------------------


def in_float32(model: Any) -> Any:
    """The model itself if its weights are float32, else a float32 copy of it."""
    weights = {p.dtype for p in model.parameters()}
    packed = (weights | {b.dtype for b in model.buffers()}) - {*FLOATS, torch.int64, torch.bool}  # those count and mask
    if packed or not weights <= FLOATS:
        kinds = ", ".join(sorted(map(str, packed or weights)))
        raise Unsupported(
            f"{type(model).__name__} has quantized weights ({kinds}), which cannot be made "
            "float32: load it with dtype=torch.float32 and without its quantization"
        )
    return model if weights == {torch.float32} else copy.deepcopy(model).float()


def _progress(total: int, wanted: bool) -> tuple[Callable[[int], Any], Callable[[], Any]]:
    """advance(tokens) and close(): a bar by tqdm where that is installed, else lines on stderr."""
    if not wanted:
        return lambda n: None, lambda: None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        done = [0]

        def advance(n: int) -> None:
            before, done[0] = done[0], done[0] + n
            if 10 * before // total != 10 * done[0] // total:
                print(f"kvant.hf.evaluate: {100 * done[0] // total} %", file=sys.stderr, flush=True)

        return advance, lambda: None
    bar = tqdm(total=total, unit="token", desc="kvant.hf.evaluate")
    return bar.update, bar.close


def _formats(formats: Sequence[str], exact_ends: bool | str) -> list[tuple[str, str, bool]]:
    if exact_ends not in (True, False, "both"):
        raise InvalidArgument(f'exact_ends = {exact_ends!r}: must be True, False or "both"')
    formats = [formats] if isinstance(formats, str) else list(formats)
    if not formats:
        raise InvalidArgument('formats is empty: give at least one, for example "tq6/tq4"')
    rows = []
    for name in formats:
        k, _, v = str(name).partition("/")
        ends = (True, False) if exact_ends == "both" or (exact_ends is True and name == "fp8") else (exact_ends,)
        rows += [(k, v or k, end) for end in ends]
    return rows


def _new_cache(model: Any, tokens: int, k: str, v: str, exact_ends: bool, options: dict[str, Any]) -> Any:
    from . import cache

    ends = {} if exact_ends else {"sink_pages": 0, "tail_pages": 0}
    return cache(model, max_length=tokens, batch=1, k=k, v=v, **(options | ends))


def _logits(model: Any, ids: torch.Tensor, past: Any) -> torch.Tensor:
    return model(input_ids=ids, use_cache=True, **{versions.CACHE_NAME: past}).logits[0]


@torch.no_grad()
def _run(
    model: Any, ids: torch.Tensor, caches: list[Any], step: int, advance: Callable[[int], Any]
) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Yields (row, what `compare` gave for some positions, whether they read codes), block after block of the text; row
    -1: -log p of the exact model."""
    text = versions.decoder_config(model.config)
    # torch's attention has no softcap and no sinks; such models say that they have their own.
    plain = getattr(type(model), "_supports_sdpa", True) and not getattr(text, "attn_logit_softcapping", None)
    exact_attention = "sdpa" if plain and text._attn_implementation != "eager" else "eager"
    past = versions.DynamicCache(config=text)
    tokens = ids.shape[1] - 1
    for begin in range(0, tokens, REFERENCE_TOKENS):
        end = min(begin + REFERENCE_TOKENS, tokens)
        with attention_of(model, exact_attention):
            exact = _logits(model, ids[:, begin:end], past)
        targets = ids[0, begin + 1 : end + 1]
        yield -1, -exact.double().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu(), False
        with attention_of(model, versions.IMPLEMENTATION):
            for row, cache in enumerate(caches):
                for at in range(begin, end, step):
                    stop = min(at + step, end)
                    here = slice(at - begin, stop - begin)
                    logits = _logits(model, ids[:, at:stop], cache)
                    yield row, compare(exact[here], logits, targets[here]).cpu(), cache.reads_codes(stop - at)
                advance(end - begin)


def evaluate(
    model: Any,
    text_or_ids: Any,
    formats: Sequence[str] = ("fp8", "tq6/tq4", "tq4/tq4", "tq3/tq4"),
    *,
    tokenizer: Any = None,
    positions: int = 2000,
    first: int = 0,
    step: int = 4,
    exact_ends: bool | str = True,
    progress: bool = True,
    **cache_options: Any,
) -> Evaluation:
    """Measures formats by the model's own predictions: KL divergence, total variation, top-1 agreement, perplexity
    ratio.

    The text is fed `step` tokens at a time through a kvant cache of each format, the path of decoding. At every
    position the next-token distribution is compared with that of the exact model, which runs over transformers' own
    cache.

    text_or_ids: a text (with tokenizer=) or the token ids of one sequence; positions + 1 of them are used.
    formats: "tq6/tq4" is keys/values, "tq4" is both. fp8 is there for comparison: it is what other engines offer.
    positions: how many are fed. 2000 give about 10 % of accuracy; they matter from about 200 on, since the first and
        the newest pages are exact: `from_codes` counts those that did read codes, and a warning says that none did.
        first: how many of them are not counted.
    exact_ends: True: as kvant stores by default, and fp8 also without exact pages, as other engines have it; False: all
        formats without; "both".
    cache_options: further options of kvant.hf.cache.

    Everything is computed in float32; a model in another dtype is copied. In bfloat16 the logits are rounded so
    coarsely that any change of the keys, however small, moves the distributions by a KL divergence of about 1e-3: that
    hides the differences between all formats above 4 bits.

    On a CUDA device exact pages are in bfloat16, which moves a float32 model by about 1e-6.

    Errors: InvalidArgument; Unsupported for quantized weights, for formats in which no layer is stored by kvant, and
    whatever kvant.hf.cache refuses.
    """
    wanted = _formats(formats, exact_ends)
    if step < 1 or positions < 1 or not 0 <= first < positions:
        raise InvalidArgument(
            f"positions = {positions}, first = {first}, step = {step}: must be positions > first >= 0, step >= 1"
        )
    ids = token_ids(text_or_ids, tokenizer, positions + 1)
    if ids.shape[1] < first + 2:
        raise InvalidArgument(f"text_or_ids has {ids.shape[1]} tokens: first = {first} needs at least {first + 2}")
    model32 = in_float32(model)
    was_training = model32.training
    model32.eval()
    ids = ids.to(model32.device)
    advance, close = _progress((ids.shape[1] - 1) * len(wanted), progress)
    found: dict[int, list[torch.Tensor]] = {row: [] for row in range(-1, len(wanted))}
    read: list[list[bool]] = [[] for _ in wanted]
    try:
        caches = [_new_cache(model32, ids.shape[1], *row, cache_options) for row in wanted]
        for row, values, from_codes in _run(model32, ids, caches, step, advance):
            found[row].append(values)
            if row >= 0:
                read[row] += [from_codes] * len(values)
        reports = [make_report(cache) for cache in caches]
        for row, report in zip(wanted, reports):
            if not any(layer.stored for layer in report.rows):
                reasons = "; ".join(sorted({layer.reason for layer in report.rows if layer.reason}))
                raise Unsupported(
                    f"{row[0]}/{row[1]}: kvant stores no layer of {type(model).__name__}, "
                    f"so there is nothing to measure: {reasons}"
                )
    finally:
        close()
        model32.train(was_training)
    rows = tuple(
        summary(*row, torch.cat(found[i])[first:], reports[i], sum(read[i][first:])) for i, row in enumerate(wanted)
    )
    unread = [row.name for row in rows if row.from_codes == 0]
    if unread:
        warnings.warn(
            f"{', '.join(unread)}: none of the {rows[0].positions} positions read encoded tokens, as the first and the "
            "newest pages are exact. The figures say nothing about these formats: take a longer text, or "
            "exact_ends=False",
            stacklevel=2,
        )
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    return Evaluation(
        model=Path(name).name,
        device=str(model32.device),
        tokens=ids.shape[1] - 1,
        first=first,
        step=step,
        reference_perplexity=float(torch.cat(found[-1])[first:].mean().exp()),
        rows=rows,
        versions={"kvant": version()} | {name: metadata.version(name) for name in ("torch", "transformers")},
    )
