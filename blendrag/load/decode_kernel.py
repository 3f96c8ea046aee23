"""The Triton kernel of :class:`~blendrag.load.layer_decode.LayerDecode`: rows of all chunks of a prompt
become some layers' K and V. A program decodes some tokens of one head of one layer of one chunk, as its
codec's ``read`` does."""

from __future__ import annotations

import triton
import triton.language as tl

# Of a chunk in the table: where it goes, how many tokens, the first of its heads, bytes of a layer before it
# and of its own row, where its arrays are in that.
PLACE, LENGTH, HEAD, BEFORE, ROW, ARRAYS = (tl.constexpr(number) for number in range(6))
COLUMNS = tl.constexpr(11)
_GROUP = tl.constexpr(32)


@triton.jit
def _fp8(bits: tl.tensor) -> tl.tensor:
    """Return e4m3 numbers times 2^-8, whose bits these are: all but the sign, shifted."""
    return ((bits.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["layers", "layer_stride", "part_stride"])
def decode(
    rows: tl.tensor,
    table: tl.tensor,
    numbers: tl.tensor,
    layers: tl.tensor,
    layer_stride: tl.tensor,
    part_stride: tl.tensor,
    CODEC: tl.constexpr,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    entry = table + tl.program_id(0) * COLUMNS
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head, layer = tl.program_id(2) % HEADS, (tl.program_id(2) // HEADS).to(tl.int64)
    dim = tl.arange(0, WIDTH)[None, :]
    length = tl.load(entry + LENGTH)
    used = (token < length) & (dim < SIZE)
    at = (token * HEADS + head) * SIZE + dim
    kind = tl.pointer_type(numbers.dtype.element_ty)

    rows += tl.load(entry + BEFORE) * layers + tl.load(entry + ROW) * layer
    first = rows + tl.load(entry + ARRAYS)
    second = rows + tl.load(entry + ARRAYS + 1)
    if CODEC == "raw":
        key = tl.load(first.to(kind) + at, mask=used)
        value = tl.load(second.to(kind) + at, mask=used)
    else:
        third = rows + tl.load(entry + ARRAYS + 2)
        fourth = rows + tl.load(entry + ARRAYS + 3)
        fifth = rows + tl.load(entry + ARRAYS + 4)
        if CODEC == "int4":
            sixth = rows + tl.load(entry + ARRAYS + 5)
            of_key = (token // _GROUP * HEADS + head) * SIZE + dim
            of_value = (token * HEADS + head) * ((SIZE + _GROUP - 1) // _GROUP) + dim // _GROUP
            pair, nibble = (token // 2 * HEADS + head) * SIZE + dim, token % 2 * 4
            key = (tl.load(fifth + pair, mask=used) >> nibble) & 15
            value = (tl.load(sixth + pair, mask=used) >> nibble) & 15
            low = tl.load(first.to(kind) + of_key, mask=used).to(tl.float32)
            key = low + key.to(tl.float32) * tl.load(second.to(kind) + of_key, mask=used).to(tl.float32)
            low = tl.load(third.to(kind) + of_value, mask=used).to(tl.float32)
            value = low + value.to(tl.float32) * tl.load(fourth.to(kind) + of_value, mask=used).to(tl.float32)
        else:
            channel, of_token = head * SIZE + dim, token * HEADS + head
            low = tl.load(first.to(kind) + channel, mask=dim < SIZE).to(tl.float32)
            step = tl.load(second.to(kind) + channel, mask=dim < SIZE).to(tl.float32)
            of_value = tl.load(third.to(kind) + of_token, mask=token < length).to(tl.float32)
            key, value = tl.load(fourth + at, mask=used), tl.load(fifth + at, mask=used)
            value = value.to(tl.int8, bitcast=True)
            if CODEC == "fp8":
                key, value = _fp8(key.to(tl.int8, bitcast=True)), _fp8(value)
            key = low + key.to(tl.float32) * step
            value = value.to(tl.float32) * of_value
    place = (tl.load(entry + PLACE) + token) * OWN + tl.load(entry + HEAD) + head
    into = numbers + layer * layer_stride + place * SIZE + dim
    tl.store(into, key.to(numbers.dtype.element_ty), mask=used)
    tl.store(into + part_stride, value.to(numbers.dtype.element_ty), mask=used)
