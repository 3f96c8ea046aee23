"""What is known of a use when it happens: the features of the hazard model. Only the past is in them."""

from __future__ import annotations

from collections import OrderedDict

from blendrag.eviction.interface import Use

FEATURES = (
    "count", "gap", "first", "depth", "length", "new", "fresh", "last", "answer", "similarity", "continues",
)  # fmt: skip
"""count: uses so far, this one included. gap: seconds since the use before; -1: there was none. first:
seconds since the first use; with the count it tells a rate. depth, length: place in the prompt, and chunks in
it. new: chunks of the prompt never seen before. fresh: 1 for one of these. last: 1 for the prompt's last
chunk (which, being cut off anywhere, seldom comes again). answer: tokens of what was answered. similarity: to
the questions asked lately. continues: chance that the conversation goes on; -1: nobody said."""

Features = tuple[float, ...]
UNTOLD = -1.0


class History:
    """Uses of each chunk, also of chunks that left: of the ``most`` used last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._uses: OrderedDict[str, tuple[int, float, float]] = OrderedDict()  # count, first time, last

    def used(self, key: str, use: Use, at: float) -> Features:
        """Note a use at ``at``, and what was known of it then."""
        count, first, last = self._uses.get(key, (0, at, at))
        gap = at - last if count else -1.0
        count += 1
        self._uses[key] = (count, first, at)
        if count > 1:
            self._uses.move_to_end(key)
        elif len(self._uses) > self.most:
            self._uses.popitem(last=False)
        new = max(0, use.length - use.known)
        fresh, tail = float(use.depth >= use.known), float(use.depth == use.length - 1)
        place = (use.depth, use.length, new, fresh, tail)
        return (count, gap, at - first, *place, use.answer, use.similarity, UNTOLD)
