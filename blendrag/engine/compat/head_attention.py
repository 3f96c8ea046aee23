"""Attention of sequences that are one KV head each, by a stock backend's own kernel.

:func:`register` has vLLM look for its backends here, under their names. An engine that is started to evict
finds subclasses, whose layers first ask whether a step's rows attend by heads (:class:`HeadAttention`). Any
other finds the stock backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from blendrag.engine.compat.platform import is_cpu

_Copied = TypeVar("_Copied")

# The backends that can do this, with the attributes of their metadata builder for one KV head and its group
# of heads.
_ONE_HEAD: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "CPU_ATTN": lambda _, group: {"num_heads": group, "num_kv_heads": 1},
    # A buffer for full graphs would hold no more sequences than there are requests.
    "FLASH_ATTN": lambda _, group: {"num_heads_q": group, "num_heads_kv": 1, "use_full_cuda_graph": False},
    # The kernel divides the keys of so few sequences, in buffers with room for as many heads in all.
    "TRITON_ATTN": lambda builder, group: {
        "num_heads_q": group,
        "num_heads_kv": 1,
        "seq_threshold_3D": builder.seq_threshold_3D * builder.num_heads_kv,
    },
}


@dataclass(frozen=True, slots=True, eq=False)
class HeadSequences:
    """Sequences over pages of one KV head, in one layer.

    table: [sequences, pages] int32. lengths: [sequences] int32, the number of each sequence's keys, ``most``
    at most. starts: [sequences + 1] int32, where the rows of each begin: its last tokens, ``longest`` at
    most. on_host: ``starts`` on the host.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    most: int
    starts: torch.Tensor
    on_host: torch.Tensor
    longest: int


class HeadAttention(Protocol):
    """The interface of an object that computes a layer's attention in the steps that it chooses."""

    def attend(self, layer: Any, query: torch.Tensor, metadata: Any, output: torch.Tensor) -> bool:
        """Fill ``output``, [tokens, heads, head_size]; or leave it, and return False."""


class HeadAttentionImpl(AttentionImpl[Any]):
    """A mixin in front of a stock implementation, which asks :class:`HeadAttention` first."""

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
        stock: Any = super()
        return stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **other)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # rows that attend by heads are written as they are computed


@cache
def _by_heads(name: str) -> type[AttentionBackend]:
    stock = _stock(name)
    builder, implementation = stock.get_builder_cls(), stock.get_impl_cls()
    never = classmethod(lambda *_: AttentionCGSupport.NEVER)  # a graph would replay the decision of one step
    eager = type(builder.__name__, (builder,), {"get_cudagraph_support": never})
    looking = type(implementation.__name__, (HeadAttentionImpl, implementation), {})
    members = {
        "__module__": __name__,  # with the name, so that vLLM can find the class again
        "get_builder_cls": staticmethod(lambda: eager),
        "get_impl_cls": staticmethod(lambda: looking),
    }
    return type(name, (stock,), members)


def _stock(name: str) -> type[AttentionBackend]:
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> type[AttentionBackend]:
        """Return the backend of this name, as vLLM looks for it here."""
        if name not in _ONE_HEAD:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _by_heads(name) if started_to_evict() else _stock(name)


def started_to_evict() -> bool:
    """Return whether the engine whose layers are being made is started to evict, as the options of its
    connector say, which may be a child of vLLM's ``MultiConnector``. False where no layers are being made."""
    transfer = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    children = [child.get("kv_connector_extra_config", {}) for child in extra.get("connectors", ())]
    return any(each.get("evicts") for each in (extra, *children))


def register() -> None:
    """Have vLLM look for its backends here, in a process that has not loaded its model yet."""
    for name in _ONE_HEAD:
        if is_cpu() == (name == "CPU_ATTN"):
            register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


def not_by_heads(attentions: Sequence[Any]) -> str | None:
    """Return why these modules do not attend by heads; None if they can."""
    if all(isinstance(attention.impl, HeadAttentionImpl) for attention in attentions):
        return None
    name = attentions[0].attn_backend.get_name()
    if name in _ONE_HEAD:
        return "the engine was started without kv_budget"
    return f"backend {name} does not read by heads"


def bind(attentions: Sequence[Any], by_heads: HeadAttention) -> None:
    """Have these modules ask ``by_heads`` before they attend."""
    for attention in attentions:
        attention.impl.by_heads = by_heads


class HeadKernel:
    """The stock implementation of these modules with one KV head. ``runner``: vLLM's model runner."""

    def __init__(self, attentions: Sequence[Any], runner: Any) -> None:
        first = attentions[0]
        group = first.num_heads // first.num_kv_heads
        builder = runner.attn_groups[0][0].get_metadata_builder(0)
        self._builder = _copied(builder, _ONE_HEAD[first.attn_backend.get_name()](builder, group))
        heads = {"num_heads": group, "num_kv_heads": 1}
        self._impls = {each.layer_name: _copied(each.impl, heads) for each in attentions}

    def attend(
        self, attention: Any, query: torch.Tensor, view: torch.Tensor, sequences: HeadSequences
    ) -> torch.Tensor:
        """Return the attention of ``query``, [rows, group, head_size], over pages of one KV head, ``view``;
        same shape."""
        common = CommonAttentionMetadata(
            query_start_loc=sequences.starts,
            query_start_loc_cpu=sequences.on_host,
            seq_lens=sequences.lengths,
            num_reqs=len(sequences.lengths),
            num_actual_tokens=len(query),
            max_query_len=sequences.longest,
            max_seq_len=sequences.most,
            block_table_tensor=sequences.table,
            slot_mapping=sequences.starts,  # nothing is written
            causal=True,
        )
        out = torch.empty_like(query)
        metadata = self._builder.build(0, common)
        self._impls[attention.layer_name].forward(attention, query, query, query, view, metadata, out)
        return out


def _copied(thing: _Copied, changes: dict[str, Any]) -> _Copied:
    made = copy(thing)
    vars(made).update(changes)
    return made
