"""Whether the learned order is better than LRU's just now: both are tried out on a sample of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from blendrag.eviction.ranks import Ranks

_KEYS = 2048  # each trial cache holds at most
_MEMORY = 2000.0  # uses of sampled keys, after which a hit counts 1/e
_MARGIN = 1.02  # so much more, relatively, the other side has to find for a change of sides


class Guard:
    """Two small caches, one evicting in the learned order, one in LRU's, see the same sample of the uses.

    A key is in the sample by its hash, so a trial cache that has a share of the keys and the same share of
    the space finds what the whole would find (SHARDS). The sample is halved whenever it becomes too large.
    """

    def __init__(self, ages: Sequence[float]) -> None:
        self._trials = Ranks(ages), Ranks((0.0,))  # learned, LRU
        self._found = [0.0, 0.0]
        self._mask = 0
        self.learned = True
        """Whether the learned order is the one to follow."""

    def used(self, key: str, size: int, levels: bytes, now: float, held: int | None) -> None:
        """Any key's use. levels: the model's, by age. held: how much fits into the cache; None: unknown."""
        if crc32(key.encode()) & self._mask:
            return
        for side, trial in enumerate(self._trials):
            found = size if key in trial else 0
            self._found[side] += found - self._found[side] / _MEMORY
            trial.used(key, size, levels, now)
            if held is not None:
                self._make_room(trial, held / (self._mask + 1))
        if max(map(len, self._trials)) > _KEYS:
            self._halve()
        learned, lru = self._found
        self.learned = lru <= learned * _MARGIN if self.learned else learned > lru * _MARGIN

    def revised(self, key: str, levels: bytes) -> None:
        """The model says something else of the key's last use."""
        self._trials[0].revise(key, levels)

    def _make_room(self, trial: Ranks, room: float) -> None:
        while trial.size > room:
            victim = trial.least() if trial is self._trials[0] else trial.oldest()
            assert victim is not None
            trial.remove(victim)

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        for trial in self._trials:
            for key in [key for key in trial if crc32(key.encode()) & self._mask]:
                trial.remove(key)
