"""Exact prefixes of prompts that were blended, prefilled while the engine has nothing else to do."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from blendrag.engine.client.generation import Sampling
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.tree import Nodes
from blendrag.tree.tree import Tree

_MOST = 64  # prompts that wait at most; the latest are kept
_LOOK_S = 0.02  # seconds between looks whether the engine is idle
_MOST_REFUSED = 1024  # refused nodes that are remembered
_REFUSED_S = 600.0  # for how long they are remembered: a disk may be slow or full for a while
_STORED_S = 5.0  # seconds that a node may take from its last slice to its store
_SLICE_BLOCKS = 2  # an arrival waits for one slice at most

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A wish for nodes of a path, with all token ids up to the end of the last."""

    nodes: Nodes
    token_ids: Sequence[int]


Expect = Callable[[Nodes, Nodes, Sequence[int]], bool]
"""A function that says which new nodes of a path are about to be stored (:meth:`Prefixes.expect`)."""


class Growth:
    """The growing of prefixes, until :meth:`close`. One node at a time, in slices of a few blocks: each is a
    request for one token, which finds the slice before in vLLM's prefix cache."""

    def __init__(self, client: TreeClient, tree: Tree, expect: Expect, *, sliced: bool) -> None:
        self._expect = expect
        self._client, self._engine, self._tree = client, client.engine, tree
        self._slice = _SLICE_BLOCKS * self._engine.facts.block_size if sliced else None
        self._waiting: deque[Wanted] = deque(maxlen=_MOST)
        self._woken, self._closed = threading.Condition(), False
        self.grown = 0
        """The number of nodes grown so far."""
        self.refused: dict[str, float] = {}
        """The times from which nodes are tried again that were computed and not stored: there is no room
        for them, or the disk fails. Oldest first."""
        self._thread = threading.Thread(target=self._run, name="blendrag-growth", daemon=True)
        self._thread.start()

    def want(self, wanted: Wanted) -> None:
        """Ask for these nodes, to be had sometime. Returns at once."""
        last = wanted.nodes[-1].key
        with self._woken:
            if self._closed or any(other.nodes[-1].key == last for other in self._waiting):
                return
            self._waiting.append(wanted)
            self._woken.notify_all()

    def forget(self, nodes: Iterable[str]) -> None:
        """Forget nodes that have gone: if they come again, it is another time."""
        for key in nodes:
            self.refused.pop(key, None)

    @property
    def waiting(self) -> int:
        """The number of prompts whose nodes are still to be had."""
        return len(self._waiting)

    def wait(self) -> None:
        """Wait until nothing is to be had any more."""
        with self._woken:
            self._woken.wait_for(lambda: not self._waiting)

    def finish(self) -> None:
        """Give up what waits; the path at hand is waited for."""
        with self._woken:
            while len(self._waiting) > 1:
                self._waiting.pop()
        self.wait()

    def close(self) -> None:
        """Give up what waits; the slice at hand is waited for."""
        with self._woken:
            self._closed = True
            self._waiting.clear()
            self._woken.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._woken:
                self._woken.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                wanted = self._waiting[0]
            try:
                while self._grow(wanted):
                    self.grown += 1
            except Exception as error:  # nobody asked for it: the engine has ended, or is about to
                _log.info("a prefix did not grow: %s", error)
            with self._woken:
                if self._waiting and self._waiting[0] is wanted:
                    self._waiting.popleft()
                self._woken.notify_all()

    def _grow(self, wanted: Wanted) -> bool:
        """Grow the first node that is missing; False if there is none, or it cannot be had."""
        nodes, held = wanted.nodes, self._tree.match(wanted.nodes)
        if held == len(nodes):
            return False
        coming = self._tree.next(nodes, held, wanted.token_ids)
        new, key = coming.new[-1], coming.new[-1].key
        if time.monotonic() < self.refused.get(key, 0.0):
            return False
        path = tuple(node for node in nodes if node.end <= new.end)
        if not self._expect(path, coming.new, wanted.token_ids):
            return False
        for end in self._slices(coming.new[0].start, new.end):
            if not self._wait(lambda: self._engine.idle, None):  # the engine has ended before it was idle
                return False
            named = self._client.growing(coming, stored=end == new.end)
            self._engine.generate(
                wanted.token_ids[:end],
                Sampling(max_tokens=1, path=named),
                None,
                self._tree.identity.namespace,
            )
        stored = self._wait(lambda: self._tree.match(nodes) > held, _STORED_S)
        # What nobody knows any more was deleted meanwhile: it may come again.
        if not stored and self._engine.alive and not self._closed and self._tree.knows(key):
            if not self.refused:
                _log.warning("a prefix was computed and could not be stored: is its tree too small, or full?")
            self.forget([key, *islice(self.refused, max(0, len(self.refused) + 1 - _MOST_REFUSED))])
            self.refused[key] = time.monotonic() + _REFUSED_S
        return stored

    def _slices(self, start: int, end: int) -> Iterator[int]:
        """Yield where the slices end: each a token behind a block, since a hybrid model's state is in vLLM's
        prefix cache only if something was computed behind it."""
        if self._slice is not None:
            yield from range((start // self._slice + 1) * self._slice + 1, end, self._slice)
        yield end

    def _wait(self, until: Callable[[], bool], seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._closed and self._engine.alive:
            if until():
                return True
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        return False
