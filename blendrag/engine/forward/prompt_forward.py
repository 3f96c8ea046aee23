"""The forward of a prompt's rows through the model's layers, in pieces, into its pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np
import torch

from blendrag.engine.forward.decoder import Attended, Decoder, Rows
from blendrag.engine.forward.drafter import Drafter, DraftRows
from blendrag.engine.forward.indices import Indices, Ints, await_former, upload
from blendrag.engine.forward.kv_layers import KVLayers, Projected
from blendrag.engine.forward.paged import Addresses, PagedCache, Pages, Places
from blendrag.engine.forward.ranks import ALONE, Ranks
from blendrag.engine.forward.slices import Pace
from blendrag.load.trace import Trace
from blendrag.store.record import NO_DRAFTS, DraftLayers

_LEAST_ROWS = 32  # of a piece


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """A stretch of a prompt with stored KV: the first ``length`` tokens of a chunk stand at ``start``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """Return the position behind the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """A prompt's tokens, and which of them have stored KV. On the host.

    ids: [n]. cached: [c] positions, ascending. offsets, lengths: [c], the place of each cached token in its
    chunk, and the chunk's length. fresh: [f] positions, ascending, of tokens that are always computed.
    """

    ids: Ints
    cached: Ints
    offsets: Ints
    lengths: Ints
    fresh: Ints

    @classmethod
    def of(cls, ids: Sequence[int], spans: Sequence[CachedSpan]) -> Self:
        none = [np.zeros(0, np.int64)]
        cached = np.concatenate([np.arange(s.start, s.end) for s in spans] or none)
        offsets = np.concatenate([np.arange(s.length) for s in spans] or none)
        lengths = np.concatenate([np.full(s.length, s.length) for s in spans] or none)
        return cls(np.array(ids), cached, offsets, lengths, np.delete(np.arange(len(ids)), cached))

    def behind(self, position: int) -> Self:
        """Return only the tokens at this position and behind it."""
        left = self.cached >= position
        return replace(
            self,
            cached=self.cached[left],
            offsets=self.offsets[left],
            lengths=self.lengths[left],
            fresh=self.fresh[self.fresh >= position],
        )

    def computed(self, repaired: Ints) -> Ints:
        """Return the positions of the fresh tokens and of the cached ones with these indices, ascending."""
        return np.sort(np.concatenate([self.fresh, self.cached[repaired]]))

    def repaired(self, positions: Ints) -> Ints:
        """Return the indices of the cached tokens at any of these positions."""
        return np.flatnonzero(np.isin(self.cached, positions))


class Stopwatch:
    """A blend's seconds by activity, without pauses. load_s: waiting for stored KV, moving it, writing it.
    rows: that were computed, of all layers."""

    def __init__(self) -> None:
        self.load_s = self.select_s = 0.0
        self.slices, self.rows = 1, 0
        self._before, self._since = 0.0, time.perf_counter()

    @property
    def total_s(self) -> float:
        return self._before + time.perf_counter() - self._since

    def pause(self) -> None:
        self._before = self.total_s
        self.slices += 1

    def resume(self) -> None:
        self._since = time.perf_counter()


# A function that looks at a layer's projections of the rows at these positions, and returns which of them go
# on; None for all.
Look = Callable[[Indices, Projected], Indices | None]
# A function that is told of a layer's Q, [rows, heads, head_size], of the rows at these positions.
Note = Callable[[int, Ints, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The loaded model that all requests are blended with. ranks: the ranks that have the rest of it. drafts:
    the model that drafts its answers, whose layers are behind its own in the cache."""

    decoder: Decoder
    cache: PagedCache
    ranks: Ranks = ALONE
    drafts: Drafter | None = None

    @property
    def stored_drafts(self) -> DraftLayers:
        """Return the layers of the model that drafts as records have them."""
        return NO_DRAFTS if self.drafts is None else self.drafts.stored_as


