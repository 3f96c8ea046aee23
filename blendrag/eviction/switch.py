"""From one policy to another while a tier is used, a few chunks at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from blendrag.eviction.hazard import Hazard
from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything


class PolicySwitch(EvictionPolicy):
    """Stands for both policies until :meth:`step` has carried everything over.

    Chunks go to the new policy in the order in which they would have left under the former one, and until the
    end it is that order which decides. So a chunk that is used meanwhile goes back to the former policy: it
    will be carried over later, behind those that were not used.
    """

    def __init__(self, former: EvictionPolicy, successor: EvictionPolicy, sizes: Mapping[str, int]) -> None:
        """sizes: of everything that ``former`` knows; read again and again, as it changes."""
        self.successor = successor
        self._former, self._sizes = former, sizes
        self._carried: OrderedDict[str, None] = OrderedDict()

    def step(self, most: int, use: Use) -> bool:
        """Carry over up to ``most`` chunks, as of ``use``; whether ``successor`` has them all."""
        for _ in range(most):
            key = self._former.victim()
            if key is None:
                break
            self._former.removed(key)
            self._carry(key, use)
        if self._former.victim() is not None:
            return False
        if len(self._carried) < len(self._sizes):  # the former policy, against its promise, did not name all
            for key in [key for key in self._sizes if key not in self._carried]:
                self._carry(key, use)
        return True

    def added(self, key: str, size: int, use: Use) -> None:
        self._take_back(key)
        self._former.added(key, size, use)

    def used(self, key: str, use: Use) -> None:
        if self._take_back(key):
            self._former.added(key, self._sizes[key], use)
        else:
            self._former.used(key, use)

    def removed(self, key: str) -> None:
        if not self._take_back(key):
            self._former.removed(key)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        return next(filter(may_leave, self._carried), None) or self._former.victim(may_leave)

    def taught(self, hazard: Hazard) -> EvictionPolicy | None:
        return self.successor.taught(hazard)

    def forecast(self, key: str, probability: float, at: float, conversation: str = "") -> None:
        policy = self.successor if key in self._carried else self._former
        policy.forecast(key, probability, at, conversation)

    def _carry(self, key: str, use: Use) -> None:
        if key in self._sizes:
            self._carried[key] = None
            self.successor.carried(key, self._sizes[key], use)

    def _take_back(self, key: str) -> bool:
        if key not in self._carried:
            return False
        del self._carried[key]
        self.successor.removed(key)
        return True
