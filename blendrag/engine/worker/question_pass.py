"""The first pass of selectors that read the question: its tokens over reused KV (ProphetKV, InfoFlow).

It leaves the reused KV written where it belongs, so that what follows only has to write what it recomputes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from functools import partial

import torch

from blendrag.attention.question import question_attention
from blendrag.engine.worker.decoder import Projected
from blendrag.engine.worker.prompt_forward import KV, PromptForward
from blendrag.engine.worker.stored_kv import StoredKV, WrittenKV


class QuestionPass:
    """Full reuse, on the way of which the question's attention to each cached token is noted.

    question: its first token's position, with nothing stored behind it. compared: layers at which a selector
    will compare stored KV.
    """

    def __init__(
        self, forward: PromptForward, stored: StoredKV, question: int, compared: Collection[int]
    ) -> None:
        self._forward, self._stored = forward, stored
        self._question, self._compared = question, compared
        cached = forward.tokens.cached
        self._mass = torch.zeros(forward.decoder.num_layers, cached.numel(), device=cached.device)

    def run(self) -> Generator[None, None, tuple[WrittenKV, torch.Tensor]]:
        """What the next pass takes for the stored KV; the attention, [layers, cached] float32. The last
        layer's is 0: nothing needs its attention's output here."""
        forward, copies = self._forward, dict[int, KV]()
        self._stored.begin(0)
        rows = forward.embed(forward.tokens.fresh)
        for layer in range(forward.decoder.num_layers):
            if layer in self._compared:
                key, value = self._stored.at(layer)
                copies[layer] = key.clone(), value.clone()
            whole = forward.whole(self._stored.write(layer))
            rows = yield from forward.layer(layer, rows, whole, partial(self._note, layer, whole))
        forward.watch.select_s = forward.watch.total_s - forward.watch.load_s
        return WrittenKV(copies), self._mass

    def _note(self, layer: int, whole: KV, positions: torch.Tensor, projected: Projected) -> None:
        asking = positions >= self._question
        if layer < self._forward.decoder.num_layers - 1 and asking[-1]:  # ascending: else none of them asks
            scale = self._forward.decoder.attentions[layer].impl.scale
            query, cached = projected.query[asking], self._forward.tokens.cached
            self._mass[layer] += question_attention(query, whole[0], positions[asking], scale, cached)
