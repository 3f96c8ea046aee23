"""Learned Prefix Caching (LPC, section 3.4): chunks of conversations that are over leave first."""

from __future__ import annotations

import math

from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything, register_policy

SCALE = 1e-2  # per second: one over the mean gap between turns (section 3.4.2)
_LEAST = 1e-6  # 0 and 1 have no logit
_SHARING = 8
_NOBODY = ""  # the owner of the usual chance, which holds until a forecast comes
_LATELY = 1e-3  # the weight of one more forecast in the usual chance

_Lines = tuple[tuple[float, str], ...]  # lines, the highest first, each with its conversation


@register_policy("lpc")
class LPC(EvictionPolicy):
    """The policy that ranks a chunk by the chance that a conversation that used it goes on. The chance fades
    while nothing happens.

    The paper's p' = p d / (p d + 1 - p) with d = exp(-(t - t_last) scale) is a line in logits:
    logit(p') = logit(p) - scale (t - t_last). All chunks' lines fall alike, so that their order never changes
    while time passes: the heap holds the constant logit(p) + scale t_last, and the paper's sweep over all
    chunks every 10 seconds would change nothing. The maximum over conversations that share a chunk (section
    3.5) is that of their constants. A conversation's new forecast takes the place of its former one.

    Between a use and its forecast the chance is what it lately was on average: were it 1/2 where most go on,
    the newest chunks would leave first. If no forecast ever comes, or always the same, that is exactly LRU.
    """

    def __init__(self) -> None:
        self._heap = IndexedHeap()
        self._lines: dict[str, _Lines] = {}
        self._usual: float | None = None

    def added(self, key: str, size: int, use: Use) -> None:
        chance = 0.5 if self._usual is None else self._usual
        self._note(key, _logit(chance) + SCALE * self._now(use.at), _NOBODY)

    def used(self, key: str, use: Use) -> None:
        if key in self._lines:
            self.added(key, 0, use)

    def removed(self, key: str) -> None:
        self._heap.remove(key)
        self._lines.pop(key, None)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        return self._heap.first(may_leave)

    def forecast(self, key: str, probability: float, at: float, conversation: str = "") -> None:
        if key in self._lines and 0.0 <= probability <= 1.0:
            usual = probability if self._usual is None else self._usual
            self._usual = usual + _LATELY * (probability - usual)
            self._note(key, _logit(probability) + SCALE * self._now(at), conversation or "?")

    def _note(self, key: str, line: float, whose: str) -> None:
        others = (one for one in self._lines.get(key, ()) if one[1] not in (whose, _NOBODY))
        lines = tuple(sorted([(line, whose), *others], reverse=True)[:_SHARING])
        self._lines[key] = lines
        self._heap.push(key, lines[0][0])


def _logit(chance: float) -> float:
    chance = min(max(chance, _LEAST), 1.0 - _LEAST)
    return math.log(chance / (1.0 - chance))
