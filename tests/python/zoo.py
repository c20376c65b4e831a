"""Tiny models with random weights of many architectures, made from their configuration. Attention is sharpened
so that an error of a mask, a scale or a softcap shows in the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
NO_HEAD_DIM = {"hidden_size": 128}  # 128 / 4 heads: 32
WITHOUT = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Entry:
    """expected: fused, proxy (kvant decodes for the model's own attention) or left (all layers stay transformers')."""

    name: str
    prefix: str  # of the classes PREFIXConfig and PREFIXForCausalLM
    changes: dict[str, Any] = field(default_factory=dict)
    expected: str = "fused"
    without: tuple[str, ...] = ()
    config: str = ""
    model: str = ""
    tolerance: float = 1e-4  # of the standard deviation of the logits


ZOO = [
    Entry("llama", "Llama"),
    Entry("mistral, window", "Mistral", {"sliding_window": 64}),
    Entry("mixtral", "Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}),
    Entry("qwen2", "Qwen2", NO_HEAD_DIM, without=("head_dim",)),
    Entry("qwen3", "Qwen3"),
    Entry("qwen3_moe", "Qwen3Moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}),
    Entry("phi3, head_dim 96", "Phi3", {"hidden_size": 384, "sliding_window": None}, without=("head_dim",)),
    Entry("gemma", "Gemma"),
    Entry("gemma2, softcap", "Gemma2", MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    Entry("gemma3_text", "Gemma3", MIXED | {"query_pre_attn_scalar": 16}, config="Gemma3TextConfig"),
    Entry("gpt_oss, sinks", "GptOss", MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    Entry("cohere2", "Cohere2", MIXED),
    Entry(
        "llama4_text, chunks",
        "Llama4",
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 48,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        config="Llama4TextConfig",
    ),
    Entry("olmo2", "Olmo2", NO_HEAD_DIM, without=("head_dim",)),
    Entry("olmo3", "Olmo3", MIXED | NO_HEAD_DIM, without=("head_dim",)),
    Entry("granite", "Granite", NO_HEAD_DIM | {"attention_multiplier": 0.3}, without=("head_dim",)),
    Entry("smollm3", "SmolLM3", NO_HEAD_DIM | {"no_rope_layers": [1, 0]}, without=("head_dim",)),
    Entry("glm4", "Glm4"),
    Entry("exaone4", "Exaone4", MIXED | NO_HEAD_DIM, without=("head_dim",)),
    Entry(
        "gemma4, k is v",
        "Gemma4",
        MIXED
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
        },
        config="Gemma4TextConfig",
    ),
    Entry(
        "gemma4, shared layers",
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": MIXED["layer_types"] * 2,
            "sliding_window": 64,
            "num_kv_shared_layers": 2,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "enable_moe_block": False,
        },
        config="Gemma4TextConfig",
    ),
    Entry(
        "qwen3_next, hybrid",
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    Entry("gpt_neox", "GPTNeoX", NO_HEAD_DIM, without=WITHOUT),
    Entry("starcoder2", "Starcoder2", NO_HEAD_DIM, without=("head_dim",)),
    Entry("phi", "Phi", NO_HEAD_DIM, without=WITHOUT),
    Entry("stablelm", "StableLm", NO_HEAD_DIM, without=("head_dim",)),
    Entry(
        "opt",
        "OPT",
        {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 96},
        without=(*WITHOUT, "intermediate_size"),
    ),
    Entry(
        "deepseek_v3, latent",
        "DeepseekV3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
        },
        without=("head_dim",),
        expected="proxy",
    ),
    Entry(
        "deepseek_v2, latent",
        "DeepseekV2",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 72,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
        },
        without=("head_dim",),
        expected="proxy",
    ),
    Entry(
        "mimo_v2, values of 40",
        "MiMoV2Flash",
        MIXED
        | {
            "head_dim": 48,
            "v_head_dim": 40,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
        },
    ),
    Entry(
        "falcon",
        "Falcon",
        {"hidden_size": 128, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
        without=WITHOUT,
        expected="proxy",
    ),
    Entry(
        "bloom, alibi",
        "Bloom",
        {"hidden_size": 128, "n_layer": 2, "n_head": 4},
        without=(*WITHOUT, "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        expected="proxy",
    ),
    Entry(
        "gpt2, head_dim 16",
        "GPT2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        without=tuple(COMMON)[1:8],
        model="GPT2LMHeadModel",
    ),
    Entry("llama, head_dim 72", "Llama", {"head_dim": 72}),
]


def build(entry: Entry):
    """The model of an entry, or None if this version of transformers does not have it."""
    config_class = getattr(transformers, entry.config or f"{entry.prefix}Config", None)
    model_class = getattr(transformers, entry.model or f"{entry.prefix}ForCausalLM", None)
    if config_class is None or model_class is None:
        return None
    values = {key: value for key, value in COMMON.items() if key not in entry.without} | entry.changes
    torch.manual_seed(0)
    model = model_class(config_class(**values)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Random biases and norms (they begin as 0 and 1), and query and key weights that make attention choose.
            weight.add_(0.02 * torch.randn_like(weight))
            if "sinks" in name:
                weight.add_(torch.randn_like(weight))
            if any(
                part in name for part in ("q_proj.weight", "qkv", "query_key_value", "q_b_proj.weight", "c_attn.weight")
            ):
                weight.mul_(6.0)
    return model


def gemma3_with_images(tokens: int, first: int, padding: int):
    """Gemma 3 with a vision tower: (model, ids [2, tokens], their 2-D mask, arguments of the first forward pass).

    Both rows have an image of 16 tokens in the first pass; the second row begins with padding.
    """
    config = transformers.Gemma3Config(
        text_config=COMMON | MIXED | {"query_pre_attn_scalar": 16, "vocab_size": 128},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=16,
        image_token_index=127,
        boi_token_index=125,
        eoi_token_index=126,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.02 * torch.randn_like(weight))
            if "language_model" in name and "q_proj.weight" in name:
                weight.mul_(6.0)
    ids = torch.randint(3, 120, (2, tokens))
    real = torch.ones_like(ids)
    real[1, :padding] = 0
    ids *= real
    kinds = torch.zeros(2, first, dtype=torch.long)
    for row, at in ((0, 5), (1, padding + 10)):
        ids[row, at : at + 16] = 127
        kinds[row, at : at + 16] = 1
    return model, ids, real, {"pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": kinds}
