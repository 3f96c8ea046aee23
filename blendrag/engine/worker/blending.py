"""One request's blend: open its chunks, load them layer by layer, fuse; without those that turn out
unusable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import torch

from blendrag.control.choose import ChunkCost, Controller
from blendrag.control.estimate import Estimator
from blendrag.engine.recipe import BlendOrder
from blendrag.engine.report import BlendReport
from blendrag.engine.worker.decoder import Decoder
from blendrag.engine.worker.fused_prefill import CachedSpan, FusedPrefill, FusedStats, Target
from blendrag.engine.worker.masks import Mask
from blendrag.engine.worker.question_pass import QuestionPass
from blendrag.engine.worker.slices import Blend, Pace
from blendrag.load.layers import StoredLayers
from blendrag.load.loader import LayerLoader, LoadFailedError, LoadSpan, whole_rows
from blendrag.load.trace import Trace
from blendrag.select import Selector, make_selector
from blendrag.store.kv_store import KVStore
from blendrag.store.record import Miss
from blendrag.store.tiers import Opened

Prefill = TypeVar("Prefill", bound=FusedPrefill)

WITHOUT_QUESTION = "gradual"  # the best of those that need none (docs/results.md)


@dataclass(frozen=True, slots=True)
class BlendModel:
    """What a fused prefill runs on. ``runner``: vLLM's model runner."""

    decoder: Decoder
    runner: Any
    block_size: int
    mask: Mask

    @property
    def device(self) -> torch.device:
        device: torch.device = self.decoder.attentions[0].kv_cache.device
        return device


