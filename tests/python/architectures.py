"""Every causal language model of the installed transformers, made tiny, over kvant caches in f32: `judge` and a script.

    python tests/python/architectures.py                 # all, one line each
    python tests/python/architectures.py llama mllama    # some
    python tests/python/architectures.py --write         # all, and tests/python/architectures.md

A padded batch of 2 passes in five forward passes (60, 1, 1, 24, 1 tokens), then generate() runs. Right is what the
model gives without kvant.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import textwrap
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import images
import tiny
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvant
import kvant.hf
from kvant.hf import versions

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
WITH_IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
FORWARDS = (60, 1, 1, 24, 1)
SHORTER = (60, 1, 1)  # without padding, where a model cannot do more
PADDING = 5  # tokens before the second row
NEW = 4  # tokens of generate()
PAGE = Path(__file__).with_name("architectures.md")
TOLERANCE = 1e-4  # of the logits' standard deviation
SECONDS = 240  # for one architecture
ISA = next(i["name"] for i in kvant.info()["isas"] if i["available"] and i["name"] != "amx")
OPTIONS = dict(k="f32", v="f32", short_windows=True, isa=ISA)

# How kvant serves an architecture. "wrong" is what must not be.
VERDICTS = {
    "attention": "through kvant's attention, every layer stored by kvant",
    "partly": "through kvant's attention; some layers are left to transformers",
    "left": "every layer is left to transformers",
    "decoded": "stored by kvant, which decodes the cache in each step",
    "refused": "refused by `enable`, or by the first forward pass",
    "not made": "no tiny model could be made",
    "wrong": "wrong",
}


@dataclass(frozen=True)
class Result:
    """error: the largest, of the logits' standard deviation. why: of layers left, refusals, or what failed."""

    name: str
    model: str
    verdict: str
    stored: int = 0
    layers: int = 0
    why: str = ""
    error: float = 0.0
    image: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        of = f"{self.stored}/{self.layers}" if self.layers else ""
        return f"{self.verdict:<10}{self.name:<28}{of:>5} {self.error:8.1e} {self.seconds:5.1f} s  {self.why}"


def build(name: str, table: dict[str, str] = CAUSAL) -> torch.nn.Module:
    """A tiny model of an entry of transformers' tables, with random weights in float32."""
    model_class, config = getattr(transformers, table[name]), tiny.tiny(CONFIG_MAPPING[name])
    if not isinstance(config, model_class.config_class):  # the class takes a part of it, or is of another type
        parts = (getattr(config, key) for key in config.sub_configs)
        own = (part for part in parts if isinstance(part, model_class.config_class))
        config = next(own, None) or tiny.tiny(model_class.config_class)
    config.is_decoder = True  # of BERT and its kin
    torch.manual_seed(0)
    return tiny.sharpen(model_class._from_config(config).eval().float())


def batch(tokens: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, tokens] and their mask."""
    ids = torch.randint(3, 100, (2, tokens), generator=torch.Generator().manual_seed(5))
    real = torch.ones_like(ids)
    real[1, :padding] = 0
    return ids * real, real


def run(model: Any, cache: Any, ids: torch.Tensor, real: torch.Tensor, **first: Any) -> torch.Tensor:
    """Logits [2, tokens, vocabulary] of all forward passes."""
    outputs, at = [], 0
    with torch.no_grad():
        for n in FORWARDS if ids.shape[1] == sum(FORWARDS) else SHORTER:
            more = {} if at else first
            if at and hasattr(getattr(model, "model", None), "rope_deltas"):  # which else takes those of all tokens
                more = {"position_ids": torch.arange(at, at + n).expand(3, len(ids), n)}
            out = model(input_ids=ids[:, at : at + n], attention_mask=real[:, : at + n], use_cache=True,
                        **{versions.CACHE_NAME: cache}, **more)  # fmt: skip
            outputs.append(out.logits[:, -n:])
            at += n
    return torch.cat(outputs, 1)


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(
        ids[:1, :40], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, use_cache=True
    )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _ours(error: BaseException) -> bool:
    """Whether kvant says a sentence, rather than something breaking below it."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return isinstance(error, kvant.KvantError) or "/kvant/" in frame.tb_frame.f_code.co_filename


