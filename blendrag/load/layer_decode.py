"""One layer's K and V of all chunks of a prompt, decoded at once: one launch, however many chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self

import torch

from blendrag.store.codec import Codec
from blendrag.store.record import Layout

_TOKENS = 16  # of a program


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk's rows, one a layer, of a shard. tokens: all of it; length: how many of them are decoded;
    place: of the first one among all; head: of its first head among those of this process."""

    tokens: int
    length: int
    place: int
    head: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerDecode:
    """The decoding of a layer whose rows lie behind each other on a device.

    table: [chunks, 9] int64: place, length, head, and where the row's arrays are among all bytes.
    """

    codec: Codec
    layout: Layout
    table: torch.Tensor
    longest: int

    @classmethod
    def of(cls, chunks: Sequence[Encoded], codec: Codec, layout: Layout, device: torch.device) -> Self:
        """Prepare the decoding of every layer of these chunks, in the order of their rows."""
        lines, begin = [], 0
        for chunk in chunks:
            arrays = [begin + at for at in codec.arrays(chunk.tokens)]
            lines.append([chunk.place, chunk.length, chunk.head, *arrays, *[0] * (6 - len(arrays))])
            begin += codec.row_bytes(chunk.tokens)
        table = torch.tensor(lines)
        if device.type != "cpu":
            table = table.pin_memory().to(device, non_blocking=True)
        return cls(codec, layout, table, max(chunk.length for chunk in chunks))

    def __call__(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """Decode ``rows``, uint8, to ``numbers``, [2, tokens, own heads, size], of the layout's type."""
        # Only builds of torch for GPUs bring Triton, which this imports.
        from blendrag.load.decode_kernel import decode

        heads, size = self.codec.heads, self.codec.size
        decode[len(self.table), -(-self.longest // _TOKENS), heads](
            rows,
            self.table,
            numbers,
            numbers.stride(0),
            CODEC=self.layout.identity.codec,
            HEADS=heads,
            OWN=len(self.layout.own),
            SIZE=size,
            WIDTH=1 << (size - 1).bit_length(),
            TOKENS=_TOKENS,
        )


def decodes_at_once(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
