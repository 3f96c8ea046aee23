"""The codec with an 8-bit float (e4m3) per number: scaled, K about each channel's middle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store.codec.interface import register_codec
from blendrag.store.codec.parts import ByteCodec, extremes

_MOST = torch.finfo(torch.float8_e4m3fn).max
# An e4m3 shifted left by seven, its sign apart, has the bits of a float16 2^8 times smaller, as exponents are
# biased by 7 and by 15. So decoding needs no table and no branch; PyTorch's own way takes ten times longer.
_SHIFT, _SIGN_TWICE, _SMALLER = 7, 1 << 14, 2.0**-8


@register_codec("fp8")
class Fp8(ByteCodec):
    """The 8-bit float codec. K: middle + scale * number of a channel. V: scale * number."""

    kinds = (torch.float8_e4m3fn, torch.float8_e4m3fn)

    def write(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        middle, key_scale, value_scale, keys, values = parts
        low, high = extremes(key, -3)
        middle.copy_((low + high) / 2)
        key = key - middle.float().unsqueeze(-3)
        key_scale.copy_(self.step(key.abs().amax(-3) / (_MOST * _SMALLER)))
        value_scale.copy_(self.step(value.abs().amax(-1, keepdim=True) / (_MOST * _SMALLER)))
        keys.copy_(_scaled(key, key_scale.unsqueeze(-3)))
        values.copy_(_scaled(value, value_scale))

    def numbers(self, stored: torch.Tensor) -> torch.Tensor:
        """Return e4m3 numbers times 2^-8 in float16, exactly."""
        bits = stored.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
        return bits.bitwise_left_shift_(_SHIFT).bitwise_and_(~_SIGN_TWICE).view(torch.float16)


def _scaled(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(scale == 0, 1, scale.float())
    return (numbers / divisor).div_(_SMALLER).clamp_(-_MOST, _MOST)
