"""The worker's half of blending: one prompt after the other, a slice in each of the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blending import Choices, RequestBlend
from blendrag.engine.forward.indices import Ints
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.slices import IDLE_S, BlendQueue, Finished, Pace, Sliced, StepClock, in_thread
from blendrag.engine.hooks import Step, WorkerHook
from blendrag.engine.stores import OpenStore
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.load.loader import LayerLoader


class Blends(WorkerHook):
    """The blends of one loaded model. store: finds an open one. share: of an engine step, at most. hooks: the
    halves of all mechanisms, which may take part in a blend. guard: refuses what is sooner prefilled."""

    name = "blend"

    def __init__(
        self,
        model: LoadedModel,
        store: Callable[[str], OpenStore],
        clock: StepClock,
        share: float,
        hooks: Sequence[WorkerHook],
        guard: LoadGuard,
    ) -> None:
        self._model, self._store, self._clock, self._share, self._hooks = model, store, clock, share, hooks
        self._loader, self._choices, self._guard = LayerLoader(timed=guard.loaded), Choices(), guard
        self._queue = BlendQueue(self.blend, model.ranks)

    def bring(self, step: Step) -> list[Finished]:
        queue, clock = self._queue, self._clock
        queue.add(step.of(self.name).claims)
        finished = [Finished(order, None) for order in queue.cancel(step.ended)]
        device = self._model.cache.device
        if queue and device.type != "cpu":  # otherwise the engine's own forward would be taken for ours
            torch.accelerator.current_stream(device).synchronize()
        clock.enter(follows=step.follows)
        idle = not step.busy
        done = queue.run(IDLE_S if idle else clock.slice_s(self._share), idle=idle)
        clock.leave()
        return finished if done is None else [*finished, done]

    def closing(self, store: str) -> None:
        self._queue.stop(store)
        self._loader.drain()

    def blend_of(self, order: BlendOrder) -> type[RequestBlend]:
        """Return the class that blends this order."""
        return RequestBlend

    def blend(self, order: BlendOrder, pace: Pace) -> Sliced:
        """Compute and write the KV of one prompt. Returns the report that goes with its output."""
        opened = self._store(order.recipe.store)
        wanted = [key for key, _, _ in order.recipe.spans]
        yield from in_thread(self._loader.thread, pace, lambda: opened.prefetcher.arrived(wanted))
        notes, endings = [], []
        for hook in self._hooks:
            order, note, finish = hook.blending(order)
            notes += [note] if note else []
            endings += [finish] if finish else []

        def note_queries(layer: int, positions: Ints, query: torch.Tensor) -> None:
            for note in notes:
                note(layer, positions, query)

        told = opened.estimate, pace, note_queries if notes else None, self._choices, self._guard
        report = yield from self.blend_of(order)(self._model, self._loader, opened.kv, order, *told).run()
        if report.fallback:  # what is in memory by the next time is not refused
            opened.prefetcher.begin(wanted)
        for finish in endings:
            report = finish(report)
        return report
