"""The codec with a byte per number: K per channel, V per token and head (KIVI, Liu et al. 2024, section 3).

Some channels of K are far larger than others for every token, so each has a range of its own, from its least
to its greatest number in the chunk. V has no such channels; its ranges are a token's, symmetric about zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store.codec.interface import register_codec
from blendrag.store.codec.parts import ByteCodec, extremes, multiples


@register_codec("int8")
class Int8(ByteCodec):
    """The 8-bit integer codec. K: least + step * (0 to 255). V: step * (-127 to 127)."""

    kinds = (torch.uint8, torch.int8)

    def write(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        least, key_step, value_step, keys, values = parts
        low, high = extremes(key, -3)
        least.copy_(low)
        key_step.copy_(self.step((high - low) / 255))
        keys.copy_(multiples(key - low.unsqueeze(-3), key_step.unsqueeze(-3), 0, 255))
        value_step.copy_(self.step(value.abs().amax(-1, keepdim=True) / 127))
        values.copy_(multiples(value, value_step, -127, 127))
