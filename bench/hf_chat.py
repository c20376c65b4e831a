#!/usr/bin/env python3
"""A chat whose turns are calls of generate() with the whole conversation: with and without prefix_cache.

usage: hf_chat.py MODEL [--turns 20] [--answer 32] [--words 60] [--k tq6 --v tq4] [--directory]

MODEL: a folder that transformers reads (bench/quality/fetch_models.py makes some). Prints the time to the first token
of each fifth turn: without a prefix cache, with one, and with one kvant.hf.cache that lasts for the chat. Each way goes
on from its own answers. Answers with a prefix cache are compared with both others; the ids and the scores of a cache
that lasts must be the same bits (exit code 1).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import kvant.hf  # noqa: E402
from kvant.hf import versions  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


class FirstToken:
    """A streamer that takes the time of the first token."""

    def __init__(self):
        self.begin, self.seconds, self._puts = time.perf_counter(), 0.0, 0

    def put(self, value):
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.seconds = time.perf_counter() - self.begin

    def end(self):
        pass


def questions(folder: str, turns: int, words: int) -> list[list[int]]:
    """Token ids of what the user says: pieces of the documents."""
    text = (ROOT / "docs" / "design.md").read_text().split()
    pieces = [" ".join(text[i * words : (i + 1) * words]) for i in range(turns)]
    if not list(Path(folder).glob("tokenizer*")):
        return [list(piece.encode()) for piece in pieces]  # the test model's tokens are bytes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": piece}] for piece in pieces]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


def chat(model, turns: list[list[int]], answer: int, cache=None):
    """Seconds to the first token of each turn, the answers, and their scores."""
    ids, seconds, answers, scores = torch.zeros(1, 0, dtype=torch.long, device=model.device), [], [], []
    for turn in turns:
        ids = torch.cat([ids, torch.tensor([turn], device=model.device)], 1)
        given = {} if cache is None else {versions.CACHE_NAME: cache}
        first = FirstToken()
        output = model.generate(ids, max_new_tokens=answer, min_new_tokens=answer, do_sample=False, streamer=first,
                                output_scores=True, return_dict_in_generate=True, **given)
        seconds.append(first.seconds)
        answers.append(output.sequences[0, ids.shape[1] :].tolist())
        scores.append(torch.stack(output.scores))
        ids = output.sequences
    return seconds, answers, scores, ids.shape[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--k", default="tq6")
    parser.add_argument("--v", default="tq4")
    parser.add_argument("--directory", action="store_true", help="the prefix cache is a folder, not memory")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    turns = questions(args.model, args.turns, args.words)
    model.generate(torch.tensor([turns[0]]), max_new_tokens=2)  # the first call of a process takes longer

    kvant.hf.enable(model, k=args.k, v=args.v)
    without = chat(model, turns, args.answer)
    lasting = chat(model, turns, args.answer, kvant.hf.cache(model, max_length=1 << 16, batch=1))
    with tempfile.TemporaryDirectory() as folder:
        index = kvant.PrefixIndex(folder if args.directory else None)
        kvant.hf.enable(model, k=args.k, v=args.v, prefix_cache=index)
        known = chat(model, turns, args.answer)
        stats = index.stats

    print(f"{args.turns} turns, {known[3]} tokens at the end, {args.k}/{args.v}, one thread")
    print("turn  without  prefix_cache  one cache   seconds to the first token")
    for i in [0, *range(4, args.turns, 5)]:
        print(f"{i + 1:4}  {without[0][i]:7.3f}  {known[0][i]:12.3f}  {lasting[0][i]:9.3f}")
    print(f"turn {args.turns}: {without[0][-1] / known[0][-1]:.1f} times as fast as without; {stats}")
    same = sum(a == b for a, b in zip(without[1], known[1]))
    print(f"answers equal to those without: {same} of {args.turns}")
    equal = known[1] == lasting[1] and all(torch.equal(a, b) for a, b in zip(known[2], lasting[2]))
    print(f"ids and scores equal to those of one cache, in all bits: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
