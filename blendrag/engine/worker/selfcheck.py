"""A check at every start that a model's layers can be run apart from its own forward (decision D12)."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from blendrag.attention.runs import dense_attention
from blendrag.engine.compat.drafts import DraftingModel
from blendrag.engine.compat.model import (
    ForwardEnded,
    exactly_kept,
    heads_of,
    layer_context,
    own_forward,
    scores_of,
)
from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.drafter import Drafter
from blendrag.engine.forward.indices import upload
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.ranks import ALONE, Ranks
from blendrag.engine.forward.slices import exhaust
from blendrag.engine.ingest.chunk_prefill import ChunkPrefill, ChunkTokens, prefill_chunks
from blendrag.errors import ModelNotSupportedError

_log = logging.getLogger(__name__)

# The tolerance for two orders of the same bfloat16 sums, over many layers; a forgotten multiplier or norm is
# off by far more.
_FORWARD_TOLERANCE = 0.1
# The same where K and V are kept in eight bits, which round K at another position otherwise.
_ROUNDED_TOLERANCE = 0.3
_PROBE = range(100, 148)
_SHIFT = 512  # positions
# The rounding of a bfloat16 is 0.2 %.
_MASK_TOLERANCE = 0.01
# Errors that running an unknown structure raises, on all ranks alike.
_OF_STRUCTURE = (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


def unfit_reason(decoder: Decoder, cache: PagedCache, ranks: Ranks = ALONE) -> str | None:
    """Return why this model's layers cannot be run apart from its own forward; None if they can. Takes
    milliseconds, more where our kernel has to be compiled, which is checked, too. ranks: those that run the
    layers."""
    try:
        with ranks.together(*_OF_STRUCTURE):
            error, error_of_shift = forward_errors(decoder, cache)
        # All sides of forward_errors attend the same way, so it does not see a wrong mask.
        error_of_mask = mask_error(decoder, cache, tokens=2048, share=0.25) if cache.has_kernel else 0.0
    except Exception as problem:  # whatever an unknown structure may do, it must not end the worker
        return not_apart(problem)
    tolerance = _ROUNDED_TOLERANCE if cache.rounds else _FORWARD_TOLERANCE
    if not error <= tolerance:
        return f"its layers, run apart, give other KV than its own forward (relative error {error:.2g})"
    if not error_of_shift <= tolerance:
        return f"its KV depends on positions by more than RoPE (relative error {error_of_shift:.2g})"
    if not error_of_mask <= _MASK_TOLERANCE:
        return f"its attention over scattered tokens is not exact (relative error {error_of_mask:.2g})"
    return None


def join_drafts(
    decoder: Decoder, cache: PagedCache, ranks: Ranks = ALONE
) -> tuple[Drafter | None, PagedCache]:
    """Return the layers of the model that drafts, and the cache with them behind the model's own; None, and
    the cache, if there are none that can be run apart, which is logged: drafts are only accepted more seldom.
    """
    drafts, whole, problem = None, cache, None
    try:
        if (model := DraftingModel.of(cache.runner, cache.groups, decoder.attentions)) is not None:
            drafts = Drafter(model, decoder.vllm_config)
            whole = PagedCache([*decoder.attentions, *drafts.attentions], cache.runner, cache.groups)
    except Exception as error:  # whatever an unknown structure may do
        drafts, problem = None, error
    if ranks.all(drafts is not None):
        try:
            with ranks.together(*_OF_STRUCTURE, RuntimeError):  # as torch raises for other shapes
                exhaust(ChunkPrefill(decoder, whole, (), drafts).run([ChunkTokens("", tuple(_PROBE))]))
            assert drafts is not None
            _ = drafts.unrotates  # learnt here, where an error ends nothing
            if whole.readable == cache.readable:
                return drafts, whole
            problem = ModelNotSupportedError("its KV cannot be read back")
        except Exception as error:
            problem = error
    if problem is not None:
        _log.warning("the KV of the model that drafts is not stored with chunks: %s", problem)
    return None, cache


def not_apart(problem: Exception) -> str:
    """Say that running a model's layers apart from its own forward raised this."""
    return f"its layers cannot be run apart ({type(problem).__name__}: {problem})"


