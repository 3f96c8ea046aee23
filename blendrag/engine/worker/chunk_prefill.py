"""Prefilling chunks at ingest, each apart from the others: the KV that is stored (design decision D3).

Several chunks share one forward. Each attends to itself only, in a scratch paged cache of one layer that is
used again for every layer: the KV that is kept is captured on the way, K before RoPE.

Behind a shared prefix, every chunk has a copy of the prefix before it in the forward, and sees it at its true
distance; of the KV only the chunk's own rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blendrag.attention.runs import Runs
from blendrag.engine import compat
from blendrag.engine.worker.decoder import Decoder, LayerVisitor


class AlonePrefill(LayerVisitor):
    """Prefill of several chunks, each as if it were the only text in the world, or the only one behind a
    prefix, at positions 0, 1, ..."""

    wants_raw_keys = True

    def __init__(self, decoder: Decoder, runner: Any, block_size: int) -> None:
        self.decoder, self.runner, self.block_size = decoder, runner, block_size
        self._scratch: torch.Tensor | None = None
        self._kv = torch.empty(0)
        self._kept: torch.Tensor | None = None  # rows of the forward that are captured; None: all

    @torch.inference_mode()
    def run(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int] = ()) -> list[torch.Tensor]:
        """KV of every chunk: [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size], on the CPU.

        ``prefix_ids`` stand before each of them; prefix and chunk must fit the model's window.
        """
        device = self.decoder.attentions[0].kv_cache.device
        lengths = [len(chunk) for chunk in chunks]
        behind = len(prefix_ids)
        ids = torch.tensor([i for chunk in chunks for i in (*prefix_ids, *chunk)], device=device)
        positions = torch.cat([torch.arange(behind + n) for n in lengths]).to(device)
        self._kept = torch.nonzero(positions >= behind, as_tuple=True)[0] if behind else None
        self._place([behind + n for n in lengths], positions)
        hidden = self.decoder.embed(ids)
        shape = (self.decoder.num_layers, 2, sum(lengths), *self.decoder.kv_shape)
        self._kv = torch.empty(shape, dtype=hidden.states.dtype)
        for layer in range(self.decoder.num_layers):
            result = self.decoder.prefill_layer(layer, hidden, positions, self)
            if result is None:
                break
            hidden = result
        captured, self._kv = self._kv, torch.empty(0)
        return [part.clone(memory_format=torch.contiguous_format) for part in captured.split(lengths, dim=2)]

    def _place(self, lengths: Sequence[int], positions: torch.Tensor) -> None:
        blocks = [-(-n // self.block_size) for n in lengths]
        total, widest = sum(blocks), max(blocks)
        attention = self.decoder.attentions[0]
        if self._scratch is None or self._scratch.shape[0] < total:
            self._scratch = compat.scratch_cache(attention, total)
        table = torch.zeros(len(lengths), widest, dtype=torch.int32, device=positions.device)
        starts, first = [0], 0
        slots = []
        for row, (n, count) in enumerate(zip(lengths, blocks, strict=True)):
            table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
            slots.append(torch.arange(n) + first * self.block_size)  # a chunk's blocks are consecutive
            starts.append(starts[-1] + n)
            first += count
        runs = Runs(
            torch.tensor(starts, dtype=torch.int32, device=positions.device),
            torch.tensor(lengths, dtype=torch.int32, device=positions.device),
            max(lengths),
        )
        self._slots = torch.cat(slots).to(positions.device)
        self._metadata = compat.attention_metadata(self.runner, runs, table, self._slots)

    def keep(
        self, layer: int, key: torch.Tensor, raw_key: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor | None:
        assert raw_key is not None
        for part, fresh in enumerate((raw_key, value)):
            self._kv[layer, part].copy_(fresh if self._kept is None else fresh[self._kept])
        self.keep_in_scratch(layer, key, value)
        return None

    def keep_in_scratch(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a layer's K and V where :meth:`attend` reads them."""
        assert self._scratch is not None
        compat.write_kv(self.decoder.attentions[layer], key, value, self._scratch, self._slots)

    def attend(self, layer: int, query: torch.Tensor, all_rows: bool) -> torch.Tensor:
        assert self._scratch is not None
        attention = self.decoder.attentions[layer]
        return compat.attend(attention, query, self._scratch, self._metadata[attention.layer_name])
