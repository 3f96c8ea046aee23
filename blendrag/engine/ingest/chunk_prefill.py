"""The prefill of chunks at ingest, each apart from the others, which makes the KV that is stored (design
decision D3).

Several chunks share one forward. Each attends to itself and what stands before it (the shared prefix and its
context), in scratch pages of one layer that are used again for every layer: the KV that is kept is captured
on the way, K before RoPE.

What stands before a chunk is mostly known: the prefix is the same for all, and the context is what the chunk
before it in the document was. Its K is moved to its place there, its V is taken as it is, and it is computed
only where nobody has computed it lately.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from blendrag.engine.forward.decoder import Attended, Decoder, Rows
from blendrag.engine.forward.drafter import Drafter, DraftRows
from blendrag.engine.forward.indices import Indices, Ints, await_former, upload
from blendrag.engine.forward.kv_layers import KVLayers, Projected
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.slices import exhaust
from blendrag.store.contexts import Ids

_BETWEEN = 16  # tokens that a separator may have
_REMEMBERED = 1024  # tokens of the last chunk and its context; longer contexts are computed in every call


class ChunkTokens(NamedTuple):
    """The tokens of a chunk: :class:`~blendrag.store.contexts.Chunk` without the text."""

    key: str
    token_ids: Ids
    context: Ids = ()
    after: str = ""


class Known(NamedTuple):
    """The tokens whose KV was computed before: the prefix, and behind it the end of a chunk and its context.
    ids: of both. key: the chunk's."""

    ids: Ids = ()
    key: str = ""


_NOTHING = Known()


