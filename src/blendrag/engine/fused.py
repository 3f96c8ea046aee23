"""The fused prefill: load, move, select, recompute, write (CacheBlend section 4; design step by step there).

Layers below the first check layer run over all tokens and stay fully fresh. At a check layer only norm, QKV
and RoPE run for all current rows; the selector keeps some, and the rest takes its K and V of later layers
from the store. Fresh tokens (system prompt, separators, unknown documents, question) are always computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.engine import compat
from blendrag.engine.decoder import Decoder, LayerVisitor
from blendrag.engine.masks import Mask
from blendrag.fuse.deviation import deviation
from blendrag.fuse.masked import masked_attention
from blendrag.fuse.runs import find_runs
from blendrag.fuse.selector import CachedTokens, Selector
from blendrag.load.layers import StoredLayers
from blendrag.load.trace import Trace


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """The first ``length`` tokens of a stored chunk stand at ``start`` in a prompt."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where the KV goes. block_ids: the request's blocks; positions below ``written`` are there already."""

    block_ids: torch.Tensor
    block_size: int
    written: int = 0

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self.block_ids[positions // self.block_size] * self.block_size + positions % self.block_size


@dataclass(slots=True)
class FusedStats:
    """What one fused prefill did. Times in seconds; ``load_s``: waiting for stored KV, moving and writing
    it."""

    cached: int = 0
    fresh: int = 0
    recomputed: int = 0
    load_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0


class FusedPrefill(LayerVisitor):
    """One request's fused prefill into the paged cache. Use once: ``FusedPrefill(...).run()``."""

    def __init__(
        self,
        decoder: Decoder,
        runner: Any,
        token_ids: torch.Tensor,
        spans: Sequence[CachedSpan],
        stored: StoredLayers,
        selector: Selector,
        target: Target,
        mask: Mask = "runs",
        trace: Trace | None = None,
    ) -> None:
        """``stored``: the spans' KV, the spans one after the other."""
        self.decoder, self.runner, self.selector, self.target = decoder, runner, selector, target
        self.token_ids, self.mask, self.trace = token_ids, mask, trace or Trace(on=False)
        self.spans, self.stored = spans, stored
        self.checks = selector.check_layers(decoder.num_layers)
        self.wants_raw_keys = selector.options.metric != "v"
        self.stats = FusedStats()
        device = token_ids.device
        n = token_ids.numel()
        self.cached = _concat([torch.arange(s.start, s.start + s.length) for s in self.spans], device)
        self.offsets = _concat([torch.arange(s.length) for s in self.spans], device)
        self.lengths = _concat([torch.full((s.length,), s.length) for s in self.spans], device)
        is_fresh = torch.ones(n, dtype=torch.bool, device=device)
        is_fresh[self.cached] = False
        self.fresh = torch.nonzero(is_fresh, as_tuple=True)[0]
        self.alive = torch.arange(self.cached.numel(), device=device)  # cached tokens still recomputed
        self.rows = torch.arange(n, device=device)
        self.block_table = target.block_ids[None].to(torch.int32)
        self._entered = self.rows  # the rows with which the current layer began
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # this layer's K and V, for the dense mask
        )
        self._metadata: tuple[torch.Tensor, dict[str, Any]] | None = None
        self._layer_kv: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def run(self) -> FusedStats:
        """Compute and write the KV of all tokens given."""
        begin = time.perf_counter()
        if self.checks[0] == 0:
            self._drop(self.selector.select(0, self._candidates()))
        if self.cached.numel():
            self.stored.fetch_kv(self.checks[0])  # layers below are all fresh
        hidden = self.decoder.embed(self.token_ids[self.rows])
        for layer in range(self.decoder.num_layers):
            if not self.rows.numel():  # nothing to recompute: only stored KV is left to write
                self._write_stored(layer)
                continue
            with self.trace.span("compute", f"layer {layer}"):
                result = self.decoder.prefill_layer(layer, hidden, self.rows, self)
            if result is None:
                break
            hidden = result
        self.stats.cached, self.stats.fresh = self.cached.numel(), self.fresh.numel()
        self.stats.recomputed = self.alive.numel()
        spent = time.perf_counter() - begin
        self.stats.recompute_s = spent - self.stats.load_s - self.stats.select_s
        return self.stats

    # -- at each layer ------------------------------------------------------------------------------------

    def keep(
        self, layer: int, key: torch.Tensor, raw_key: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor | None:
        stored = self._write_stored(layer) if self.alive.numel() < self.cached.numel() else None
        self._write(layer, self.rows, key, value)
        self._entered = self.rows
        if self.mask == "dense":
            self._dense = self._whole(key, value, stored)
        if layer not in self.checks or layer == 0 or not self.cached.numel():
            return None
        stored_k, stored_v = self._stored(layer)
        begin = time.perf_counter()
        rows = self.rows
        at_alive = torch.searchsorted(rows, self.cached[self.alive])
        fresh_k = key if raw_key is None else raw_key
        scores, norm = deviation(
            self.selector.options.metric,
            fresh_k[at_alive],
            value[at_alive],
            stored_k[self.alive],
            stored_v[self.alive],
        )
        self._drop(self.selector.select(layer, self._candidates(scores, norm)))
        self.stats.select_s += time.perf_counter() - begin
        return torch.searchsorted(rows, self.rows)

    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        attention = self.decoder.attentions[layer]
        rows = self._entered if all_rows else self.rows
        if self._dense is not None and rows.numel() < self.token_ids.numel():
            return masked_attention(query, *self._dense, rows, attention.impl.scale)
        metadata = self._metadata_for(rows)
        return compat.attend(attention, query, attention.kv_cache, metadata[attention.layer_name])

    # -- bookkeeping --------------------------------------------------------------------------------------

    def _candidates(self, scores: torch.Tensor | None = None, norm: float = 1.0) -> CachedTokens:
        return CachedTokens(
            self.offsets[self.alive], self.lengths[self.alive], self.cached.numel(), scores, norm
        )

    def _drop(self, chosen: torch.Tensor) -> None:
        """Go on with only the ``chosen`` of the cached tokens alive."""
        self.alive = self.alive[chosen]
        self.rows = torch.sort(torch.cat([self.fresh, self.cached[self.alive]])).values

    def _metadata_for(self, rows: torch.Tensor) -> dict[str, Any]:
        if self._metadata is None or self._metadata[0] is not rows:
            slots = self.target.slots(rows)
            built = compat.attention_metadata(self.runner, find_runs(rows), self.block_table, slots)
            self._metadata = (rows, built)
        return self._metadata[1]

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This layer's stored K before RoPE and V, [cached, kv_heads, head_size] each."""
        if self._layer_kv is None or self._layer_kv[0] != layer:
            begin = time.perf_counter()
            with self.trace.span("wait", f"layer {layer}"):
                self._layer_kv = (layer, *self.stored.synchronize(layer))
            self.stats.load_s += time.perf_counter() - begin
        return self._layer_kv[1:]

    def _whole(
        self, key: torch.Tensor, value: torch.Tensor, stored: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens' K and V of this layer: stored, and fresh where there is fresh."""
        if stored is None:
            return key, value
        whole = []
        for old, new in zip(stored, (key, value), strict=True):
            both = new.new_empty(self.token_ids.numel(), *new.shape[1:])
            both[self.cached], both[self.rows] = old, new
            whole.append(both)
        return whole[0], whole[1]

    def _write_stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        raw_key, value = self._stored(layer)
        begin = time.perf_counter()
        key = self.decoder.rotate_keys(layer, self.cached, raw_key.clone())  # a check compares the raw one
        self._write(layer, self.cached, key, value)
        self.stats.load_s += time.perf_counter() - begin
        return key, value

    def _write(self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.target.written:
            new = positions >= self.target.written
            positions, key, value = positions[new], key[new], value[new]
            if not positions.numel():
                return
        attention = self.decoder.attentions[layer]
        compat.write_kv(attention, key, value, attention.kv_cache, self.target.slots(positions))


def _concat(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)
