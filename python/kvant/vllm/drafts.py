"""Draft models beside a target: what cannot start is refused when the first layer of the target is made."""

from __future__ import annotations

from . import dtypes, versions


def refuse(vllm_config) -> None:
    """Raises where the configuration's draft model cannot run beside its target.

    The draft's own configuration has the draft's cache dtype for both, so the target's layers see the difference.
    """
    draft = versions.draft(vllm_config)
    if draft is None:
        return
    names, target = dtypes.names(), versions.cache_dtype(vllm_config)
    # A spec does not say whose it is, so that pages of two formats cannot be told apart. vLLM's exact dtypes can be.
    if target in names and draft.cache_dtype in names and names[target] != names[draft.cache_dtype]:
        raise NotImplementedError(
            f"kvant: --kv-cache-dtype is {target}, and kv_cache_dtype in --speculative-config is "
            f"{draft.cache_dtype}: a server has one cache dtype of kvant. Leave out kv_cache_dtype in "
            f"--speculative-config, and the draft model takes {target}, or set auto there, and the draft model's cache "
            f"is exact"
        )
    if draft.cache_dtype in names and draft.chooses_backend:
        raise NotImplementedError(
            f"kvant: --speculative-config has no attention_backend, so vLLM chooses one for the draft model, and none "
            f'that vLLM chooses reads {draft.cache_dtype}: add "attention_backend": "CUSTOM" to --speculative-config, '
            f'or "kv_cache_dtype": "auto", with which the draft model\'s cache is exact'
        )
