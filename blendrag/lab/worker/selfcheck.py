"""The worker's part of ``doctor``: what needs tensors to be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from blendrag.attention.scattered import why_not
from blendrag.engine.compat.model import scores_of
from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.known_layers import KnownDecoder
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.ingest.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.engine.worker.selfcheck import mask_error, relative_error
from blendrag.lab.worker.operations import ModelCheck

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane


@torch.inference_mode()
def check_model(data_plane: DataPlane, token_ids: Sequence[int], split: int) -> ModelCheck:
    """Check the model on a text, from ``split`` on a chunk. Errors are the worst rank's."""
    model = data_plane.model
    chunks = [ChunkTokens("", tuple(ids)) for ids in (token_ids, token_ids[split:])]
    with model.ranks.together():
        whole, chunk = prefill_chunks(model.decoder, model.cache, chunks)
    errors = (
        relative_error(chunk[0], whole[0, :, split:]),
        relative_error(chunk[-1], whole[-1, :, split:]),
        mask_error(model.decoder, model.cache, tokens=300, share=0.2),
    )
    of_layer0, deeper, of_mask = map(max, zip(*model.ranks.everyone(errors), strict=True))
    return ModelCheck(
        layers=layers_of(model.decoder),
        attention=tuple(attention_of(model.decoder)),
        scattered=scattered_by(model.cache),
        layer0_deviation=of_layer0,
        deeper_deviation=deeper,
        mask_error=of_mask,
    )


def layers_of(decoder: Decoder) -> Literal["piece by piece", "whole"]:
    """Say how the layers are run."""
    return "piece by piece" if isinstance(decoder, KnownDecoder) else "whole"


def scattered_by(cache: PagedCache) -> str:
    """Say what attends for scattered tokens, and why it is no kernel of ours where one would do."""
    if cache.latent:
        return "matrix products"
    if cache.has_kernel:
        return "a kernel of blendrag's"
    fits = any(cache.order_for_kernel(layer) for layer in range(len(cache.kv)))
    return f"the engine's backend ({why_not()})" if fits else "the engine's backend"


def attention_of(decoder: Decoder) -> Iterator[str]:
    """Say what attention has in some layers besides the causal mask."""
    scores = [each for each in map(scores_of, decoder.attentions) if each is not None]
    if any(each.window for each in scores):
        yield "windows"
    if any(each.soft_cap for each in scores):
        yield "soft caps"
    if any(each.sinks is not None for each in scores):
        yield "sinks"
