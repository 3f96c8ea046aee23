"""The worker's part of ``doctor``: what needs tensors to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blendrag.engine.worker.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.engine.worker.selfcheck import mask_error, relative_error
from blendrag.lab.worker.operations import ModelCheck

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane


@torch.inference_mode()
def check_model(data_plane: DataPlane, token_ids: Sequence[int], split: int) -> ModelCheck:
    """Of a text, whose tokens from ``split`` on are a chunk."""
    model = data_plane.model
    chunks = [ChunkTokens("", tuple(ids)) for ids in (token_ids, token_ids[split:])]
    whole, chunk = prefill_chunks(model.decoder, model.cache, chunks)
    return ModelCheck(
        layer0_deviation=relative_error(chunk[0], whole[0, :, split:]),
        deeper_deviation=relative_error(chunk[-1], whole[-1, :, split:]),
        mask_error=mask_error(model.decoder, model.cache, tokens=300, share=0.2),
    )
