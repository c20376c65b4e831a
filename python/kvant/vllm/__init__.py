"""kvant as the attention backend of stock vLLM: its KV cache holds kvant's pages, and kvant's kernels attend over them.

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype kvant_tq6_tq4

vLLM finds `register` through the entry point group vllm.general_plugins and calls it in each of its processes; nothing
else has to be imported. docs/vllm.md says what is supported.

versions.py is the only file that knows vLLM's version and where its names are. Importing this package imports neither
vLLM nor torch.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

BACKEND_CLASS = "kvant.vllm.backend.Backend"

_registered = False


def register() -> None:
    """Makes the cache dtypes and the backend known to vLLM. Further calls in the same process do nothing.

    vLLM calls this for everyone who has kvant installed, also for servers that do not use it. So where kvant cannot
    serve it warns, and vLLM works as ever.
    """
    global _registered
    if _registered:
        return
    from . import versions

    unusable = versions.unusable()
    if unusable:
        logging.getLogger("vllm.kvant").warning("kvant is not available as an attention backend: %s", unusable)
        return
    from . import dtypes, two_sizes

    for name in dtypes.names():
        versions.register_cache_dtype(name)
    versions.register_backend_class(BACKEND_CLASS)
    for name, backend in two_sizes.NAMES.items():
        versions.register_backend_class(f"kvant.vllm.two_sizes.{name}", backend)
    _registered = True
