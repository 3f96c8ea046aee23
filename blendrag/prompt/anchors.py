"""A search that tells, in one pass over a prompt, where a known text may begin.

Each window of ``size`` characters is hashed (a polynomial modulo 2^64, from prefix sums, so all windows
cost a few array operations) and looked up in a bit table; the few windows that pass are looked up among
the anchors themselves. Nothing is rebuilt when anchors are added. Removed anchors leave their bits set:
that costs a look-up, never a wrong answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 22

Hashes = npt.NDArray[np.uint64]


class Anchors:
    """An index of texts by their first ``size`` characters; texts that share them (a heading, say) are kept
    sorted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._texts: dict[str, list[str]] = {}
        self._table = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)

    def add(self, text: str) -> None:
        anchor = text[: self.size]
        if anchor not in self._texts:
            self._table[self._slots(anchor)] = True
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
        maybe: list[int] = np.flatnonzero(self._table[self._slots(text)]).tolist()
        return [at for at in maybe if text[at : at + self.size] in self._texts]

    def _slots(self, text: str) -> Hashes:
        """Return the table slot of each window of ``text``: the top bits of its hash."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
        sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        np.cumsum(codes * _powers(_BASE, len(codes)), out=sums[1:])
        windows = sums[self.size :] - sums[: -self.size]
        hashes: Hashes = windows * _powers(_INVERSE, len(windows))
        return hashes >> np.uint64(64 - _TABLE_BITS)


def _powers(base: int, count: int) -> Hashes:
    """Return 1, base, base^2, ... modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)
