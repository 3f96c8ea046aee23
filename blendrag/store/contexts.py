"""The context of a chunk, which it is prefilled behind: the text before it in its own document.

A chunk that is prefilled alone believes that it begins a text, and has not read what it refers to. Behind the
text that precedes it, it needs less repair, at no cost when it is retrieved (FusionRAG puts a chunk's nearest
neighbours there; the document's own text comes with ingest, and leaves with its document).

The KV of a context is that of the chunk before, which has read what is before it: so a chunk's key names the
chunk before it, and with it all that its KV has traces of. A chunk is kept only as long as the chunk before
it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from blendrag.store.identity import KVIdentity, context_name

Ids = tuple[int, ...]


State = Literal["pending", "ready", "evicted"]


class Chunk(NamedTuple):
    """A chunk of a text, and its place among others. key: names its KV. context: token ids of the text before
    it that it is prefilled behind; after: the key of the chunk that this text ends with, ``""`` for none.
    state: whether its KV is there, as the catalogue knows; bytes: of that, 0 unless ready."""

    key: str
    text: str
    token_ids: Ids
    context: Ids = ()
    after: str = ""
    state: State = "pending"
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of an index's chunks. separator: token ids that prompts have between documents, and
    contexts between chunks. limit: tokens of the longest context; 0: none. room: tokens that context and
    chunk may have together."""

    identity: KVIdentity
    separator: Ids = ()
    limit: int = 0
    room: int | None = None

    def chunk(self, text: str, ids: Ids, before: Chunk | None = None) -> Chunk:
        """Return a chunk behind the last tokens of ``before``, and of its context."""
        most = self.limit if self.room is None else min(self.limit, max(0, self.room - len(ids)))
        if before is None or most == 0:
            return Chunk(self.identity.chunk_key(ids), text, ids)
        context = (*before.context, *before.token_ids, *self.separator)[-most:]
        key = self.identity.chunk_key(ids, context_name(context, before.key))
        return Chunk(key, text, ids, context, before.key)

    def document(self, pieces: Iterable[tuple[str, Ids]], before: Chunk | None = None) -> list[Chunk]:
        """Return the chunks of a document, in order. before: what precedes the first of them.

        A piece that is repeated gives its first chunk again, and the next piece stands behind that.
        """
        made: dict[Ids, Chunk] = {}
        chunks = []
        for text, ids in pieces:
            before = made.setdefault(ids, self.chunk(text, ids, before))
            chunks.append(before)
        return chunks
