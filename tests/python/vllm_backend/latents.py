"""latents.py MODEL RUNS: generate.py for models with latent attention, with several engines one after another.

RUNS is JSON, a list of {"options", "rounds"} as in generate.py. Prints for each run {"rounds": [[[tokens, log
probabilities, cached tokens of the prompt], ...], ...]}.
"""

from __future__ import annotations

import json
import sys

from generate import SMALL, library  # noqa: F401
import torch


def mla_decode_kvcache(out, q, cache, scale, block_table, lengths):
    """vLLM's compiled function of this name: a query a request over blocks of latents and rotary keys."""
    for i, length in enumerate(lengths.tolist()):
        blocks = -(-length // cache.shape[1])
        stored = cache[block_table[i, :blocks].long()].flatten(0, 1)[:length].float()
        weights = torch.softmax(scale * (q[i].float() @ stored.T), dim=-1)
        out[i] = weights @ stored[:, : out.shape[-1]]


def stand_in():
    library.define(
        "mla_decode_kvcache(Tensor(a!) out, Tensor q, Tensor cache, float scale, Tensor table, Tensor lengths) -> ()"
    )
    library.impl("mla_decode_kvcache", mla_decode_kvcache, "CPU")
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def keep_limits(cls, config):
        """Its own makes the limits of its kernels those of every backend."""
        before = config.cache_config.enable_prefix_caching, config.scheduler_config.enable_chunked_prefill
        most, size = config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size
        check(config)
        if config.attention_config.backend.name == "CUSTOM":
            config.cache_config.enable_prefix_caching, config.scheduler_config.enable_chunked_prefill = before
            config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size = most, size

    platform.check_and_update_config = classmethod(keep_limits)


def main():
    import gc

    from vllm import LLM, SamplingParams

    model, results = sys.argv[1], []
    for run in json.loads(sys.argv[2]):
        llm = LLM(model, **(SMALL | {"skip_tokenizer_init": True} | run["options"]))
        rounds = []
        for prompts, count in run["rounds"]:
            sampling = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False, ignore_eos=True, logprobs=0)
            done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            found = []
            for request in done:
                out = request.outputs[0]
                likely = [at[token].logprob for token, at in zip(out.token_ids, out.logprobs)]
                found.append([list(out.token_ids), likely, request.num_cached_tokens])
            rounds.append(found)
        results.append({"rounds": rounds})
        del llm
        gc.collect()
    print("RESULT " + json.dumps(results), flush=True)


stand_in()  # in worker processes, too

if __name__ == "__main__":
    main()
