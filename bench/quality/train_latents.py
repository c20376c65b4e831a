#!/usr/bin/env python3
"""A small model with latent attention (MLA), trained on Python code for minutes on a GPU, for latents.py.

    python bench/quality/train_latents.py FOLDER --seconds 120
    python bench/quality/latents.py FOLDER

No large model of this kind fits a small machine. This one has the attention of DeepSeek V2 (latents of 512 numbers and
rotary keys of 64, arXiv 2405.04434, section 2.1), 6 layers without experts, and bytes as tokens. The text is every
Python file of this Python's library and packages but for the modules that kl.py reads as `code`.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from pathlib import Path

import torch
from kl import CODE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

MOST_BYTES = 200_000_000


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<s>": 256, "</s>": 257}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def text() -> bytes:
    """Python files, in an order that does not depend on where they lie."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    left_out = {folders[0] / f"{name}.py" for name in CODE}
    files = sorted({p for folder in folders for p in folder.rglob("*.py")} - left_out, key=lambda p: p.parts[-3:])
    random.Random(1).shuffle(files)
    found, size = [], 0
    for path in files:
        found.append(path.read_bytes())
        size += len(found[-1]) + 2
        if size > MOST_BYTES:
            break
    return b"\n\n".join(found)


def token_ids(read: bytes, by_letter: dict[str, int]) -> torch.Tensor:
    """As the tokenizer gives them, without its minutes."""
    # ByteLevel's letters: printable bytes are themselves, the others come behind 255 in their order.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    letter = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
    table = bytes(by_letter[letter[b]] for b in range(256))
    return torch.frombuffer(bytearray(read.translate(table)), dtype=torch.uint8)


def make_model(layers: int, width: int) -> DeepseekV2ForCausalLM:
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=258, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, q_lora_rank=None, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, first_k_dense_replace=layers,
            n_routed_experts=2, num_experts_per_tok=1, max_position_embeddings=8192, bos_token_id=256,
            eos_token_id=257, tie_word_embeddings=True,
        )
    )  # fmt: skip


def train(model: DeepseekV2ForCausalLM, ids: torch.Tensor, a: argparse.Namespace) -> float:
    """The mean loss, in bits a byte, of the last tenth of the steps."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.9, 0.95), weight_decay=0.1)
    ids, begin, losses = ids.to(device), time.monotonic(), []
    generator = torch.Generator(device).manual_seed(1)
    steps = 0
    while (passed := (time.monotonic() - begin) / a.seconds) < 1:
        for group in optimizer.param_groups:  # a rise over the first 2 %, then a cosine to a tenth
            group["lr"] = a.rate * min(passed / 0.02, 0.55 + 0.45 * math.cos(math.pi * passed))
        at = torch.randint(len(ids) - a.length, (a.batch, 1), generator=generator, device=device)
        batch = ids[at + torch.arange(a.length, device=device)].long()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        losses.append(loss.detach())
        if steps % 100 == 0:
            print(f"{steps} steps, {passed:4.0%}: {losses[-1].item() / math.log(2):.3f} bits a byte", flush=True)
    last = losses[-max(1, steps // 10) :]
    return torch.stack(last).mean().item() / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a training text")
    parser.add_argument("--rate", type=float, default=1e-3)
    a = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = tokenizer()
    ids = token_ids(text(), words.get_vocab())
    model = make_model(a.layers, a.width).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights, {len(ids) / 1e6:.0f} million bytes")
    loss = train(model, ids, a)
    model.to(torch.bfloat16).save_pretrained(a.folder, max_shard_size="15MB")
    words.save_pretrained(a.folder)
    print(f"{loss:.3f} bits a byte over the last tenth of the steps")


if __name__ == "__main__":
    main()
