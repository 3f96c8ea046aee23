"""The worker of the laboratory's engine: production's, and what only measurements ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from blendrag.engine.compat.requests import output_ids_not_read
from blendrag.engine.worker.extension import BlendWorker
from blendrag.lab.worker.lmcache import LabDataPlane
from blendrag.lab.worker.selfcheck import check_model


class LabWorker(BlendWorker):
    """A worker for an engine that has :class:`ForcedTokens`, too (see ``lab.running``)."""

    blendrag_data_plane = LabDataPlane
    blendrag_operations: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **BlendWorker.blendrag_operations,
        "selfcheck": check_model,
    }

    def blendrag_bind(self) -> dict[str, Any]:
        output_ids_not_read(self.model_runner)
        return super().blendrag_bind()
