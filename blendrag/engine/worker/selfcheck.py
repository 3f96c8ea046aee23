"""Whether a model's layers can be run apart from its own forward: tried with every start (decision D12)."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from blendrag.engine import compat
from blendrag.engine.worker.chunk_prefill import AlonePrefill
from blendrag.engine.worker.decoder import Decoder, OnAttention, tapped

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
    return max(relative_error(ours[layer], theirs[layer]) for layer in range(decoder.num_layers))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``reference``."""
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm().clamp_min(1e-12))
