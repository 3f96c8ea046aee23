"""The codec with half a byte per number, in groups of 32: K per channel over tokens, V per token over
channels.

KIVI's layout and group size (Liu et al. 2024, section 3). A group's least number and step take a bit per
number. Groups of 64 would take half as much, for a third more divergence (``docs/codecs.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store.codec.interface import register_codec
from blendrag.store.codec.parts import Part, PartedCodec, extremes, multiples

GROUP = 32


@register_codec("int4")
class Int4(PartedCodec):
    """The 4-bit codec. K and V of each group: least + step * (0 to 15)."""

    def parts(self, tokens: int) -> Sequence[Part]:
        of_keys = (_groups(tokens), self.heads, self.size)
        of_values = (tokens, self.heads, _groups(self.size))
        pairs = (_half(tokens), self.heads, self.size)
        shapes = (of_keys, of_keys, of_values, of_values)
        return *((shape, self.dtype) for shape in shapes), (pairs, torch.uint8), (pairs, torch.uint8)

    def write(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        key_least, key_step, value_least, value_step, keys, values = parts
        self._quantise(key, -3, key_least, key_step, keys)
        self._quantise(value, -1, value_least, value_step, values)

    def _quantise(
        self, numbers: torch.Tensor, dim: int, least: torch.Tensor, step: torch.Tensor, into: torch.Tensor
    ) -> None:
        length = numbers.shape[dim]
        # The last number is repeated until the last group is full: that leaves the group's range as it is.
        index = torch.arange(_groups(length) * GROUP, device=numbers.device).clamp_(max=length - 1)
        groups = numbers.index_select(dim, index).unflatten(dim, (-1, GROUP))
        low, high = extremes(groups, dim)
        least.copy_(low)
        step.copy_(self.step((high - low) / 15))
        counts = multiples(groups - low.unsqueeze(dim), step.unsqueeze(dim), 0, 15)
        _pack(counts.flatten(dim - 1, dim).narrow(dim, 0, length).to(torch.uint8), into)

    def read(self, parts: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        key_least, key_step, value_least, value_step, keys, values = parts
        n = len(key)
        counts, whole = _unpack(keys, n), n // GROUP
        split, shape = whole * GROUP, (whole, GROUP)
        if whole:
            least, step = key_least[:whole, None], key_step[:whole, None]
            torch.addcmul(
                least, counts[:split].unflatten(0, shape), step, out=key[:split].unflatten(0, shape)
            )
        if split < n:
            torch.addcmul(key_least[whole], counts[split:], key_step[whole], out=key[split:])
        least, step = (self._per_channel(each[:n]) for each in (value_least, value_step))
        torch.addcmul(least, _unpack(values, n), step, out=value)

    def _per_channel(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the numbers copied out: PyTorch's kernel is ten times slower if it has to broadcast within a
        row."""
        return groups.repeat_interleave(GROUP, -1)[..., : self.size]


def _groups(length: int) -> int:
    return -(-length // GROUP)


def _half(tokens: int) -> int:
    return -(-tokens // 2)


def _pack(counts: torch.Tensor, into: torch.Tensor) -> None:
    """Pack whole numbers from 0 to 15, [..., tokens, heads, size]: tokens 2 i and 2 i + 1 share the bytes of
    row i."""
    into.copy_(counts[..., 0::2, :, :])
    into[..., : counts.shape[-3] // 2, :, :] |= counts[..., 1::2, :, :] << 4


def _unpack(packed: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the first ``tokens`` tokens of what was packed."""
    pairs = packed[: _half(tokens)]
    counts = packed.new_empty(2 * len(pairs), *packed.shape[1:])
    torch.bitwise_and(pairs, 15, out=counts[0::2])
    torch.bitwise_right_shift(pairs, 4, out=counts[1::2])
    return counts[:tokens]
