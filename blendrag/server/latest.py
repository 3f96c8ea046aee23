"""The latest prompts of a tenant: what became of their tokens, without their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from threading import Lock
from typing import Any

MOST_PROMPTS = 32
_MOST_BYTES = 1 << 20  # roughly, of all; the latest is kept whatever it takes
_ROW_BYTES = 400
_KEPT = ("kind", "source", "tokens", "reused", "reason", "start", "chunk_key")
_FACTS = ("computed_at", "missing", "decision", "prefill_s", "tiers", "ms")


class LatestPrompts:
    """The latest prompts, in this process. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_PROMPTS)
        self._lock = Lock()

    def add(self, counts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Note a prompt by its evidence, as ``Blending.evidence`` has it.

        Kept are counts, positions and the names of documents that it holds; no text of it, of its answer or
        of its documents.
        """
        rows = [{name: row[name] for name in _KEPT} for row in facts.get("documents", ()) if _told(row)]
        for row in rows:
            if row["start"] is None:
                row["source"] = None  # a document's first words, where it has no name
        kept = {name: facts[name] for name in _FACTS if name in facts}
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        size = len(rows) * _ROW_BYTES + len(kept.get("computed_at", ""))
        with self._lock:
            self._prompts.append((size, {"at": at, **counts, **kept, "documents": rows}))
            while len(self._prompts) > 1 and sum(size for size, _ in self._prompts) > _MOST_BYTES:
                self._prompts.popleft()

    def all(self) -> list[dict[str, Any]]:
        """Return them, latest first."""
        with self._lock:
            return [prompt for _, prompt in reversed(self._prompts)]


def _told(row: Mapping[str, Any]) -> bool:
    """Return whether a row is about a document."""
    return row["kind"] != "fresh" or row["chunk_key"] is not None
