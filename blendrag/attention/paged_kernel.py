"""The Triton kernel of :func:`~blendrag.attention.paged.paged_attention`.

A program has a tile of rows, and for each row the query heads that share one KV head: together they are the
rows of its matrix products. It goes over the keys that any of them sees, a few at a time, and keeps a running
softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that rows that have seen no key yet give no NaN: what they gather is wiped by their first one.
_UNSEEN = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """The tile of one program: ``rows``, which are ``lanes`` with their heads and padding; ``keys``, at a
    time; ``width``, the padded head size. All but ``rows`` are powers of two, and enough for tensor cores."""

    rows: int
    lanes: int
    keys: int
    width: int

    @classmethod
    def of(cls, group: int, head_size: int, itemsize: int) -> Tile:
        """Return the tile for ``group`` query heads to a KV head: any GPU has room for two steps' K and V."""
        width = max(16, triton.next_power_of_2(head_size))
        keys, lanes = (max(16, min(most, (most << 8) // (width * itemsize))) for most in (64, 128))
        lanes = max(lanes, triton.next_power_of_2(group))
        return cls(lanes // group, lanes, keys, width)

    @property
    def options(self) -> dict[str, int]:
        """Return how the kernel is compiled. In three stages, the table's entries come a step before the keys
        that they lead to."""
        return {"num_stages": 3, "num_warps": 8 if self.lanes >= 128 else 4}


@triton.jit
def _step(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    mine: tl.tensor,
    position: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the softmax behind the next keys. MASKED: whether some row does not see some of them."""
    key = start + tl.arange(0, KEYS)
    dim = tl.arange(0, WIDTH)
    if KEYS % BLOCK_SIZE == 0 and not MASKED:  # an entry for each block, not for each key
        at = start // BLOCK_SIZE + tl.arange(0, KEYS // BLOCK_SIZE)
        block = tl.load(table + at).to(tl.int64)
        block = tl.broadcast_to(block[:, None], [KEYS // BLOCK_SIZE, BLOCK_SIZE]).reshape(KEYS)
    else:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    slot = key % BLOCK_SIZE
    key_at = keys + block * key_block_stride + slot * key_slot_stride
    value_at = values + block * value_block_stride + slot * value_slot_stride
    if MASKED or HEAD_SIZE < WIDTH:
        written = (key < end) & (dim < HEAD_SIZE)[:, None]
        k = tl.load(key_at[None, :] + dim[:, None], mask=written, other=0.0)
        v = tl.load(value_at[:, None] + dim[None, :], mask=tl.trans(written), other=0.0)
    else:
        k = tl.load(key_at[None, :] + dim[:, None])
        v = tl.load(value_at[:, None] + dim[None, :])
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if SOFT_CAP > 0:
        score = score * scale
        score = (SOFT_CAP * _LOG2_E) * (1 - 2 / (tl.exp2(score * (2 * _LOG2_E / SOFT_CAP)) + 1))  # tanh
    else:
        score = score * (scale * _LOG2_E)
    if MASKED:
        seen = mine[:, None] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        score = tl.where(seen, score, _UNSEEN)
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    kept = tl.exp2(top - higher)
    total = total * kept + tl.sum(weight, 1)
    mixed = mixed * kept[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return higher, total, mixed


# Not specialised on what changes from prompt to prompt: compiling takes seconds, and the engine waits.
@triton.jit(do_not_specialize=["row_count", "table_stride"])
def attend(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    positions: tl.tensor,
    sequences: tl.tensor,
    block_table: tl.tensor,
    sinks: tl.tensor,
    row_count: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most: they begin first
    kv_head = tl.program_id(1)
    lane = tl.arange(0, LANES)
    row = tile * ROWS + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    used = (lane < ROWS * GROUP) & (row < row_count)
    position = tl.load(positions + row, mask=used, other=-1)
    sequence = tl.load(sequences + row, mask=used, other=-1)
    dim = tl.arange(0, WIDTH)
    in_head = dim < HEAD_SIZE
    lanes_in_use = used[:, None] & in_head[None, :]
    row, head = row.to(tl.int64), head.to(tl.int64)
    heads = query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(heads, mask=lanes_in_use, other=0.0)

    # The softmax so far, in powers of two: its greatest score, its sum, its weighted sum of values.
    if sinks is None:
        top = tl.full([LANES], _UNSEEN, tl.float32)
        total = tl.zeros([LANES], tl.float32)
    else:
        top = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * _LOG2_E
        total = tl.full([LANES], 1.0, tl.float32)
    mixed = tl.zeros([LANES, WIDTH], tl.float32)

    first = tl.min(tl.where(used, sequence, 2147483647))
    last = tl.max(sequence)
    for current in range(first, last + 1):
        mine = sequence == current
        end = tl.max(tl.where(mine, position, -1)) + 1
        begin = 0
        if WINDOW > 0:
            begin = tl.min(tl.where(mine, position, 2147483647)) - WINDOW + 1
            begin = tl.maximum(begin, 0) // KEYS * KEYS
        elif first == last:  # up to here, all rows see all keys
            seen_by_all = (tl.min(tl.where(used, position, 2147483647)) + 1) // KEYS * KEYS
            for start in range(0, seen_by_all, KEYS):
                top, total, mixed = _step(
                    q, top, total, mixed, start, end, mine, position, block_table + current * table_stride,
                    key_cache + kv_head * key_head_stride, value_cache + kv_head * value_head_stride,
                    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                    scale, False, WINDOW, SOFT_CAP, BLOCK_SIZE, HEAD_SIZE, KEYS, WIDTH,
                )  # fmt: skip
            begin = seen_by_all
        for start in range(begin, end, KEYS):
            top, total, mixed = _step(
                q, top, total, mixed, start, end, mine, position, block_table + current * table_stride,
                key_cache + kv_head * key_head_stride, value_cache + kv_head * value_head_stride,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                scale, True, WINDOW, SOFT_CAP, BLOCK_SIZE, HEAD_SIZE, KEYS, WIDTH,
            )  # fmt: skip

    mixed = mixed / tl.where(used, total, 1.0)[:, None]
    heads = out + row[:, None] * out_row_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(heads, mixed.to(q.dtype), mask=lanes_in_use)
