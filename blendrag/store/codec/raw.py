"""The codec that keeps KV as the model computed it, bit for bit."""

from __future__ import annotations

import torch

from blendrag.store.codec.interface import Codec, register_codec


@register_codec("raw")
class Raw(Codec):
    """The exact codec. A row is K, then V, [tokens, heads, size] each, in the model's dtype."""

    def row_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.heads * self.size * self.dtype.itemsize

    def arrays(self, tokens: int) -> list[int]:
        return [0, self.row_bytes(tokens) // 2]

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.to(self.dtype).contiguous().view(kv.shape[0], -1).view(torch.uint8)

    def decode(self, row: torch.Tensor, tokens: int, key: torch.Tensor, value: torch.Tensor) -> None:
        both = row.view(self.dtype).view(2, tokens, self.heads, self.size)
        key.copy_(both[0, : key.shape[0]])
        value.copy_(both[1, : value.shape[0]])
