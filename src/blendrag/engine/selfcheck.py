"""The worker's part of the start-up self-check (design decision D12): what needs tensors to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blendrag.engine import compat
from blendrag.engine.alone import AlonePrefill
from blendrag.engine.decoder import Decoder
from blendrag.fuse.runs import dense_attention, find_runs

if TYPE_CHECKING:
    from blendrag.engine.blender import Blender


@torch.inference_mode()
def check_model(blender: Blender, token_ids: Sequence[int], split: int) -> dict[str, float]:
    """Relative errors that are small, or exactly 0, when blending works for this model.

    layer0_deviation: K and V of layer 0 depend on the token alone, so a chunk prefilled alone must equal the
        same tokens behind others.
    deeper_deviation: the same at the last layer: what blending has to repair (above 0 unless the check is
        blind).
    mask_error: attention of scattered tokens against a dense float32 reference.
    """
    alone = AlonePrefill(blender.decoder, blender.runner, blender.block_size)
    whole, chunk = alone.run([token_ids, token_ids[split:]])
    return {
        "layer0_deviation": _relative(chunk[0], whole[0, :, split:]),
        "deeper_deviation": _relative(chunk[-1], whole[-1, :, split:]),
        "mask_error": mask_error(blender.decoder, blender.runner, blender.block_size),
    }


def mask_error(decoder: Decoder, runner: object, block_size: int, tokens: int = 300) -> float:
    """Relative error of the backend's attention over runs of random scattered positions."""
    attention = decoder.attentions[0]
    cache = compat.scratch_cache(attention, -(-tokens // block_size))
    device, dtype = cache.device, next(decoder.model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    key, value = (random(tokens, *decoder.kv_shape) for _ in range(2))
    compat.write_kv(attention, key, value, cache, torch.arange(tokens, device=device))
    rows = torch.sort(torch.randperm(tokens, generator=generator)[: tokens // 5]).values.to(device)
    query = random(rows.numel(), attention.num_heads, attention.head_size)
    table = torch.arange(cache.shape[0], dtype=torch.int32, device=device)[None]
    metadata = compat.attention_metadata(runner, find_runs(rows), table, rows)
    out = compat.attend(attention, query, cache, metadata[attention.layer_name])
    return _relative(out, dense_attention(query, key, value, rows, attention.impl.scale))


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm().clamp_min(1e-12))