def judge(name: str, model: Any, ids: torch.Tensor, real: torch.Tensor, **first: Any) -> Result:
    """How kvant serves a model, and whether its logits and its tokens are right."""
    begin, title = time.time(), type(model).__name__

    def result(verdict: str, **facts: Any) -> Result:
        return Result(name, title, verdict, seconds=round(time.time() - begin, 1), **facts)

    try:
        text = model.config.get_text_config(decoder=True)
        expected = run(model, versions.DynamicCache(config=text), ids, real, **first)
        alone = model(input_ids=ids[:, -1:], attention_mask=real[:, -1:]).logits if not first else None
        try:
            tokens = generated(model, ids) if not first else None
        except Exception:  # of models whose generate() needs more than ids
            tokens = None
    except Exception as error:
        try:
            kvant.hf.enable(model, **OPTIONS)
        except ValueError as refusal:
            return result("refused", why=str(refusal))
        return result("not made", why="without kvant: " + _sentence(error))
    refusal = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kvant.hf.enable(model, **OPTIONS)
        except (ValueError, kvant.KvantError) as error:
            refusal = str(error)
        if refusal and not versions.takes_cache(model):
            return result("refused", why=refusal)
        try:
            cache = kvant.hf.cache(model, **OPTIONS)
            actual = run(model, cache, ids, real, **first)
        except Exception as error:
            if _ours(error):
                return result("refused", why=refusal or _sentence(error))
            return result("wrong", why="under kvant: " + _sentence(error))
        rows = kvant.hf.report(cache).rows
        facts = dict(stored=sum(row.stored for row in rows), layers=len(rows))
        facts["why"] = refusal or "; ".join(dict.fromkeys(row.reason for row in rows if row.reason))
        seen = real.bool()
        facts["error"] = float((actual - expected)[seen].abs().max() / expected[seen].std())
        if not facts["error"] <= TOLERANCE:
            return result("wrong", **facts)
        if alone is not None and facts["stored"]:
            change = float((alone[:, -1] - expected[:, -1]).abs().max() / expected[seen].std())
            if change < 10 * TOLERANCE:
                return result("wrong", **facts | {"why": f"the model does not see its past ({change:.1e})"})
        if tokens is not None and not refusal:
            try:
                got = generated(model, ids)
            except Exception as error:
                if _ours(error):
                    return result("refused", **facts | {"why": "generate(): " + _sentence(error)})
                return result("wrong", **facts | {"why": "generate() under kvant: " + _sentence(error)})
            if not torch.equal(got, tokens):
                return result("wrong", **facts | {"why": "generate() gives other tokens"})
    decoded = any("decodes the whole cache" in str(w.message) for w in caught)
    if not facts["stored"]:
        return result("refused" if refusal else "left", **facts)
    if decoded and not refusal:
        facts["why"] = "changes its keys behind the cache, so that kvant decodes them in each step, with a warning"
    if refusal or decoded:
        return result("decoded", **facts)
    return result("attention" if facts["stored"] == facts["layers"] else "partly", **facts)


def examine(name: str) -> Result:
    """Builds and judges one architecture."""
    try:
        model = build(name)
        result = judge(name, model, *batch(sum(FORWARDS), PADDING))
        if result.verdict == "not made":
            result = judge(name, build(name), *batch(sum(SHORTER), 0))
        elif result.verdict == "refused" and "padded batch" in result.why:
            alone = judge(name, build(name), *batch(sum(FORWARDS), 0))
            result = alone if alone.verdict == "wrong" else replace(alone, why=f"padded batches: {result.why}")
        return result
    except Exception as error:
        return Result(name, CAUSAL[name], "not made", why=_sentence(error))


def examine_with_image(name: str) -> Result:
    """Builds and judges one architecture that reads images; each row has one image if its form is known, else none."""
    try:
        ids, real = batch(sum(FORWARDS), PADDING)
        model, none = build(name, WITH_IMAGES), ""
        first: dict[str, Any] = {}
        try:
            ids, first = images.with_image(model, ids, real, FORWARDS[0])
        except ValueError as error:
            none = f"without images ({error})"
        result = judge(name, model, ids, real, **first)
        return replace(result, why="; ".join(x for x in (result.why, none) if x), image=bool(first))
    except Exception as error:
        return Result(name, WITH_IMAGES[name], "not made", why=_sentence(error))


