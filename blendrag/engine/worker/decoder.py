"""Running a model's decoder layers outside the engine's own forward, with attention in our hands."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.engine import compat
from blendrag.errors import ModelNotSupportedError


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream between two layers, [rows, hidden_size] each; no ``residual`` before layer 0."""

    states: torch.Tensor
    residual: torch.Tensor | None


class LayerVisitor(ABC):
    """What a forward does at each layer's attention.

    ``wants_raw_keys``: whether ``keep`` needs K before RoPE; without it, None is passed.
    """

    wants_raw_keys: bool = False

    @abstractmethod
    def keep(
        self, layer: int, key: torch.Tensor, raw_key: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor | None:
        """Take the fresh K (with RoPE) and V of the current rows, [rows, kv_heads, head_size] each.

        Returns indices of the rows that go on from here; None for all of them.
        """

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        """Attention output for [m, heads, head_size], the kept rows, or all rows from before ``keep``."""


class Decoder(ABC):
    """A model's layers. ``prefill_layer`` advances rows of the residual stream by one layer."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.layers = compat.decoder_layers(model)
        self.attentions: list[Any] = [compat.attention_of(layer) for layer in self.layers]
        self.rotaries: list[Any] = [compat.rotary_of(layer) for layer in self.layers]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """(kv_heads, head_size) of one layer's K or V."""
        return self.attentions[0].num_kv_heads, self.attentions[0].head_size

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        dtype: torch.dtype = self.vllm_config.model_config.dtype
        return dtype

    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """[n] int64 token ids to the input of layer 0."""
        return Hidden(self.model.embed_input_ids(token_ids), None)

    def rotate_keys(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """K before RoPE, [n, kv_heads, head_size], moved to ``positions``. May overwrite ``key``."""
        rotated = compat.rotate(self.rotaries[layer], positions, key.view(key.shape[0], -1))
        return rotated.view(key.shape)

    @abstractmethod
    def prefill_layer(
        self, layer: int, hidden: Hidden, positions: torch.Tensor, visitor: LayerVisitor
    ) -> Hidden | None:
        """One layer over the rows at ``positions``. None after the last layer, whose output is unused."""


class KnownDecoder(Decoder):
    """Llama, Mistral, Qwen2 and Qwen3: dropped rows skip attention, output projection and MLP."""

    def prefill_layer(
        self, layer: int, hidden: Hidden, positions: torch.Tensor, visitor: LayerVisitor
    ) -> Hidden | None:
        block = self.layers[layer]
        attention = block.self_attn
        x, residual = compat.rms_norm(block.input_layernorm, hidden.states, hidden.residual)
        qkv, _ = attention.qkv_proj(x)
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        kv_shape = (x.shape[0], *self.kv_shape)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous().view(kv_shape)
        if hasattr(attention, "q_norm"):
            query, key = self._per_head(attention.q_norm, query), self._per_head(attention.k_norm, key)
        raw_key = key.view(kv_shape).clone() if visitor.wants_raw_keys else None
        query, key = attention.rotary_emb(positions, query, key)
        rows = visitor.keep(layer, key.view(kv_shape), raw_key, value)
        if layer == self.num_layers - 1:
            return None
        if rows is not None:
            query, residual = query[rows], residual[rows]
        out = visitor.attend(layer, query.view(query.shape[0], -1, attention.head_dim), False)
        x, _ = attention.o_proj(out.view(out.shape[0], -1))
        x, residual = compat.rms_norm(block.post_attention_layernorm, x, residual)
        return Hidden(block.mlp(x), residual)

    def _per_head(self, norm: Any, heads: torch.Tensor) -> torch.Tensor:
        by_head: torch.Tensor = norm(heads.view(heads.shape[0], -1, self.kv_shape[1]))
        return by_head.reshape(heads.shape)


class WholeLayerDecoder(Decoder):
    """Any other decoder: each layer runs whole, its attention tapped. Dropped rows leave after the layer.

    How layers are called, and with what, is learnt from the model's own call of its first layer.
    """

    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """What the model's own forward gives to its first layer: embeddings may be scaled, for example."""
        positions = torch.arange(token_ids.numel(), device=token_ids.device)
        caught: list[inspect.BoundArguments] = []

        def catch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(inspect.signature(layer.forward).bind(*args, **kwargs))
            raise _FirstLayerReached

        hook = self.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with compat.layer_context(self.vllm_config, {}, {}, positions.numel()):
                self.model.model.forward(token_ids, positions, None)
        except _FirstLayerReached:
            pass
        finally:
            hook.remove()
        return Hidden(self._learn(caught[0].arguments, positions), None)

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

    def prefill_layer(
        self, layer: int, hidden: Hidden, positions: torch.Tensor, visitor: LayerVisitor
    ) -> Hidden | None:
        kept: list[torch.Tensor | None] = []

        def on_attention(
            query: torch.Tensor, key: torch.Tensor, raw_key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            kept.append(visitor.keep(layer, key, raw_key if visitor.wants_raw_keys else None, value))
            return visitor.attend(layer, query, True)

        arguments = {self._positions_name: positions, self._states_name: hidden.states, **self._others}
        if self._takes_residual:
            arguments["residual"] = hidden.residual
        with (
            tapped(self, layer, on_attention),
            compat.layer_context(self.vllm_config, {}, {}, positions.numel()),
        ):
            out = self.layers[layer](**arguments)
        if layer == self.num_layers - 1:
            return None
        states, residual = (out[0], out[1]) if isinstance(out, tuple) else (out, None)
        if kept[0] is None:
            return Hidden(states, residual)
        return Hidden(states[kept[0]], None if residual is None else residual[kept[0]])


class _FirstLayerReached(Exception):
    """Ends the model's own forward where ours begins."""


OnAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def tapped(decoder: Decoder, layer: int, on_attention: OnAttention) -> Iterator[None]:
    """Have ``on_attention(query, key, raw key, value)`` compute a layer's attention.

    All are [rows, heads or kv_heads, head_size], as is the result; the raw key is K before RoPE.
    """
    attention, rotary = decoder.attentions[layer], decoder.rotaries[layer]
    raw_keys: list[torch.Tensor] = []

    def before_rotary(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[2] if len(args) > 2 else kwargs["key"]
        if key is not None:  # None: `rotate_keys` moving stored KV
            raw_keys.append(key.clone())

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        shape = (query.shape[0], *decoder.kv_shape)
        key, raw, value = (t.reshape(shape).contiguous() for t in (key, raw_keys.pop(), value))
        heads = query.reshape(shape[0], -1, shape[2]).contiguous()
        return on_attention(heads, key, raw, value).reshape(shape[0], -1)

    hook = rotary.register_forward_pre_hook(before_rotary, with_kwargs=True)
    attention.forward = forward
    try:
        yield
    finally:
        hook.remove()
        del attention.forward


def make_decoder(model: Any, vllm_config: Any) -> Decoder:
    """The piecewise decoder where the structure is known, else the whole-layer one."""
    known = type(model).__name__ in compat.KNOWN_ARCHITECTURES
    plain = all(
        hasattr(layer, "self_attn")
        and hasattr(layer.self_attn, "qkv_proj")
        and not getattr(layer.self_attn, "do_llama_4_scaling", False)
        and getattr(layer, "ada_rms_norm_t_cond", None) is None
        and getattr(layer.self_attn, "qk_norm", True)
        for layer in compat.decoder_layers(model)
    )
    return (KnownDecoder if known and plain else WholeLayerDecoder)(model, vllm_config)
