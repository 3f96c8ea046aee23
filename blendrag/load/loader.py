"""The loader: a thread that reads, verifies and decodes stored KV, layers ahead of the fused prefill.

Loading layer i + 1 hides behind the recompute of layer i (CacheBlend sections 5 and 6): what a request waits
for is the longer of the two, not their sum. Where the selector reads the question, loading hides behind the
question's first pass only (``engine.blend.question_pass``).
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from blendrag.load.layer_decode import Encoded, LayerDecode, decodes_at_once
from blendrag.load.layers import StoredLayer, StoredLayers
from blendrag.load.slots import Slots, make_slots, sent_at_once
from blendrag.load.trace import Trace
from blendrag.store.record import NO_DRAFTS, DamagedError, DraftLayers, Head, Layout, Reason, Record
from blendrag.store.tiers import GoneError, Opened, Read, Tier, TierError

IN_FLIGHT = 8
"""The most layers of stored KV that are loaded and not yet used."""

_BYTE = torch.uint8


class LoadFailedError(Exception):
    """Rows of these records cannot be used: they are damaged, or not there any more, or their tier cannot be
    reached now."""

    def __init__(self, opened: Sequence[Opened], problem: DamagedError | TierError) -> None:
        super().__init__(str(problem))
        self.opened, self.reason = opened, _reason(problem)


def _reason(problem: DamagedError | TierError) -> Reason:
    if isinstance(problem, DamagedError):
        return "damaged"
    return "missing" if isinstance(problem, GoneError) else "unavailable"


@dataclass(frozen=True, slots=True, eq=False)
class LoadSpan:
    """A request for the first ``length`` tokens of an opened record. kept: uint8 [own rows, row] to be
    filled, for RAM, with all that this process reads of it on the way; None if RAM would not keep it."""

    opened: Opened
    length: int
    kept: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A shard of a span that begins at ``at`` among all cached tokens. first: its first row in the record.
    kept: its rows of ``span.kept``."""

    span: LoadSpan
    at: int
    shard: int
    first: int
    kept: torch.Tensor | None

    @classmethod
    def all_of(cls, spans: Sequence[LoadSpan]) -> list[_Part]:
        parts, at = [], 0
        for span in spans:
            head = span.opened.head
            layers = head.num_layers
            for number, shard in enumerate(head.own_shards):
                kept = None if span.kept is None else span.kept[number * layers : (number + 1) * layers]
                parts.append(cls(span, at, shard, shard * layers, kept))
            at += span.length
        return parts

    def read(self, first: int, last: int, into: torch.Tensor) -> Read:
        """Return the request for these layers."""
        return Read(self.span.opened, self.first + first, self.first + last, into)


Filled = Callable[[Sequence[Record], Sequence[Tier]], None]
Timed = Callable[[Tier, int, float], None]
"""A function that is told how many tokens were loaded from a tier, and in how many seconds, without those of
waiting for room."""


