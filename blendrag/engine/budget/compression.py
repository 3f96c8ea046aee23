"""The eviction of a prompt's KV after its first token (Ada-KV): what the question reads is kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from blendrag.compress import Budget, Observed, Scorer, kept_tokens, make_budget, page_gains
from blendrag.compress.window import gram_of
from blendrag.engine.budget.head_pages import HeadPages, KeptPages, PageReader
from blendrag.engine.budget.head_reading import HeadReading
from blendrag.engine.compat.head_attention import HeadKernel, bind, not_by_heads
from blendrag.engine.compat.model import all_layers, heads_of, output_weight, scale_of, scores_of
from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.indices import Ints, upload
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.hooks import Blending, Reports, Step, WorkerHook
from blendrag.engine.wire.recipe import BlendOrder, EvictionOrder
from blendrag.engine.wire.report import Eviction
from blendrag.errors import ConfigError

_LAST_ROWS = 12  # the last rows of a prompt, at most, that the engine computes behind its question
_NOT_YET = Eviction(whole="the answer ended with its first tokens")  # unless a later step evicts


class WindowQueries:
    """Q of a prompt's last fresh tokens in every layer, as the last pass over each leaves it: those of the
    observation window, or of the question where that is shorter. Cached tokens may have no Q.

    first: the position of the first of them. query: [layers, window, heads, head_size].
    """

    def __init__(self, order: BlendOrder, budget: Budget, decoder: Decoder) -> None:
        self.budget = budget
        end = len(order.token_ids)
        self.first, self.end = max(end - budget.scorer.window, order.recipe.cached_end), end
        self._query: torch.Tensor | None = None
        self._layers = decoder.num_layers

    def note(self, layer: int, positions: Ints, query: torch.Tensor) -> None:
        """Keep ``query``'s rows, [n, heads, head_size], at ascending positions. The last pass counts."""
        begin = int(np.searchsorted(positions, self.first))
        if begin == len(positions):
            return
        if self._query is None:
            shape = (self._layers, self.end - self.first, *query.shape[1:])
            self._query = query.new_empty(shape)
        self._query[layer, upload(positions[begin:] - self.first, query.device)] = query[begin:]

    def __getitem__(self, layer: int) -> torch.Tensor:
        if self._query is None:
            raise WholeError("no question stands behind the documents")
        return self._query[layer]


class WholeError(Exception):
    """The error that nothing is evicted; the message says why."""


@dataclass(frozen=True, slots=True)
class Parts:
    pages: HeadPages
    reader: PageReader
    reading: HeadReading


