"""What stands before a chunk when it is prefilled: the text before it in its own document.

A chunk that is prefilled alone believes that it begins a text, and has not read what it refers to. Behind the
text that precedes it, it needs less repair, at no cost when it is retrieved (FusionRAG puts a chunk's nearest
neighbours there; the document's own text comes with ingest, and leaves with its document).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Ids = tuple[int, ...]
_KNOWN_BY = 32  # tokens at the end of a context that tell what it goes on from


class _Chunk(Protocol):
    @property
    def token_ids(self) -> Ids: ...
    @property
    def context(self) -> Ids: ...


T = TypeVar("T", bound=_Chunk)


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
            most = self._most(ids)
            found.setdefault(ids, behind[-most:] if most else ())
            behind = (*behind[-self.limit :], *ids, *self.separator) if self.limit else ()
        return [found[ids] for ids in chunks]

    def last(self, before: Sequence[Ids], chunk: Ids) -> tuple[Ids, int]:
        """The context of a chunk behind these, and how many of them, the last ones, it has text of."""
        most, context, count = self._most(chunk), Ids(), 0
        while len(context) < most and count < len(before):
            count += 1
            context = (*before[-count], *self.separator, *context)
        return context[-most:] if most else (), count

    def in_order(self, chunks: Sequence[T]) -> list[T]:
        """Each chunk after the one that its context ends with, if that is among them: so contexts are seldom
        computed, whatever order the chunks came in."""
        behind: dict[Ids, list[int]] = {}
        end = min(_KNOWN_BY, self.limit)
        for number, chunk in enumerate(chunks):
            behind.setdefault(chunk.context[-end:], []).append(number)
        ordered, done = list[T](), set[int]()
        for first in range(len(chunks)):
            following = [first]
            while next_ones := [number for number in following if number not in done]:
                done.add(next_ones[0])
                ordered.append(one := chunks[next_ones[0]])
                following = behind.get((*one.context, *one.token_ids, *self.separator)[-end:], [])
        return ordered

    def _most(self, chunk: Ids) -> int:
        return self.limit if self.room is None else min(self.limit, max(0, self.room - len(chunk)))
