"""The codec axis: how a chunk's KV is laid down in a record. One interface, one registry."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from blendrag.names import Registry


class Codec(ABC):
    """Packs one layer's K and V of a chunk into a row of bytes, and back. Rows of a record are equally long.

    K is stored before RoPE (design decision D4), so a channel's range does not depend on the position.
    """

    def __init__(self, heads: int, size: int, dtype: torch.dtype) -> None:
        """``heads`` KV heads of ``size`` channels; ``dtype``: what the model computes in."""
        self.heads, self.size, self.dtype = heads, size, dtype

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row for a chunk of ``tokens`` tokens."""

    @abstractmethod
    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """[layers, 2 (K, V), tokens, heads, size] to uint8 [layers, row_bytes(tokens)]."""

    @abstractmethod
    def decode(self, row: torch.Tensor, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """A row of a chunk of ``tokens`` tokens into ``key`` and ``value``, [n, heads, size] each, on the
        row's device, n <= tokens: the chunk's first n tokens. In any thread, beside the model's computation:
        few passes, little allocated."""


CODECS = Registry[Codec]("codec")
register_codec = CODECS.register


def make_codec(name: str, heads: int, size: int, dtype: torch.dtype) -> Codec:
    """The codec called ``name``. Raises ConfigError for an unknown one."""
    return CODECS[name](heads, size, dtype)
