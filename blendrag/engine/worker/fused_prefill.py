"""The fused prefill: load, move, select, recompute, write (CacheBlend section 4; design step by step there).

Layers below the first check layer run over all tokens and stay fully fresh. At a check layer only norm, QKV
and RoPE run for all current rows; the selector keeps some, and the rest takes its K and V of later layers
from the store. Fresh tokens (system prompt, separators, unknown documents, question) are always computed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blendrag.attention.dense import masked_attention
from blendrag.attention.runs import Runs, bottom_right, find_runs
from blendrag.engine import compat
from blendrag.engine.worker.decoder import Decoder, Hidden, LayerVisitor
from blendrag.engine.worker.masks import Mask
from blendrag.engine.worker.slices import Pace
from blendrag.load.layers import StoredLayers
from blendrag.load.trace import Trace
from blendrag.select.deviation import deviation
from blendrag.select.interface import CachedTokens, Selector


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
    """What one fused prefill did, in how many slices. recomputed: cached tokens, mean over the layers from
    the selector's first choice on. Times in seconds; ``load_s``: waiting for stored KV, moving and writing
    it."""

    cached: int = 0
    fresh: int = 0
    recomputed: int = 0
    load_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0
    slices: int = 1


class FusedPrefill(LayerVisitor):
    """One request's fused prefill into the paged cache. Use once: ``yield from FusedPrefill(...).run()``.

    wants_whole: whether all tokens' K and V of a layer are put together at each layer, whatever the mask.
    """

    wants_whole = False

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
        *,
        trace: Trace | None = None,
        pace: Pace | None = None,
        attention: torch.Tensor | None = None,
        written: bool = False,
        leaky: bool = False,
    ) -> None:
        """``stored``: the spans' KV, the spans one after the other. ``pace``: says when to pause.
        ``attention``: the question's, [layers, cached], for selectors that read it. ``written``: whether the
        stored KV is where it belongs, and only compared with. ``leaky``: with LMCache's mask."""
        self.decoder, self.runner, self.selector, self.target = decoder, runner, selector, target
        self.token_ids, self.mask, self.trace = token_ids, mask, trace or Trace(on=False)
        self.pace, self.attention = pace or Pace(), attention
        self.written, self.leaky = written, leaky
        self.spans, self.stored = spans, stored
        self.checks = selector.check_layers(decoder.num_layers)
        self.wants_raw_keys = selector.options.metric != "v"
        self.stats = FusedStats()
        device, n = token_ids.device, token_ids.numel()
        self.cached = _concat([torch.arange(s.start, s.start + s.length) for s in self.spans], device)
        self.offsets = _concat([torch.arange(s.length) for s in self.spans], device)
        self.lengths = _concat([torch.full((s.length,), s.length) for s in self.spans], device)
        is_fresh = torch.ones(n, dtype=torch.bool, device=device)
        is_fresh[self.cached] = False
        self.fresh = torch.nonzero(is_fresh, as_tuple=True)[0]
        self.stats.cached, self.stats.fresh = self.cached.numel(), self.fresh.numel()
        if written:  # what stands before all that is repaired is right as it is
            self.fresh = self.fresh[self.fresh > self.cached[0]]
        self.alive = torch.arange(self.cached.numel(), device=device)  # cached tokens still recomputed
        self.rows = torch.sort(torch.cat([self.fresh, self.cached])).values
        self.block_table = target.block_ids[None].to(torch.int32)
        self._at = 0  # where among the rows this piece begins
        self._entered = self._going = self.rows  # its rows, before and after a selection
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None  # this layer's K and V, for that mask
        self._metadata: dict[tuple[int, int], dict[str, Any]] = {}  # by where a piece begins, and its rows
        self._layer_kv: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def run(self) -> Generator[None, None, FusedStats]:
        """Compute and write the KV of all tokens given. Pauses, if it has to, between pieces of a layer."""
        begin = time.perf_counter()
        if self.checks[0] == 0:
            self._drop(self.selector.select(0, self._candidates(0)))
        if self.cached.numel():
            self.stored.fetch_kv(self.checks[0])  # layers below are all fresh
        hidden = self.decoder.embed(self.token_ids[self.rows])
        recomputed: list[int] = []  # per layer from the first choice on
        for layer in range(self.decoder.num_layers):
            reused = not self.written and self.alive.numel() < self.cached.numel()
            stored = self._write_stored(layer) if reused else None
            if not self.rows.numel():  # nothing to recompute: only stored KV is left to write
                recomputed.append(0)
                continue
            scattered = self.rows.numel() < self.token_ids.numel() or layer in self.checks
            whole = self.wants_whole or self.mask == "dense"
            self._dense = self._whole(stored) if whole and scattered else None
            parts: list[Hidden] = []
            for piece in self._pieces(layer):
                with self.trace.span("compute", f"layer {layer}"):
                    self._at, self._entered = piece.start, self.rows[piece]
                    self._going = self._entered
                    part = self.decoder.prefill_layer(layer, _cut(hidden, piece), self._entered, self)
                if part is not None:
                    parts.append(part)
                if self._pause():
                    self.stats.recompute_s += time.perf_counter() - begin
                    self.stats.slices += 1
                    self._forget_metadata()
                    yield
                    begin = time.perf_counter()
            hidden = _joined(parts)
            if layer >= self.checks[0]:
                recomputed.append(self.alive.numel())
        self.stats.recomputed = round(sum(recomputed) / len(recomputed))
        self.stats.recompute_s += time.perf_counter() - begin - self.stats.load_s - self.stats.select_s
        return self.stats

    # -- pieces of a layer --------------------------------------------------------------------------------

    def _pieces(self, layer: int) -> Iterator[slice]:
        """Ascending, so that what a piece attends to is written; one at a check layer, where all are
        compared."""
        at, count = 0, self.rows.numel()
        while at < count:
            rows = None if (layer in self.checks and layer) or self.leaky else self.pace.rows
            end = count if rows is None else min(count, at + rows)
            yield slice(at, end)
            at = end

    def _pause(self) -> bool:
        if self.pace.rows is None:
            return False
        if self.rows.device.type != "cpu":  # else only the launch would be timed
            torch.accelerator.synchronize(self.rows.device)
        return self.pace.pause(self._entered.numel())

    # -- at each layer ------------------------------------------------------------------------------------

    def keep(
        self, layer: int, key: torch.Tensor, raw_key: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor | None:
        self._write(layer, self._entered, key, value)
        if self._dense is not None:
            for whole, fresh in zip(self._dense, (key, value), strict=True):
                whole[self._entered] = fresh
        if layer not in self.checks or layer == 0 or not self.cached.numel():
            return None
        rows = self.rows
        scores, norm = self._compare(layer, key if raw_key is None else raw_key, value)
        begin = time.perf_counter()
        self._drop(self.selector.select(layer, self._candidates(layer, scores, norm)))
        self._going = self.rows
        self.stats.select_s += time.perf_counter() - begin
        return torch.searchsorted(rows, self.rows)

    def _compare(
        self, layer: int, fresh_k: torch.Tensor, fresh_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, float]:
        """Deviation of the tokens that are alive, and its unit."""
        if not self.selector.reads_deviation:
            return None, 1.0
        stored_k, stored_v = self._stored(layer)
        begin = time.perf_counter()
        at = torch.searchsorted(self.rows, self.cached[self.alive])
        metric, alive = self.selector.options.metric, self.alive
        found = deviation(metric, fresh_k[at], fresh_v[at], stored_k[alive], stored_v[alive])
        self.stats.select_s += time.perf_counter() - begin
        return found

    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        attention = self.decoder.attentions[layer]
        rows = self._entered if all_rows else self._going
        if self._dense is not None and self.mask == "dense" and rows.numel() < self.token_ids.numel():
            return masked_attention(query, *self._dense, rows, attention.impl.scale)
        metadata = self._metadata_for(rows)
        return compat.attend(attention, query, attention.kv_cache, metadata[attention.layer_name])

    # -- bookkeeping --------------------------------------------------------------------------------------

    def _candidates(self, layer: int, scores: torch.Tensor | None = None, norm: float = 1.0) -> CachedTokens:
        """Those that are alive, of which ``scores`` are."""
        total = self.cached.numel()
        cached = CachedTokens(self.offsets, self.lengths, total, None, norm, self.attention, layer)
        return replace(cached.at(self.alive), deviation=scores)

    def _drop(self, chosen: torch.Tensor) -> None:
        """Go on with only the ``chosen`` of the cached tokens alive."""
        self.alive = self.alive[chosen]
        self.rows = torch.sort(torch.cat([self.fresh, self.cached[self.alive]])).values
        self._metadata.clear()

    def _metadata_for(self, rows: torch.Tensor) -> dict[str, Any]:
        """Made once for layers that run over the same rows in the same pieces."""
        key = self._at, rows.numel()
        if key not in self._metadata:
            self._forget_metadata()
            slots = self.target.slots(rows)
            leaky = self.leaky and rows.numel() < self.token_ids.numel()
            runs = self._leaking(rows) if leaky else find_runs(rows)
            self._metadata[key] = compat.attention_metadata(self.runner, runs, self.block_table, slots)
        return self._metadata[key]

    def _forget_metadata(self) -> None:
        """Before any other is built: GPU backends may build it in buffers that they keep."""
        if self.rows.device.type != "cpu":
            self._metadata.clear()

    def _leaking(self, rows: torch.Tensor) -> Runs:
        selected = torch.isin(rows, self.cached[self.alive])
        return bottom_right(rows, selected, int(self.cached[-1]) + 1)

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This layer's stored K before RoPE and V, [cached, kv_heads, head_size] each."""
        if self._layer_kv is None or self._layer_kv[0] != layer:
            begin = time.perf_counter()
            with self.trace.span("wait", f"layer {layer}"):
                self._layer_kv = (layer, *self.stored.synchronize(layer))
            self.stats.load_s += time.perf_counter() - begin
        return self._layer_kv[1:]

    def _whole(self, stored: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for all tokens' K and V of this layer; what is stored is in it."""
        shape = (self.token_ids.numel(), *self.decoder.kv_shape)
        key, value = (torch.empty(shape, dtype=self.decoder.dtype, device=self.rows.device) for _ in (0, 1))
        if stored is not None:
            key[self.cached], value[self.cached] = stored
        return key, value

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


def _cut(hidden: Hidden, piece: slice) -> Hidden:
    return Hidden(hidden.states[piece], None if hidden.residual is None else hidden.residual[piece])


def _joined(parts: Sequence[Hidden]) -> Hidden:
    if len(parts) == 1:
        return parts[0]
    residuals = [part.residual for part in parts if part.residual is not None]
    states = torch.cat([part.states for part in parts]) if parts else torch.empty(0)
    return Hidden(states, torch.cat(residuals) if residuals else None)
