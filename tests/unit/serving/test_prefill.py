"""What is told of a prefill while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from blendrag.progress import Progress
from blendrag.serving.prefill import PrefillReport, prefill_pending


class Store:
    def ingest(self, batch: list[Any]) -> Any:
        return SimpleNamespace(tokens=sum(len(one.token_ids) for one in batch), seconds=1.0, nbytes=1)

    def flush(self) -> int:
        return 0


class Noting(Progress):
    def __init__(self) -> None:
        self.done, self.at = 0, list[int]()

    def note(self, what: str) -> None:
        self.at.append(self.done)

    def advance(self, amount: int = 1) -> None:
        self.done += amount


def test_progress_is_told_a_batch_late() -> None:
    entries: Any = [SimpleNamespace(token_ids=(1, 2, 3)), SimpleNamespace(token_ids=(4, 5))]
    store: Any = Store()
    noting = Noting()
    prefill_pending(entries, store, 3, PrefillReport(), noting)
    assert noting.at == [3, 5]