@dataclass
class Forward:
    """The plan of one forward. Rows are numbered: first those that are known already, then those that are
    computed.

    ids, positions, sequences: of each computed row. borrowed: (row, position, sequence) of rows that
    sequences take over from others. computed, whole: tokens of each sequence. own: rows of each chunk. last:
    the rows of the last sequence.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    borrowed: list[tuple[int, int, int]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    own: list[range] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, prefix: Ids, chunks: Sequence[ChunkTokens], known: Known = _NOTHING) -> Forward:
        made = cls()
        count = len(known.ids)
        prefix_rows = list(range(len(prefix))) if count else []
        # Ids and rows of chunks and their contexts: a context is borrowed from the chunk that it names.
        ends = {known.key: (known.ids[len(prefix) :], list(range(len(prefix), count)))}
        for number, (key, ids, context, after) in enumerate(chunks):
            before, rows = ends[after] if after and after in ends else ((), [])
            shared = _overlap(before, context)
            sequence = prefix_rows + rows[len(rows) - shared :]
            made.borrowed += [(row, position, number) for position, row in enumerate(sequence)]
            missing = () if prefix_rows else prefix
            new = (*missing, *context[shared:], *ids)
            first = count + len(made.ids)
            made.positions += range(len(sequence), len(sequence) + len(new))
            made.sequences += [number] * len(new)
            made.ids += new
            made.computed.append(len(new))
            made.own.append(range(first + len(new) - len(ids), first + len(new)))
            made.last = [*sequence, *range(first, first + len(new))]
            made.whole.append(len(made.last))
            prefix_rows = made.last[: len(prefix)]
            ends[key] = (*context, *ids), made.last[len(prefix) :]
        return made


def _overlap(before: Ids, context: Ids) -> int:
    """Return how many tokens ``context`` begins with that ``before`` ends with: all but a separator's, or
    none, since a shorter match may be chance where ``before`` has lost its beginning."""
    least = len(context) - min(_BETWEEN, len(context) // 2)
    for count in range(min(len(before), len(context)), max(0, least - 1), -1):
        if before[-count] == context[0] and before[-count:] == context[:count]:
            return count
    return 0


class ChunkPrefill:
    """The prefill of a store's chunks, behind a shared prefix."""

    def __init__(
        self, decoder: Decoder, cache: PagedCache, prefix: Ids = (), drafts: Drafter | None = None
    ) -> None:
        self._decoder, self._cache, self._prefix, self._drafts = decoder, cache, prefix, drafts
        self._known = Known()  # of the rows below
        self._kv: torch.Tensor | None = None
        self._forgotten = 0  # how many times

    @torch.inference_mode()
    def run(self, chunks: Sequence[ChunkTokens]) -> Generator[None, None, list[torch.Tensor]]:
        """Yield after each layer, and return the KV of every chunk: [layers, 2 (K before RoPE, V), tokens,
        kv_heads, head_size], on the model's device; the layers of the model that drafts are the last ones.

        Prefix, context and chunk must fit the model's window. Contexts that continue the chunk before them,
        in this call or the last, are not computed again.
        """
        decoder, device, forgotten = self._decoder, self._cache.device, self._forgotten
        plan, count = Forward.of(self._prefix, chunks, self._known), len(self._known.ids)
        positions, sequences = np.array(plan.positions), np.array(plan.sequences)
        # Contiguous: kernels read positions as they lie in memory.
        borrowed: Ints = np.array(plan.borrowed, np.int64).reshape(-1, 3).T.copy()
        sources, at = upload(borrowed[0], device), upload(borrowed[1], device)
        pages = self._cache.scratch(plan.whole)
        addresses = pages.addresses(positions, sequences)
        computed, known = pages.places(positions, sequences), pages.places(*borrowed[1:])
        rows = decoder.embed(upload(np.array(plan.ids), device), Indices.of(positions, device))
        drafts = self._drafts
        every: list[tuple[KVLayers, int]] = [(decoder, layer) for layer in range(decoder.num_layers)]
        if drafts is not None:
            every += [(drafts, layer) for layer in range(drafts.num_layers)]
        shape = (len(every), 2, count + len(plan.ids), *decoder.stored_shape)
        kv = torch.empty(shape, dtype=rows.states.dtype, device=device)
        if self._kv is not None:
            kv[:, :, :count] = self._kv

        def keep(number: int, projected: Projected) -> None:
            assert projected.raw_key is not None, "asked for"
            layers, layer = every[number]
            for part, of_rows in enumerate(layers.stored(layer, projected.raw_key, projected.value)):
                kv[number, part, count:].copy_(of_rows)
            if number == len(every) - 1:
                return
            pages.write(number, computed, projected.key, projected.value)
            if sources.numel():
                key, value = layers.kv[layer].loaded(*kv[number][:, sources].unbind())
                pages.write(number, known, layers.rotate_keys(layer, at, key.contiguous()), value)

        launched: list[torch.Event] = []
        outputs: dict[int, Rows] = {}
        for layer in range(decoder.num_layers):

            def attention(projected: Projected, layer: int = layer) -> Attended:
                keep(layer, projected)
                last = layer == decoder.num_layers - 1 and not (drafts and drafts.reads_outputs)
                return Attended(None if last else pages.attend(layer, projected.query, addresses))

            rows = decoder.prefill_layer(layer, rows, attention, raw_keys=True)
            if drafts is not None:
                drafts.keep(outputs, layer, rows)
            await_former(launched, device)
            yield
        if drafts is not None:
            first = decoder.num_layers
            # What will stand behind a chunk's last token is not known: a row's own token stands for it.
            ends = np.append(sequences[1:] != sequences[:-1], True)
            ids = np.array(plan.ids)
            following = np.where(ends, ids, np.roll(ids, -1))
            drafts.prefill(
                DraftRows(ids, following, rows.positions, outputs),
                lambda layer, projected: keep(first + layer, projected),
                lambda layer, query: pages.attend(first + layer, query, addresses),
            )
            await_former(launched, device)
            yield
        if self._forgotten == forgotten:
            self._remember(plan, chunks[-1], kv)
        apart = (kv[:, :, own.start : own.stop] for own in plan.own)
        return [part.clone(memory_format=torch.contiguous_format) for part in apart]

    def forget(self) -> None:
        """Drop the last chunk, and those that are under way: they may have been deleted."""
        self._forgotten += 1
        self._known, self._kv = Known(), None

    def _remember(self, plan: Forward, chunk: ChunkTokens, kv: torch.Tensor) -> None:
        """Keep the prefix, and the end of the text that the document's next chunk stands behind."""
        prefix = len(self._prefix)
        last = max(prefix, len(plan.last) - _REMEMBERED)
        ids = (*self._prefix, *(*self._prefix, *chunk.context, *chunk.token_ids)[last:])
        self._known = Known(ids, chunk.key)
        self._kv = kv[:, :, upload(np.array([*plan.last[:prefix], *plan.last[last:]], np.int64), kv.device)]


def prefill_chunks(decoder: Decoder, cache: PagedCache, chunks: Sequence[ChunkTokens]) -> list[torch.Tensor]:
    """Run :meth:`ChunkPrefill.run` once, behind no prefix."""
    return exhaust(ChunkPrefill(decoder, cache).run(chunks))
