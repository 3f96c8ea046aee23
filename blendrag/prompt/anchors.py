"""A search that tells, in one pass over a prompt, where a known text may begin.

Each window of ``size`` characters is hashed (:func:`rolling_hashes`) and looked up in a table of bits, which
a processor's cache holds; the few windows that pass are looked up among the anchors themselves. Nothing is
rebuilt when anchors are added. Removed anchors leave their bits set: that costs a look-up, never a wrong
answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 25
_MASKS = (1 << np.arange(8)).astype(np.uint8)

Hashes = npt.NDArray[np.uint64]


class Anchors:
    """An index of texts by their first ``size`` characters; those that share them (a heading) are sorted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._texts: dict[str, list[str]] = {}
        self._table = np.zeros(1 << _TABLE_BITS - 3, dtype=np.uint8)

    def add(self, text: str) -> None:
        anchor = text[: self.size]
        if anchor not in self._texts:
            (byte,), (bit,) = self._bits(anchor)
            self._table[byte] |= bit
        insort(self._texts.setdefault(anchor, []), text)

    def remove(self, text: str) -> None:
        texts = self._texts[text[: self.size]]
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._texts[text[: self.size]]

    def sharing(self, anchor: str) -> Sequence[str]:
        """Return the texts that begin with ``anchor``, sorted."""
        return self._texts.get(anchor, ())

    def starts(self, text: str) -> list[int]:
        """Return where in ``text`` an anchor stands."""
        if not self._texts or len(text) < self.size:
            return []
        bytes_, bits = self._bits(text)
        maybe: list[int] = np.flatnonzero(self._table[bytes_] & bits != 0).tolist()
        return [at for at in maybe if text[at : at + self.size] in self._texts]

    def _bits(self, text: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
        """Return the bit of the table for each window of ``text``, as a byte's place and a mask."""
        slots = (rolling_hashes(text, self.size) >> np.uint64(64 - _TABLE_BITS)).astype(np.intp)
        return slots >> 3, _MASKS[slots & 7]


def rolling_hashes(text: str, size: int) -> Hashes:
    """Return the hash of each window of ``size`` characters of ``text``, which has as many at least: a
    polynomial modulo 2^64 (Rabin and Karp's), from prefix sums, so that all windows cost a few array
    operations. Its top bits depend on all characters."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes * _powers(_BASE, len(codes)), out=sums[1:])
    windows = sums[size:] - sums[:-size]
    return windows * _powers(_INVERSE, len(windows))


def _powers(base: int, count: int) -> Hashes:
    """Return 1, base, base^2, ... modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)
