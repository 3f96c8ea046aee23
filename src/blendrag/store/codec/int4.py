"""Half a byte per number, in groups: K per channel in groups of tokens, V per token in groups of channels.

KIVI's layout (Liu et al. 2024, section 3). A group of K has its own range; a group of V has one number, the step,
and is half as large: the same bytes, and less error than ranges that need two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from blendrag.store.codec.interface import register_codec
from blendrag.store.codec.parts import Part, PartedCodec, multiples

_TOKENS = 32
_CHANNELS = 16


@register_codec("int4")
class Int4(PartedCodec):
    """K: least + step * (0 to 15). V: step * (-15, -13, ... 13, 15): all sixteen, and symmetric."""

    def parts(self, tokens: int) -> Sequence[Part]:
        ranges = (-(-tokens // _TOKENS), self.heads, self.size)
        steps = (tokens, self.heads, -(-self.size // _CHANNELS))
        pairs = (-(-tokens // 2), self.heads, self.size)
        return (
            (ranges, self.dtype),
            (ranges, self.dtype),
            (steps, self.dtype),
            (pairs, torch.uint8),
            (pairs, torch.uint8),
        )

    def write(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        least, key_step, value_step, keys, values = parts
        # The last token again, until the last group is full: its range stays what it was.
        full = torch.cat([key, key[-1:].expand(-len(key) % _TOKENS, -1, -1)]).unflatten(0, (-1, _TOKENS))
        low, high = torch.aminmax(full, dim=1)
        least.copy_(low)
        key_step.copy_(self.step((high - low) / 15))
        _pack(multiples(full - low[:, None], key_step[:, None], 0, 15).flatten(0, 1)[: len(key)], keys)

        groups = pad(value, (0, -self.size % _CHANNELS)).unflatten(-1, (-1, _CHANNELS))
        value_step.copy_(self.step(groups.abs().amax(-1) / 15))
        counts = multiples((groups + 15 * value_step.float()[..., None]) / 2, value_step[..., None], 0, 15)
        _pack(counts.flatten(-2)[..., : self.size], values)

    def read(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        least, key_step, value_step, keys, values = parts
        n = len(key)
        counts = _unpack(keys, n)
        whole = n // _TOKENS * _TOKENS
        if whole:
            groups = slice(whole // _TOKENS)
            shape = (-1, _TOKENS)
            out = key[:whole].unflatten(0, shape)
            torch.addcmul(
                least[groups, None], counts[:whole].unflatten(0, shape), key_step[groups, None], out=out
            )
        if n > whole:
            torch.addcmul(least[n // _TOKENS], counts[whole:], key_step[n // _TOKENS], out=key[whole:])

        odd = _unpack(values, n).view(torch.int8).mul_(2).sub_(15)
        steps = value_step[:n].repeat_interleave(_CHANNELS, -1)[..., : self.size]
        torch.mul(odd, steps, out=value)


def _pack(counts: torch.Tensor, into: torch.Tensor) -> None:
    """Whole numbers from 0 to 15, [tokens, heads, size], as uint8 [tokens / 2, heads, size]: tokens 2 i and 2 i + 1
    share a byte."""
    counts = counts.to(torch.uint8)
    into.copy_(counts[0::2])
    into[: len(counts) // 2] |= counts[1::2] << 4


def _unpack(packed: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of what was packed."""
    pairs = packed[: -(-tokens // 2)]
    counts = packed.new_empty(2 * len(pairs), *packed.shape[1:])
    torch.bitwise_and(pairs, 15, out=counts[0::2])
    torch.bitwise_right_shift(pairs, 4, out=counts[1::2])
    return counts[:tokens]
