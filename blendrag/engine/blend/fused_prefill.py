"""The fused prefill: load, move, select, recompute, write (CacheBlend section 4; design step by step there).

Layers below the first check layer run over all tokens and stay fully fresh. At a check layer only norm, QKV
and RoPE run for all current rows; the selector keeps some, and the rest takes its K and V of later layers
from the store, moved by ``shift`` where the selector wants that. Fresh tokens (system prompt, separators,
unknown documents, question) are always computed.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from blendrag.engine.blend.shift import Shift
from blendrag.engine.blend.stored_kv import StoredKV
from blendrag.engine.forward.decoder import Rows
from blendrag.engine.forward.indices import Indices, Ints, upload
from blendrag.engine.forward.kv_layers import Projected
from blendrag.engine.forward.prompt_forward import Look, PromptForward
from blendrag.select.deviation import deviation
from blendrag.select.interface import CachedTokens, Selector


class FusedPrefill:
    """One request's fused prefill. Use once: ``yield from FusedPrefill(...).run()``.

    stored: the stored KV; that of layers which it does not bring is in the pages already. chosen: the
    positions to recompute, if they were decided before; else the selector is asked.
    """

    def __init__(
        self,
        forward: PromptForward,
        stored: StoredKV,
        selector: Selector,
        chosen: Ints | None = None,
    ) -> None:
        self._forward, self._stored, self._selector = forward, stored, selector
        self._chosen, self._ranks = chosen, forward.pace.ranks

    def run(self) -> Generator[None, None, tuple[int, Ints]]:
        """Compute and write the KV of all tokens given, with a pause where the pace says so. Returns how many
        cached tokens were recomputed, mean over the layers from the selector's first choice on, and the
        positions computed in the last layer."""
        forward, tokens, layers = self._forward, self._forward.tokens, self._forward.decoder.num_layers
        checks = self._selector.check_layers(layers) if self._chosen is None else (0,)
        repaired: Ints = np.arange(tokens.cached.size)
        if self._chosen is not None:
            repaired = tokens.repaired(self._chosen)
        elif checks[0] == 0:
            repaired = self._selected(0, self._candidates(repaired))
        self._stored.begin(checks[0])  # layers below are all fresh
        rows = forward.embed(tokens.computed(repaired))
        shift = self._shift(repaired) if checks == (0,) else None
        ends = None if shift is None else shift.ends(rows.positions.host)
        outputs: dict[int, Rows] = {}  # that the model which drafts reads
        recomputed: list[int] = []  # per layer, from the first choice on
        for layer in range(layers):
            reuses = repaired.size < tokens.cached.size
            check = layer > 0 and layer in checks and tokens.cached.size > 0
            brought = self._stored.brings(layer)
            if brought and (reuses or check):
                yield from self._stored.arrival(layer)
            written = self._stored.write(layer, check) if brought and reuses else None
            if len(rows):  # otherwise only stored KV is left to write
                look: Look | None = partial(self._choose, layer, repaired) if check else None
                if shift is not None and layer > 0:  # KV of layer 0 depends on nothing else
                    look = shift.look(layer, written)
                rows = yield from forward.layer(layer, rows, look, check, ends)
                repaired = tokens.repaired(rows.positions.host) if check else repaired
                if forward.drafts is not None:
                    forward.drafts.keep(outputs, layer, rows)
            if layer >= checks[0]:
                recomputed.append(repaired.size)
        if repaired.size < tokens.cached.size:
            yield from self._stored.write_drafts()
        if forward.drafts is not None:
            looks = shift.look if shift is not None and forward.drafts.unrotates else None
            yield from forward.draft(rows, outputs, looks, ends)
        return round(sum(recomputed) / len(recomputed)), rows.positions.host

    def _shift(self, repaired: Ints) -> Shift | None:
        """Return what moves the tokens that are not repaired, if the selector wants it, and it can be."""
        forward = self._forward
        some = 0 < repaired.size < forward.tokens.cached.size
        moves = self._selector.shifts and some and forward.pages.readable and forward.decoder.unrotates
        return Shift(forward, repaired) if moves else None

    def _choose(self, layer: int, repaired: Ints, positions: Indices, projected: Projected) -> Indices:
        """Return the rows that go on: all but the cached tokens that the selector drops."""
        candidates, tokens, device = self._candidates(repaired), self._forward.tokens, self._forward.device
        metric, begin = self._selector.reads_deviation, time.perf_counter()
        if metric is not None:
            assert projected.raw_key is not None, "asked for at check layers"
            at = upload(np.searchsorted(positions.host, tokens.cached[repaired]), device)
            fresh, left = (projected.raw_key[at], projected.value[at]), upload(repaired, device)
            stored = [part[left] for part in self._stored.at(layer)]
            scores, norm = deviation(metric, fresh, stored, self._ranks.sum)
            candidates = replace(candidates, deviation=scores, norm=norm)
        chosen = self._selected(layer, candidates)
        self._forward.watch.select_s += time.perf_counter() - begin
        self._forward.trace.add("select", f"layer {layer}", begin)
        return Indices.of(np.searchsorted(positions.host, tokens.computed(repaired[chosen])), device)

    def _selected(self, layer: int, candidates: CachedTokens) -> Ints:
        """Return the owner's choice: two sums of the same numbers need not be the same."""
        chosen: Ints = self._selector.select(layer, candidates).numpy()
        return self._ranks.choose(chosen)

    def _candidates(self, repaired: Ints) -> CachedTokens:
        """Return the cached tokens that were not dropped yet."""
        tokens = self._forward.tokens
        offsets, lengths = (torch.from_numpy(each[repaired]) for each in (tokens.offsets, tokens.lengths))
        return CachedTokens(offsets, lengths, tokens.cached.size)
