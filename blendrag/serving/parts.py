"""Texts as vector stores give them: parts of documents, each with an owner that comes and goes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from blendrag.prompt.context import Contexts, Ids
from blendrag.store.catalogue import NewChunk
from blendrag.store.identity import KVIdentity, context_name


@dataclass(frozen=True, slots=True)
class Part:
    """An owner's chunks, and the other owners whose text stands before them in their document."""

    owner: str
    chunks: tuple[NewChunk, ...]
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes parts of texts. encode: token ids of a text."""

    identity: KVIdentity
    contexts: Contexts
    encode: Callable[[str], Ids]

    def of(self, documents: Mapping[str, Iterable[str]], sources: Mapping[str, str]) -> Iterator[Part]:
        """sources: the document that an owner's texts are a part of. Neighbours of one source stand in it one
        behind the other; an owner without a source stands alone.

        Several texts of an owner are forms of one (with metadata and without): each stands behind the same
        form of those before; one that comes again stands where it did first. Blanks around a text are not
        part of it: prompts often strip them.
        """
        source: str | None = None
        before: list[tuple[str, list[Ids]]] = []
        first: dict[Ids, tuple[Ids, list[str]]] = {}
        for owner, texts in documents.items():
            stripped = dict.fromkeys(text.strip() for text in texts)
            encoded = [(text, ids) for text in stripped if (ids := self.encode(text))]
            if sources.get(owner) != source:
                source, before, first = sources.get(owner), [], {}
            chunks, behind = [], set[str]()
            for form, (text, ids) in enumerate(encoded):
                if ids not in first:
                    same_form = [forms[min(form, len(forms) - 1)] for _, forms in before]
                    context, count = self.contexts.last(same_form, ids)
                    first[ids] = context, [one for one, _ in before[len(before) - count :]]
                context, owners = first[ids]
                behind.update(owners)
                chunks.append(self._chunk(text, ids, context))
            yield Part(owner, tuple(chunks), tuple(sorted(behind - {owner})))
            if source is not None and encoded:
                before = [*before, (owner, [ids for _, ids in encoded])][-max(1, self.contexts.limit) :]

    def alone(self, owner: str, texts: Iterable[tuple[str, Ids]]) -> Part:
        """An owner's texts behind nothing."""
        return Part(owner, tuple(self._chunk(text, ids, ()) for text, ids in texts))

    def _chunk(self, text: str, ids: Ids, context: Ids) -> NewChunk:
        return NewChunk(self.identity.chunk_key(ids, context_name(context)), text, ids, context)