class LayerLoader:
    """The loader of a worker, whose requests follow each other. ``in_flight``: the most layers loaded and not
    yet used. ``timed``: is told of every load of all layers that came to its end."""

    def __init__(self, in_flight: int = IN_FLIGHT, timed: Timed | None = None) -> None:
        self._in_flight, self._timed = in_flight, timed
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="blendrag-loader", initializer=stay_aside)
        """The loader's thread, for more work that may wait, too: it is done before what is loaded next."""
        self._slots: Slots | None = None
        self._kind: tuple[object, ...] = ()

    def load(
        self,
        spans: Sequence[LoadSpan],
        layout: Layout,
        device: torch.device,
        trace: Trace,
        filled: Filled | None = None,
        drafts: DraftLayers = NO_DRAFTS,
    ) -> StoredLayers:
        """Load the layers of ``spans``, one after the other, and behind them those of ``drafts``, if all have
        them. ``filled`` gets what was read for RAM, and from which tiers, in the loader's thread. Waiting for
        a layer raises LoadFailedError."""
        count = min(self._in_flight, layout.num_layers)
        group = max([sent_at_once(device), *(span.opened.tier.group for span in spans)])
        group = max(1, min(group, count // 2))
        count -= count % group
        tokens = sum(span.length for span in spans)
        numbers, kind = 2 * tokens * len(layout.own) * layout.size, (count, group, layout.dtype, device)
        nbytes = sum(len(head.own_shards) * head.row_bytes for head in (span.opened.head for span in spans))
        if self._slots is None or kind != self._kind or not self._slots.fit(numbers, nbytes):
            self.drain()
            self._slots = None  # before there are others: both may not have room
            sizes = _rounded(numbers), _rounded(nbytes)
            self._slots = make_slots(count, *sizes, layout.dtype, device, group)
            self._kind = kind
        ring, told = _Ring(self._slots, count, group), (trace, filled, self._timed)
        more = drafts.layers if all(span.opened.head.drafts == drafts for span in spans) else 0
        return _Loading(self.thread, ring, tokens, spans, layout, device, *told, more)

    def drain(self) -> None:
        """Wait until no former request is still loading."""
        self.thread.submit(lambda: None).result()


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    """Slots, so many of them, that are filled by groups of so many layers."""

    slots: Slots
    count: int
    group: int


class _Loading(StoredLayers):
    def __init__(
        self,
        thread: ThreadPoolExecutor,
        ring: _Ring,
        tokens: int,
        spans: Sequence[LoadSpan],
        layout: Layout,
        device: torch.device,
        trace: Trace,
        filled: Filled | None,
        timed: Timed | None,
        drafts: int,
    ) -> None:
        self.num_layers = layout.num_layers + drafts
        self._thread, self._slots, self._count, self._group = thread, ring.slots, ring.count, ring.group
        self._turns: list[int] = []  # the layers, in the order of loading
        self._spans, self._layout, self._trace, self._filled = spans, layout, trace, filled
        self._timed, self._read_s, self._decode_s = timed, dict[Tier, float](), 0.0
        self._parts = _Part.all_of(spans)
        self._shape = (2, tokens, len(layout.own), layout.size)
        self._numbers = math.prod(self._shape)
        self._at_once = _decode_at_once(self._parts, layout, device)
        self._free = threading.Semaphore(ring.count)
        self._ready: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._held: int | None = None  # a turn
        self._given = False  # whether its layer was given out
        self._started = self._stopped = False
        self._scratch = [
            torch.empty(
                0 if part.kept is not None else self._group, part.span.opened.head.row_bytes, dtype=_BYTE
            )
            for part in self._parts
        ]

    # -- the fused prefill's side -------------------------------------------------------------------------

    def fetch_kv(self, first_layer: int, again: Sequence[int] = ()) -> None:
        self._started = True
        self._turns = [*range(first_layer, self.num_layers), *again]
        self._thread.submit(self._run, first_layer)

    def ready(self, layer: int, wait_s: float = 0.0) -> bool:
        try:
            self._take(layer, wait_s)
        except queue.Empty:
            return False
        except BaseException as error:  # it is raised where the layer is asked for
            self._ready.put(error)
        return True

    def synchronize(self, layer: int) -> StoredLayer:
        slot = self._take(layer) % self._count
        self._given = True
        key, value = self._slots.receive(slot)[: self._numbers].view(self._shape)
        return StoredLayer(key, value)

    def _take(self, layer: int, wait_s: float | None = None) -> int:
        """Hold this layer, and none before it, and return its turn. Raises what loading raised, and Empty if
        the layer is not here after so many seconds."""
        while not self._holds(layer):
            self._release()
            ready = self._ready.get(block=wait_s != 0.0, timeout=wait_s or None)
            if isinstance(ready, BaseException):
                raise ready
            assert layer in self._turns[ready:], "layers are asked for in the order of loading"
            self._held, self._given = ready, False
        assert self._held is not None, "it is, if it holds the layer"
        return self._held

    def _holds(self, layer: int) -> bool:
        if self._held is None or self._turns[self._held] != layer:
            return False
        # One that was given out may be overwritten by now.
        return not (self._given and layer in self._turns[self._held + 1 :])

    def _release(self) -> None:
        if self._held is not None:
            self._slots.done(self._held % self._count)
            self._held = None
            self._free.release()

    def close(self) -> None:
        self._release()
        self._stopped = True
        self._free.release()  # the loader may be waiting for room
        if not self._started:
            self._close_records()

    def _close_records(self) -> None:
        for span in self._spans:
            span.opened.tier.close_record(span.opened)

    # -- the loader's side --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, first_layer: int) -> None:
        turn, once = 0, self.num_layers - first_layer
        try:
            while turn < len(self._turns):
                count = self._together(turn, once)
                for _ in range(count):
                    self._free.acquire()
                    if self._stopped:  # close() wakes it only once, whatever it waits for
                        return
                self._load(turn, count, again=turn >= once)
                turn += count
            if self._timed is not None and first_layer == 0:  # a part of the layers tells no rate of tokens
                self._tell(self._timed)
            if self._filled is not None:
                with suppress(Exception):  # what is not kept in a faster tier is read again the next time
                    self._fill(first_layer, self._filled)
        except BaseException as error:
            self._ready.put(error)
        finally:
            with suppress(RuntimeError):  # whoever computes next is told of a device that has failed
                self._slots.settle()
            self._close_records()

    def _together(self, turn: int, once: int) -> int:
        """Return how many layers from this turn on are read at once: next to each other in the records and in
        the ring, and behind the first ``once`` turns, for a second time."""
        most = min(self._group, self._count - turn % self._count)
        turns = self._turns[turn : once if turn < once else None][:most]
        return next((n for n, layer in enumerate(turns) if layer != turns[0] + n), len(turns))

    def _load(self, turn: int, count: int, *, again: bool) -> None:
        first = self._turns[turn]
        last = first + count
        name = f"layer {first}" if count == 1 else f"layers {first}-{last - 1}"
        with self._trace.span("load", name):
            rows = self._read(first, last, again=again)
            begin = time.perf_counter()
            self._slots.fill(turn % self._count, rows, self._decode)
            for at in range(count):
                self._ready.put(turn + at)
            if not again:
                self._decode_s += time.perf_counter() - begin

    def _tell(self, timed: Timed) -> None:
        """Tell what each tier took, the first time. Decoding is every token's alike."""
        tokens: Counter[Tier] = Counter()
        for span in self._spans:
            tokens[span.opened.tier] += span.opened.head.tokens
        for tier, count in tokens.items():
            timed(tier, count, self._read_s[tier] + self._decode_s * count / tokens.total())

    def _decode(self, rows: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        """Decode some layers' rows of every part to the beginning of each layer's ``numbers``."""
        layers = numbers[:, : self._numbers].unflatten(1, self._shape)
        if self._at_once is not None:
            self._at_once(rows[0], layers)
            return
        for number, both in enumerate(layers):
            for part, own in zip(self._parts, rows, strict=True):
                key, value = both[:, part.at : part.at + part.span.length]
                part.span.opened.head.decode(own[number], part.shard, key, value)

    def _read(self, first: int, last: int, *, again: bool) -> list[torch.Tensor]:
        """Return verified rows of every part. again: those that are kept for RAM are here already."""
        kept = enumerate(part.kept for part in self._parts) if again else ()
        rows = {at: own[first:last] for at, own in kept if own is not None}
        by_tier: dict[Tier, list[int]] = {}
        for at, part in enumerate(self._parts):
            if at not in rows:
                by_tier.setdefault(part.span.opened.tier, []).append(at)
        for tier, members in by_tier.items():
            wanted = [self._parts[at].read(first, last, self._into(at, first, last)) for at in members]
            begin = time.perf_counter()
            try:
                answers = tier.read(wanted)
                for one, read in zip(wanted, answers, strict=True):
                    if not isinstance(one.opened.source, Record):  # that one was verified when it came in
                        one.opened.head.verify(one.first, read)
            except (DamagedError, GoneError) as problem:
                culprits = [one.opened for one in wanted if one.opened.head.key == problem.key]
                raise LoadFailedError(culprits, problem) from problem
            except TierError as problem:
                raise LoadFailedError([one.opened for one in wanted], problem) from problem
            for at, read in zip(members, answers, strict=True):
                own = self._parts[at].kept
                if own is not None and read.data_ptr() != own[first].data_ptr():
                    own[first:last] = read
                rows[at] = read
            if not again:
                self._read_s[tier] = self._read_s.get(tier, 0.0) + time.perf_counter() - begin
        return [rows[at] for at in range(len(self._parts))]

    def _into(self, at: int, first: int, last: int) -> torch.Tensor:
        kept = self._parts[at].kept
        return self._scratch[at][: last - first] if kept is None else kept[first:last]

    def _fill(self, first_layer: int, filled: Filled) -> None:
        """Read the layers that nobody asked for, too, and hand the records over."""
        for part in self._parts:
            for first, last in ((0, first_layer), (self.num_layers, part.span.opened.head.num_layers)):
                if first == last or part.kept is None:
                    continue
                read = part.read(first, last, part.kept[first:last])
                (rows,) = read.opened.tier.read([read])
                read.opened.head.verify(read.first, rows)
                if rows.data_ptr() != read.into.data_ptr():
                    read.into.copy_(rows)
        opened = [(span.opened, span.kept) for span in self._spans if span.kept is not None]
        if opened:
            records = [Record(one.head, kept, one.head.own_rows.start) for one, kept in opened]
            filled(records, [one.tier for one, _ in opened])


def _decode_at_once(parts: Sequence[_Part], layout: Layout, device: torch.device) -> LayerDecode | None:
    """Return what decodes a layer of all parts by one launch; None where it takes several: without kernels,
    and where shards differ, or are not all this process's."""
    shards = {part.span.opened.head.shards for part in parts}
    if not parts or len(shards) > 1 or not decodes_at_once(device):
        return None
    codec = layout.codec_of(shards.pop())
    if len(layout.own) % codec.heads or layout.own.start % codec.heads:
        return None
    chunks = []
    for part in parts:
        first = part.shard * codec.heads - layout.own.start
        chunks.append(Encoded(part.span.opened.head.tokens, part.span.length, part.at, first))
    return LayerDecode(chunks, codec, layout)


def _rounded(size: int) -> int:
    """Round up to a power of two: prompts differ, and not each is worth new buffers."""
    return 1 << (size - 1).bit_length() if size else 0


def own_rows(head: Head) -> torch.Tensor:
    """Return a buffer for all that this process reads of a record."""
    return torch.empty(len(head.own_rows), head.row_bytes, dtype=_BYTE)


def stay_aside() -> None:
    """Make the calling thread run on any core, with no threads of its own, so that it does not disturb the
    model."""
    # For this thread, and for those that begin later. In a worker on a CPU, vLLM has put a function that does
    # nothing in the place of torch.set_num_threads.
    torch._C.set_num_threads(1)
    with suppress(OSError, AttributeError):  # vLLM has bound the worker's main thread to a core
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
