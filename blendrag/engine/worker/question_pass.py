"""The first pass of selectors that read the question: its tokens over reused KV (ProphetKV, InfoFlow).

It leaves the reused KV written where it belongs, so that what follows only has to write what it recomputes.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import torch

from blendrag.attention.question import question_attention
from blendrag.engine.worker.decoder import Projected
from blendrag.engine.worker.prompt_forward import PromptForward
from blendrag.engine.worker.stored_kv import StoredKV


class QuestionPass:
    """Full reuse, on the way of which the question's attention to each cached token is noted.

    question: its first token's position, with nothing stored behind it.
    """

    def __init__(self, forward: PromptForward, stored: StoredKV, question: int) -> None:
        self._forward, self._stored, self._question = forward, stored, question
        tokens, decoder = forward.tokens, forward.decoder
        device = tokens.cached.device
        self._mass = torch.zeros(tokens.cached.numel(), device=device)
        self._fresh_key = torch.empty(
            (tokens.fresh.numel(), *decoder.kv_shape), dtype=decoder.dtype, device=device
        )

    def run(self) -> Generator[None, None, torch.Tensor]:
        """The attention, [cached] float32, summed over layers: without those below the middle, as they tell
        less (docs/results.md), and the last, which has no output here."""
        forward = self._forward
        self._stored.begin(0)
        rows = forward.embed(forward.tokens.fresh)
        for layer in range(forward.decoder.num_layers):
            yield from self._stored.arrival(layer)
            moved = self._stored.write(layer)
            whole = forward.whole(moved) if forward.dense else None
            rows = yield from forward.layer(layer, rows, whole, partial(self._note, layer, moved[0]))
        forward.watch.select_s = forward.watch.total_s - forward.watch.load_s
        return self._mass

    def _note(
        self, layer: int, cached_key: torch.Tensor, positions: torch.Tensor, projected: Projected
    ) -> None:
        last = self._forward.decoder.num_layers - 1
        if layer not in range(min((last + 1) // 2, last - 1), last):
            return
        fresh = self._forward.tokens.fresh
        begin = int(torch.searchsorted(fresh, positions[0]))  # of this piece; those before are there
        end = begin + positions.numel()
        self._fresh_key[begin:end] = projected.key
        asking = positions >= self._question
        if asking[-1]:  # ascending: else none of them asks
            scale = self._forward.decoder.attentions[layer].impl.scale
            query, fresh_key = projected.query[asking], self._fresh_key[:end]
            self._mass += question_attention(
                query, positions[asking], cached_key, fresh_key, fresh[:end], scale
            )
