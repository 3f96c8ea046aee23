"""The shift of tokens that are not repaired, by what the repaired ones near them have moved.

Stored KV of neighbouring tokens deviates from full prefill's in similar ways, and of the repaired ones the
deviation is known. It is passed on inside a chunk, weighted by distance, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blendrag.engine.compat.layer_kv import KV
from blendrag.engine.forward.indices import Indices, Ints, upload
from blendrag.engine.forward.kv_layers import Projected
from blendrag.engine.forward.paged import Places
from blendrag.engine.forward.prompt_forward import Look, PromptForward

# Chosen by first-token divergence on chunks of 48 to 200 tokens, and flat around these.
_RANGE = 32.0  # in tokens, over which a weight falls to 1/e
_FACTOR = 0.8
_PRIOR = 0.5  # added to the sum of weights: a token far from all repaired ones stays where it is
_LEAST = 0.02  # sums of weights below this move nothing
_FIRST = 16  # tokens of a chunk that move no others: its attention sinks deviate in a way of their own
_TILE = 128  # tokens; those that one matrix product moves, by repaired ones among them or as near to them

# [128, 3 tiles]: of a tile's tokens, by the place of a source in the tile before it, in it, or behind it.
_BY_DISTANCE = np.exp(
    -np.abs(np.arange(_TILE)[:, None] + _TILE - np.arange(3 * _TILE)).astype(np.float32) / np.float32(_RANGE)
)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The numbers that the shift of one piece of rows needs in every layer.

    span: of the cached tokens that may move. rows, sources: of the r repaired tokens among them, their
    numbers among the piece's rows and in the span. weights: [tiles, 128, width], what of the repaired tokens
    ``near`` a tile, [tiles, width], moves each of its tokens.
    """

    span: slice
    rows: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    places: Places
    near: torch.Tensor
    weights: torch.Tensor
    turned: dict[int, Callable[[torch.Tensor], torch.Tensor]]


class Shift:
    """The shift of one prompt's cached tokens without those that are ``repaired``, indices into them."""

    def __init__(self, forward: PromptForward, repaired: Ints) -> None:
        self._forward, self._repaired = forward, repaired
        tokens = forward.tokens
        self._chunks = np.cumsum(tokens.offsets == 0)
        self._plans: dict[tuple[int, int], _Plan | None] = {}

    @cached_property
    def _read(self) -> Callable[[int], KV]:
        return self._forward.pages.reader(self._forward.tokens.cached)

    def ends(self, positions: Ints) -> Ints:
        """Return where rows at these positions may be divided: not inside a chunk, whose tokens all have to
        be there before any of them moves."""
        cached = self._forward.tokens.cached
        at = np.minimum(np.searchsorted(cached, positions), len(cached) - 1)
        chunk = np.where(cached[at] == positions, self._chunks[at], -1 - np.arange(len(positions)))
        return np.append(np.flatnonzero(np.diff(chunk)) + 1, len(positions))

    def look(self, layer: int, written: KV | None = None) -> Look:
        """Return what moves a layer's tokens, before any of them is repaired there. written: as :meth:`move`
        has it, if that is known; else it is read from the pages."""
        return partial(self.move, layer, self._read(layer) if written is None else written)

    def move(self, layer: int, written: KV, positions: Indices, projected: Projected) -> None:
        """Write the moved K and V of the chunks whose repaired tokens are among these rows.

        written: K with RoPE and V of all cached tokens as they are stored, [cached, kv_heads, head_size].
        """
        piece = int(positions.host[0]), len(positions)
        if piece not in self._plans:
            self._plans[piece] = self._plan(positions.host)
        plan = self._plans[piece]
        if plan is None:
            return
        layers, number = self._forward.among(layer)
        rotary = id(layers.rotaries[number])
        if rotary not in plan.turned:
            plan.turned[rotary] = layers.unrotation(number, positions.device[plan.rows])
        fresh = projected.key[plan.rows], projected.value[plan.rows]
        key, value = (part[plan.span] for part in written)
        by_key = _spread(plan, plan.turned[rotary](fresh[0] - key[plan.sources]))
        key = key + layers.rotate_keys(number, plan.positions, by_key)
        value = value + _spread(plan, fresh[1] - value[plan.sources])
        key[plan.sources], value[plan.sources] = fresh  # they are where they belong
        self._forward.pages.write(layer, plan.places, key, value)

    def _plan(self, positions: Ints) -> _Plan | None:
        tokens, device = self._forward.tokens, self._forward.device
        sources = self._repaired[np.isin(tokens.cached[self._repaired], positions)]
        tells = tokens.offsets[sources] >= _FIRST
        if not tells.any():
            return None
        first, last = np.searchsorted(self._chunks, self._chunks[sources[0]]), self._chunks[sources[-1]]
        span = slice(int(first), int(np.searchsorted(self._chunks, last, side="right")))
        parts: Sequence[Any] = _near(self._chunks[span], sources - first, tells)
        if device.type != "cpu":  # millions of weights: the device would wait for the host
            parts = [upload(each, device) for each in parts]
        weights: torch.Tensor = torch.as_tensor(_weights(*parts))
        at = tokens.cached[span]
        return _Plan(
            span=span,
            rows=upload(np.searchsorted(positions, tokens.cached[sources]), device),
            sources=upload(sources - first, device),
            positions=upload(at, device),
            places=self._forward.pages.places(at),
            near=torch.as_tensor(parts[0][0]),
            weights=weights.to(self._forward.decoder.dtype).contiguous(),
            turned={},
        )


def _near(chunks: Ints, sources: Ints, tells: npt.NDArray[np.bool_]) -> tuple[Any, Any, Any]:
    """Return what :func:`_weights` takes, of the ``sources``, [r], that are near each tile of tokens: which
    they are, their distance from what is left of the tile, and their chunk, [3, tiles, width]; the tiles'
    chunks; the weights by distance.

    chunks: [n], ascending, the chunk of each token; sources: numbers of tokens, ascending; tells: [r],
    whether a source moves others.
    """
    begins = np.arange(0, len(chunks), _TILE)
    low, high = np.searchsorted(sources, [begins - _TILE, begins + 2 * _TILE])
    near = low[:, None] + np.arange((high - low).max())
    there = near < high[:, None]
    near = near.clip(max=len(sources) - 1)
    there &= tells[near]
    at = sources[near]
    told = np.where(there, chunks[at], -2)
    distance = (at - begins[:, None] + _TILE).clip(0, 3 * _TILE - 1)
    tiles = np.append(chunks, np.full(-len(chunks) % _TILE, -1)).reshape(-1, _TILE)
    return np.stack([near, distance, told]), tiles, _BY_DISTANCE


def _weights(near: Any, tiles: Any, by_distance: Any) -> Any:
    """Return what the sources near a tile move its tokens by, [tiles, 128, width], of arrays of the host, or
    tensors on a device, as :func:`_near` gives them."""
    _, distance, told = near
    weights = by_distance[:, distance].swapaxes(0, 1) * (told[:, None] == tiles[..., None])
    total = weights.sum(2, keepdims=True)
    return _FACTOR * weights / (total + _PRIOR) * (total >= _LEAST)


def _spread(plan: _Plan, moved: torch.Tensor) -> torch.Tensor:
    """Return what moves the span's tokens, from what the repaired ones have moved; [tokens, kv_heads,
    head_size] each."""
    by = torch.bmm(plan.weights, moved.flatten(1)[plan.near]).flatten(0, 1)
    return by[: len(plan.positions)].view(-1, *moved.shape[1:])
