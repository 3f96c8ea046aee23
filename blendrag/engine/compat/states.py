"""Layers that keep a state of what they have read in place of KV (Mamba, linear attention)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from blendrag.engine.compat.parallel import divided_otherwise

# Before these a connector cannot say which requests' loads have failed, of models with several groups.
CAN_FAIL = hasattr(base, "KVConnectorTransferResults")


class StateGroups(NamedTuple):
    """The groups of layers of a hybrid model. attention: the number of the one whose layers have KV. states:
    of each of the others, its number, and how many tokens a block stands for."""

    attention: int
    states: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, kv_cache_config: Any) -> Self | None:
        """Return the groups of vLLM's ``KVCacheConfig``, or None if they are of other kinds, or if prefix
        caching takes every block before the last for a state. Blocks that drafts need come last."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        full = [number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        states = [(number, spec) for number, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        if len(full) != 1 or not states or len(specs) != 1 + len(states):
            return None
        if any(spec.mamba_cache_mode == "all" for _, spec in states):
            return None
        return cls(full[0], tuple((number, spec.block_size) for number, spec in states))


@dataclass(slots=True)
class StateBlocks:
    """The blocks that vLLM's manager (``KVCacheManager``) holds for a hybrid model's requests."""

    groups: StateGroups
    manager: Any = None

    def kv(self, request_id: str) -> list[int]:
        """Return the ids of a request's blocks of KV."""
        return list(self.manager.get_block_ids(request_id)[self.groups.attention])

    def states(self, request_id: str, tokens: int) -> list[int]:
        """Return, for each group of states, the id of the block that has the one behind so many tokens; 0
        where there is none."""
        held = self.manager.get_block_ids(request_id)
        at = [(held[group], (tokens - 1) // size) for group, size in self.groups.states]
        return [ids[block] if block < len(ids) else 0 for ids, block in at]


class HybridLayers:
    """The layers of a loaded hybrid model: ``attentions`` keep KV, the others the states that are read and
    written here."""

    def __init__(self, groups: StateGroups, vllm_config: Any, kv_cache_config: Any) -> None:
        named = [set(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        # In the model's order: how vLLM groups layers may change.
        layers = list(vllm_config.compilation_config.static_forward_context.items())
        self.blocks: int = kv_cache_config.num_blocks
        self.attentions = [layer for name, layer in layers if name in named[groups.attention]]
        self._states = [
            (at, layer)
            for name, layer in layers
            for at, (group, _) in enumerate(groups.states)
            if name in named[group]
        ]

    @classmethod
    def of(cls, vllm_config: Any, runner: Any) -> Self | None:
        """Return the layers of a worker's model, or None if it is no hybrid whose blocks are understood, or
        its workers share other things than tensors."""
        config = getattr(runner, "kv_cache_config", None)
        if divided_otherwise(vllm_config.parallel_config) or config is None:
            return None
        if (groups := StateGroups.of(config)) is None:
            return None
        found = cls(groups, vllm_config, config)
        whole = all(one.kv_cache.shape[0] % found.blocks == 0 for one in found.attentions)
        return found if whole else None

    def _parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensors of states of all layers, [blocks, ...], with the places of their groups."""
        for group, layer in self._states:
            for part in layer.kv_cache:
                yield group, part

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a state, of all layers."""
        return sum(prod(part.shape[1:]) * part.element_size() for _, part in self._parts())

    @property
    def format(self) -> str:
        """Return a name for the format of a state's bytes."""
        return " ".join(f"{part.dtype} {(*part.shape[1:],)}" for _, part in self._parts())

    def read_state(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the bytes of the state in these blocks, one of each group: uint8, on the CPU."""
        parts = (part[block_ids[group]].cpu().contiguous() for group, part in self._parts())
        return torch.cat([part.view(-1).view(torch.uint8) for part in parts])

    def write_state(self, block_ids: Sequence[int], state: torch.Tensor) -> None:
        """Write what :meth:`read_state` gave into these blocks."""
        at = 0
        for group, part in self._parts():
            place = part[block_ids[group]]
            size = place.numel() * place.element_size()
            # Copied first: a part may begin where its type does not.
            place.copy_(state[at : at + size].clone().view(part.dtype).view(place.shape))
            at += size
