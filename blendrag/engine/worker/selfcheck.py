"""The worker's part of the start-up self-check (design decision D12): what needs tensors to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from blendrag.attention.runs import dense_attention
from blendrag.engine import compat
from blendrag.engine.worker.chunk_prefill import AlonePrefill
from blendrag.engine.worker.decoder import Decoder, OnAttention, tapped
from blendrag.engine.worker.masks import make_probe

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import Blender


# Two orders of the same bfloat16 sums, over many layers; a forgotten multiplier or norm is off by far more.
_FORWARD_TOLERANCE = 0.1
_PROBE = range(100, 148)


def unfit_reason(decoder: Decoder, runner: object, block_size: int) -> str | None:
    """Why this model's layers cannot be run apart from its own forward; None if they can. Milliseconds."""
    try:
        error = forward_error(decoder, AlonePrefill(decoder, runner, block_size))
    except Exception as problem:  # whatever an unknown structure may do, it must not end the worker
        return f"its layers cannot be run apart ({type(problem).__name__}: {problem})"
    if not error <= _FORWARD_TOLERANCE:
        return f"its layers, run apart, give other KV than its own forward (relative error {error:.2g})"
    return None


@torch.inference_mode()
def forward_error(decoder: Decoder, alone: AlonePrefill) -> float:
    """Largest relative error, over layers, of our forward's K and V against the model's own forward."""
    ours = alone.run([_PROBE])[0]
    ids = torch.tensor(_PROBE, device=decoder.attentions[0].kv_cache.device)
    positions = torch.arange(ids.numel(), device=ids.device)
    theirs: dict[int, torch.Tensor] = {}

    def tap(layer: int) -> OnAttention:
        def on_attention(
            query: torch.Tensor, key: torch.Tensor, raw_key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            theirs[layer] = torch.stack([raw_key, value]).cpu()
            alone.keep_in_scratch(layer, key, value)
            return alone.attend(layer, query, True)

        return on_attention

    with ExitStack() as stack:
        for layer in range(decoder.num_layers):
            stack.enter_context(tapped(decoder, layer, tap(layer)))
        stack.enter_context(compat.layer_context(decoder.vllm_config, {}, {}, ids.numel()))
        decoder.model.model.forward(ids, positions, None)
    return max(_relative(ours[layer], theirs[layer]) for layer in range(decoder.num_layers))


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


def mask_error(decoder: Decoder, runner: object, block_size: int) -> float:
    """Relative error of the backend's attention over runs of random scattered positions."""
    probe = make_probe(decoder, runner, block_size, tokens=300, share=0.2)
    scale = probe.attention.impl.scale
    reference = dense_attention(probe.query, probe.key, probe.value, probe.rows, scale)
    return _relative(probe.runs(), reference)


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm().clamp_min(1e-12))
