"""The tree of a hybrid model, whose exact prefixes end where a state is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blendrag.prompt.plan import Span
from blendrag.tree.path import Node, Nodes, parts_of, place, state_key
from blendrag.tree.tree import Next, Tree


class StateTree(Tree):
    """The tree of a model that keeps a state beside KV. A path's nodes are the states behind its documents,
    by their tokens alone; KV is stored in one node from the last state that is held to the next, over as many
    documents as that takes. So states are where paths part, and where they end."""

    has_states = True

    def path(self, token_ids: Sequence[int], documents: Iterable[Span]) -> Nodes:
        return tuple(
            Node(state_key(self.identity, token_ids[:end]), "", start, end, document)
            for document, start, end in parts_of(documents)
        )

    def match(self, path: Nodes) -> int:
        """Return how many of the path's first nodes end in the last of its states that is stored, with all KV
        before it."""
        return next((at for at in range(len(path), 0, -1) if self.held(path[:at])), 0)

    def held(self, path: Nodes) -> tuple[tuple[str, int], ...]:
        """Return the nodes with the KV of a path that ends in a stored state, from the root on; none if that
        or one of them is not stored any more."""
        found: list[tuple[str, int]] = []
        key = self.state(path)
        while key:
            entries = self._catalogue.entries_of([key])
            if not entries or entries[0].state != "ready":
                return ()
            found.append((key, len(entries[0].token_ids)))
            key = entries[0].after
        return tuple(reversed(found[1:]))  # the first is the state

    def state(self, path: Nodes) -> str:
        return path[-1].key if path else ""

    def next(self, path: Nodes, held: int, token_ids: Sequence[int]) -> Next:
        before = self.held(path[:held])
        parent, start = before[-1] if before else ("", 0)
        end = path[-1].end
        key = self.identity.chunk_key(token_ids[:end], place(start, parent))
        # A node of documents begins with what stands before the first: it is theirs.
        documents = [node.document for node in path if node.end > start and node.document] or [""]
        new = [Node(key, parent, start, end, document) for document in documents]
        new.append(Node(path[-1].key, key, end, end, path[-1].document))
        return Next((*before, (key, end)), tuple(new), self.state(path[:held]), path[-1].key)

    def expect(self, path: Nodes, token_ids: Sequence[int]) -> None:
        # A state's key does not say where the nodes before it end, which may be elsewhere than it was.
        self._release([path[-1].key])
        super().expect(path, token_ids)
