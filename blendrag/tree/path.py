"""The nodes that a prompt passes through, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blendrag.prompt.plan import Span
from blendrag.store.identity import KVIdentity
from blendrag.store.record import TokenIds


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens [start, end) of a prompt: one document and what stands between it and the document before.

    key: names identity and namespace, all token ids up to ``end``, and with ``parent`` (the key of the node
    that ends at ``start``; "" for the first) where the nodes before it end. document: the key of its chunk;
    "" for what stands before the first document.
    """

    key: str
    parent: str
    start: int
    end: int
    document: str = ""


Nodes = tuple[Node, ...]  # of a path, from the root on


def place(start: int, parent: str) -> str:
    """Return what a record says of a node besides its token ids (``Head.context``)."""
    return f"{start}:{parent}"


def placed(context: str) -> tuple[int, str]:
    """Return the start and the parent in a record's ``context``. Raises ValueError if it is not a node's."""
    start, colon, parent = context.partition(":")
    if not (colon and start.isascii() and start.isdecimal()) or bool(parent) != (start != "0"):
        raise ValueError(f"{context!r} is no place in a tree")
    return int(start), parent


def state_key(identity: KVIdentity, token_ids: Sequence[int] | TokenIds) -> str:
    """Return the name of a hybrid model's state behind these tokens, wherever the nodes before it end."""
    return identity.chunk_key(token_ids, "state")


def path_of(identity: KVIdentity, token_ids: Sequence[int], documents: Iterable[Span]) -> Nodes:
    """Return the nodes of a prompt. documents: ascending; may be none."""
    nodes: list[Node] = []
    parent = ""
    for document, start, end in parts_of(documents):
        key = identity.chunk_key(token_ids[:end], place(start, parent))
        nodes.append(Node(key, parent, start, end, document))
        parent = key
    return tuple(nodes)


def parts_of(documents: Iterable[Span]) -> Iterator[tuple[str, int, int]]:
    """Yield the document, the start and the end of each node that a prompt with these documents has."""
    end = 0
    for document, at, length in documents:
        if not end and at:  # what stands before the first document
            yield "", 0, at
            end = at
        yield document, end, at + length
        end = at + length
