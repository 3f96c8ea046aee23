"""K and V of one layer: their shapes, how they are caught, moved, written, and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)

from blendrag.engine.compat.rope import rotated
from blendrag.store.identity import HeadShape, common_shape, latent_shape

KV = tuple[torch.Tensor, torch.Tensor]
"""K and V of some tokens, [tokens, heads, size] each."""

# A function that is given a layer's Q, K and V, [rows, heads or kv_heads, size] each, and returns what its
# attention gives, [rows, heads, size of V].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LayerKV:
    """K and V of one layer that has heads of them (MHA, GQA)."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    @property
    def key(self) -> HeadShape:
        """Return the shape of a token's K."""
        return self.attention.num_kv_heads, self.attention.head_size

    @property
    def value(self) -> HeadShape:
        """Return the shape of a token's V."""
        return self.key

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Have ``attend`` compute what the layer's attention module does."""
        self.attention.forward = self._forward(attend)
        try:
            yield
        finally:
            del self.attention.forward

    def _forward(self, attend: Attend) -> Callable[..., torch.Tensor]:
        def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
            heads = query.reshape(query.shape[0], -1, self.key[1]).contiguous()
            key, value = (part.reshape(-1, *self.key).contiguous() for part in (key, value))
            return attend(heads, key, value).reshape(heads.shape[0], -1)

        return forward

    def before_rope(self, turned: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return K before RoPE. turned: what the layer gives its rotary module as K."""
        return turned.reshape(-1, *self.key).contiguous()

    def rotate(self, rotary: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Apply the model's own RoPE to [n, heads * size], in place where the platform's kernel is."""
        if isinstance(rotary, DeepseekScalingRotaryEmbedding):  # of heads, and no Q without K
            heads = keys.view(len(keys), -1, rotary.head_size)
            return rotary(positions, heads[:, :1].clone(), heads)[1].view(keys.shape)
        if isinstance(rotary, MRotaryEmbedding | Phi3LongRoPEScaledRotaryEmbedding):  # no Q without K
            return rotary(positions, keys[:, : rotary.head_size].clone(), keys)[1]
        return rotated(rotary, positions, keys)[0]

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
        """Write [n, *shape] K and V to int64 ``slots``, in the backend's own layout."""
        self.attention.impl.do_kv_cache_update(self.attention, key, value, cache, slots)

    def stored(self, shape: HeadShape, key: torch.Tensor, value: torch.Tensor) -> KV:
        """Return K before RoPE and V as they are stored, [n, *shape] each: the numbers of some heads next to
        each other, and zeros behind them, where other layers have other heads."""
        if shape == self.key:
            return key, value
        flat = (part.reshape(len(part), shape[0], -1) for part in (key, value))
        key, value = (pad(part, (0, shape[1] - part.shape[2])) for part in flat)
        return key, value

    def loaded(self, key: torch.Tensor, value: torch.Tensor) -> KV:
        """Return what :meth:`stored` was given."""
        if key.shape[1:] == self.key:
            return key, value
        numbers = self.key[0] * self.key[1] // key.shape[1]
        key, value = (part[..., :numbers].reshape(-1, *self.key) for part in (key, value))
        return key, value


class LatentKV(LayerKV):
    """The latent KV of one layer with MLA (DeepSeek V2, section 2.1), as one head that all Q share: V is the
    latent, K the latent and behind it the numbers that RoPE turns. Q comes through the projection from
    latents to K, and what is attended to goes through the one to V ("absorbed")."""

    @property
    def value(self) -> HeadShape:
        return 1, self.attention.kv_lora_rank

    def _forward(self, attend: Attend) -> Callable[..., torch.Tensor]:
        module = self.attention

        def forward(query: Any, latent: Any, turned: Any, *_: Any, **__: Any) -> torch.Tensor:
            plain, by_position = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
            absorbed = torch.einsum("nhp,hpl->nhl", plain, module.W_UK_T)
            value = latent.unsqueeze(1).contiguous()
            key = torch.cat([value, turned.view(len(value), 1, -1)], -1)
            out = attend(torch.cat([absorbed, by_position], -1), key, value)
            return torch.einsum("nhl,hlv->nhv", out, module.W_UV).reshape(len(value), -1)

        return forward

    def before_rope(self, turned: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if turned.shape[-1] == self.key[1]:
            return turned
        return torch.cat([value, turned.reshape(len(value), 1, -1)], -1)

    def rotate(self, rotary: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rank = self.value[1]
        turned = super().rotate(rotary, positions, keys[:, rank:].contiguous())
        return torch.cat([keys[:, :rank], turned], -1)

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
        module = self.attention
        latent, turned = value[:, 0], key[..., self.value[1] :]
        kind = module.kv_cache_dtype, module._k_scale
        module.impl.do_kv_cache_update(latent, turned, cache, slots, *kind)

    def stored(self, shape: HeadShape, key: torch.Tensor, value: torch.Tensor) -> KV:
        """Return K as two halves, the first of which begins with the numbers that RoPE turns: V is part of
        it. Codecs keep those of K by channel."""
        numbers = torch.cat([key[..., self.value[1] :], value], -1)
        return numbers[..., : shape[1]], pad(numbers[..., shape[1] :], (0, 2 * shape[1] - self.key[1]))

    def loaded(self, key: torch.Tensor, value: torch.Tensor) -> KV:
        turned = self.key[1] - self.value[1]
        numbers = torch.cat([key, value], -1)[..., : self.key[1]]
        latent = numbers[..., turned:].contiguous()
        return torch.cat([latent, numbers[..., :turned]], -1), latent


def is_latent(attention: Any) -> bool:
    """Return whether an attention module keeps latents (MLA)."""
    return isinstance(attention, MLAAttention)


def layer_kv(attention: Any) -> LayerKV:
    """Return what an attention module keeps of a token."""
    return LatentKV(attention) if is_latent(attention) else LayerKV(attention)


def stored_shape(layers: Sequence[LayerKV]) -> HeadShape | None:
    """Return the shape in which K and V of all these layers are stored, as
    :func:`~blendrag.store.identity.kv_shape` has it from the configuration; None if there is none."""
    keys, latents = {each.key for each in layers}, {isinstance(each, LatentKV) for each in layers}
    if latents == {True}:
        return latent_shape(next(iter(keys))[1]) if len(keys) == 1 else None
    return None if len(latents) > 1 else common_shape(keys)


def unread_latents(attention: Any) -> str | None:
    """Return why a module with MLA is not computed from latents alone; None if it can be."""
    if attention.use_sparse:
        return "an indexer chooses what its attention reads (DSA)"
    if attention.sliding_window is not None:
        return "its latent attention has a window"
    if getattr(attention, "W_UK_T", None) is None or getattr(attention, "W_UV", None) is None:
        return f"backend {attention.attn_backend.get_name()} has packed its projections away"
    return None