class Blending:
    """Use once: ``yield from Blending(...).run()``."""

    def __init__(
        self,
        model: BlendModel,
        loader: LayerLoader,
        kv: KVStore,
        order: BlendOrder,
        estimate: Estimator | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._pace = pace or Pace()
        self._model, self._loader, self._kv, self._order = model, loader, kv, order
        self._estimate, self._decision = estimate, ""
        self._options = order.recipe.options
        self._missing: dict[str, str] = {}
        self._selector = order.recipe.options.selector
        self._trace = Trace(order.recipe.options.trace)

    @torch.inference_mode()
    def run(self) -> Blend:
        """Compute and write the prompt's KV, pausing as the pace says; the report. Raises whatever the model
        does."""
        stats, opened_s = None, 0.0
        while stats is None:
            begin = time.perf_counter()
            with self._trace.span("open", "records"):
                spans = self._worth_loading(self._open(without=frozenset(self._missing)))
            opened_s += time.perf_counter() - begin
            try:
                stats = yield from self._fuse(spans)
            except LoadFailedError as failure:  # what is written for this prompt by now is written again
                assert failure.opened, failure
                self._note(failure)
        return BlendReport(
            cached=stats.cached,
            fresh=stats.fresh,
            recomputed=stats.recomputed,
            missing=self._missing,
            selector=self._selector,
            ratio=self._options.recompute_ratio,
            decision=self._decision,
            slices=stats.slices,
            tiers=dict(Counter(opened.tier.name for _, opened in spans)),
            ms={
                "load": 1e3 * (opened_s + stats.load_s),
                "select": 1e3 * stats.select_s,
                "recompute": 1e3 * stats.recompute_s,
            },
            trace=tuple(self._trace.events),
        )

    def _open(self, without: frozenset[str] = frozenset()) -> list[tuple[CachedSpan, Opened]]:
        recipe, ids = self._order.recipe, self._order.token_ids
        # The prompt's last token is the engine's, whatever it belongs to.
        cut = sorted((at, key, CachedSpan(at, min(n, len(ids) - at))) for key, at, n in recipe.spans)
        stops = recipe.semantics == "lmcache"  # at the first that is missing
        left = takewhile if stops else filter
        wanted = list(left(lambda one: one[1] not in without, cut))
        found = self._kv.open_records(
            [(key, ids[at : at + span.length]) for at, key, span in wanted], use=not without
        )
        spans: list[tuple[CachedSpan, Opened]] = []
        for (_, key, span), opened in zip(wanted, found, strict=True):
            if isinstance(opened, Opened):
                spans.append((span, opened))
            else:
                self._missing[key] = opened.reason
                if stops:
                    break
        self._close_all_but(spans, found)
        return spans

    def _worth_loading(self, spans: list[tuple[CachedSpan, Opened]]) -> list[tuple[CachedSpan, Opened]]:
        """Those that the controller would load; the others are computed like fresh tokens."""
        if self._estimate is None or not spans:
            return spans
        recipe = self._order.recipe
        costs = [ChunkCost(span.length, opened.head.nbytes, opened.tier.name) for span, opened in spans]
        fresh = len(self._order.token_ids) - sum(span.length for span, _ in spans)
        options = self._options
        controller = Controller(self._estimate, options.recompute_ratio)
        try:
            decision = controller.decide(
                costs, fresh, None if recipe.options.auto_ratio else recipe.options.recompute_ratio
            )
        except Exception as error:  # its advice is not worth a request
            self._decision = f"the controller failed: {type(error).__name__}"
            return spans
        self._decision = decision.why
        if any(decision.load):
            self._options = replace(options, recompute_ratio=decision.ratio)
        kept = [span for span, load in zip(spans, decision.load, strict=True) if load]
        self._close_all_but(kept, [opened for _, opened in spans])
        return kept

    def _close_all_but(self, kept: list[tuple[CachedSpan, Opened]], found: Sequence[Opened | Miss]) -> None:
        still = {id(opened) for _, opened in kept}  # a chunk may stand in a prompt twice
        self._kv.close_records([one for one in found if id(one) not in still])

    def _fuse(self, spans: list[tuple[CachedSpan, Opened]]) -> Generator[None, None, FusedStats]:
        self._selector = self._options.selector if spans else "none"
        selector = self._make(self._selector)
        question = self._order.recipe.cached_end  # where it begins, whichever documents are there
        if selector.reads_question and question >= len(self._order.token_ids):
            # A long text behind the last document is left to the engine, and the question with it.
            self._selector = WITHOUT_QUESTION
            selector = self._make(self._selector)
        checks = selector.check_layers(self._model.decoder.num_layers)
        with self._load(spans) as layers:
            if not selector.reads_question:
                fused = self._prefill(FusedPrefill, spans, layers, selector)
                return (yield from fused.run())
            reuse = self._make("none")
            keep = checks if selector.reads_deviation else ()
            first = self._prefill(QuestionPass, spans, layers, reuse, keep=keep, question=question)
            before = yield from first.run()
        fused = self._prefill(FusedPrefill, spans, first.kept, selector, attention=first.mass, written=True)
        stats = yield from fused.run()
        stats.load_s += before.load_s
        stats.select_s += before.recompute_s
        stats.slices += before.slices - 1
        return stats

    def _make(self, selector: str) -> Selector:
        return make_selector(replace(self._options, selector=selector))

    def _prefill(
        self,
        kind: type[Prefill],
        spans: list[tuple[CachedSpan, Opened]],
        layers: StoredLayers,
        selector: Selector,
        **options: Any,
    ) -> Prefill:
        model, order = self._model, self._order
        leaky = order.recipe.semantics == "lmcache"
        return kind(
            model.decoder,
            model.runner,
            torch.tensor(order.token_ids, device=model.device),
            [span for span, _ in spans],
            layers,
            selector,
            Target(torch.tensor(order.block_ids, device=model.device), model.block_size, order.written),
            "runs" if leaky or options.get("written") else model.mask,
            trace=self._trace,
            pace=self._pace,
            leaky=leaky,
            **options,
        )

    def _load(self, spans: list[tuple[CachedSpan, Opened]]) -> StoredLayers:
        kv = self._kv
        try:
            load = [
                LoadSpan(opened, span.length, whole_rows(opened.head) if kv.replicas.wants(opened) else None)
                for span, opened in spans
            ]
            filled = kv.replicas.promote_behind
            return self._loader.load(load, kv.layout, self._model.device, self._trace, filled)
        except BaseException:
            kv.close_records([opened for _, opened in spans])
            raise

    def _note(self, failure: LoadFailedError) -> None:
        for opened in failure.opened:
            if failure.reason == "damaged":
                self._kv.damaged(opened)
            self._missing[opened.head.key] = failure.reason
