"""Some layers' K and V of all chunks of a prompt, decoded at once: one launch, however many chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

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


class LayerDecode:
    """The decoding of layers of some chunks. Their rows lie behind each other on a device: those of the first
    chunk, then those of the second."""

    def __init__(self, chunks: Sequence[Encoded], codec: Codec, layout: Layout) -> None:
        self._codec, self._layout = codec, layout
        lines, begin = [], 0  # the columns that the kernel reads; bytes of a layer before a chunk
        for chunk in chunks:
            size, arrays = codec.row_bytes(chunk.tokens), codec.arrays(chunk.tokens)
            line = [chunk.place, chunk.length, chunk.head, begin, size, *arrays]
            lines.append(line + [0] * (11 - len(line)))
            begin += size
        self._table = torch.tensor(lines)
        self._longest = max(chunk.length for chunk in chunks)

    def __call__(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """Decode ``rows``, uint8, to ``numbers``, [layers, 2, tokens, own heads, size], of the layout's type,
        on the current stream. rows: a tensor that begins where the first of them does."""
        # Only builds of torch for GPUs bring Triton, which this imports.
        from blendrag.load.decode_kernel import decode

        if self._table.device != rows.device:  # sent once, on the stream that reads it
            self._table = self._table.pin_memory().to(rows.device, non_blocking=True)
        heads, size = self._codec.heads, self._codec.size
        layers = len(numbers)
        decode[len(self._table), -(-self._longest // _TOKENS), heads * layers](
            rows,
            self._table,
            numbers,
            layers,
            numbers.stride(0),
            numbers.stride(1),
            CODEC=self._layout.identity.codec,
            HEADS=heads,
            OWN=len(self._layout.own),
            SIZE=size,
            WIDTH=1 << (size - 1).bit_length(),
            TOKENS=_TOKENS,
        )


def decodes_at_once(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
