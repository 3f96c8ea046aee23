"""Progress of long work, as it was told."""

from __future__ import annotations

from blendrag.progress import Progress


class Noted(Progress):
    """at: what was done when each of the notes came."""

    def __init__(self) -> None:
        self.notes, self.at, self.expected, self.done = list[str](), list[int](), 0, 0

    def note(self, what: str) -> None:
        self.notes.append(what)
        self.at.append(self.done)

    def total(self, amount: int) -> None:
        self.expected += amount

    def advance(self, amount: int = 1) -> None:
        self.done += amount
