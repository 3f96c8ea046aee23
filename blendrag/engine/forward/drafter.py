"""The layers of a model that drafts.

Their KV is made with that of the model it drafts for, stored behind it, and reused: nothing that is drafted
from other KV would be accepted. Since no text depends on it, only rows that are computed anyway are repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from blendrag.engine.compat.drafts import DraftingModel
from blendrag.engine.compat.model import ForwardEnded
from blendrag.engine.forward.decoder import Rows
from blendrag.engine.forward.indices import Indices, Ints, upload
from blendrag.engine.forward.kv_layers import KVLayers, Projected
from blendrag.store.record import DraftLayers


class DraftRows(NamedTuple):
    """Some rows of a prompt, for a model that drafts. token_ids, following: [n], of each row and of the one
    behind it. outputs: of those of the model's layers that it reads."""

    token_ids: Ints
    following: Ints
    positions: Indices
    outputs: Mapping[int, Rows]


class Drafter(KVLayers):
    """The layers of a model that drafts."""

    def __init__(self, model: DraftingModel, vllm_config: Any) -> None:
        super().__init__(model.layers, model.attentions, vllm_config)
        self._model = model
        self.stored_as = DraftLayers(model.name, self.num_layers)

    @property
    def reads_outputs(self) -> bool:
        """Return whether it takes outputs of the model's layers, not tokens alone."""
        return self._model.reads_outputs

    def keep(self, outputs: dict[int, Rows], layer: int, rows: Rows) -> None:
        """Keep the ``rows`` that a layer of the model has given on among ``outputs``, if they are read."""
        if layer in self._model.reads:
            outputs[layer] = rows if layer == max(self._model.reads) else rows.copied

    def prefill(
        self,
        rows: DraftRows,
        write: Callable[[int, Projected], None],
        attend: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        """Compute the KV of some rows: of each layer, ``write`` gets K and V, and ``attend`` returns the
        attention of Q. Raises ValueError if its forward does not call all of its layers."""
        last = self.num_layers - 1

        def attention(layer: int, projected: Projected) -> torch.Tensor:
            write(layer, projected)
            if layer == last:
                raise ForwardEnded
            return attend(layer, projected.query)

        at = rows.positions.device
        ids = upload(rows.following if self._model.reads_outputs else rows.token_ids, at.device)
        outputs = {layer: (one.states, one.residual) for layer, one in rows.outputs.items()}
        with self.attending(range(self.num_layers), attention):
            try:
                self._model.run(ids, at, outputs)
            except ForwardEnded:
                return
        raise ValueError("its forward does not call all of its layers")
