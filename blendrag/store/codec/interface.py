"""The interface of codecs, which encode a chunk's KV in a record, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from blendrag.names import Registry


class Codec(ABC):
    """The interface of codecs: one layer's K and V of a chunk become a row of bytes, and back. Rows of a
    record are equally long.

    K is stored before RoPE (design decision D4), so a channel's range does not depend on the position.
    """

    def __init__(self, heads: int, size: int, dtype: torch.dtype) -> None:
        """Make a codec for ``heads`` KV heads of ``size`` channels. ``dtype``: what the model computes in."""
        self.heads, self.size, self.dtype = heads, size, dtype

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of a row for a chunk of ``tokens`` tokens."""

    @abstractmethod
    def arrays(self, tokens: int) -> list[int]:
        """Return where in a row its arrays begin, in bytes, for a kernel that decodes many rows."""

    @abstractmethod
    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """Encode [layers, 2 (K, V), tokens, heads, size] as uint8 [layers, row_bytes(tokens)]."""

    @abstractmethod
    def decode(self, row: torch.Tensor, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Decode a row of a chunk of ``tokens`` tokens into ``key`` and ``value``, [n, heads, size] each, on
        the row's device: the chunk's first n tokens, n <= tokens. It may run in any thread, at the same time
        as the model computes: few passes, little allocated."""


CODECS = Registry[Codec]("codec")
register_codec = CODECS.register


def make_codec(name: str, heads: int, size: int, dtype: torch.dtype) -> Codec:
    """Return the codec called ``name``. Raises ConfigError for an unknown one."""
    return CODECS[name](heads, size, dtype)