@torch.inference_mode()
def forward_errors(decoder: Decoder, cache: PagedCache) -> tuple[float, float]:
    """Return the largest relative errors, over layers, of the probe's V, and K moved as stored K is: of our
    forward against the model's own, and against that one further on, where positions that come in unseen by
    us show up."""
    ours = prefill_chunks(decoder, cache, [ChunkTokens("", tuple(_PROBE))])[0]
    longest = decoder.vllm_config.model_config.max_model_len
    begins = 0, min(_SHIFT, longest - len(_PROBE))
    _ = decoder.unrotates  # learnt now and not in a blend, since it waits for the device
    error, error_of_shift = (max(_own_forward(decoder, cache, ours, begin)) for begin in begins)
    return error, error_of_shift


def _own_forward(decoder: Decoder, cache: PagedCache, ours: torch.Tensor, begin: int) -> list[float]:
    """Run the model's own forward over the probe, which begins at this position and sees only itself. Returns
    the relative errors of ``ours``, [layers, 2, n, kv_heads, head_size], K before RoPE and V."""
    ids = torch.tensor(_PROBE, device=cache.device)
    positions = np.arange(ids.numel())
    there = upload(positions + begin, cache.device)
    pages = cache.scratch([ids.numel()])
    addresses, places = pages.addresses(positions), pages.places(positions)
    errors: list[float] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raw_key, our_value = decoder.kv[layer].loaded(*ours[layer].unbind())
        moved = decoder.rotate_keys(layer, there, raw_key.clone())
        errors.extend((relative_error(moved, key), relative_error(our_value, value)))
        if layer == decoder.num_layers - 1:
            raise ForwardEnded
        pages.write(layer, places, key, value)
        return pages.attend(layer, query, addresses)

    with ExitStack() as stack:
        for layer, kv in enumerate(decoder.kv):
            stack.enter_context(kv.attending(partial(attend, layer)))
        stack.enter_context(layer_context(decoder.vllm_config, ids.numel()))
        own_forward(decoder.model, ids, there)
    return errors


@torch.inference_mode()
def mask_error(decoder: Decoder, cache: PagedCache, tokens: int, share: float) -> float:
    """Return the largest relative error, over the kinds of layers, of attention of random scattered rows over
    the paged cache, against float32 on the CPU."""
    device, dtype, pages = cache.device, next(decoder.model.parameters()).dtype, cache.scratch([tokens])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    places = pages.places(np.arange(tokens))
    positions = torch.randperm(tokens, generator=generator)[: int(tokens * share)].sort().values
    addresses = pages.addresses(positions.numpy(), scattered=len(positions))
    errors = {}
    for layer, kv in enumerate(cache.kv):
        attention = kv.attention
        scores = scores_of(attention)
        if scores is None:  # only on a CPU
            continue
        kind = scores.window, scores.soft_cap, scores.sinks is None, kv.key
        if kind not in errors:
            sinks = None if scores.sinks is None else scores.sinks.cpu()
            key, value = random(tokens, *kv.key), random(tokens, *kv.value)
            if cache.latent:
                value = key[..., : kv.value[1]]
            query = random(len(positions), heads_of(attention), kv.key[1])
            kept = exactly_kept(attention, key, value)
            pages.write(layer, places, *kept)
            on_host = query.cpu(), kept[0].cpu(), kept[1].cpu()
            reference = dense_attention(*on_host, positions, replace(scores, sinks=sinks))
            errors[kind] = relative_error(pages.attend(layer, query, addresses).cpu(), reference)
    return max(errors.values(), default=0.0)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``reference``."""
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm().clamp_min(1e-12))
