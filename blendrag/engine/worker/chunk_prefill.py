"""Prefilling chunks at ingest, each apart from the others: the KV that is stored (design decision D3).

Several chunks share one forward. Each attends to itself only, in scratch pages of one layer that are used
again for every layer: the KV that is kept is captured on the way, K before RoPE.

Behind a shared prefix, every chunk has a copy of the prefix before it in the forward, and sees it at its true
distance; of the KV only the chunk's own rows are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blendrag.attention.runs import whole_sequences
from blendrag.engine.worker.decoder import Attended, Decoder, Projected
from blendrag.engine.worker.paged import PagedCache


@torch.inference_mode()
def prefill_chunks(
    decoder: Decoder,
    cache: PagedCache,
    chunks: Sequence[Sequence[int]],
    prefix_ids: Sequence[int] = (),
    look: Callable[[int, Projected], None] | None = None,
) -> list[torch.Tensor]:
    """Prefill chunks, each as if it were the only text in the world, or the only one behind a prefix, at
    positions 0, 1, ...

    ``prefix_ids`` stand before each of them; prefix and chunk must fit the model's window. ``look`` is shown
    every layer's projections. Returns KV of every chunk: [layers, 2 (K before RoPE, V), tokens, kv_heads,
    head_size], on the CPU.
    """
    own, behind = [len(chunk) for chunk in chunks], len(prefix_ids)
    lengths = [behind + n for n in own]
    ids = torch.tensor([i for chunk in chunks for i in (*prefix_ids, *chunk)], device=cache.device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(cache.device)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(cache.device)
    wanted = torch.nonzero(positions >= behind, as_tuple=True)[0] if behind else slice(None)
    pages = cache.scratch(lengths)
    addresses = pages.addresses(whole_sequences(lengths), positions, sequences)
    rows = decoder.embed(ids, positions)
    kv = torch.empty(decoder.num_layers, 2, sum(own), *decoder.kv_shape, dtype=rows.states.dtype)

    for layer in range(decoder.num_layers):

        def attention(projected: Projected, layer: int = layer) -> Attended:
            assert projected.raw_key is not None, "asked for"
            kv[layer, 0].copy_(projected.raw_key[wanted])
            kv[layer, 1].copy_(projected.value[wanted])
            if look is not None:
                look(layer, projected)
            if layer == decoder.num_layers - 1:
                return Attended(None)
            pages.write(layer, positions, projected.key, projected.value, sequences)
            return Attended(pages.attend(layer, projected.query, addresses))

        rows = decoder.prefill_layer(layer, rows, attention, raw_keys=True)
    return [part.clone(memory_format=torch.contiguous_format) for part in kv.split(own, dim=2)]
