"""The policy that evicts the least recently used chunk."""

from __future__ import annotations

from collections import OrderedDict

from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything, register_policy


@register_policy("lru")
class LRU(EvictionPolicy):
    """The policy by which the chunk leaves that was not read for longest, by the order of calls."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def added(self, key: str, size: int, use: Use) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, key: str, use: Use) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: str) -> None:
        self._order.pop(key, None)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        return next(filter(may_leave, self._order), None)
