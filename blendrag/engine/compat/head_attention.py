"""Attention of sequences that are one KV head each, by the stock CPU backend's own kernel.

``register`` puts a subclass in the stock backend's place, under its name. Only an engine that is started to
evict has layers of it, and they differ in one look: whether a step's rows attend by heads
(:class:`HeadAttention`); else it is the stock backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from blendrag.engine.compat.platform import is_cpu


class HeadAttention(Protocol):
    """What takes a layer's attention over in steps of its own."""

    def attend(self, layer: Any, query: torch.Tensor, metadata: Any, output: torch.Tensor) -> bool:
        """Fill ``output``, [tokens, heads, head_size]; or leave it, and return False."""


class HeadAttentionImpl(CPUAttentionBackendImpl):
    by_heads: HeadAttention | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **other: Any,
    ) -> torch.Tensor:
        by_heads = self.by_heads if attn_metadata is not None and kv_cache is layer.kv_cache else None
        if by_heads is not None and by_heads.attend(layer, query, attn_metadata, output):
            return output
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **other)


class HeadAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return HeadAttentionImpl if started_to_evict() else CPUAttentionBackendImpl


def started_to_evict() -> bool:
    """Whether the engine whose layers are being made is: its connector's options say it, which may be a child
    of vLLM's ``MultiConnector``."""
    transfer = get_current_vllm_config().kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    children = [child.get("kv_connector_extra_config", {}) for child in extra.get("connectors", ())]
    return any(each.get("evicts") for each in (extra, *children))


def register() -> None:
    """Have vLLM use it, in a process that has not loaded its model yet."""
    if is_cpu():
        name = f"{HeadAttentionBackend.__module__}.{HeadAttentionBackend.__qualname__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, name)


def not_by_heads(attentions: Sequence[Any]) -> str | None:
    """Why these modules do not attend by heads; None if they can."""
    if all(isinstance(attention.impl, HeadAttentionImpl) for attention in attentions):
        return None
    if isinstance(attentions[0].impl, CPUAttentionBackendImpl):
        return "the engine was started without kv_budget"
    return f"backend {attentions[0].attn_backend.get_name()} does not read by heads"


def bind(attentions: Sequence[Any], by_heads: HeadAttention) -> None:
    """Have these modules ask it first."""
    for attention in attentions:
        attention.impl.by_heads = by_heads


class HeadKernel:
    """The stock implementation with one KV head. ``runner``: vLLM's model runner."""

    def __init__(self, attention: Any, runner: Any) -> None:
        self._group = attention.num_heads // attention.num_kv_heads
        self._builder = copy(runner.attn_groups[0][0].get_metadata_builder(0))
        self._builder.num_heads, self._builder.num_kv_heads = self._group, 1

    def attend(
        self,
        attention: Any,
        query: torch.Tensor,
        view: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Attention of [rows, group, head_size] over pages of one KV head, ``view``; same shape.

        table: [sequences, pages] int32. lengths: [sequences] int32, keys of each. starts: [sequences + 1]
        int32, where each one's rows begin, which are its last tokens; ``longest`` of them at most.
        """
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=len(query),
            max_query_len=longest,
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=starts,  # nothing is written
            causal=True,
        )
        out = torch.empty_like(query)
        metadata = self._builder.build(0, common)
        CPUAttentionBackendImpl.forward(attention.impl, attention, query, query, query, view, metadata, out)
        return out
