"""The decoder for models whose layers are computed piece by piece."""

from __future__ import annotations

from typing import Any

import torch

from blendrag.engine.compat.model import normed, scaled_query
from blendrag.engine.compat.rope import rotated
from blendrag.engine.forward.decoder import Attention, Decoder, Rows
from blendrag.engine.forward.kv_layers import Projected


class KnownDecoder(Decoder):
    """The decoder for Llama, Mistral, Phi3, Qwen2 and Qwen3: dropped rows skip attention, output projection
    and MLP."""

    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        block = self.layers[layer]
        module = block.self_attn
        x, residual = normed(block.input_layernorm, rows.states, rows.residual)
        qkv, _ = module.qkv_proj(x)
        parts = qkv.split([module.q_size, module.kv_size, module.kv_size], dim=-1)
        # Kernels of a CPU want rows behind each other.
        query, key, value = (each.contiguous() for each in parts) if x.device.type == "cpu" else parts
        kv_shape = (x.shape[0], *self.kv[layer].key)
        if hasattr(module, "q_norm"):
            query = _per_head(module.q_norm, query, module.head_dim)
            key = _per_head(module.k_norm, key, module.head_dim)
        raw_key = key.view(kv_shape).clone() if raw_keys else None
        query, key = rotated(module.rotary_emb, rows.positions.device, query, key)
        query = scaled_query(module, rows.positions.device, query)
        heads = query.view(query.shape[0], -1, module.head_dim)
        done = attention(Projected(heads, key.view(kv_shape), value.view(kv_shape), raw_key))
        if done.output is None:
            return rows.at(done.kept)
        positions = rows.positions
        if done.kept is not None:
            positions, residual = positions[done.kept], residual[done.kept.device]
        x, _ = module.o_proj(done.output.view(len(positions), -1))
        x, residual = normed(block.post_attention_layernorm, x, residual)
        return Rows(positions, block.mlp(x), residual)


def _per_head(norm: Any, heads: torch.Tensor, size: int) -> torch.Tensor:
    by_head: torch.Tensor = norm(heads.view(heads.shape[0], -1, size))
    return by_head.reshape(heads.shape)
