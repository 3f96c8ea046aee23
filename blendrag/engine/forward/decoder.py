"""A model's decoder layers, run outside the engine's own forward, with attention in our hands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.engine.compat.model import attention_of, decoder_layers, text_model
from blendrag.engine.forward.indices import Indices
from blendrag.engine.forward.kv_layers import KVLayers, Projected


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

    @property
    def copied(self) -> Rows:
        """Return the same rows, whatever becomes of these: layers may overwrite what they are given."""
        residual = None if self.residual is None else self.residual.clone()
        return Rows(self.positions, self.states.clone(), residual)

    def joined(self, parts: Sequence[Rows]) -> Rows:
        """Return these rows behind a layer computed in several parts, or what one part leaves of them."""
        if len(parts) == 1:
            return parts[0]
        residuals = [part.residual for part in parts if part.residual is not None]
        states = torch.cat([part.states for part in parts])
        return Rows(self.positions, states, torch.cat(residuals) if residuals else None, self.more)


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The rows that go on in a layer after its attention.

    output: [m, heads, head_size]; None after the last layer's projections: nothing reads later results. kept:
    which [m] of the rows go on; None for all of them.
    """

    output: torch.Tensor | None
    kept: Indices | None = None


Attention = Callable[[Projected], Attended]


class Decoder(KVLayers, ABC):
    """A model's layers. ``prefill_layer`` advances rows of the residual stream by one layer."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model = text_model(model)
        layers = decoder_layers(model)
        super().__init__(layers, [attention_of(layer) for layer in layers], vllm_config)

    def embed(self, token_ids: torch.Tensor, positions: Indices) -> Rows:
        """Return the input of layer 0 for [n] int64 token ids."""
        return Rows(positions, self.model.embed_input_ids(token_ids), None)

    @abstractmethod
    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        """Run one layer over ``rows``, which may be overwritten, and return those that go on. Without an
        output of attention their states mean nothing. raw_keys: whether ``attention`` needs K before RoPE."""
