"""The first pass of selectors that read the question: its tokens over reused KV (ProphetKV, InfoFlow).

It leaves the reused KV written where it belongs, so that what follows only has to write what it recomputes or
moves.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from blendrag.attention.question import question_attention
from blendrag.attention.scores import Scores
from blendrag.engine.blend.stored_kv import StoredKV
from blendrag.engine.compat.model import scale_of, scores_of
from blendrag.engine.forward.indices import Indices, upload
from blendrag.engine.forward.kv_layers import Projected
from blendrag.engine.forward.prompt_forward import PromptForward


class QuestionPass:
    """A pass with full reuse of KV, which notes the question's attention to each cached token.

    question: the position of its first token; nothing is stored behind it.
    """

    def __init__(self, forward: PromptForward, stored: StoredKV, question: int) -> None:
        self._forward, self._stored, self._question = forward, stored, question
        tokens, decoder = forward.tokens, forward.decoder
        # Layers whose scores are not known, which happens on a CPU only, are read as plain products.
        self._scores = [scores_of(each) or Scores(scale_of(each)) for each in decoder.attentions]
        self._mass = torch.zeros(tokens.cached.size, device=forward.device)
        self._cached = upload(tokens.cached, forward.device)
        self._fresh = Indices.of(tokens.fresh, forward.device)
        shapes = {kv.key for kv in decoder.kv}
        self._fresh_keys = {
            shape: torch.empty((tokens.fresh.size, *shape), dtype=decoder.dtype, device=forward.device)
            for shape in shapes
        }

    def run(self) -> Generator[None, None, torch.Tensor]:
        """Return the attention to the cached tokens, [cached] float32, summed over layers: without
        those below the middle, since they tell less (docs/results.md), and without the last, which has no
        output here."""
        forward = replace(self._forward, drafts=None)
        begin = time.perf_counter()
        self._stored.begin(0)
        rows = forward.embed(forward.tokens.fresh)
        for layer in range(forward.decoder.num_layers):
            yield from self._stored.arrival(layer)
            moved = self._stored.write(layer)
            rows = yield from forward.layer(layer, rows, partial(self._note, layer, moved[0]))
        mass = forward.pace.ranks.sum(self._mass)
        forward.watch.select_s = forward.watch.total_s - forward.watch.load_s
        forward.trace.add("select", "question", begin)
        return mass

    def _note(self, layer: int, cached_key: torch.Tensor, positions: Indices, projected: Projected) -> None:
        last = self._forward.decoder.num_layers - 1
        if layer not in range(min((last + 1) // 2, last - 1), last):
            return
        begin = int(np.searchsorted(self._fresh.host, positions.host[0]))  # where this piece begins
        end = begin + len(positions)
        fresh_keys = self._fresh_keys[self._forward.decoder.kv[layer].key]
        fresh_keys[begin:end] = projected.key  # earlier ones are there
        first = int(np.searchsorted(positions.host, self._question))
        if first < len(positions):  # otherwise none of them asks
            query, at = projected.query[first:], positions.device[first:]
            fresh_key, fresh = fresh_keys[:end], self._fresh.device[:end]
            self._mass += question_attention(
                query, at, cached_key, self._cached, fresh_key, fresh, self._scores[layer]
            )
