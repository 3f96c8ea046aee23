"""A model's decoder layers, run outside the engine's own forward, with attention in our hands."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from blendrag.engine.compat.model import (
    attention_of,
    decoder_layers,
    dtype_of,
    kv_shape_of,
    rotary_of,
    rotate,
    text_model,
)
from blendrag.engine.forward.indices import Indices, upload
from blendrag.engine.forward.rotation import Unrotation


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some tokens between two layers. states, residual: the residual stream, [rows, hidden_size] each; no
    ``residual`` before layer 0. more: by layer, what else of these rows it takes, [rows, ...] each; empty if
    no layer takes any."""

    positions: Indices
    states: torch.Tensor
    residual: torch.Tensor | None
    more: tuple[Mapping[str, torch.Tensor], ...] = ()

    def __len__(self) -> int:
        return len(self.positions)

    def at(self, which: Indices | slice | None) -> Rows:
        """Return only these rows; None: all."""
        if which is None:
            return self
        rows = which if isinstance(which, slice) else which.device
        residual = None if self.residual is None else self.residual[rows]
        more = tuple({name: each[rows] for name, each in layer.items()} for layer in self.more)
        return Rows(self.positions[which], self.states[rows], residual, more)

    def joined(self, parts: Sequence[Rows]) -> Rows:
        """Return these rows behind a layer that was computed in several parts, or what one part leaves of
        them."""
        if len(parts) == 1:
            return parts[0]
        residuals = [part.residual for part in parts if part.residual is not None]
        states = torch.cat([part.states for part in parts])
        return Rows(self.positions, states, torch.cat(residuals) if residuals else None, self.more)


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """A layer's projections of its rows, [rows, heads or kv_heads, head_size] each. Q and K are with RoPE;
    raw_key: K before RoPE; None if nobody asked for it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    raw_key: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The rows that go on in a layer after its attention.

    output: [m, heads, head_size]; None after the last layer's projections: nothing reads later results. kept:
    which [m] of the rows go on; None for all of them.
    """

    output: torch.Tensor | None
    kept: Indices | None = None


Attention = Callable[[Projected], Attended]


class Decoder(ABC):
    """A model's layers. ``prefill_layer`` advances rows of the residual stream by one layer."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model = text_model(model)
        self.vllm_config = vllm_config
        self.layers = decoder_layers(model)
        self.attentions: list[Any] = [attention_of(layer) for layer in self.layers]
        # None: of a layer without positions (NoPE). One that has a module and does not call it is found by
        # running it.
        self.rotaries: list[Any | None] = [rotary_of(layer) for layer in self.layers]
        self._unrotations: dict[int, Unrotation] = {}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return (kv_heads, head_size) of one layer's K or V."""
        return kv_shape_of(self.attentions[0])

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of K and V."""
        return dtype_of(self.vllm_config)

    def embed(self, token_ids: torch.Tensor, positions: Indices) -> Rows:
        """Return the input of layer 0 for [n] int64 token ids."""
        return Rows(positions, self.model.embed_input_ids(token_ids), None)

    def rotate_keys(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return ``key``, K before RoPE, [n, kv_heads, head_size], moved to ``positions``. May overwrite
        ``key``."""
        rotary = self.rotaries[layer]
        return key if rotary is None else rotate(rotary, positions, key.flatten(1)).view(key.shape)

    @cached_property
    def unrotates(self) -> bool:
        """Return whether :meth:`unrotation` is right for all layers: their RoPE turns pairs of numbers. Waits
        for the device the first time."""
        layers = {id(rotary): layer for layer, rotary in enumerate(self.rotaries)}
        device = next(self.model.parameters()).device
        positions = upload(np.array([0, 1, 5, 77, 500]), device)
        key = upload(np.linspace(-1, 1, 5 * math.prod(self.kv_shape), dtype=np.float32), device)
        key = key.view(5, *self.kv_shape).to(self.dtype)
        for layer in layers.values():
            back = self.unrotation(layer, positions)(self.rotate_keys(layer, positions, key.clone()))
            if not torch.allclose(back, key, atol=0.05):
                return False
        return True

    def unrotation(self, layer: int, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what takes K at ``positions``, [n], back to K before RoPE."""
        rotary = self.rotaries[layer]
        if rotary is None:
            return lambda key: key
        if id(rotary) not in self._unrotations:
            learnt = Unrotation.of(partial(rotate, rotary), self.kv_shape[1], self.dtype, positions.device)
            self._unrotations[id(rotary)] = learnt
        return self._unrotations[id(rotary)].at(positions)

    @abstractmethod
    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        """Run one layer over ``rows``, which may be overwritten, and return those that go on. Without an
        output of attention their states mean nothing. raw_keys: whether ``attention`` needs K before RoPE."""
