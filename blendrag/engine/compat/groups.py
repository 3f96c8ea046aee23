"""The groups in which vLLM keeps the KV of a model's layers: those with and without windows apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

NULL_BLOCK = 0
"""The id that stands for blocks which a request does not have any more, or never had."""


class LayerGroup(NamedTuple):
    """A group of layers. block_size: tokens in a block. window: in tokens, behind which vLLM gives up blocks,
    or the chunk before which it does; 0: nowhere. layers: their names; of a single group, there may be none.
    """

    block_size: int
    window: int = 0
    layers: frozenset[str] = frozenset()

    def gives_up(self, tokens: int) -> bool:
        """Return whether a request has not all of its blocks, once so many of its tokens are computed. Of
        chunks, up to a block too late."""
        return self.window > 0 and tokens + 1 - self.window >= self.block_size


def groups_of_config(kv_cache_config: Any) -> list[LayerGroup]:
    """Return the groups of vLLM's ``KVCacheConfig``, in its order."""
    return [
        _group(getattr(group.kv_cache_spec, "kv_cache_specs", {0: group.kv_cache_spec}), group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    ]


def groups_of_runner(runner: Any) -> list[LayerGroup]:
    """Return the groups of vLLM's model runner, which are in the same order."""
    return [
        _group(
            {number: kind.kv_cache_spec for number, kind in enumerate(kinds)},
            [name for kind in kinds for name in kind.layer_names],
        )
        for kinds in runner.attn_groups
    ]


def common_block_size(groups: Sequence[LayerGroup]) -> int:
    """Return the tokens behind which a block ends in every group: only there ends a hit of the prefix
    cache."""
    return lcm(*(group.block_size for group in groups))


def _group(specs: dict[Any, Any], layers: Iterable[str]) -> LayerGroup:
    """Make a group of layers, which may differ in the shape of their KV."""
    window = max(map(_window, specs.values()))
    return LayerGroup(next(iter(specs.values())).block_size, window, frozenset(layers))


def _window(spec: Any) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else 0
