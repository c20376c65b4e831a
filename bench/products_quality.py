#!/usr/bin/env python3
"""Products of 8 bits and a real model: how much they add to the loss of its formats (KL divergence from float32).

    python3 bench/products_quality.py FOLDER tq6/tq4 tq4/tq4 tq8/tq8 --tokens 1024

FOLDER is a causal model in Hugging Face's form; bench/quality/fetch_models.py makes some. A prompt is fed through
kvant.hf in chunks, as an engine feeds a prompt: each chunk's queries read all that is stored, their own keys too. For
each format the table has, by bits of products:

    KL       mean KL divergence of the float32 model from this one, in nats
    adds     how much more that is than with products of 16 bits, with an interval that holds 95 %
    of 16    the same as a share of the KL divergence with 16 bits: the format's own loss
    apart    mean KL divergence of the model with 16 bits from this one. It is large where formats are coarse: layers
             behind the first one get other keys, which their formats round otherwise, by as much as ever
    top-1    share of positions at which both models like the same token best
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent / "python"), str(BENCH / "quality")]

ROWS = 64  # that are compared at a time, in float64


def logits_of(model, ids, chunk, past):
    """Logits [tokens, vocabulary] of all of ids [1, tokens], which the model is given in chunks."""
    import torch

    from kvant.hf import versions

    found = []
    for begin in range(0, ids.shape[1], chunk):
        here = ids[:, begin : begin + chunk]
        found.append(model(input_ids=here, use_cache=True, **{versions.CACHE_NAME: past}).logits[0])
    return torch.cat(found)


def compared(exact, other, targets):
    """Per position: KL divergence, and whether both like the same token best."""
    import torch

    from kvant.hf._evaluate import compare

    parts = [compare(*x) for x in zip(exact.split(ROWS), other.split(ROWS), targets.split(ROWS))]
    found = torch.cat(parts)
    return found[:, 0], found[:, 2]


def compare_prompt(model, ids, a):
    """{(format, bits): (KL divergence, agreement, KL divergence from 16 bits)}, by position of ids [1, tokens + 1]."""
    from transformers import DynamicCache

    import kvant.hf

    targets, ids = ids[0, 1:], ids[:, :-1]
    exact = logits_of(model, ids, a.chunk, DynamicCache(config=model.config))
    found = {}
    for pair in a.formats:
        k, _, v = pair.partition("/")
        of_sixteen = None
        for bits in (16, 8):
            kvant.hf.enable(model, k=k, v=v or k, products=bits, fresh_keys=False, isa=a.isa, threads=a.threads)
            cache = kvant.hf.cache(model)
            logits = logits_of(model, ids, a.chunk, cache)
            report = kvant.hf.report(cache)
            kvant.hf.disable(model)
            if not any(row.stored for row in report.rows):
                raise SystemExit(f"{pair}: kvant stores no layer of this model:\n{report}")
            apart = None if of_sixteen is None else compared(of_sixteen, logits, targets)[0]
            found[pair, bits] = (*compared(exact, logits, targets), apart)
            of_sixteen = logits
    return found


def rows_of(parts, a):
    """A row for each format and number of bits, of what compare_prompt gave for some prompts."""
    import torch

    from kvant.hf._evaluate import interval

    rows = []
    for pair in a.formats:
        kl_of_sixteen = None
        for bits in (16, 8):
            kl, same = (torch.cat([part[pair, bits][i] for part in parts]) for i in range(2))
            row = dict(
                format=pair, products=bits, kl=float(kl.mean()), kl_p99=float(kl.quantile(0.99)),
                top1=float(same.mean()),
            )
            if kl_of_sixteen is None:
                kl_of_sixteen = kl
            else:
                added = kl - kl_of_sixteen
                row["adds"], row["adds_interval"] = float(added.mean()), interval(added)
                row["share"] = row["adds"] / float(kl_of_sixteen.mean())
                row["apart"] = float(torch.cat([part[pair, bits][2] for part in parts]).mean())
            rows.append(row)
    return rows


def line(r):
    text = f"{r['format']:<9} {r['products']:>4}   {r['kl']:.2e}  {r['kl_p99']:.1e}  {100 * r['top1']:>7.2f}"
    if "adds" not in r:
        return text
    within = "[{:+.1e}, {:+.1e}]".format(*r["adds_interval"]) if r["adds_interval"] else "-"
    return f"{text}  {r['adds']:>+9.1e}  {within:<21} {100 * r['share']:>+7.1f} %  {r['apart']:.2e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("formats", nargs="*", metavar="KEYS/VALUES", default=["tq6/tq4", "tq4/tq4", "tq8/tq8"])
    parser.add_argument("--text", default="topics", help="topics (English), code, or a file")
    parser.add_argument("--bytes", action="store_true", help="tokens are the text's bytes: models without a tokenizer")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="pieces of the text, one after another")
    parser.add_argument("--chunk", type=int, default=512, help="tokens that are fed at a time")
    parser.add_argument("--isa", help="of kvant; the best of the machine if this is not given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    a = parser.parse_args()

    import torch
    from kl import read
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvant

    torch.set_num_threads(a.threads)
    model = AutoModelForCausalLM.from_pretrained(a.folder, dtype=torch.float32).eval()
    needed = a.prompts * a.tokens + 1
    text = read(a.text)[: 8 * needed]
    numbers = list(text.encode()) if a.bytes else AutoTokenizer.from_pretrained(a.folder)(text).input_ids
    if len(numbers) < needed:
        parser.error(f"--tokens {a.tokens} --prompts {a.prompts}: the text has {len(numbers)} tokens")
    isa = a.isa or next(i["name"] for i in kvant.info()["isas"] if i["available"])
    print(f"{Path(a.folder).name}: {a.prompts} x {a.tokens} tokens of {a.text} in chunks of {a.chunk}, {isa}")
    parts = []
    with torch.no_grad():
        for begin in range(0, needed - 1, a.tokens):
            parts.append(compare_prompt(model, torch.tensor([numbers[begin : begin + a.tokens + 1]]), a))
            print(f"{len(parts)} of {a.prompts}", file=sys.stderr, flush=True)
    rows = rows_of(parts, a)
    print("format    bits   KL        99 %     top-1 %       adds  95 % interval           of 16    apart")
    print("\n".join(map(line, rows)))
    if a.json:
        a.json.write_text(json.dumps(dict(model=Path(a.folder).name, tokens=a.tokens, isa=isa, rows=rows), indent=1))


if __name__ == "__main__":
    main()