@dataclass(frozen=True)
class PromptForward:
    """The forward of one prompt, once or several times. ``pace`` says when to pause, and knows the other
    ranks. ``note`` is told of Q. ``drafts``: what else is run over the rows; ``next_id``: the token behind
    them. ``exact``: whether all rows attend as the engine's own do, to the last bit. Those behind the last
    whole block always do: a prefix hit leaves them to the engine."""

    decoder: Decoder
    tokens: PromptTokens
    pages: Pages
    pace: Pace
    trace: Trace
    watch: Stopwatch
    note: Note | None = None
    drafts: Drafter | None = None
    next_id: int = 0
    exact: bool = False
    # The key is where a piece begins and its length: layers with the same rows in the same pieces share an
    # entry.
    _addresses: dict[tuple[int, int], Addresses] = field(default_factory=dict, init=False)
    _places: dict[tuple[int, int], Places] = field(default_factory=dict, init=False)
    _launched: list[torch.Event] = field(default_factory=list, init=False)

    @property
    def device(self) -> torch.device:
        return self.pages.device

    def among(self, layer: int) -> tuple[KVLayers, int]:
        """Return the layers that this one is among, and its number there: behind the model's own are those of
        the model that drafts."""
        if layer < self.decoder.num_layers:
            return self.decoder, layer
        assert self.drafts is not None, "it has no such layers"
        return self.drafts, layer - self.decoder.num_layers

    def embed(self, positions: Ints) -> Rows:
        ids = upload(self.tokens.ids[positions], self.device)
        return self.decoder.embed(ids, Indices.of(positions, self.device))

    def layer(
        self,
        layer: int,
        rows: Rows,
        look: Look | None = None,
        check: bool = False,
        ends: Ints | None = None,
    ) -> Generator[None, None, Rows]:
        """Run one layer over ``rows``, and write their K and V. Returns the rows that go on. Pauses between
        pieces.

        check: whether ``look`` may drop rows; it sees all of them at once then, with K before RoPE. ends:
        the only numbers of rows, ascending, behind which a piece may end.
        """
        if check:  # these rows, and those that go on, may be as many as others were
            self._addresses.clear()
            self._places.clear()
        parts: list[Rows] = []
        at, count = 0, len(rows)
        self.watch.rows += count
        while at < count:  # ascending, so that what a piece attends to is written
            end = self._end(at, count, check, ends)
            piece = rows if end - at == count else rows.at(slice(at, end))
            attention = partial(self._attention, layer, at, piece.positions, look)
            with self.trace.span("compute", f"layer {layer}"):
                parts.append(self.decoder.prefill_layer(layer, piece, attention, raw_keys=check))
            if self._pauses(end - at):
                yield from self.pause()
            at = end
        return rows.joined(parts)

    def draft(
        self,
        rows: Rows,
        outputs: Mapping[int, Rows],
        looks: Callable[[int], Look] | None = None,
        ends: Ints | None = None,
    ) -> Generator[None, None, None]:
        """Run the model that drafts over the ``rows`` of the last layer, and write its K and V. Pauses
        between pieces.

        outputs: as :meth:`Drafter.keep` has kept them. looks: makes each layer's look, before the
        layer is written. ends: as :meth:`layer` has them.
        """
        assert self.drafts is not None
        first, count, at = self.decoder.num_layers, len(rows), 0
        following = np.append(self.tokens.ids[1:], self.next_id)
        while at < count:
            end = self._end(at, count, ends=ends, layers=self.drafts.num_layers)
            positions = rows.positions if end - at == count else rows.positions[at:end]
            read = {layer: _at(one, positions) for layer, one in outputs.items()}
            piece = DraftRows(self.tokens.ids[positions.host], following[positions.host], positions, read)
            places, addresses = self._placed(at, positions.host), self._addressed(at, positions.host)

            def write(
                layer: int, projected: Projected, places: Places = places, positions: Indices = positions
            ) -> None:
                look = looks and looks(first + layer)
                self.pages.write(first + layer, places, projected.key, projected.value)
                if look:
                    look(positions, projected)

            def attend(layer: int, query: torch.Tensor, addresses: Addresses = addresses) -> torch.Tensor:
                return self.pages.attend(first + layer, query, addresses)

            with self.trace.span("compute", "drafts"):
                self.drafts.prefill(piece, write, attend)
            if self._pauses((end - at) * self.drafts.num_layers):
                yield from self.pause()
            at = end

    def pause(self) -> Generator[None, None, None]:
        """Let the engine take a step."""
        self.watch.pause()
        yield
        self.watch.resume()

    def _end(
        self, at: int, count: int, check: bool = False, ends: Ints | None = None, layers: int = 1
    ) -> int:
        """Return where the next piece of ``count`` rows ends, which runs through so many layers. No piece has
        only a few rows, which a CPU's matrix products would round differently."""
        left, most = count - at, max(_LEAST_ROWS, self.pace.rows // layers)
        end = count if check else at - (-left // -(-left // most))
        return end if ends is None else int(ends[np.searchsorted(ends, end)])

    def _pauses(self, rows: int) -> bool:
        await_former(self._launched, self.device)
        return self.pace.pause(rows)

    def _attention(
        self,
        layer: int,
        at: int,
        positions: Indices,
        look: Look | None,
        projected: Projected,
    ) -> Attended:
        self.pages.write(layer, self._placed(at, positions.host), projected.key, projected.value)
        if self.note is not None:
            self.note(layer, positions.host, projected.query)
        kept = None if look is None else look(positions, projected)
        read_on = self.drafts is not None and self.drafts.reads_outputs
        if layer == self.decoder.num_layers - 1 and not read_on:
            return Attended(None, kept)
        query = projected.query
        if kept is not None:
            query, positions = query[kept.device], positions[kept]
        return Attended(self.pages.attend(layer, query, self._addressed(at, positions.host)), kept)

    def _placed(self, at: int, positions: Ints) -> Places:
        key = at, len(positions)
        if key not in self._places:
            self._places[key] = self.pages.places(positions)
        return self._places[key]

    def _addressed(self, at: int, positions: Ints) -> Addresses:
        key = at, len(positions)
        if key not in self._addresses:
            last = self.pages.whole_blocks(len(self.tokens.ids))
            scattered = 0 if self.exact else int(np.searchsorted(positions, last))
            self._addresses[key] = self.pages.addresses(self._seen(positions), scattered=scattered)
        return self._addresses[key]

    def _seen(self, positions: Ints) -> Ints:
        """Return the position up to which each of these rows sees."""
        return positions


def _at(rows: Rows, positions: Indices) -> Rows:
    """Return those of the rows that are at these positions, ascending."""
    if len(rows) == len(positions):
        return rows
    at = np.searchsorted(rows.positions.host, positions.host)
    return rows.at(Indices.of(at, positions.device.device))
