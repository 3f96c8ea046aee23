"""The blend of one request: open its chunks, load them layer by layer, recompute what is worth it, report.

Chunks that turn out unusable are computed like fresh tokens.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import xxhash

from blendrag.control.choose import ChunkCost, Decision, decide
from blendrag.control.estimate import Estimator
from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.fused_prefill import FusedPrefill
from blendrag.engine.blend.question_pass import QuestionPass
from blendrag.engine.blend.stored_kv import StoredKV
from blendrag.engine.forward.indices import Ints, download
from blendrag.engine.forward.prompt_forward import (
    CachedSpan,
    LoadedModel,
    Note,
    PromptForward,
    PromptTokens,
    Stopwatch,
)
from blendrag.engine.forward.slices import Pace, Sliced, in_thread
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.engine.wire.report import BlendReport, out_of_memory
from blendrag.load.loader import LayerLoader, LoadFailedError, LoadSpan, StoredLayers, own_rows
from blendrag.load.trace import Trace
from blendrag.options import BlendOptions
from blendrag.ranges import write_ranges
from blendrag.select import CachedTokens, Selector, make_selector
from blendrag.select.static import All
from blendrag.store.kv_reader import KVReader
from blendrag.store.record import Miss
from blendrag.store.tiers import Opened, Tier

WITHOUT_QUESTION = "gradual"  # the best selector that needs no question (docs/results.md)

_KEPT_CHOICES = 256

Chunk = tuple[CachedSpan, Opened]  # where it stands in the prompt, and its record
Lost = tuple[str, str, str]  # a chunk that cannot be used: its key, the tier that was read, why


class Choices:
    """The positions that were chosen for the latest prompts by their questions.

    A part of a prompt that comes again may still be in the prefix cache. Over that KV, which is partly
    repaired, its question would choose other positions, and the answer would depend on earlier requests.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[bytes, Ints] = OrderedDict()

    def of(self, order: BlendOrder) -> Ints | None:
        return self._latest.get(_name(order))

    def keep(self, order: BlendOrder, chosen: Ints) -> None:
        self._latest[_name(order)] = chosen.astype(np.int32)
        if len(self._latest) > _KEPT_CHOICES:
            self._latest.popitem(last=False)


def _name(order: BlendOrder) -> bytes:
    asked_for = order.recipe.spans, order.recipe.untraced.options, order.token_ids, order.behind
    return xxhash.xxh3_128_digest(repr(asked_for).encode())


class _NoRoomError(MemoryError):
    """The error, raised on all ranks, that one of them cannot hold the prompt's stored KV."""


