"""The first pass of selectors that read the question: its tokens over reused KV (ProphetKV, InfoFlow).

It leaves the reused KV written where it belongs, so that what follows only has to write what it recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blendrag.attention.question import question_attention
from blendrag.engine.worker.fused_prefill import FusedPrefill
from blendrag.load.layers import StoredLayers


class QuestionPass(FusedPrefill):
    """Full reuse, on the way of which the question's attention to each cached token is noted.

    mass: [layers, cached] float32. The last layer's is 0: nothing needs its attention's output here.
    kept: the stored KV of ``keep``, the layers at which it will be compared.
    question: its first token's position, with nothing stored behind it.
    """

    wants_whole = True

    def __init__(self, *args: Any, keep: Sequence[int], question: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mass = torch.zeros(self.decoder.num_layers, self.cached.numel(), device=self.cached.device)
        self.kept = KeptLayers()
        self._keep = frozenset(keep)
        self._question = question

    def keep(
        self, layer: int, key: torch.Tensor, raw_key: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor | None:
        if layer in self._keep and layer not in self.kept:
            self.kept[layer] = self._stored(layer)
        return super().keep(layer, key, raw_key, value)

    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        mine = self._going >= self._question
        if mine[-1]:  # ascending: else this piece has none of the question
            assert self._dense is not None, "all keys are put together where only some tokens are computed"
            scale = self.decoder.attentions[layer].impl.scale
            self.mass[layer] += question_attention(
                query[mine], self._dense[0], self._going[mine], scale, self.cached
            )
        return super().attend(layer, query, all_rows)


class KeptLayers(StoredLayers):
    """Stored KV of a few layers, in memory."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def __setitem__(self, layer: int, stored: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._layers[layer] = stored[0].clone(), stored[1].clone()

    def fetch_kv(self, first_layer: int) -> None:
        """Nothing to wait for."""

    def synchronize(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer]
