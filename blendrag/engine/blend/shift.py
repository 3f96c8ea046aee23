"""The shift of tokens that are not repaired, by what the repaired ones near them have moved.

Stored KV of neighbouring tokens deviates from full prefill's in similar ways, and of the repaired ones the
deviation is known. It is passed on inside a chunk, weighted by distance, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from blendrag.engine.forward.decoder import Projected
from blendrag.engine.forward.indices import Indices, Ints, upload
from blendrag.engine.forward.paged import Places
from blendrag.engine.forward.prompt_forward import KV, PromptForward
from blendrag.engine.forward.rotation import Unrotation

# Chosen by first-token divergence on chunks of 48 to 200 tokens, and flat around these.
_RANGE = 32.0  # in tokens, over which a weight falls to 1/e
_FACTOR = 0.8
_PRIOR = 0.5  # added to the sum of weights: a token far from all repaired ones stays where it is
_LEAST = 0.02  # sums of weights below this move nothing
_BLOCK = 64  # repaired tokens; on each side of a token as many count at least, which span several ranges


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The numbers that the shift of one piece of rows needs in every layer.

    rows: of the repaired tokens among the piece's rows, [r]. sources, targets: the repaired tokens and those
    that move, among the cached ones, [r] and [t]. spread, gathered: see ``_Blocks``. nearest, weights:
    [t, 2], the repaired tokens before and behind each target, and what they count.
    """

    rows: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    places: Places
    spread: torch.Tensor
    gathered: torch.Tensor
    nearest: torch.Tensor
    weights: torch.Tensor
    turned: dict[int, Unrotation]


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The repaired tokens in blocks of one chunk each, for sums over those near each of them: linear in their
    number, however long a chunk is.

    spread: [blocks, 2 * size, width] float32, the weights by which the ``width`` tokens of a block and of
    those beside it add up at each of its own, those before it and those behind it apart. gathered: [blocks,
    width], which of the r tokens these are. places: [r], where the first of its two sums is.
    """

    size: int
    spread: npt.NDArray[np.float32]
    gathered: Ints
    places: Ints

    @classmethod
    def of(cls, chunk_of: Ints, offsets: Ints) -> Self:
        """chunk_of, offsets: [r], the number of each one's chunk, ascending from 0, and its place there."""
        counts = np.bincount(chunk_of)
        size = min(_BLOCK, int(counts.max()))
        blocks = -(-counts // size)
        slot = np.arange(len(chunk_of)) - (np.cumsum(counts) - counts)[chunk_of]
        block = (np.cumsum(blocks) - blocks)[chunk_of] + slot // size
        own = np.full((int(blocks.sum()), size), -1)
        own[block, slot % size] = np.arange(len(chunk_of))
        around = own
        if counts.max() > size:
            chunk = np.repeat(np.arange(len(counts)), blocks)
            begins, nobody = np.diff(chunk, prepend=-1) != 0, np.full_like(own, -1)
            before = np.where(begins[:, None], nobody, np.roll(own, 1, axis=0))
            behind = np.where(np.roll(begins, -1)[:, None], nobody, np.roll(own, -1, axis=0))
            around = np.concatenate([before, own, behind], axis=1)
        rows, columns = (
            np.where(each < 0, np.nan, offsets[each]).astype(np.float32) for each in (own, around)
        )
        with np.errstate(invalid="ignore"):
            apart = rows[:, :, None] - columns[:, None, :]
            near = np.nan_to_num(np.exp(-np.abs(apart) / _RANGE))
            spread = np.concatenate([near * (apart >= 0), near * (apart <= 0)], axis=1)
        return cls(size, spread, around.clip(min=0), block * 2 * size + slot % size)


class Shift:
    """The shift of one prompt's cached tokens that are not among ``repaired``, which are indices into
    them."""

    def __init__(self, forward: PromptForward, repaired: Ints) -> None:
        self._forward, self._repaired = forward, repaired
        tokens = forward.tokens
        self._chunks = np.cumsum(tokens.offsets == 0)
        self._plans: dict[tuple[int, int], _Plan | None] = {}

    def ends(self, positions: Ints) -> Ints:
        """Return where rows at these positions may be divided: not inside a chunk, whose tokens all have to
        be there before any of them moves."""
        cached = self._forward.tokens.cached
        at = np.minimum(np.searchsorted(cached, positions), len(cached) - 1)
        chunk = np.where(cached[at] == positions, self._chunks[at], -1 - np.arange(len(positions)))
        return np.append(np.flatnonzero(np.diff(chunk)) + 1, len(positions))

    def move(self, layer: int, written: KV, positions: Indices, projected: Projected) -> None:
        """Write the moved K and V of the chunks whose repaired tokens are among these rows.

        written: K with RoPE and V of all cached tokens as they are stored, [cached, kv_heads, head_size].
        """
        key = int(positions.host[0]), len(positions)
        if key not in self._plans:
            self._plans[key] = self._plan(positions.host)
        plan = self._plans[key]
        if plan is None:
            return
        decoder, pages = self._forward.decoder, self._forward.pages
        rotary = id(decoder.rotaries[layer])
        if rotary not in plan.turned:
            plan.turned[rotary] = decoder.unrotation(layer, positions.device[plan.rows])
        moved_key = plan.turned[rotary](projected.key[plan.rows] - written[0][plan.sources])
        moved_value = projected.value[plan.rows] - written[1][plan.sources]
        moved = torch.stack([moved_key, moved_value], 1).flatten(1).float()
        sums = (plan.spread @ moved[plan.gathered]).flatten(0, 1)
        shifts = torch.nn.functional.embedding_bag(
            plan.nearest, sums, mode="sum", per_sample_weights=plan.weights
        )
        shifts = shifts.to(moved_key.dtype).view(-1, 2, *moved_key.shape[1:])
        turned = decoder.rotate_keys(layer, plan.positions, shifts[:, 0].contiguous())
        new_key, new_value = written[0][plan.targets] + turned, written[1][plan.targets] + shifts[:, 1]
        pages.write(layer, plan.places, new_key, new_value)

    def _plan(self, positions: Ints) -> _Plan | None:
        tokens, device = self._forward.tokens, self._forward.device
        sources = self._repaired[np.isin(tokens.cached[self._repaired], positions)]
        chunks, chunk_of = np.unique(self._chunks[sources], return_inverse=True)
        rest = np.setdiff1d(np.arange(tokens.cached.size), self._repaired, assume_unique=True)
        rest = rest[np.isin(self._chunks[rest], chunks)]
        if not sources.size or not rest.size:
            return None
        blocks = _Blocks.of(chunk_of, tokens.offsets[sources])
        # Of each token that may move: the nearest repaired ones of its chunk.
        behind = np.searchsorted(sources, rest)
        nearest, weights = np.zeros((len(rest), 2), np.int64), np.zeros((len(rest), 2))
        for side, at in enumerate((behind - 1, behind)):
            inside = (at >= 0) & (at < len(sources))
            at = np.clip(at, 0, len(sources) - 1)
            inside &= self._chunks[sources[at]] == self._chunks[rest]
            distance = np.abs(tokens.offsets[rest] - tokens.offsets[sources[at]])
            nearest[:, side] = blocks.places[at] + side * blocks.size
            weights[:, side] = np.where(inside, np.exp(-distance / _RANGE), 0)
        total = (weights * blocks.spread.sum(2).reshape(-1)[nearest]).sum(1)
        moves = (total >= _LEAST) & (tokens.cached[rest] >= self._forward.pages.written)
        if not moves.any():
            return None
        weights = weights * (_FACTOR / (total + _PRIOR))[:, None]
        targets = rest[moves]
        return _Plan(
            rows=upload(np.searchsorted(positions, tokens.cached[sources]), device),
            sources=upload(sources, device),
            targets=upload(targets, device),
            positions=upload(tokens.cached[targets], device),
            places=self._forward.pages.places(tokens.cached[targets]),
            spread=upload(blocks.spread, device),
            gathered=upload(blocks.gathered, device),
            nearest=upload(nearest[moves], device),
            weights=upload(weights[moves].astype(np.float32), device),
            turned={},
        )
