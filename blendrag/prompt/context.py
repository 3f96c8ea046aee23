"""What stands before a chunk when it is prefilled: the text before it in its own document.

A chunk that is prefilled alone believes that it begins a text, and has not read what it refers to. Behind the
text that precedes it, it needs less repair, at no cost when it is retrieved (FusionRAG puts a chunk's nearest
neighbours there; the document's own text comes with ingest, and leaves with its document).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contexts:
    """separator: token ids that prompts have between documents, and contexts between chunks. limit: tokens of
    the longest context; 0: none. room: tokens that context and chunk may have together."""

    separator: Ids = ()
    limit: int = 0
    room: int | None = None

    def of(self, chunks: Sequence[Ids], before: Ids = ()) -> list[Ids]:
        """The context of each chunk of a document, whose chunks are in order: the last tokens before it.

        before: text before the first chunk. Equal chunks share the context of the first of them.
        """
        found: dict[Ids, Ids] = {}
        behind = before
        for ids in chunks:
            most = self.limit if self.room is None else min(self.limit, max(0, self.room - len(ids)))
            found.setdefault(ids, behind[-most:] if most else ())
            behind = (*behind[-self.limit :], *ids, *self.separator) if self.limit else ()
        return [found[ids] for ids in chunks]
