"""The tree's nodes as the client sees them: over the catalogue of the worker's :class:`NodeStore`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from blendrag.errors import StoreError, StoreMismatchError
from blendrag.files import sqlite
from blendrag.prompt.plan import Span
from blendrag.store.catalogue import Catalogue, Totals
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from blendrag.tree.path import Node, Nodes, path_of

_SPARE = 256  # nodes that are known and not stored, besides as many as are stored


@dataclass(frozen=True, slots=True)
class Row:
    """A node as ``blendrag stats --tree`` shows it. uses: by prompts that took its KV from the tree."""

    node: Node
    stored: bool
    nbytes: int
    uses: int

    def to_plain(self) -> dict[str, Any]:
        return asdict(self.node) | {"bytes": self.nbytes, "uses": self.uses}


class Next(NamedTuple):
    """The next part of a path to be stored. named: (key, end) of the nodes with its KV, from the root on; the
    last is new. new: what is to be stored, once for each document that it is of. state, kept_state: the
    states (of hybrid models) behind the nodes that are stored, and behind the new one."""

    named: tuple[tuple[str, int], ...]
    new: Nodes
    state: str = ""
    kept_state: str = ""


class Tree:
    """The tree of exact prefixes that a client knows. Open it with :meth:`open`. Thread-safe."""

    has_states: ClassVar[bool] = False
    """Whether there is a state behind each of its paths."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.identity = catalogue.identity

    @classmethod
    def open(cls, root: Path, identity: KVIdentity) -> tuple[Self, bool]:
        """Return the tree in ``root``, and whether it is an empty one in place of another identity's or a
        damaged one. Raises StoreError where none can be opened or made: it may be sound."""
        try:
            return cls(Catalogue.open(root, identity)), False
        except StoreError as error:
            if not (isinstance(error, StoreMismatchError) or sqlite.damaged(error)):
                raise
            shutil.rmtree(root, ignore_errors=True)
            return cls(Catalogue.open(root, identity)), True

    @classmethod
    def found(cls, root: Path) -> Tree | None:
        """Return the tree in ``root``, whatever engine it is of, if there is one."""
        return cls(Catalogue.open(root, None)) if Catalogue.is_in(root) else None

    def close(self) -> None:
        self._catalogue.close()

    def path(self, token_ids: Sequence[int], documents: Iterable[Span]) -> Nodes:
        """Return the nodes of a prompt. documents: ascending; may be none."""
        return path_of(self.identity, token_ids, documents)

    def held(self, path: Nodes) -> tuple[tuple[str, int], ...]:
        """Return (key, end) of the nodes with the KV of a stored path, from the root on."""
        return tuple((node.key, node.end) for node in path)

    def state(self, path: Nodes) -> str:
        """Return the key of the state behind a stored path; "" where the model keeps none."""
        return ""

    def next(self, path: Nodes, held: int, token_ids: Sequence[int]) -> Next:
        """Return what is to be stored next of a path whose first ``held`` nodes are."""
        return Next(self.held(path[: held + 1]), path[held : held + 1])

    def match(self, path: Nodes) -> int:
        """Return how many of the path's first nodes are stored: none counts behind one that is not."""
        stored = self._catalogue.ready(node.key for node in path)
        return next((at for at, node in enumerate(path) if node.key not in stored), len(path))

    def order(self, documents: Sequence[str]) -> list[int]:
        """Return the places of these documents (chunk keys, "" for unknown ones): first the longest stored
        path that they make, whatever stands before it; then the others as they came."""
        of = {
            key: document
            for document in filter(None, documents)
            for keys in self._catalogue.owners(f"{document} ").values()
            for key in keys
        }
        behind = self._catalogue.ready_behind(of)
        # A node of several documents is found by none of them alone, nor does it say their order.
        alone = Counter(owner.partition(" ")[2] for owner in self._catalogue.owners_of(of))
        children = {(parent, of[key]): key for key, parent in behind.items() if alone[key] == 1}
        parents = set(behind.values()) - {""}
        roots = ["", *(owner[1:] for owner in self._catalogue.owners_of(parents) if owner.startswith(" "))]

        def longest(node: str, left: list[int]) -> list[int]:
            found: list[int] = []
            for place in left:
                if child := children.get((node, documents[place])):
                    path = [place, *longest(child, [other for other in left if other != place])]
                    found = max(found, path, key=len)
            return found

        places = list(range(len(documents)))
        first = max((longest(root, places) for root in roots), key=len)
        return first + [place for place in places if place not in first]

    def knows(self, key: str) -> bool:
        """Return whether a node is stored, or about to be."""
        return self._catalogue.knows(key)

    def expect(self, path: Nodes, token_ids: Sequence[int]) -> None:
        """Note that these nodes, in a path's order, are about to be stored. The worker accepts no others."""
        for node in path:
            ids = tuple(token_ids[: node.end])
            self._catalogue.register(_owner(node), [Chunk(node.key, "", ids, (), node.parent)])

    def forget(self, documents: Iterable[str]) -> list[str]:
        """Forget every node whose path holds one of these documents. Returns their keys, each before those
        that it stands behind."""
        keys = [
            key for name in documents for held in self._catalogue.owners(f"{name} ").values() for key in held
        ]
        return self._release(keys)

    def documents(self) -> set[str]:
        """Return the documents in its paths."""
        return {owner.partition(" ")[0] for owner in self._catalogue.owners()} - {""}

    def withdraw(self, path: Nodes) -> list[str]:
        """Forget these nodes, as :meth:`forget` does."""
        return self._release([node.key for node in path])

    def prune(self, path: Nodes = ()) -> list[str]:
        """Forget what is known and not stored, except this path's nodes, once that is too much, as
        :meth:`forget` does."""
        totals = self._catalogue.totals()
        if totals.chunks <= _SPARE + 2 * totals.ready:
            return []
        known = self._catalogue.known()
        absent = known - self._catalogue.ready(known) - {node.key for node in path}
        return self._release(sorted(absent))

    def _release(self, keys: Sequence[str]) -> list[str]:
        behind = [entry.key for entry in self._catalogue.behind(keys)]
        keys = list(dict.fromkeys([*reversed(behind), *keys]))
        self._catalogue.release(*self._catalogue.owners_of(keys))  # a crash leaves no path broken
        return keys

    def totals(self) -> Totals:
        return self._catalogue.totals()

    def rows(self) -> list[Row]:
        """Return all nodes, oldest first, so that each comes after what it stands behind."""
        uses = {row.owner: row.uses for row in self._catalogue.reuse(-1)}
        documents = {
            key: owner.partition(" ")[0] for owner, keys in self._catalogue.owners().items() for key in keys
        }
        ends: dict[str, int] = {}
        rows = []
        for entry in self._catalogue.entries():
            ends[entry.key] = len(entry.token_ids)
            start = ends.get(entry.after, 0)
            node = Node(entry.key, entry.after, start, len(entry.token_ids), documents[entry.key])
            rows.append(Row(node, entry.state == "ready", entry.bytes, uses[_owner(node)]))
        return rows

    def parents(self) -> dict[str, str]:
        """Return the parent of each node that is known, by key."""
        return {entry.key: entry.after for entry in self._catalogue.entries()}


def _owner(node: Node) -> str:
    """Return the node's owner. Each node has its own, whose name begins with the node's document."""
    return f"{node.document} {node.key}"
