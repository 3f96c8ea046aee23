"""The exact causal mask for scattered tokens, by one kernel over the paged cache, for devices that are not
CPUs (design decision D7). It needs Triton, and nothing of the engine's but the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendrag.attention.scores import Scores


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """Rows of one or several sequences that attend to their own. All int32, on the device.

    positions: [m], of the last key that each row sees. sequences: [m], each row's line of the table. Any
    order is right; a sequence's rows together, ascending, are fast. block_table: [sequences, blocks].
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    block_table: torch.Tensor


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: PagedRows, scores: Scores
) -> torch.Tensor:
    """Return the attention of ``query``, [m, heads, d], over the keys that ``rows`` see, all of them in the
    cache. Same shape, same type; sums are in float32.

    key_cache, value_cache: [blocks, block_size, kv_heads, d], views of a cache of any layout in which a head
    is contiguous. d, block_size and heads / kv_heads may be any number.
    """
    # Only builds of torch for GPUs bring Triton, which this imports.
    from blendrag.attention.paged_kernel import Tile, attend

    _, block_size, kv_heads, head_size = key_cache.shape
    assert query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1, "a head is read as a line"
    group = query.shape[1] // kv_heads
    tile = Tile.of(group, head_size, query.itemsize)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend[-(-query.shape[0] // tile.rows), kv_heads](
        query,
        key_cache,
        value_cache,
        out,
        rows.positions,
        rows.sequences,
        rows.block_table,
        scores.sinks,
        query.shape[0],
        scores.scale,
        *query.stride()[:2],
        *out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        rows.block_table.stride(0),
        WINDOW=scores.window or 0,
        SOFT_CAP=scores.soft_cap,
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        GROUP=group,
        ROWS=tile.rows,
        LANES=tile.lanes,
        KEYS=tile.keys,
        WIDTH=tile.width,
        **tile.options,
    )
    return out
