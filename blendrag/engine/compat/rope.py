"""RoPE on a GPU by one kernel."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform


def rotated(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[Any, Any]:
    """Apply a model's RoPE to [n, heads * size] each, in place where there is a kernel. Engines that compile
    their model leave the module's own call to plain operations, which take a dozen launches outside of it."""
    fused = isinstance(rotary, RotaryEmbedding) and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
    if not fused or positions.device.type == "cpu":
        return rotary(positions, query, key)
    return (rotary.forward_hip if current_platform.is_rocm() else rotary.forward_cuda)(positions, query, key)
