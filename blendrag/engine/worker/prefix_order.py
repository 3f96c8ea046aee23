"""The order in which vLLM's prefix cache gives up blocks: first those of conversations that are over.

vLLM leaves the KV of finished requests in their blocks and takes the block that was freed first when it needs
one. It hands its pool of blocks to the connector, so that a connector can put free blocks elsewhere in that
queue. Nothing else is touched: what a block holds, by which hash it is found, who uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from blendrag.engine.compat.connector import FreeBlocks

UNLIKELY = 0.3
"""Below this chance a conversation is over. In the paper's order (:mod:`blendrag.eviction.lpc`) such blocks
count as used ln(7 / 3) / scale = 85 s before they were. Measured against .1, .2 and .5."""

_NEAR = 256  # empty blocks at the front: as long as there are so many, nothing that is held is given up soon
_TIMES = 4  # so many times as many blocks as there are, are remembered to be of use to somebody

_Held = list[tuple[int, bytes]]  # blocks and what they hold, the prompt's last one first


class PrefixOrder:
    """Told of conversations and requests by the connector's scheduler half, in whose thread all calls are.

    A block that several conversations use (LPC, section 3.5) stays where it is until all of them are over.
    """

    def __init__(self, blocks: FreeBlocks) -> None:
        self._blocks = blocks
        self._asking: Counter[str] = Counter()  # conversations with requests under way
        self._told: dict[str, float] = {}  # forecasts for these
        self._held: OrderedDict[str, _Held] = OrderedDict()  # conversations that may go on
        self._remembered = 0  # blocks in it
        self._users: Counter[bytes] = Counter()  # how many of them use a block, by what it holds
        self._leaving: dict[int, bytes] = {}  # blocks that nobody is expected to use again

    def began(self, conversation: str) -> None:
        """A request of the conversation came in. It will need blocks."""
        self._asking[conversation] += 1
        self.settle()

    def finished(self, conversation: str, block_ids: Sequence[int]) -> None:
        """The request has ended; its blocks, in the prompt's order, are freed after this."""
        self._asking[conversation] -= 1
        if self._asking[conversation] < 1:
            del self._asking[conversation]
        self._dismiss(conversation)
        blocks = [(block, self._blocks.holds(block)) for block in reversed(block_ids)]
        held = [(block, content) for block, content in blocks if content is not None]
        self._held[conversation] = held
        self._users.update(content for _, content in held)
        self._remembered += len(held)
        if self._told.pop(conversation, 1.0) < UNLIKELY:
            self._leaving.update(self._dismiss(conversation))
        while self._remembered > _TIMES * len(self._blocks):
            self._dismiss(next(iter(self._held)))

    def forecast(self, conversation: str, probability: float) -> None:
        """The conversation goes on with this chance after its last request; NaN: nobody knows."""
        known = 0.0 <= probability <= 1.0
        if known and conversation in self._asking:
            self._told[conversation] = probability
        elif known and probability < UNLIKELY:
            self._leaving.update(self._dismiss(conversation))

    def settle(self) -> None:
        """Put what is leaving to the front of the queue, behind blocks that hold nothing."""
        if not self._leaving or (empty := self._blocks.empty_in_front(_NEAR)) == _NEAR:
            return
        first: list[int] = []
        for block, content in list(self._leaving.items()):
            if self._blocks.holds(block) != content or content in self._users:
                del self._leaving[block]  # it was given up, or somebody has come to use it
            elif self._blocks.is_free(block):
                del self._leaving[block]
                first.append(block)
        self._blocks.put_behind(empty, first)

    def _dismiss(self, conversation: str) -> _Held:
        """Count the conversation's blocks as its own no longer."""
        held = self._held.pop(conversation, [])
        self._remembered -= len(held)
        for _, content in held:
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]
        return held
