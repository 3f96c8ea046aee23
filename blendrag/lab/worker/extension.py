"""The worker of the laboratory's engine: production's, and what only measurements ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from blendrag.engine.compat.requests import output_ids_not_read
from blendrag.engine.worker.data_plane import DataPlane
from blendrag.engine.worker.extension import BlendWorker
from blendrag.lab.worker.lmcache import LabBlends, NoGuard
from blendrag.lab.worker.selfcheck import check_model


class LabDataPlane(DataPlane):
    """A data plane with the laboratory's blends and check of the model."""

    blends, guard_type = LabBlends, NoGuard

    def operations(self) -> dict[str, Callable[..., Any]]:
        return super().operations() | {"selfcheck": partial(check_model, self)}


class LabWorker(BlendWorker):
    """A worker for an engine that has :class:`ForcedTokens`, too (see ``lab.running``)."""

    blendrag_data_plane = LabDataPlane

    def blendrag_bind(self) -> dict[str, Any]:
        output_ids_not_read(self.model_runner)
        return super().blendrag_bind()
