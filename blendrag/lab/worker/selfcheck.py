"""The worker's part of ``doctor``: what needs tensors to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blendrag.engine.worker.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.engine.worker.selfcheck import mask_error, relative_error

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane


@torch.inference_mode()
def check_model(data_plane: DataPlane, token_ids: Sequence[int], split: int) -> dict[str, float]:
    """Relative errors that are small, or exactly 0, when blending works for this model.

    layer0_deviation: K and V of layer 0 depend on the token alone, so a chunk prefilled alone must equal the
        same tokens behind others.
    deeper_deviation: the same at the last layer: what blending has to repair (above 0 unless the check is
        blind).
    mask_error: attention of scattered tokens against a dense float32 reference.
    """
    model = data_plane.model
    chunks = [ChunkTokens("", tuple(ids)) for ids in (token_ids, token_ids[split:])]
    whole, chunk = prefill_chunks(model.decoder, model.cache, chunks)
    return {
        "layer0_deviation": relative_error(chunk[0], whole[0, :, split:]),
        "deeper_deviation": relative_error(chunk[-1], whole[-1, :, split:]),
        "mask_error": mask_error(model.decoder, model.cache, tokens=300, share=0.2),
    }
