"""The first pass of selectors that read the question: its tokens over reused KV (ProphetKV, InfoFlow).

It leaves the reused KV written where it belongs, so that what follows only has to write what it recomputes.
"""

from __future__ import annotations

from typing import Any

import torch

from blendrag.engine.fused import FusedPrefill
from blendrag.fuse.query import layers_that_count, question_attention, question_rows


class QuestionPass(FusedPrefill):
    """Full reuse, on the way of which the question's attention to each cached token is summed up.

    mass: [cached] float32. The last layer's is left out: nothing needs its output here.
    """

    wants_whole = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mass = torch.zeros(self.cached.numel(), device=self.cached.device)
        self._asked = question_rows(self.fresh, self.cached)
        self._counted = layers_that_count(self.decoder.num_layers)

    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        if layer in self._counted and self._asked.numel() and self._dense is not None:
            mine = self._going >= self._asked[0]
            self.mass += question_attention(
                query[mine],
                self._dense[0],
                self._going[mine],
                self.decoder.attentions[layer].impl.scale,
                self.cached,
            )
        return super().attend(layer, query, all_rows)
