"""The worker's halves of all mechanisms, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blends import Blends
from blendrag.engine.budget.compression import Compression
from blendrag.engine.forward.blocks import KVBlocks
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.ranks import Ranks
from blendrag.engine.forward.slices import StepClock
from blendrag.engine.guard.prefill_times import GuardTimes
from blendrag.engine.hooks import Reports, WorkerHook
from blendrag.engine.ingest.ingest import Ingest
from blendrag.engine.jobs import Jobs
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes
from blendrag.engine.stores import Stores
from blendrag.store.tiers import Tier


class Plane:
    """The mechanisms of a worker, and what they share. Methods run on the worker's own thread, between or
    inside engine steps, and on all ranks alike."""

    guard_type: ClassVar[type[LoadGuard]] = LoadGuard

    def __init__(self, dtype: str, ranks: Ranks, share: float, *, owner: bool) -> None:
        """Begin without any. owner: whether this engine stores; of data parallel engines the first one does,
        and all read."""
        self.dtype, self.ranks, self.share, self.owner = dtype, ranks, share, owner
        self.clock, self.reports, self.guard = StepClock(), Reports(), self.guard_type()
        self.jobs = Jobs(self.clock, share, ranks)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="blendrag-writer")
        self.stores = Stores(ranks, dtype, owner, self._closing)
        self.hooks: list[WorkerHook] = [GuardTimes(self.guard)]

    def operations(self) -> dict[str, Callable[..., Any]]:
        """Return what a client may call by name, with plain data."""
        operations: dict[str, Callable[..., Any]] = {"report": self.reports.get, **self.stores.operations}
        for hook in self.hooks:
            operations |= hook.operations
        return operations

    def keep_prefixes(self, blocks: KVBlocks) -> WorkerHook:
        """Return the mechanism that keeps exact prefixes of what is in these blocks."""
        return ExactPrefixes(blocks, self.dtype, self.writer, self.guard, self.ranks, owner=self.owner)

    def _closing(self, store: str) -> None:
        with ExitStack() as stack:  # one's error keeps no other in the store
            for hook in reversed(self.hooks):
                stack.callback(hook.closing, store)

    def close(self) -> None:
        """Close all stores. Raises the error of one of them after all are closed."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.callback(hook.close)
            for store in self.stores:
                stack.callback(self.stores.close, store)

    @property
    def tiers(self) -> list[Tier]:
        """Return the tiers of all open stores and trees that count for the engine: the owner's."""
        if not self.ranks.first:
            return []
        return self.stores.tiers + [tier for hook in self.hooks for tier in hook.tiers]


class StatePlane(Plane):
    """The plane of a hybrid model, which is not blended: its exact prefixes alone."""

    def __init__(self, blocks: KVBlocks, dtype: str, ranks: Ranks, *, owner: bool) -> None:
        super().__init__(dtype, ranks, 1.0, owner=owner)
        self.hooks.append(self.keep_prefixes(blocks))


class DataPlane(Plane):
    """The data plane: the stores of one loaded model, and all mechanisms that use them."""

    blends: ClassVar[type[Blends]] = Blends

    def __init__(self, model: LoadedModel, share: float = 1.0, *, owner: bool = True) -> None:
        """Serve the model without any store yet."""
        dtype = str(model.decoder.dtype).removeprefix("torch.")
        super().__init__(dtype, model.ranks, share, owner=owner)
        self.model = model
        self.hooks += [  # in a step, they come in this order
            self.keep_prefixes(model.cache.with_drafts),
            Compression(model.decoder, model.cache, model.ranks.size, self.reports),
            self.blends(model, self.stores.get, self.clock, share, self.hooks, self.guard),
            Ingest(model, self.stores, self.writer, owner=owner),
        ]
