"""A prompt's rows through the model's layers, in pieces, into its pages: what both passes of a blend do."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch

from blendrag.attention.dense import masked_attention
from blendrag.engine import compat
from blendrag.engine.worker.decoder import Attended, Decoder, Projected, Rows
from blendrag.engine.worker.paged import Addresses, Pages, Places
from blendrag.engine.worker.slices import Pace
from blendrag.load.trace import Trace


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """The first ``length`` tokens of a stored chunk stand at ``start`` in a prompt."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """A prompt's tokens, and which of them have stored KV. All int64, on the device.

    ids: [n]. cached: [c] positions, ascending; offsets and lengths, [c]: of each its place in its chunk, and
    the chunk's length. fresh: [f] positions, ascending, of those that are computed in any case.
    """

    ids: torch.Tensor
    cached: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor
    fresh: torch.Tensor

    @classmethod
    def of(cls, ids: Sequence[int], spans: Sequence[CachedSpan], device: torch.device) -> Self:
        none = [torch.zeros(0, dtype=torch.int64)]
        cached = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans] or none)
        offsets = torch.cat([torch.arange(s.length) for s in spans] or none)
        lengths = torch.cat([torch.full((s.length,), s.length) for s in spans] or none)
        is_fresh = torch.ones(len(ids), dtype=torch.bool)
        is_fresh[cached] = False
        tensors = (torch.tensor(ids), cached, offsets, lengths, torch.nonzero(is_fresh, as_tuple=True)[0])
        return cls(*(tensor.to(device) for tensor in tensors))

    def behind(self, position: int) -> Self:
        """Only those at this position and behind it."""
        left = self.cached >= position
        return replace(
            self,
            cached=self.cached[left],
            offsets=self.offsets[left],
            lengths=self.lengths[left],
            fresh=self.fresh[self.fresh >= position],
        )

    def computed(self, repaired: torch.Tensor) -> torch.Tensor:
        """Positions of the fresh ones and of the cached ones with these indices, ascending."""
        return torch.sort(torch.cat([self.fresh, self.cached[repaired]])).values

    def repaired(self, positions: torch.Tensor) -> torch.Tensor:
        """Indices of the cached ones at any of these positions."""
        return torch.nonzero(torch.isin(self.cached, positions), as_tuple=True)[0]


class Stopwatch:
    """What a blend's seconds went to, pauses left out. load_s: waiting for stored KV, moving, writing it."""

    def __init__(self) -> None:
        self.load_s = self.select_s = 0.0
        self.slices = 1
        self._before, self._since = 0.0, time.perf_counter()

    @property
    def total_s(self) -> float:
        return self._before + time.perf_counter() - self._since

    def pause(self) -> None:
        self._before = self.total_s
        self.slices += 1

    def resume(self) -> None:
        self._since = time.perf_counter()


KV = tuple[torch.Tensor, torch.Tensor]  # K and V, [tokens, kv_heads, head_size] each
# Looks at a layer's projections of the rows at these positions; indices of those that go on, None for all.
Look = Callable[[torch.Tensor, Projected], torch.Tensor | None]


@dataclass(frozen=True)
class PromptForward:
    """Of one prompt, once or several times. dense: whether rows attend to all K and V of a layer put together
    instead of the pages; ``pace`` says when to pause."""

    decoder: Decoder
    tokens: PromptTokens
    pages: Pages
    dense: bool
    pace: Pace
    trace: Trace
    watch: Stopwatch
    # By where a piece begins and its length: shared by layers that run over the same rows in the same pieces.
    _addresses: dict[tuple[int, int], Addresses] = field(default_factory=dict, init=False)
    _places: dict[tuple[int, int], Places] = field(default_factory=dict, init=False)

    def embed(self, positions: torch.Tensor) -> Rows:
        return self.decoder.embed(self.tokens.ids[positions], positions)

    def layer(
        self, layer: int, rows: Rows, whole: KV | None = None, look: Look | None = None, check: bool = False
    ) -> Generator[None, None, Rows]:
        """One layer over ``rows``, whose K and V are written; those that go on. Pauses between its pieces.

        whole: room for all tokens' K and V of this layer (:meth:`whole`), the stored ones in it.
        check: whether ``look`` may drop rows; it sees all of them at once then, with K before RoPE.
        """
        if check:  # these rows and those that go on may be as many as others were
            self._addresses.clear()
            self._places.clear()
        parts: list[Rows] = []
        at, count = 0, len(rows)
        while at < count:  # ascending, so that what a piece attends to is written
            end = min(count, at + (self._most_rows(check) or count))
            piece = rows if end - at == count else rows.at(slice(at, end))
            attention = partial(self._attention, layer, at, piece.positions, whole, look)
            with self.trace.span("compute", f"layer {layer}"):
                parts.append(self.decoder.prefill_layer(layer, piece, attention, raw_keys=check))
            if self._pauses(end - at):
                yield from self.pause()
            at = end
        return Rows.joined(parts)

    def pause(self, until: Callable[[], bool] = lambda: True) -> Generator[None, None, None]:
        """Once, or as often as it takes."""
        self.watch.pause()
        while True:
            yield
            if self.pace.rows is None or until():
                break
        self.watch.resume()

    def whole(self, stored: KV | None) -> KV:
        """Room for all tokens' K and V of a layer; what is stored is in it."""
        shape = (self.tokens.ids.numel(), *self.decoder.kv_shape)
        device = self.tokens.ids.device
        key, value = (torch.empty(shape, dtype=self.decoder.dtype, device=device) for _ in (0, 1))
        if stored is not None:
            key[self.tokens.cached], value[self.tokens.cached] = stored
        return key, value

    def _most_rows(self, check: bool) -> int | None:
        """Of a piece; None: all."""
        return None if check else self.pace.rows

    def _pauses(self, rows: int) -> bool:
        device = self.tokens.ids.device
        if self.pace.rows is not None and device.type != "cpu":  # else only the launch would be timed
            torch.accelerator.synchronize(device)
        return self.pace.pause(rows)

    def _attention(
        self,
        layer: int,
        at: int,
        positions: torch.Tensor,
        whole: KV | None,
        look: Look | None,
        projected: Projected,
    ) -> Attended:
        self.pages.write(layer, self._placed(at, positions), projected.key, projected.value)
        if whole is not None:
            whole[0][positions], whole[1][positions] = projected.key, projected.value
        kept = None if look is None else look(positions, projected)
        if layer == self.decoder.num_layers - 1:
            return Attended(None, kept)
        query = projected.query
        if kept is not None:
            query, positions = query[kept], positions[kept]
        if whole is not None and self.dense and positions.numel() < self.tokens.ids.numel():
            scores = compat.scores_of(self.decoder.attentions[layer])
            assert scores is not None, "the mask is not written out for such a model"
            return Attended(masked_attention(query, *whole, positions, scores), kept)
        return Attended(self.pages.attend(layer, query, self._addressed(at, positions)), kept)

    def _placed(self, at: int, positions: torch.Tensor) -> Places:
        key = at, positions.numel()
        if key not in self._places:
            self._places[key] = self.pages.places(positions)
        return self._places[key]

    def _addressed(self, at: int, positions: torch.Tensor) -> Addresses:
        key = at, positions.numel()
        if key not in self._addresses:
            self._addresses[key] = self.pages.addresses(self._seen(positions))
        return self._addresses[key]

    def _seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Up to which position each of these rows sees."""
        return positions
