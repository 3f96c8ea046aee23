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

from blendrag.engine.compat.layer_kv import layer_kv, stored_shape
from blendrag.engine.compat.model import (
    attention_of,
    decoder_layers,
    dtype_of,
    rotary_of,
    text_model,
)
from blendrag.engine.forward.indices import Indices, upload
from blendrag.engine.forward.rotation import Unrotation
from blendrag.store.identity import HeadShape


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
        self.kv = [layer_kv(attention) for attention in self.attentions]
        # None: of a layer without positions (NoPE). One that has a module and does not call it is found by
        # running it.
        self.rotaries: list[Any | None] = [rotary_of(layer) for layer in self.layers]
        self._unrotations: dict[int, Unrotation] = {}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def stored_shape(self) -> HeadShape:
        """Return the shape in which K and V of every layer are stored, (kv_heads, head_size)."""
        shape = stored_shape(self.kv)
        assert shape is not None, "such a model is not blended"
        return shape

    def stored(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's K before RoPE and V as they are stored, [n, *stored_shape] each."""
        return self.kv[layer].stored(self.stored_shape, key, value)

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
        if rotary is None:
            return key
        return self.kv[layer].rotate(rotary, positions, key.flatten(1)).view(key.shape)

    @cached_property
    def unrotates(self) -> bool:
        """Return whether :meth:`unrotation` is right for all layers: their RoPE turns pairs of numbers. Waits
        for the device the first time."""
        layers = {id(rotary): layer for layer, rotary in enumerate(self.rotaries)}
        device = next(self.model.parameters()).device
        positions = upload(np.array([0, 1, 5, 77, 500]), device)
        for layer in layers.values():
            shape = 5, *self.kv[layer].key
            key = upload(np.linspace(-1, 1, math.prod(shape), dtype=np.float32), device)
            key = key.view(shape).to(self.dtype)
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
            kv = self.kv[layer]
            learnt = Unrotation.of(partial(kv.rotate, rotary), kv.key[1], self.dtype, positions.device)
            self._unrotations[id(rotary)] = learnt
        return self._unrotations[id(rotary)].at(positions)

    @abstractmethod
    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        """Run one layer over ``rows``, which may be overwritten, and return those that go on. Without an
        output of attention their states mean nothing. raw_keys: whether ``attention`` needs K before RoPE."""