def apart(name: str, examine: Any = examine) -> Result:
    """`examine` in a process of its own, which frees what it takes, and which may crash or hang."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(SECONDS)
        text = json.dumps(asdict(examine(name)))
        with os.fdopen(write, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not text:
        return Result(name, "", "wrong", why=f"ended with status {status} (14: after {SECONDS} s)")
    return Result(**json.loads(text))


def quiet() -> None:
    """One thread, and what all models import, so that processes made by fork share it."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    examine("llama")


def sweep(names: list[str], table: dict[str, str]) -> list[Result]:
    results = []
    for name in names or table:
        results.append(apart(name, examine if table is CAUSAL else examine_with_image))
        print(results[-1], file=sys.stderr, flush=True)
    return results


def version() -> str:
    return f"transformers {transformers.__version__}"


HEAD = """# Architectures

All {causal} causal language models of {version} and all {images} models that read images and text: tiny ones, with
random weights in float32, over kvant caches in f32. A padded batch passes in five forward passes, the first with an
image where one could be made, then `generate()` runs. *Right* is what the model gives without kvant, within 1e-4 of
the logits' standard deviation; the largest difference was {worst:.1e}. `python tests/python/architectures.py --write`
makes this page, and fails where an output is wrong. `pytest -m slow tests/python/test_hf_architectures.py` repeats it.

A tiny model says how an architecture is served, not every checkpoint of it: layers whose window is short, or whose
head_dim kvant lacks, are left to transformers, and `kvant.hf.report` says so.
"""


def section(title: str, results: list[Result]) -> list[str]:
    """Results by their verdict, those of one reason together."""
    text = [f"## {title}\n"]
    for verdict, words in VERDICTS.items():
        groups: dict[str, list[str]] = {}
        for r in results:
            if r.verdict == verdict:
                numbers = r" \[[\d, ]*\]"
                why = re.sub(numbers, "", re.sub(r"without images \(.*\)", "without images", r.why))
                why = re.sub(r"\b[A-Z]\w+(ForCausalLM|LMHeadModel|Model|Decoder|Generation)\b", "the model", why)
                groups.setdefault(why.replace("|", "/"), []).append(r.name)
        if not groups:
            continue
        text.append(f"**{words[0].upper()}{words[1:]}** ({sum(map(len, groups.values()))})\n")
        rows = sorted(groups.items(), key=lambda item: -len(item[1]))
        if list(groups) == [""]:
            text.append(textwrap.fill(", ".join(groups[""]), 120, break_on_hyphens=False) + "\n")
        else:
            text += ["| types | why |", "|---|---|", *(f"| {', '.join(names)} | {why} |" for why, names in rows), ""]
    return text


def page(causal: list[Result], images: list[Result]) -> str:
    """tests/python/architectures.md."""
    worst = max(r.error for r in causal + images)
    text = [HEAD.format(causal=len(causal), images=len(images), version=version(), worst=worst)]
    text += section("Causal language models", causal)
    text += section("Images and text, an image in each row", [r for r in images if r.image])
    text += section("Images and text, tried with text alone", [r for r in images if not r.image])
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TYPE", help="types of transformers' table; default: all")
    parser.add_argument("--images", action="store_true", help="TYPE is of the table of models that read images")
    parser.add_argument("--write", action="store_true", help="all of both tables, and tests/python/architectures.md")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    quiet()
    if arguments.write:
        causal, images = sweep([], CAUSAL), sweep([], WITH_IMAGES)
        PAGE.write_text(page(causal, images), encoding="utf-8")
        results = causal + images
    else:
        results = sweep(arguments.names, WITH_IMAGES if arguments.images else CAUSAL)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(r) for r in results], indent=1))
    sys.exit(any(r.verdict == "wrong" for r in results))


if __name__ == "__main__":
    main()