class RequestBlend:
    """The blend of one request. Use once: ``yield from RequestBlend(...).run()``."""

    def __init__(
        self,
        model: LoadedModel,
        loader: LayerLoader,
        kv: KVReader,
        order: BlendOrder,
        estimate: Estimator | None,
        pace: Pace,
        note: Note | None,
        choices: Choices,
        guard: LoadGuard,
    ) -> None:
        """Prepare the blend. note: is told of queries. choices: those made for earlier prompts. guard: may
        refuse it."""
        self._model, self._loader, self._kv, self._order = model, loader, kv, order
        self._estimate, self._pace, self._note_queries = estimate, pace, note
        self._choices, self._guard = choices, guard
        # A choice is of what stands behind the exact prefix, if there is one.
        self._chosen = self._choices.of(order) if order.written > order.recipe.exact_end else None
        # What the engine has of these begins too late for the rows behind a hit: they begin anew.
        self._given_up = model.cache.given_up(order.block_ids, order.others)
        self._there = 0 if self._given_up else order.written
        self._options = order.recipe.options
        self._trace = Trace(self._options.trace)
        self._ranks = model.ranks
        self._layers: StoredLayers  # of the last attempt
        self._missing: dict[str, str] = {}
        self._decision = ""
        self._prefill_s: float | None = None
        self._attention: dict[str, float] = {}
        self._answered: Ints | None = None  # the positions that the question has chosen
        self._opened_s = 0.0

    @property
    def _asks(self) -> bool:
        """Return whether the question is read. It is not where a long text behind the last document is left
        to the engine, and the question with it; nor where positions were chosen for this prompt before, since
        those are chosen again."""
        asked = self._order.recipe.cached_end < len(self._order.token_ids)
        return asked and self._chosen is None and self._selector_of(self._options).reads_question

    @property
    def forward_type(self) -> type[PromptForward]:
        return PromptForward

    @torch.inference_mode()
    def run(self) -> Sliced:
        """Compute and write the prompt's KV, pausing as the pace says. Returns the report. Raises the model's
        errors."""
        lost: list[Lost] = []
        failure: Exception | None
        while True:
            chunks = self._worth_loading((yield from self._chunks(lost)))
            if (why := self._ranks.choose(self._refused(chunks))) is not None:
                self._close_all_but((), chunks)
                return BlendReport.refused(why, self._order.written, 1e3 * self._opened_s)
            try:
                with self._ranks.together(_NoRoomError):
                    report = yield from self._recompute(chunks)
                failure = self._layers.failure
            except LoadFailedError as problem:  # the next attempt writes this prompt's KV again
                failure = problem
            lost = self._all_lost([], failure)
            if not lost:
                break
        first = self._order.written == self._order.recipe.exact_end
        if self._answered is not None and first and not self._missing:  # another time they may be there
            self._choices.keep(self._order, self._answered)
        ms = {**report.ms, "load": report.ms["load"] + 1e3 * self._opened_s}
        return replace(report, ms=ms, trace=tuple(self._trace.events))

    def _all_lost(self, lost: list[Lost], problem: Exception | None) -> list[Lost]:
        """Return what any of the ranks has lost. Any other problem of one rank is raised on all of them."""
        grave = problem
        if isinstance(problem, LoadFailedError):
            assert problem.opened, problem
            grave = None
            lost = [(opened.head.key, opened.tier.name, problem.reason) for opened in problem.opened]
        told = self._ranks.everyone((lost, grave and f"{type(grave).__name__}: {grave}"))
        if grave is not None:
            raise grave
        for _, of_another in told:
            if of_another:
                raise RuntimeError(f"on another rank: {of_another}")
        return list(dict.fromkeys(each for of_one, _ in told for each in of_one))

    # -- open ---------------------------------------------------------------------------------------------

    def _chunks(self, lost: list[Lost]) -> Generator[None, None, list[Chunk]]:
        """Return the chunks that all ranks have, ascending. lost: found unusable by the last attempt."""
        open_all, close_all = partial(self._open, lost), partial(self._close_all_but, ())
        chunks, problem = list[Chunk](), None
        try:
            chunks = yield from in_thread(self._loader.thread, self._pace, open_all, close_all)
        except Exception as error:
            problem = error
        try:
            found = self._all_lost([(key, "", reason) for key, reason in self._missing.items()], problem)
        except Exception:
            close_all(chunks)
            raise
        elsewhere = {key: reason for key, _, reason in found if key not in self._missing}
        self._missing |= elsewhere
        if self._kv.ram is not None:  # the owner has to see for itself what the tiers below have lost
            self._kv.ram.delete(elsewhere)
        kept = [chunk for chunk in chunks if chunk[1].head.key not in elsewhere]
        self._close_all_but(kept, chunks)
        return kept

    def _open(self, lost: list[Lost]) -> list[Chunk]:
        """Open the chunks that are there. May wait for a disk, a server or a lock."""
        begin = time.perf_counter()
        with self._trace.span("open", "records"):
            for key, tier, reason in lost:
                if reason == "damaged":
                    self._kv.damaged(tier, key)
                self._missing[key] = reason
            chunks = self._found()
        self._opened_s += time.perf_counter() - begin
        return chunks

    def _found(self) -> list[Chunk]:
        """Return the chunks that are there, without those that were found unusable; ascending."""
        ids, again = self._order.token_ids, bool(self._missing)
        end = self._reused_end
        spans = [
            (key, CachedSpan(at, min(n, end - at)))
            for at, key, n in sorted((at, key, n) for key, at, n in self._order.recipe.spans)
            if at < end and key not in self._missing
        ]
        written = 0 if self._asks else self._there
        wanted = [(key, span) for key, span in spans if span.end > written]
        tokens = [(key, ids[span.start : self._whole(span).end]) for key, span in wanted]
        chunks: list[Chunk] = []
        for (key, span), found in zip(wanted, self._kv.open_records(tokens, use=not again), strict=True):
            if isinstance(found, Miss):
                self._missing[key] = found.reason
            else:
                chunks.append((span, found))
        return chunks

    def _whole(self, span: CachedSpan) -> CachedSpan:
        """Return the span with what :attr:`_reused_end` cut off."""
        length = next(n for _, at, n in self._order.recipe.spans if at == span.start)
        return CachedSpan(span.start, min(length, len(self._order.token_ids) - span.start))

    @property
    def _reused_end(self) -> int:
        return self._order.recipe.reused_end(len(self._order.token_ids), self._model.cache.block_size)

    def _behind_reused(self, end: int | None = None) -> int:
        """Return how many tokens, before ``end``, are left of the chunk whose stored KV is used in part."""
        spans = ((at, at + n) for key, at, n in self._order.recipe.spans if key not in self._missing)
        return sum(
            max(0, (last if end is None else min(last, end)) - self._reused_end)
            for at, last in spans
            if at < self._reused_end
        )

    def _worth_loading(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks that the controller would load. The others are computed like fresh tokens."""
        if self._estimate is None or not chunks:
            return chunks
        written = self._there
        there = [chunk for chunk in chunks if chunk[0].end <= written]
        chunks = chunks[len(there) :]
        if not chunks:
            return there
        costs = [
            ChunkCost(span.length, round(self._reads(opened) * opened.head.own_bytes), opened.tier.name)
            for span, opened in chunks
        ]
        begin = _first_needed(written, [span for span, _ in chunks])
        fresh = len(self._order.token_ids) - begin - sum(span.length for span, _ in chunks)
        decision = self._ranks.choose(self._decide(self._estimate, costs, fresh))
        if isinstance(decision, str):
            self._decision = decision
            return there + chunks
        self._decision, self._prefill_s = decision.why, decision.plain_s
        if any(decision.load):
            self._options = replace(self._options, recompute_ratio=decision.ratio)
        kept = [chunk for chunk, load in zip(chunks, decision.load, strict=True) if load]
        self._close_all_but(there + kept, chunks)
        return there + kept

    def _refused(self, chunks: list[Chunk]) -> str | None:
        """Return why the guard would have the engine prefill the prompt instead of loading these chunks."""
        loads: Counter[Tier] = Counter()
        left = 0
        for span, opened in chunks:
            loads[opened.tier] += round(self._reads(opened) * opened.head.tokens)
            left += max(0, span.end - max(span.start, self._order.written))
        return self._guard.refuses(loads, left)

    def _reads(self, opened: Opened) -> float:
        """Return how often a record is read: of what the engine gives up, every layer comes once more behind
        the question's pass, unless it was kept."""
        again = len(self._given_up) if self._asks and not self._kv.replicas.wants(opened) else 0
        return 1 + again / self._model.decoder.num_layers

    def _decide(self, estimate: Estimator, costs: Sequence[ChunkCost], fresh: int) -> Decision | str:
        """Return the controller's decision, or why there is none: its advice is not worth a request."""
        options = self._order.recipe.options
        ratio = None if self._selector_of(options).auto_ratio else options.recompute_ratio
        try:
            return decide(estimate, costs, fresh, ratio, self._options.recompute_ratio)
        except Exception as error:
            return f"the controller failed: {type(error).__name__}"

    def _close_all_but(self, kept: Sequence[Chunk], chunks: Sequence[Chunk]) -> None:
        still = {id(opened) for _, opened in kept}  # a chunk may stand in a prompt twice
        self._kv.close_records([opened for _, opened in chunks if id(opened) not in still])

    # -- load, select, recompute, write -------------------------------------------------------------------

    def _recompute(self, chunks: list[Chunk]) -> Generator[None, None, BlendReport]:
        model, order = self._model, self._order
        self._attention, self._answered = {}, None
        options = self._options if chunks else replace(self._options, selector="none")
        selector = self._selector_of(options)
        if selector.reads_question and not self._asks and self._chosen is None:
            options = replace(options, selector=WITHOUT_QUESTION)
            selector = self._selector_of(options)
        tokens = PromptTokens.of(order.token_ids, [span for span, _ in chunks])
        reads = selector.reads_question and self._chosen is None
        # The question reads all that stands before it, which therefore has to be written.
        begin = self._there if reads else _first_needed(self._there, [span for span, _ in chunks])
        left = tokens.behind(begin)
        only_left = begin > 0 and not reads
        if only_left:
            kept = [chunk for chunk in chunks if chunk[0].start >= begin]
            self._close_all_but(kept, chunks)
            chunks = kept
        forward = self.forward_type(
            model.decoder,
            left if only_left else tokens,
            model.cache.pages(
                order.block_ids, order.written, order.others, len(order.token_ids) + len(order.behind)
            ),
            self._pace,
            self._trace,
            Stopwatch(),
            self._note_queries,
            model.drafts,
            next_id=order.next_id,
            exact=not chunks or isinstance(selector, All),
        )
        recomputed, computed = yield from self._fuse(chunks, forward, selector, begin, reads)
        watch = forward.watch
        self._guard.computed(watch.rows / model.decoder.num_layers, watch.total_s - watch.load_s)
        spent = {"load": watch.load_s, "select": watch.select_s}
        return BlendReport(
            prefix=begin,
            cached=left.cached.size + self._behind_reused(),
            fresh=left.fresh.size - self._behind_reused(len(order.token_ids)),
            recomputed=recomputed + self._behind_reused(),
            computed_at=f"{write_ranges(computed.tolist())},{len(order.token_ids)}-".removeprefix(","),
            missing=self._missing,
            selector=options.selector,
            ratio=options.recompute_ratio,
            decision=self._decision,
            prefill_s=self._prefill_s,
            slices=watch.slices,
            attention=self._attention,
            tiers=dict(Counter(opened.tier.name for _, opened in chunks)),
            ms={
                **{part: 1e3 * seconds for part, seconds in spent.items()},
                "recompute": 1e3 * (watch.total_s - sum(spent.values())),
            },
        )

    def _fuse(
        self, chunks: list[Chunk], forward: PromptForward, selector: Selector, begin: int, reads: bool
    ) -> Generator[None, None, tuple[int, Ints]]:
        """Run the fused prefill, behind the question's pass if the selector ``reads`` it. Returns how many
        cached tokens were recomputed, of those at ``begin`` and behind it, and the positions computed."""
        spans = [self._whole(span) if reads else span for span, _ in chunks]
        with self._load([opened for _, opened in chunks], spans) as layers:
            if spans and layers.num_layers == forward.decoder.num_layers:  # drafted from nothing but holes
                forward = replace(forward, drafts=None)
            if not reads:
                stored = StoredKV(forward, layers)
                return (yield from FusedPrefill(forward, stored, selector, self._chosen).run())
            asking = PromptTokens.of([*self._order.token_ids, *self._order.behind], spans)
            question = self._order.recipe.cached_end  # where it begins, whatever documents are there
            reading = replace(forward, tokens=asking, note=None)  # the second pass notes the same rows again
            stored = StoredKV(reading, layers, again=self._given_up)
            asked = yield from QuestionPass(reading, stored, question).run()
            yield from stored.write_drafts()
            shown = download(asked)
            # No repair changes what stands before all cached tokens; the model that drafts has not read it.
            first = begin if forward.drafts else max(begin, int(forward.tokens.cached[0]))
            first = 0 if self._given_up else first
            tokens = forward.tokens.behind(first)
            count, at = tokens.cached.size, int(np.searchsorted(asking.cached, first))
            offsets, lengths = map(torch.from_numpy, (tokens.offsets, tokens.lengths))
            candidates = CachedTokens(offsets, lengths, count, attention=asked[at : at + count])
            chosen = self._ranks.choose(tokens.cached[selector.select(0, candidates).numpy()])
            # The choice has waited for all that was launched, so what is shown is here.
            self._attention = _shares([opened.head.key for _, opened in chunks], asking, shown)
            self._answered = chosen
            forward = replace(forward, tokens=tokens)
            second = stored.second(forward)
            recomputed, computed = yield from FusedPrefill(forward, second, selector, chosen).run()
        return recomputed, np.concatenate([np.arange(begin, first), computed])

    def _selector_of(self, options: BlendOptions) -> Selector:
        return make_selector(options)

    def _load(self, records: Sequence[Opened], spans: Sequence[CachedSpan]) -> StoredLayers:
        """Begin to load these records, as much of each as its span is long. Most memory is taken here, before
        the ranks' first sum: if one of them has too little, all of them raise."""
        kv, ranks, layers, problem = self._kv, self._ranks, None, None
        try:
            load = [
                LoadSpan(opened, span.length, own_rows(opened.head) if kv.replicas.wants(opened) else None)
                for span, opened in zip(spans, records, strict=True)
            ]
            device, filled = self._model.cache.device, kv.replicas.promote_behind
            drafts = self._model.stored_drafts
            layers = self._loader.load(load, kv.layout, device, self._trace, filled, drafts)
        except BaseException as error:
            kv.close_records(records)
            if ranks.size == 1 or not out_of_memory(error):
                raise
            problem = str(error)
        told = ranks.everyone((problem, 0 if layers is None else layers.num_layers))
        short = [each for each, _ in told if each is not None]
        if layers is None or short:
            if layers is not None:
                layers.close()
            raise _NoRoomError(short[0])
        layers.num_layers, layers.steady = min(count for _, count in told), ranks.size > 1
        self._layers = layers
        return layers


def _shares(keys: Sequence[str], tokens: PromptTokens, attention: torch.Tensor) -> dict[str, float]:
    """Return each chunk's share of the attention; ``keys`` in the prompt's order, some perhaps twice."""
    shares: dict[str, float] = {}
    begins = np.flatnonzero(tokens.offsets == 0)
    sums = np.add.reduceat(attention.double().numpy(), begins) if begins.size else begins
    for key, share in zip(keys, sums / max(sums.sum(), 1e-30), strict=True):
        shares[key] = shares.get(key, 0.0) + round(float(share), 6)
    return shares


def _first_needed(written: int, spans: Sequence[CachedSpan]) -> int:
    """Return the first position that is not there, or where its chunk begins: chunks are loaded from their
    beginning."""
    return min([written, *(span.start for span in spans if written < span.end)])