class Compression(WorkerHook):
    """The eviction of prompts' KV in one loaded model. reason: why all of it is always kept, if it is."""

    name = "budget"

    def __init__(
        self, decoder: Decoder, cache: PagedCache, ranks: int = 1, reports: Reports | None = None
    ) -> None:
        """Make it for a model. Raises nothing: users who ask for no eviction must not see an error. reports:
        those of blends, which then tell of evictions, too."""
        self._decoder, self._reports = decoder, reports or Reports()
        self._parts: Parts | None = None
        self.reason: str | None = None
        try:
            self._parts = _bound(decoder, cache, ranks)
        except WholeError as why:
            self.reason = str(why)
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
        self._seen: dict[str, WindowQueries | ConfigError] = {}
        self._grams: dict[int, torch.Tensor] = {}

    def before_forward(self, step: Step) -> dict[str, Eviction]:
        """Evict before the step's forward, which may give the blocks to others, and reads what is left."""
        self.forget(step.ended | step.preempted)
        evictions: dict[str, Eviction] = {}
        for order in step.of(self.name).others:
            eviction = evictions[order.request_id] = self.evict(order)
            if report := self._reports.get(order.ticket):
                self._reports.keep(order.ticket, report.evicted(eviction))
        return evictions

    def blending(self, order: BlendOrder) -> Blending:
        if (written := order.recipe.options.kv_budget) is None:
            return Blending(order)
        try:
            window = WindowQueries(order, make_budget(written), self._decoder)
        except ConfigError as error:  # evict() reports it
            self._seen[order.request_id] = error
            return Blending(order)
        self._seen[order.request_id] = window
        return Blending(order, window.note, lambda report: report.evicted(_NOT_YET))

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended, or lost their blocks."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)
        if self._parts is not None:
            self._parts.reading.forget(request_ids)

    @torch.inference_mode()
    def evict(self, order: EvictionOrder) -> Eviction:
        """Compact a computed prompt's KV into its first blocks. If anything goes wrong, all of it is kept."""
        seen = self._seen.pop(order.request_id, None)
        try:
            if self._parts is None:
                raise WholeError(self.reason)
            if not order.block_ids:
                raise WholeError("its layers' blocks are not in one group")
            if seen is None:
                raise WholeError("it was not blended to its end")
            if isinstance(seen, ConfigError):
                raise seen
            return self._evict(self._parts, seen, order)
        except WholeError as reason:
            return Eviction(whole=str(reason))
        except Exception as error:
            return Eviction(whole=f"{type(error).__name__}: {error}")

    def _evict(self, parts: Parts, seen: WindowQueries, order: EvictionOrder) -> Eviction:
        budget, size, pages = seen.budget, parts.pages.block_size, parts.pages
        last = (order.tokens - 1) // size  # the block that is still written to stays
        keep = budget.tokens // size - 1
        if seen.end < order.tokens - _LAST_ROWS:
            raise WholeError("the question is left to the engine")
        if keep >= last:
            raise WholeError("the prompt is no longer than the budget")
        most = min(last * size, seen.end - budget.scorer.window)
        stays = -(-(last * size - most) // size)  # the window, and what the engine computed behind it
        if budget.tokens < (least := max(budget.least(size), (stays + 1) * size)):
            raise WholeError(f"kv_budget is below {least}, the window and one block of {size}")
        blocks = np.array(order.block_ids[: last + 1])
        scores = self._scores(parts, seen, budget.scorer, blocks, most)
        kept_anyway = scores.new_full((*scores.shape[:2], last * size - most), float("inf"))
        scores = torch.cat([scores, kept_anyway], -1)
        counts = budget.allocator.allocate(page_gains(scores, size).cpu(), keep).numpy()
        kept = KeptPages.of(pages, blocks[:keep], counts)
        heads = list(np.ndindex(counts.shape))  # by layer
        rows = [
            parts.reader.rows(
                pages.ids(layer, blocks[:last], head),
                kept_tokens(scores[layer, head], int(counts[layer, head]) * size),
            )
            for layer, head in heads
        ]  # all pages are read before one is written: they may overlap
        before = pages.copy_of(blocks[:keep])
        try:
            for (layer, head), kv in zip(heads, rows, strict=True):
                pages.write(layer, kept.table[layer, head, : counts[layer, head]], *kv)
        except BaseException:
            pages.restore(blocks[:keep], before)
            raise
        parts.reading.keep(order.request_id, kept, last)
        tokens = keep * size + order.tokens - last * size
        return Eviction(tokens, keep, last, int(blocks[0]))

    def _scores(
        self, parts: Parts, seen: WindowQueries, scorer: Scorer, blocks: Ints, most: int
    ) -> torch.Tensor:
        """Return scores of the prompt's first ``most`` tokens, [layers, kv_heads, most]."""
        layers = (
            self._observed(parts, seen, blocks, layer, scorer.reads_values)
            for layer in range(parts.pages.num_layers)
        )
        return torch.stack([scorer.score(layer)[:, :most] for layer in layers])

    def _observed(
        self, parts: Parts, seen: WindowQueries, blocks: Ints, layer: int, values: bool
    ) -> Observed:
        """Return one layer of a prompt in these blocks. values: whether V and ``gram`` are part of it."""
        pages, query, scale = parts.pages, seen[layer], scale_of(self._decoder.attentions[layer])
        ids = pages.ids(layer, blocks, np.arange(pages.kv_heads)[:, None]).ravel()

        def read(part: int) -> torch.Tensor:
            whole = parts.reader.whole(part, ids).unflatten(0, (pages.kv_heads, -1))
            return whole.transpose(0, 1)[: seen.end]

        if not values:
            return Observed(query, read(0), scale)
        return Observed(query, read(0), scale, read(1), self._gram(layer))

    def _gram(self, layer: int) -> torch.Tensor:
        if layer not in self._grams:
            attention = self._decoder.attentions[layer]
            output = output_weight(self._decoder.layers[layer], attention)
            if output is None:
                raise WholeError("no output projection is found, which the scorer reads")
            kv_heads, _ = self._decoder.kv[layer].key
            self._grams[layer] = gram_of(output, heads_of(attention), kv_heads)
        return self._grams[layer]


def _bound(decoder: Decoder, cache: PagedCache, ranks: int) -> Parts:
    """Have a model's layers attend by heads. Raises WholeError where they cannot."""
    attentions = decoder.attentions
    if ranks > 1:  # the ranks would have to tell each other if one could not
        raise WholeError("its heads are on several devices")
    if reason := not_by_heads(attentions):
        raise WholeError(reason)
    if len(all_layers(decoder.model)) > decoder.num_layers:
        raise WholeError("some of its layers read the KV of others")
    scores = [scores_of(attention) for attention in attentions]
    if any(each is None or not each.bare or each.window is not None for each in scores):
        raise WholeError("its attention has windows, caps, sinks or ALiBi")
    pages = HeadPages.of(attentions)
    if pages is None:
        raise WholeError("its layers' KV is not in one allocation")
    scratch = torch.zeros((1, *pages.view.shape[1:]), dtype=pages.view.dtype, device=pages.device)
    reader = PageReader.of(pages, scratch)
    if reader is None:
        raise WholeError("its backend's KV is not read back")
    reading = HeadReading(attentions, pages, HeadKernel(attentions, cache.runner))
    bind(attentions, reading)
    return Parts(pages, reader, reading)
