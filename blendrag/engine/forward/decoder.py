"""A model's decoder layers, run outside the engine's own forward, with attention in our hands."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from blendrag.engine.compat.model import (
    attention_of,
    decoder_layers,
    dtype_of,
    has_known_parts,
    kv_shape_of,
    layer_context,
    norm_behind_rope,
    normed,
    rotary_of,
    rotate,
)
from blendrag.engine.forward.indices import Indices
from blendrag.engine.forward.rotation import Unrotation
from blendrag.errors import ModelNotSupportedError


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some tokens between two layers. states, residual: the residual stream, [rows, hidden_size] each; no
    ``residual`` before layer 0."""

    positions: Indices
    states: torch.Tensor
    residual: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.positions)

    def at(self, which: Indices | slice | None) -> Rows:
        """Return only these rows; None: all."""
        if which is None:
            return self
        rows = which if isinstance(which, slice) else which.device
        residual = None if self.residual is None else self.residual[rows]
        return Rows(self.positions[which], self.states[rows], residual)

    def joined(self, parts: Sequence[Rows]) -> Rows:
        """Return these rows behind a layer that was computed in several parts, or what one part leaves of
        them."""
        if len(parts) == 1:
            return parts[0]
        residuals = [part.residual for part in parts if part.residual is not None]
        states = torch.cat([part.states for part in parts])
        return Rows(self.positions, states, torch.cat(residuals) if residuals else None)


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
        self.model = model
        self.vllm_config = vllm_config
        self.layers = decoder_layers(model)
        self.attentions: list[Any] = [attention_of(layer) for layer in self.layers]
        # None: of a layer without positions (NoPE); those that do not use their module are found by `tapped`.
        self.rotaries: list[Any | None] = [rotary_of(layer) for layer in self.layers]

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
        """Return whether :meth:`unrotation` is right for all layers: their RoPE turns pairs of numbers."""
        layers = {id(rotary): layer for layer, rotary in enumerate(self.rotaries)}
        device = next(self.model.parameters()).device
        positions = torch.tensor([0, 1, 5, 77, 500], device=device)
        key = torch.linspace(-1, 1, 5 * math.prod(self.kv_shape), device=device)
        key = key.view(5, *self.kv_shape).to(self.dtype)
        for layer in layers.values():
            back = self.unrotation(layer, positions)(self.rotate_keys(layer, positions, key.clone()))
            if not torch.allclose(back, key, atol=0.05):
                return False
        return True

    def unrotation(self, layer: int, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what takes K at ``positions``, [n], back to K before RoPE."""
        if self.rotaries[layer] is None:
            return lambda key: key
        return Unrotation.of(partial(rotate, self.rotaries[layer]), positions, self.kv_shape[1], self.dtype)

    @abstractmethod
    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        """Run one layer over ``rows``, which may be overwritten, and return those that go on. Without an
        output of attention their states mean nothing. raw_keys: whether ``attention`` needs K before RoPE."""


class KnownDecoder(Decoder):
    """The decoder for Llama, Mistral, Phi3, Qwen2 and Qwen3: dropped rows skip attention, output projection
    and MLP."""

    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        block = self.layers[layer]
        module = block.self_attn
        x, residual = normed(block.input_layernorm, rows.states, rows.residual)
        qkv, _ = module.qkv_proj(x)
        query, key, value = qkv.split([module.q_size, module.kv_size, module.kv_size], dim=-1)
        kv_shape = (x.shape[0], *self.kv_shape)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous().view(kv_shape)
        if hasattr(module, "q_norm"):
            query, key = self._per_head(module.q_norm, query), self._per_head(module.k_norm, key)
        raw_key = key.view(kv_shape).clone() if raw_keys else None
        query, key = module.rotary_emb(rows.positions.device, query, key)
        heads = query.view(query.shape[0], -1, module.head_dim)
        done = attention(Projected(heads, key.view(kv_shape), value, raw_key))
        if done.output is None:
            return rows.at(done.kept)
        positions = rows.positions
        if done.kept is not None:
            positions, residual = positions[done.kept], residual[done.kept.device]
        x, _ = module.o_proj(done.output.view(len(positions), -1))
        x, residual = normed(block.post_attention_layernorm, x, residual)
        return Rows(positions, block.mlp(x), residual)

    def _per_head(self, norm: Any, heads: torch.Tensor) -> torch.Tensor:
        by_head: torch.Tensor = norm(heads.view(heads.shape[0], -1, self.kv_shape[1]))
        return by_head.reshape(heads.shape)


class WholeLayerDecoder(Decoder):
    """The decoder for any other model: each layer runs whole, its attention tapped. Dropped rows leave after
    it.

    How layers are called, and with which arguments, is learnt from the model's own call of its first layer.
    """

    def embed(self, token_ids: torch.Tensor, positions: Indices) -> Rows:
        """Return what the model's own forward passes to its first layer: embeddings may be scaled, for
        example."""
        caught: list[inspect.BoundArguments] = []

        def catch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(inspect.signature(layer.forward).bind(*args, **kwargs))
            raise _FirstLayerReached

        hook = self.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with layer_context(self.vllm_config, {}, {}, len(positions)):
                self.model.model.forward(token_ids, positions.device, None)
        except _FirstLayerReached:
            pass
        finally:
            hook.remove()
        return Rows(positions, self._learn(caught[0].arguments, positions.device), None)

    def _learn(self, arguments: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
        roles = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        at = [name for name, value in roles.items() if value is positions]
        states = [name for name, value in roles.items() if value.is_floating_point()]
        if len(at) != 1 or len(states) != 1:
            raise ModelNotSupportedError(f"its layers take {', '.join(arguments)}")
        self._positions_name, self._states_name = at[0], states[0]
        self._others = {n: v for n, v in arguments.items() if n not in (at[0], states[0], "residual")}
        self._takes_residual = "residual" in arguments
        hidden: torch.Tensor = roles[states[0]]
        return hidden

    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        kept: list[Indices | None] = []

        def for_all_rows(projected: Projected) -> torch.Tensor:
            done = attention(projected)
            kept.append(done.kept)
            if done.output is None or done.kept is None:
                return projected.query if done.output is None else done.output
            every = torch.zeros_like(projected.query)  # what is dropped goes through the layer unused
            every[done.kept.device] = done.output
            return every

        given = {self._positions_name: rows.positions.device, self._states_name: rows.states}
        arguments = {**given, **self._others}
        if self._takes_residual:
            arguments["residual"] = rows.residual
        with (
            tapped(self, layer, for_all_rows),
            layer_context(self.vllm_config, {}, {}, len(rows)),
        ):
            out = self.layers[layer](**arguments)
        states, residual = (out[0], out[1]) if isinstance(out, tuple) else (out, None)
        return Rows(rows.positions, states, residual).at(kept[0])


class _FirstLayerReached(Exception):
    """The exception that ends the model's own forward where ours begins."""


@contextmanager
def tapped(decoder: Decoder, layer: int, attention_of: Callable[[Projected], torch.Tensor]) -> Iterator[None]:
    """Have ``attention_of`` compute a layer's attention, [rows, heads, head_size]. A rotary module that the
    layer does not call is forgotten."""
    attention, rotary = decoder.attentions[layer], decoder.rotaries[layer]
    norm = norm_behind_rope(decoder.layers[layer])
    raw_keys: list[torch.Tensor] = []

    def before_rotary(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs["key"]
        if key is not None:  # None: `rotate_keys` moving stored KV
            raw_keys.append(key.clone())

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        shape = (query.shape[0], *decoder.kv_shape)
        if not raw_keys:
            decoder.rotaries[layer] = None
            raw_keys.append(key.clone())
        key, raw, value = (t.reshape(shape).contiguous() for t in (key, raw_keys.pop(), value))
        if norm is not None:
            raw = norm(raw.float()).to(raw.dtype)
        heads = query.reshape(shape[0], -1, shape[2]).contiguous()
        return attention_of(Projected(heads, key, value, raw)).reshape(shape[0], -1)

    # Layers may share a rotary module: what others caught is not this one's.
    hooks = [decoder.layers[layer].register_forward_pre_hook(lambda *_: raw_keys.clear())]
    if rotary is not None:
        hooks.append(rotary.register_forward_pre_hook(before_rotary, with_kwargs=True))
    attention.forward = forward
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del attention.forward


def make_decoder(model: Any, vllm_config: Any) -> Decoder:
    """Return the piecewise decoder where the structure is known, else the whole-layer one."""
    return (KnownDecoder if has_known_parts(model) else WholeLayerDecoder)(model, vllm_config)
