"""The layers of a model that drafts.

Their KV is made with that of the model it drafts for, stored behind it, and reused: nothing that is drafted
from other KV would be accepted. Since no text depends on it, only rows that are computed anyway are repaired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch

from blendrag.engine.compat.drafts import DraftingModel
from blendrag.engine.compat.groups import LayerGroup
from blendrag.engine.compat.model import ForwardEnded
from blendrag.engine.forward.decoder import Decoder, Rows
from blendrag.engine.forward.indices import Indices, Ints, upload
from blendrag.engine.forward.kv_layers import KVLayers, Projected
from blendrag.store.record import DraftLayers

_log = logging.getLogger(__name__)


class DraftRows(NamedTuple):
    """Some rows of a prompt, for a model that drafts. token_ids, following: [n], of each row and of the one
    behind it. outputs: of those of the model's layers that it reads."""

    token_ids: Ints
    following: Ints
    positions: Indices
    outputs: Mapping[int, Rows]


class Drafter(KVLayers):
    """The layers of a model that drafts."""

    def __init__(self, model: DraftingModel, vllm_config: Any, attentions: Sequence[Any]) -> None:
        super().__init__([model.layer_of(each) for each in attentions], attentions, vllm_config)
        self._model = model
        self.stored_as = DraftLayers(model.name, self.num_layers)

    @classmethod
    def of(cls, decoder: Decoder, runner: Any, groups: Collection[LayerGroup]) -> Self | None:
        """Return the layers of a worker's model that drafts; None if there is none, or if they cannot be run
        apart."""
        try:
            model = DraftingModel.of(runner, groups, decoder.attentions)
            if model is None:
                return None
            every, called = cls(model, decoder.vllm_config, model.attentions), list[int]()
            every._probe(decoder, called)
            # Of MTP's several, a prompt's tokens pass through the first only.
            return cls(model, decoder.vllm_config, [model.attentions[layer] for layer in called])
        except Exception:  # whatever an unknown structure may do; drafts are only accepted more seldom
            _log.warning("the KV of the model that drafts is not stored with chunks", exc_info=True)
            return None

    @torch.inference_mode()
    def _probe(self, decoder: Decoder, called: list[int]) -> None:
        """Run two rows, to see which layers are ``called``. Raises what that raises."""
        weight = next(iter(decoder.model.parameters()))
        tokens = torch.ones(2, dtype=torch.long, device=weight.device)
        rows = decoder.embed(tokens, Indices.of(tokens.cpu().numpy() * [3, 4], weight.device))
        output = rows.states, torch.zeros_like(rows.states)

        def attend(layer: int, projected: Projected) -> torch.Tensor:
            called.append(layer)
            return projected.query.new_zeros(*projected.query.shape[:2], self.kv[layer].value[1])

        outputs = dict.fromkeys(self._model.reads, output)
        with self.attending(range(self.num_layers), attend):
            self._model.run(tokens, rows.positions.device, outputs)
        if not called:
            raise ValueError("its forward calls none of its layers")

    def keep(self, outputs: dict[int, Rows], layer: int, rows: Rows) -> None:
        """Keep the ``rows`` that a layer of the model has given on among ``outputs``, if they are read: the
        next one may overwrite them."""
        if layer in self._model.reads:
            residual = None if rows.residual is None else rows.residual.clone()
            outputs[layer] = Rows(rows.positions, rows.states.clone(), residual)

    def prefill(
        self,
        rows: DraftRows,
        write: Callable[[int, Projected], None],
        attend: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        """Compute the KV of some rows: of each layer, ``write`` gets K and V, and ``attend`` returns the
        attention of Q."""
        last = self.num_layers - 1

        def attention(layer: int, projected: Projected) -> torch.Tensor:
            write(layer, projected)
            if layer == last:
                raise ForwardEnded
            return attend(layer, projected.query)

        at = rows.positions.device
        ids = upload(rows.following if self._model.reads_next else rows.token_ids, at.device)
        outputs = {layer: (one.states, one.residual) for layer, one in rows.outputs.items()}
        with suppress(ForwardEnded), self.attending(range(self.num_layers), attention):
            self._model.run(ids, at, outputs)
