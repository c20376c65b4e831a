"""Greedy decoding of a Hugging Face model, each step replayed from a CUDA graph, beside steps launched one by one.

    python examples/python/cuda_graph.py [MODEL]          # a folder with a model; without one a small random Llama
"""

import argparse
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvant.hf

PROMPT, NEW = 2000, 200

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("model", nargs="?", metavar="MODEL")
args = options.parse_args()
if not torch.cuda.is_available():
    options.error("there is no CUDA device here, and a CUDA graph needs one")
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, device_map="cuda")
else:
    config = LlamaConfig(vocab_size=8192, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
model.eval()
kvant.hf.enable(model, k="tq6", v="tq4")
prompt = torch.randint(0, model.config.get_text_config().vocab_size, (1, PROMPT), device="cuda")


@torch.no_grad()
def decode(use_graph):
    """Tokens and seconds a token."""
    cache = kvant.hf.cache(model, max_length=PROMPT + NEW + 8, batch=1)
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    token = logits.argmax(-1, keepdim=True)
    graph = kvant.hf.StepGraph(model, cache, token, choose=lambda x: x.argmax(-1, keepdim=True)) if use_graph else None
    found = []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(NEW):
        if graph is not None:
            graph.replay()
            found.append(graph.tokens.clone())
        else:
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            found.append(token)
    torch.cuda.synchronize()
    return torch.cat(found, 1).tolist(), (time.perf_counter() - begin) / NEW


decode(False)  # warms up
launched, slow = decode(False)
replayed, fast = decode(True)
print(f"launched one by one {slow * 1e3:.2f} ms a token, replayed {fast * 1e3:.2f} ms: {slow / fast:.1f} times as fast")
print("the same tokens" if launched == replayed else "DIFFERENT tokens")
sys.exit(launched != replayed)
