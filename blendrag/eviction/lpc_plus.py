"""The policy learned from chunks' own uses: eviction for chunks, not only for conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from blendrag.eviction.fitted import load_fitted
from blendrag.eviction.hazard import Features, Hazard, History
from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything, register_policy
from blendrag.eviction.ranks import RankedChunks

_MIN_REMEMBERED, _TIMES = 4096, 4  # counted chunks: the larger of this, and so many times the held
_UNTAUGHT = b"\0"  # everything on one level: the order of LRU
_KEYS = 2048  # keys that each trial cache holds, at most
_MEMORY = 2000.0  # uses of sampled keys, after which a hit counts 1/e
_MARGIN = 1.02  # how much more, relatively, the other side has to find to take over


@register_policy("lpc+")
class LPCPlus(EvictionPolicy):
    """The policy by which the chunk leaves first that is expected to be used least per second of its stay
    (:mod:`.hazard`).

    LPC ranks by the chance that a conversation goes on, and lets it fade. Here that forecast is one feature
    among others, and how the chance changes with time is learned, too: a chat pauses for a minute and then
    goes on, so its chunks are worth more after a minute than after a second. Without a model it is LRU. While
    LRU would lately have found more on a sample of the keys (:class:`_Guard`), it is LRU as well.

    The chunks of a prompt are to be named from its end to its beginning, as a prefix cache drops them.
    """

    def __init__(self, hazard: Hazard | None = None) -> None:
        ages = hazard.ages if hazard else (0.0,)
        self._hazard = hazard
        self._history = History(_MIN_REMEMBERED)
        self._features: dict[str, Features] = {}  # of the last use of each chunk that is held
        self._ranks = RankedChunks(ages)
        self._guard = _Guard(ages)
        self._held: int | None = None
        self._prompt: tuple[float, float, float] | None = None  # of the call before: its time, length, new
        self._depth, self._floor = 0.0, b""  # of the call before: the place in the prompt, and its levels

    @classmethod
    def fitted(cls, file: Path) -> LPCPlus:
        return cls(load_fitted(file).hazard)

    @property
    def learned(self) -> bool:
        """Return whether the model decides now."""
        return self._hazard is not None and self._guard.learned

    def added(self, key: str, size: int, use: Use) -> None:
        self._use(key, size, use)
        self._history.most = max(_MIN_REMEMBERED, _TIMES * len(self._features))

    def used(self, key: str, use: Use) -> None:
        size = self._ranks.size_of(key)
        if size is not None:
            self._use(key, size, use)

    def removed(self, key: str) -> None:
        self._ranks.remove(key)
        self._features.pop(key, None)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        self._held = self._ranks.size
        return self._ranks.least(may_leave) if self.learned else self._ranks.oldest(may_leave)

    def forecast(self, key: str, probability: float, at: float, conversation: str = "") -> None:
        """Note a forecast: since the chunk's last use the highest counts (LPC, section 3.5)."""
        features = self._features.get(key)
        if features is None or not features[-1] < probability <= 1.0:
            return
        now = self._now(at)
        features = self._features[key] = (*features[:-1], probability)
        levels = self._levels(features, now)
        self._ranks.revise(key, levels)
        if self._hazard:
            self._guard.revised(key, levels)

    def _use(self, key: str, size: int, use: Use) -> None:
        now = self._now(use.at)
        features = self._features[key] = self._history.used(key, use, now)
        levels = self._levels(features, now)
        self._ranks.used(key, size, levels, now)
        if self._hazard:
            self._guard.used(key, size, levels, now, self._held)

    def _levels(self, features: Features, now: float) -> bytes:
        if self._hazard is None:
            return _UNTAUGHT
        levels = self._hazard.levels(self._hazard.case(features))
        if not self._hazard.prefix:
            return levels
        _, _, _, depth, length, new, *_ = features
        prompt = (now, length, new)
        if prompt == self._prompt and depth < self._depth and levels != self._floor:
            levels = bytes(map(max, levels, self._floor))  # without it the chunks behind it are of no use
        self._prompt, self._depth, self._floor = prompt, depth, levels
        return levels


class _Guard:
    """A comparison of the learned order with LRU's: two small caches see the same sample of the uses.

    A key is in the sample by its hash, so a trial cache with a share of the keys and the same share of the
    space has the hit rate of the whole (SHARDS). The sample is halved whenever it becomes too large.
    """

    def __init__(self, ages: Sequence[float]) -> None:
        self._trials = RankedChunks(ages), RankedChunks((0.0,))  # learned, LRU
        self._found = [0.0, 0.0]
        self._mask = 0
        self.learned = True
        """True if the learned order is the one to follow."""

    def used(self, key: str, size: int, levels: bytes, now: float, held: int | None) -> None:
        """Note a use of any key. levels: by age. held: what fits into the cache; None: unknown."""
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
        """Note that the model's levels for the key's last use have changed."""
        self._trials[0].revise(key, levels)

    def _make_room(self, trial: RankedChunks, room: float) -> None:
        while trial.size > room:
            victim = trial.least() if trial is self._trials[0] else trial.oldest()
            assert victim is not None
            trial.remove(victim)

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        for trial in self._trials:
            for key in [key for key in trial if crc32(key.encode()) & self._mask]:
                trial.remove(key)
