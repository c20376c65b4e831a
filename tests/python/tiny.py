"""Tiny models of any architecture that transformers has, made from the default values of its configuration class."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers

HEAD_DIM, HEADS, KV_HEADS, HIDDEN, WINDOW, POSITIONS, VOCABULARY = 32, 4, 2, 128, 48, 512, 128

# The first pattern that matches a field's whole name gives the value: a number, or a function of the default. What no
# pattern matches keeps its default.
NUMBERS: list[tuple[str, Any]] = [
    (r"(text_)?vocab_size(_per_layer_input)?|.*_vocab_size(_per_layer_input)?", VOCABULARY),
    (r"sliding_window|attention_chunk_size|local_window_size|window_size|.*_window_size", lambda old: min(old, WINDOW)),
    (r"mamba_(n_heads|num_heads)|num_ssm_heads|linear_num_(key|value)_heads", 4),
    (r"mamba_(d_head|head_dim)|linear_(key|value)_head_dim|state_head_dim", lambda old: 16),
    (r"mamba_d_ssm|mamba_intermediate_size", 64),
    (r"(mamba_|ssm_)?(d_state|state_size)|mamba_d_state|ssm_state_size", 16),
    (r"num_(key_value|kv)_heads|(num_)?(global_|swa_)(num_)?key_value_heads|num_global_key_value_heads", KV_HEADS),
    (r"(num_|n_|swa_num_)?(attention_)?heads?|(en|de)coder_attention_heads|num_attention_heads|swa_num_attention_heads",
     HEADS),
    (r"(en|de)coder_layers|num_(hidden_|decoder_|encoder_)?layers|n_layers?|(en|de)coder_num_layers|depth", 2),
    (r"(swa_)?v_head_dim", 16),
    (r"(attention_)?head_dim|(global|swa|k|v|qk|q|mla|attention)_head_dim|kv_channels|d_kv|(attention_)?head_size",
     HEAD_DIM),
    (r"qk_rope_head_dim", 16),
    (r"qk_nope_head_dim", 16),
    (r"qk_head_dim", HEAD_DIM),
    (r"kv_lora_rank", 32),
    (r".*_lora_rank", 16),
    (r"rotary_dim", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|inner_dim|d_ff|n_inner|_mlp_size)(_mlp)?", 96),
    (r"d_model|n_embd|hidden_size|dim|hidden_dim|embed_dim|word_embed_proj_dim|embedding_size|projection_dim",
     HIDDEN),
    (r".*_hidden_size|.*_embed_dim|.*_embedding_size", HIDDEN),
    (r"(num_experts|n_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", 4),
    (r"(num_experts_per_tok|moe_k|moe_top_?k|top_k_experts|num_selected_experts|num_experts_per_token)", 2),
    (r"(num_shared_experts|n_shared_experts|n_group|topk_group|moe_num_shared_experts|zero_expert_num)", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|max_(target|source)_positions|seq_length",
     POSITIONS),
    (r"original_max_position_embeddings", POSITIONS),
    (r"index_topk", 16),
    (r"index_(n_heads|head_dim)", lambda old: 4 if old < 100 else 32),
    (r"image_size|img_size", 56),
    (r"patch_size", 14),
    (r"mm_tokens_per_image|image_seq_length|vision_soft_tokens_per_image|image_token_length", 16),
    (r"image_token_(id|index)", 120),
    (r"video_token_(id|index)", 121),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"(decoder_start|eos|sep|cls|mask)_token_id", 2),
    # Other special tokens: 122 to 127, which no text has.
    (r".*_token_(id|index)", lambda old: 122 + old % 6 if old >= VOCABULARY else old),
]

# Values for one configuration class, by its name. They replace what the patterns give.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QSA = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=16, indexer_compress_ratio=4)
_ZAMBA = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, num_key_value_heads=HEADS)
_ZAMBA |= dict(attention_hidden_size=2 * HIDDEN, attention_head_dim=2 * HEAD_DIM)
FIXES: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": {"n_group": 1},
    "BambaConfig": {"mamba_d_head": 64, "attn_layer_indices": [1]},
    "BltConfig": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "CohereCompassTextConfig": {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "DbrxConfig": {
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Dots3NoteConfig": {"num_key_value_heads": HEADS},
    "Dots3NoteTextConfig": {"num_key_value_heads": HEADS},
    "Dots3NoteVisionConfig": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "Dots3NoteAudioConfig": {"adapter_input_size": HIDDEN, "adapter_output_size": HIDDEN},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "GraniteMoeHybridConfig": {"mamba_d_head": 64, "layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 64, "n_groups": 1},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "NemotronHConfig": {"n_groups": 1},
    "Qwen4ExpTextConfig": _QSA,
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"axial_pos_embds": False},
    "Step3p7TextConfig": {"sliding_window": WINDOW},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": _ZAMBA,
    "Zamba2Config": _ZAMBA,
    "ZayaConfig": {"num_experts_per_tok": 1},
}

# The default of these fields may be None. A tiny model needs a number.
NEEDED = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS}
NEEDED |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}

def _number(name: str, old: Any) -> Any:
    for pattern, new in NUMBERS:
        if re.fullmatch(pattern, name):
            return new(old) if callable(new) else new
    return old


def _default(cls: type) -> Any:
    return cls()


def values(cls: type, default: Any = None) -> dict[str, Any]:
    """The arguments of a configuration class that make its model tiny."""
    default = _default(cls) if default is None else default
    parts = set(getattr(default, "sub_configs", {}))
    changed: dict[str, Any] = {}
    fields = {name: x for name, x in vars(default).items() if not name.startswith("_")}
    for name, x in fields.items():
        if name in parts:
            changed[name] = tiny(type(x), x) if x is not None else None
        elif x is None and name in NEEDED:
            changed[name] = NEEDED[name]
        elif isinstance(x, bool) or not isinstance(x, int):
            continue
        elif (new := _number(name, x)) != x:
            changed[name] = new
    if "kv_lora_rank" in fields:  # latent attention: keys are made for every head
        changed.update({"num_key_value_heads": HEADS} | ({"head_dim": 16} if "head_dim" in fields else {}))
    _cut_layers(fields, changed, FIXES.get(cls.__name__, {}))
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict):
            rope = fields[name]
            if re.match(r"(Qwen2VL|Qwen2_5_VL|Qwen2_5Omni|PaddleOCR|Glm4v|Glm46V|GlmOcr).*Text", cls.__name__):
                rope = rope | {"mrope_section": [16, 24, 24]}  # which the model takes for granted
            changed[name] = _rope(rope, changed.get("head_dim", HEAD_DIM))
    changed.update(FIXES.get(cls.__name__, {}))
    return changed


def _cut_layers(fields: dict[str, Any], changed: dict[str, Any], fixes: dict[str, Any]) -> None:
    """Cuts lists with a value for each layer: one layer of every kind, and two layers at least."""
    names = [n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in fields]
    count = fields[names[0]] if names else 0
    lists = {n: x for n, x in fields.items() if isinstance(x, (list, tuple)) and len(x) == count and count > 2}
    if not lists:
        return
    kinds: dict[Any, int] = {}
    for i, kind in enumerate(zip(*(map(str, x) for x in lists.values()))):
        kinds.setdefault(kind, i)
    chosen = sorted(list(kinds.values())[:4])
    if len(chosen) == 1:
        chosen = [chosen[0], chosen[0]]
    for name, x in lists.items():
        changed[name] = [_in_list(name, x[i]) for i in chosen]
    for name in names:
        changed[name] = len(chosen)


def _in_list(name: str, x: Any) -> Any:
    return _number(name, x) if isinstance(x, int) and not isinstance(x, bool) and x > 1 else x


def _rope(rope: dict[str, Any], dim: int) -> dict[str, Any]:
    """Rope parameters whose sections fit a smaller head."""
    new = {}
    for name, x in rope.items():
        if isinstance(x, dict):
            x = _rope(x, dim)
        elif name == "mrope_section":
            total = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
            x = [max(1, total * n // sum(x)) for n in x]
            x[0] += total - sum(x)
        elif name == "original_max_position_embeddings":
            x = POSITIONS
        new[name] = x
    return new


def tiny(cls: type, default: Any = None) -> Any:
    """A configuration object of a tiny model."""
    return cls(**values(cls, default))


def sharpen(model: torch.nn.Module) -> torch.nn.Module:
    """Random biases and norms, which begin as 0 and 1, and query weights that make attention choose."""
    queries = re.compile(r"(q_proj|q_b_proj|c_attn|query)\.weight|qkv|query_key_value|Wqkv|q_lin|wq\.")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            weight.add_(0.02 * torch.randn_like(weight))
            if "sinks" in name:
                weight.add_(torch.randn_like(weight))
            if queries.search(name):
                weight.mul_(6.0)
    return model
