"""The counts of how often chunks were used, also of chunks that have left."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_LEAST = 1024


@dataclass(slots=True)
class Count:
    """The counts of one chunk. uses: all its uses. computed: uses for which it had to be computed. costs: the
    costs of those, in seconds per unit of size, added up."""

    uses: int = 0
    computed: int = 0
    costs: float = 0.0


class Counts:
    """The counts of the chunks that are held, and of a multiple of that number that left last.

    A frequency that began anew with every return would make a chunk that comes and goes look new each time.
    RAGCache counts within a window of time (section 5.1); this window is one of chunks, so that memory is
    bounded whatever the rate.
    """

    def __init__(self, times: int = 4) -> None:
        self._times = times
        self._held: dict[str, Count] = {}
        self._left: OrderedDict[str, Count] = OrderedDict()

    def of(self, key: str) -> Count:
        """Return the record of a chunk that is held from now on."""
        seen = self._held.get(key)
        if seen is None:
            seen = self._held[key] = self._left.pop(key) if key in self._left else Count()
        return seen

    def left(self, key: str) -> None:
        """Note that the chunk is no longer held."""
        seen = self._held.pop(key, None)
        if seen is not None:
            self._left[key] = seen
            while len(self._left) > max(_LEAST, self._times * len(self._held)):
                self._left.popitem(last=False)
