"""One layer: keys and values go to its pages, queries attend over them."""

from __future__ import annotations

import torch

from . import connectors, context, drafts, dtypes, versions
from .check import Check
from .layer import Capacity, Layer, LayerOfKvant, pool
from .metadata import KvantMetadata
from .tail import copy_bytes, divide_memory
from .versions import AttentionImpl, AttentionType

_reserved: set[Layer] = set()


class ImplOfKvant(LayerOfKvant):
    """The part that impls of all kinds of layers have in common: pages, exact copies, and the memory of both."""

    layer: Layer

    def begin(self, kv_cache_dtype: str) -> str:
        """Notes the layer's cache dtype, and refuses what no layer can have. Returns the option k_centre."""
        self._config = versions.configuration()
        drafts.refuse(self._config)
        connectors.refuse_shared_folders(self._config)
        self.dtype = torch.get_default_dtype()  # vLLM sets it to the model's
        k_centre = versions.option(self._config, "k_centre")
        dtypes.note_layer(kv_cache_dtype, k_centre)
        self.pages = None  # of a layer that is not exact, see tail.py
        self.number = 0  # of the layer in them
        self.copies: int | None = None  # exact copies of blocks; None: their memory is not divided yet
        self.reserved: torch.Tensor | None = None
        return k_centre

    def planned(self) -> list[Layer]:
        """The layers that plans are made for: this one, or with decode context parallel its two kinds of keys."""
        return [self.layer] if self.dcp_world_size == 1 else [self.layer.own(), self.layer.shared(self.dcp_world_size)]

    def pages_on(self, device: torch.device):
        return self.pages or self.layer.pages(device)

    def reserve(self, device: torch.device) -> None:
        """Takes what the builder will need, a workspace for plans and exact copies, so that it counts as used."""
        if device.type == "cpu" or self._config is None:
            return
        capacity = Capacity.of(self._config, versions.max_decode_query_len(self._config))
        if self.layer not in _reserved:
            for planned in self.planned():
                planned.plans(self.layer.pages(device), capacity)
            _reserved.add(self.layer)
        if self.copies is None:
            divide_memory(self._config, capacity)
        if self.copies and self.pages is None and self.reserved is None:
            size = self.copies * copy_bytes(self.layer, self.dtype)
            self.reserved = torch.empty(size, dtype=torch.uint8, device=device)


class KvantImpl(ImplOfKvant, AttentionImpl[KvantMetadata]):
    """vLLM makes one for each attention layer, with the heads that this rank has."""

    # Ranks of decode context parallel have some of the keys each, see context.py. Prefill context parallel has no
    # support: vLLM refuses it.
    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"kvant: attention of type {attn_type} is not supported: decoders are")
        for name, value in others.items():
            if value not in (None, False, -1):
                raise NotImplementedError(f"kvant: layers with {name} = {value} are not supported")
        self.num_heads = num_heads
        self.head_size = head_size
        v_head_dim = dtypes.take_head_size_v(head_size)
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks  # a parameter of the model, whose numbers change: see _sink_logits
        self._converted_sinks: torch.Tensor | None = None
        k_centre = self.begin(kv_cache_dtype)
        self.check = Check()
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"kvant: {sinks.shape[0]} sinks for {num_heads} heads: there must be one each")
        pair = dtypes.parse(kv_cache_dtype, self.dtype)
        self.layer = Layer(
            pair,
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            sliding_window or 0,
            float(logits_soft_cap or 0.0),
            None if alibi_slopes is None else tuple(map(float, alibi_slopes)),
            self._has_fresh_keys(),
            "none" if pair.is_exact() else k_centre,
            options=() if pair.is_exact() else tuple(versions.of_plans(self._config).items()),
            v_head_dim=v_head_dim,
        )
        self.check.done = pair.is_exact()
        if self.dcp_world_size > 1:
            context.refuse(self)

    def _has_fresh_keys(self) -> bool:
        """Whether prompts attend to the keys and values that forward is given. A layer that shares another's cache is
        given some that are not stored; devices take them in 16 bits only."""
        if self._config is None or self.kv_sharing_target_layer_name is not None:
            return False
        return versions.option(self._config, "fresh_keys") and not (self.dtype == torch.float32 and versions.is_cuda())

    @property
    def _sink_logits(self) -> torch.Tensor | None:
        """The sinks in float32, read from the model's parameter at each use.

        Weights may be written in place at any time, through `.data`, too, which no version counter and no callback
        tells. So a parameter that is not in float32 is converted in each forward pass, into memory of a fixed address:
        a CUDA graph records the conversion.
        """
        if self.sinks is None:
            return None
        sinks = self.sinks.detach()
        if sinks.dtype == torch.float32 and sinks.is_contiguous():
            return sinks
        if self._converted_sinks is None or self._converted_sinks.device != sinks.device:
            with torch.inference_mode(False):  # both inside and outside of that mode it is written to
                self._converted_sinks = torch.empty(sinks.shape, dtype=torch.float32, device=sinks.device)
        return self._converted_sinks.copy_(sinks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this whenever it has loaded a checkpoint: the check judges the keys of other weights anew. Memory
        for converted sinks is taken here the first time, before any graph is recorded."""
        if self.sinks is not None and not self.sinks.is_meta:
            _ = self._sink_logits
        if not self.layer.pair.is_exact():
            self.check = Check()

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Encodes the keys and values of this step. slot_mapping: block * 64 + place, below 0: of no request; it may be
        shorter than padded keys. The step has begun: its metadata is built."""
        tokens = slot_mapping.shape[0]
        pages = self.pages_on(kv_cache.device)
        pages.write(pool(kv_cache), key[:tokens], value[:tokens], slot_mapping, layer=self.number)

    def _store(self, layer, query, key, value, kv_cache, metadata: KvantMetadata) -> None:
        if self.kv_sharing_target_layer_name is not None:
            return
        if key is None or value is None:
            raise NotImplementedError(
                "kvant: this layer of the model stores keys and values itself, which forward is not given; kvant's "
                "pages are written by kvant alone: choose another backend for this model"
            )
        slots = versions.slots(layer.layer_name)
        if slots is None:
            return
        is_checked = not self.check.done and metadata.has_prompts
        if metadata.local is not None:
            key, value, slots = metadata.local.take(key, value)
            if is_checked:
                query, _ = metadata.local.take(query)
        self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        if is_checked and not versions.is_recording(key.device):
            self.check.look(self, layer.layer_name, query, key, kv_cache, slots)

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KvantMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvant: outputs quantized by the attention kernel are not supported")
        if attn_metadata is None:  # memory is being measured, or vLLM warms up: slots are of no request
            self.reserve(query.device)
            return output.fill_(0)
        sinks = self._sink_logits
        runs = attn_metadata.runs(self.layer) if self.dcp_world_size == 1 else []
        self._store(layer, query, key, value, kv_cache, attn_metadata)
        cache = pool(kv_cache)
        if self.dcp_world_size > 1:
            context.attend(self, attn_metadata, query, key, value, cache, output, sinks)
        for plan, rows in runs:  # its tables say where its rows begin
            own = {}
            if plan.fresh_keys:
                own = {"keys": key[:rows], "values": value[:rows]}
            plan.run(cache, query[:rows], out=output[:rows], sink_logits=sinks, layer=self.number, **own)
        return output
