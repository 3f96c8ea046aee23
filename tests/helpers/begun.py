"""Engines that are stood in for, and begin what nobody reads yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.pieces import Pieces, Put
from blendrag.engine.wire.recipe import Recipe


def begins(engine: Any) -> list[Future[None]]:
    """Have an idle stand-in that streams begin as well, all at once. The tasks, as they are begun; one that
    has been stopped, or read, is cancelled."""
    tasks: list[Future[None]] = []

    def begin(
        token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Pieces:
        def give(put: Put) -> Future[None]:
            for delta in engine.stream(token_ids, sampling, recipe):
                put(delta)
            put(None)
            tasks.append(Future())
            return tasks[-1]

        return Pieces(give)

    engine.begin, engine.idle, engine.alive = begin, True, True
    return tasks
