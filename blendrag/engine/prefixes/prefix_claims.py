"""The scheduler's half of exact prefixes: which tokens are claimed, and when a node is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.compat.states import StateBlocks
from blendrag.engine.hooks import Asked, Orders, SchedulerHook
from blendrag.engine.wire.prefixes import MIN_LOADED, NodeLoad, NodeSave, PrefixPath, read_path
from blendrag.engine.wire.report import BlendReport


@dataclass(slots=True)
class _Growing:
    """A running request. ready: how many nodes of its path are stored, or were ordered to be."""

    asked: Asked
    path: PrefixPath
    block_ids: list[int]
    ready: int

    def save(self, key: str, parent: str, start: int, end: int, blocks: Sequence[int]) -> NodeSave:
        ids = self.asked.ids(end)
        return NodeSave(self.asked.id, self.path.tree, key, parent, start, ids, blocks)

    def completed(self, tokens: int) -> list[NodeSave]:
        """Return the nodes that end within so many tokens and were not ordered yet."""
        path, saves = self.path, []
        while self.ready < path.kept and path.nodes[self.ready][1] <= tokens:
            key, end = path.nodes[self.ready]
            parent, start = path.parent(self.ready), path.start(self.ready)
            saves.append(self.save(key, parent, start, end, list(self.block_ids)))
            self.ready += 1
        return saves


class PrefixClaims(SchedulerHook):
    """The claims of requests that are not blended. states: the blocks of a hybrid model."""

    name = "prefixes"

    def __init__(self, least: int = MIN_LOADED, states: StateBlocks | None = None) -> None:
        self._least, self._states = least, states
        self._growing: dict[str, _Growing] = {}
        self._loads: list[NodeLoad] = []

    def arrived(self, asked: Asked) -> None:
        read_path(asked.params, asked.prompt)

    def claim(self, asked: Asked, computed: int) -> int:
        """Return how many tokens to load behind ``computed`` ones. Raises any exception for a broken path."""
        path = _path(asked) if asked.plain else None
        if path is None:
            return 0
        claimed = self._loaded(asked, path) - computed
        return claimed if claimed >= self._least else 0

    def _loaded(self, asked: Asked, path: PrefixPath) -> int:
        """Return how many tokens can come from the tree: not all of a prompt. A state is that behind the last
        node's end, and behind no other token."""
        if self._states is None:
            return min(path.held_end, asked.prompt - 1)
        return path.held_end if path.state and path.held_end < asked.prompt else 0

    def allocated(self, asked: Asked, block_ids: Sequence[list[int]], claimed: int) -> None:
        """Note the blocks of a request; ``claimed`` of its tokens are to be loaded. It is called again for a
        request that had to give its blocks up, or has waited for what was loaded."""
        if not asked.plain:
            return
        try:
            path = _path(asked)
        except Exception:  # it was refused before
            return
        if path is None:
            return
        asked.counts = not path.grows
        own = block_ids[self._states.groups.attention if self._states else 0]
        known = asked.id in self._growing
        if known:
            self._growing[asked.id].block_ids = list(own)
        else:
            self._growing[asked.id] = _Growing(asked, path, list(own), path.held)
        used = path.held and not known and not path.grows
        if claimed or used:  # without tokens: a use of what the engine has itself
            end, written = path.held_end, self._loaded(asked, path) - claimed
            nodes, ids = path.nodes[: path.held], asked.ids(end) if claimed else []
            states = self._states.states(asked.id, end) if self._states and claimed else []
            use, state = not path.grows, path.state
            load = NodeLoad(
                asked.id, asked.ticket, path.tree, nodes, ids, list(own), written, use, state, states
            )
            self._loads.append(load)

    def orders(self, step: SchedulerStep) -> Orders:
        loads, self._loads = self._loads, []
        return Orders(loads, self._saves(step))

    def _saves(self, step: SchedulerStep) -> list[NodeSave]:
        """Return the nodes that the step at hand completes."""
        if not self._growing:
            return []
        for request_id, blocks in () if self._states else step.more_blocks():
            if growing := self._growing.get(request_id):
                growing.block_ids += blocks
        saves: list[NodeSave] = []
        for request_id, tokens in step.tokens.items():
            if growing := self._growing.get(request_id):
                reached = growing.asked.computed + tokens
                if self._states:
                    growing.block_ids = self._states.kv(request_id)
                completed = growing.completed(reached)
                saves += completed
                if self._states and completed:
                    key, end = growing.path.nodes[growing.path.kept - 1]
                    if end == reached:
                        blocks = self._states.states(request_id, end)
                        saves.append(growing.save(growing.path.kept_state, key, end, end, blocks))
        return saves

    def reported(self, asked: Asked, report: BlendReport) -> None:
        if report.fallback:  # nothing more of it is stored
            self.finished(asked.id)

    def finished(self, request_id: str) -> None:
        self._growing.pop(request_id, None)


def held_tokens(asked: Asked) -> int:
    """Return how many tokens of a request's prompt the tree has, as far as its client knows."""
    try:
        path = _path(asked)
    except Exception:  # it is refused next
        return 0
    return min(path.held_end, asked.prompt - 1) if path else 0


def _path(asked: Asked) -> PrefixPath | None:
    """Return the path of a prompt under a plain salt, a namespace's or none; None for any other: only with a
    plain salt is KV in the engine's cache exact."""
    if asked.salt and not asked.salt.endswith(":"):
        return None
    return read_path(asked.params, asked.prompt)
