"""Whether a model's layers can be run apart from its own forward: tried with every start (decision D12)."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from blendrag.attention.runs import whole_sequences
from blendrag.engine import compat
from blendrag.engine.worker.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.engine.worker.decoder import Decoder, Projected, tapped
from blendrag.engine.worker.paged import PagedCache

# Two orders of the same bfloat16 sums, over many layers; a forgotten multiplier or norm is off by far more.
_FORWARD_TOLERANCE = 0.1
_PROBE = range(100, 148)


def unfit_reason(decoder: Decoder, cache: PagedCache) -> str | None:
    """Why this model's layers cannot be run apart from its own forward; None if they can. Milliseconds."""
    try:
        error = forward_error(decoder, cache)
    except Exception as problem:  # whatever an unknown structure may do, it must not end the worker
        return f"its layers cannot be run apart ({type(problem).__name__}: {problem})"
    if not error <= _FORWARD_TOLERANCE:
        return f"its layers, run apart, give other KV than its own forward (relative error {error:.2g})"
    return None


@torch.inference_mode()
def forward_error(decoder: Decoder, cache: PagedCache) -> float:
    """Largest relative error, over layers, of our forward's K and V against the model's own forward."""
    ours = prefill_chunks(decoder, cache, [ChunkTokens("", tuple(_PROBE))])[0]
    ids = torch.tensor(_PROBE, device=cache.device)
    positions, lengths = torch.arange(ids.numel(), device=ids.device), [ids.numel()]
    pages = cache.scratch(lengths)
    addresses, places = pages.addresses(whole_sequences(lengths), positions), pages.places(positions)
    theirs: dict[int, torch.Tensor] = {}

    def attend(layer: int, projected: Projected) -> torch.Tensor:
        assert projected.raw_key is not None, "taps catch it"
        theirs[layer] = torch.stack([projected.raw_key, projected.value]).cpu()
        pages.write(layer, places, projected.key, projected.value)
        return pages.attend(layer, projected.query, addresses)

    with ExitStack() as stack:
        for layer in range(decoder.num_layers):
            stack.enter_context(tapped(decoder, layer, partial(attend, layer)))
        stack.enter_context(compat.layer_context(decoder.vllm_config, {}, {}, ids.numel()))
        decoder.model.model.forward(ids, positions, None)
    return max(relative_error(ours[layer], theirs[layer]) for layer in range(decoder.num_layers))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``reference``."""
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm().clamp_min(1e-12))
