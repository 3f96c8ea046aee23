"""The base of the lossy codecs: rows made of aligned parts, and numbers as multiples of a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from blendrag.store.codec.interface import Codec

_ALIGN = 16
_AT_ONCE = 1 << 23  # numbers, of which a GPU's memory holds some copies in float32
Part = tuple[Sequence[int], torch.dtype]


class PartedCodec(Codec):
    """A codec whose rows are sequences of arrays, each of which begins at a multiple of 16 bytes.

    Every array that has a dimension of tokens has it first, so that a prefix of the tokens is a slice of it.
    ``write`` gets some layers' arrays at once, with a dimension of layers before all others.
    """

    @abstractmethod
    def parts(self, tokens: int) -> Sequence[Part]:
        """Return shape and dtype of each array of a row."""

    @abstractmethod
    def write(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        """Fill the rows' arrays from K and V, float32 [layers, tokens, heads, size], within ``limit``."""

    @abstractmethod
    def read(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        """Do as :meth:`decode`, given the row's arrays."""

    @property
    def limit(self) -> float:
        """Return the greatest magnitude that is stored; ``dtype`` has it exactly, and larger ones become it.
        A range of twice this much, and a step, are within ``dtype`` too, so what was finite stays finite."""
        return torch.finfo(self.dtype).max / 4

    def row_bytes(self, tokens: int) -> int:
        return sum(_padded(shape, dtype) for shape, dtype in self.parts(tokens))

    def arrays(self, tokens: int) -> list[int]:
        *before, _ = (_padded(shape, dtype) for shape, dtype in self.parts(tokens))
        return [0, *accumulate(before)]

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        layers, _, tokens = kv.shape[:3]
        rows = torch.zeros(layers, self.row_bytes(tokens), dtype=torch.uint8, device=kv.device)
        # One layer at a time stays within a CPU's cache; a GPU waits for launches, of which few are enough.
        step = 1 if kv.device.type == "cpu" else max(1, _AT_ONCE * layers // max(1, kv.numel()))
        for some, own in zip(rows.split(step), kv.split(step), strict=True):
            key, value = own.to(self.dtype).float().clamp(-self.limit, self.limit).unbind(1)
            self.write(self._split(some, tokens), key, value)
        return rows

    def decode(self, row: torch.Tensor, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.read(self._split(row, tokens), key, value)

    def step(self, size: torch.Tensor) -> torch.Tensor:
        """Return step sizes (float32) in ``dtype``, rounded up, so that the whole range is within reach."""
        kind = torch.finfo(self.dtype)
        return (size * (1 + kind.eps / 2) + kind.smallest_normal * kind.eps / 2 * (size > 0)).to(self.dtype)

    def _split(self, rows: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """Return the arrays of [..., row bytes], each [..., its shape]."""
        found = []
        for at, (shape, dtype) in zip(self.arrays(tokens), self.parts(tokens), strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            found.append(rows[..., at : at + nbytes].view(dtype).unflatten(-1, tuple(shape)))
        return found


class ByteCodec(PartedCodec):
    """A codec with a byte per number: K by two numbers per channel, V by one per token and head. kinds: of
    the bytes of K and V."""

    kinds: ClassVar[tuple[torch.dtype, torch.dtype]]

    def parts(self, tokens: int) -> Sequence[Part]:
        channels, numbers = (self.heads, self.size), (tokens, self.heads, self.size)
        by_channel = (channels, self.dtype), (channels, self.dtype)
        return *by_channel, ((tokens, self.heads, 1), self.dtype), *((numbers, kind) for kind in self.kinds)

    def read(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        origin, key_step, value_step, keys, values = parts
        n = len(key)
        torch.addcmul(origin, self.numbers(keys[:n]), key_step, out=key)
        torch.mul(self.numbers(values[:n]), value_step[:n], out=value)

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored bytes as what PyTorch multiplies at once."""
        return stored


def extremes(numbers: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return least and greatest along ``dim``. On CPUs, PyTorch's aminmax takes ten times as long."""
    return numbers.amin(dim), numbers.amax(dim)


def multiples(numbers: torch.Tensor, step: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return ``numbers`` / ``step``, rounded, from ``least`` to ``most``; 0 where the step is 0."""
    divisor = torch.where(step == 0, 1, step.float())
    return (numbers / divisor).round_().clamp_(least, most)


def _padded(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
