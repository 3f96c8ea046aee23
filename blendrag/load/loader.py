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
from blendrag.load.slots import Kind, Slots, make_slots, sent_at_once
from blendrag.load.trace import Trace
from blendrag.store.record import NO_DRAFTS, DamagedError, DraftLayers, Head, Layout, Reason, Record
from blendrag.store.tiers import GoneError, Opened, Read, Tier, TierError

IN_FLIGHT = 8
"""The most layers of stored KV that are loaded and not yet used."""

_BYTE = torch.uint8


class LoadFailedError(Exception):
    """Rows of these records cannot be used: damaged, not there any more, or out of reach now."""

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
    kept: its rows of ``span.kept``. scratch: room for some layers' rows where none are kept."""

    span: LoadSpan
    at: int
    shard: int
    first: int
    kept: torch.Tensor | None
    scratch: torch.Tensor

    @classmethod
    def all_of(cls, spans: Sequence[LoadSpan], group: int) -> list[_Part]:
        """Return the shards of all spans. group: the most layers that are read at once."""
        parts, at = [], 0
        for span in spans:
            head = span.opened.head
            layers = head.num_layers
            room = group if span.kept is None else 0
            for number, shard in enumerate(head.own_shards):
                kept = None if span.kept is None else span.kept[number * layers : (number + 1) * layers]
                scratch = torch.empty(room, head.row_bytes, dtype=_BYTE)
                parts.append(cls(span, at, shard, shard * layers, kept, scratch))
            at += span.length
        return parts

    def read(self, first: int, last: int) -> Read:
        """Return the request for these layers."""
        into = self.scratch[: last - first] if self.kept is None else self.kept[first:last]
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
        kind = Kind(count, group, layout.dtype, device)
        numbers = 2 * sum(span.length for span in spans) * len(layout.own) * layout.size
        nbytes = sum(len(head.own_shards) * head.row_bytes for head in (span.opened.head for span in spans))
        if self._slots is None or not self._slots.fit(kind, numbers, nbytes):
            self.drain()
            self._slots = None  # before there are others: both may not have room
            self._slots = make_slots(kind, _rounded(numbers), _rounded(nbytes))
        more = drafts.layers if all(span.opened.head.drafts == drafts for span in spans) else 0
        return StoredLayers(self.thread, self._slots, spans, layout, trace, filled, self._timed, more)

    def drain(self) -> None:
        """Wait until no former request is still loading."""
        self.thread.submit(lambda: None).result()


class StoredLayers:
    """The stored K and V of a prompt's cached tokens, layer by layer (the paper's ``fetch_kv`` and
    ``synchronize``, its section 6). Use as a context manager: leaving it gives everything back.

    num_layers: how many come, those of a model that drafts behind the model's own. steady: whether zeros come
    after loading has failed. One of several ranks goes on with them, since the others would wait for it, and
    all of them are told of ``failure`` at the end.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        slots: Slots,
        spans: Sequence[LoadSpan],
        layout: Layout,
        trace: Trace,
        filled: Filled | None,
        timed: Timed | None,
        drafts: int,
    ) -> None:
        self.num_layers, self.steady = layout.num_layers + drafts, False
        self.failure: Exception | None = None
        self._thread, self._slots, self._kind = thread, slots, slots.kind
        self._turns: list[int] = []  # the layers, in the order of loading
        self._spans, self._layout, self._trace, self._filled = spans, layout, trace, filled
        self._timed, self._read_s, self._decode_s = timed, dict[Tier, float](), 0.0
        self._parts = _Part.all_of(spans, self._kind.group)
        self._shape = (2, sum(span.length for span in spans), len(layout.own), layout.size)
        self._numbers = math.prod(self._shape)
        self._at_once = _decode_at_once(self._parts, layout, self._kind.device)
        self._free = threading.Semaphore(self._kind.count)
        self._ready: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._held: int | None = None  # a turn
        self._given = False  # whether its layer was given out
        self._started = self._stopped = False

    def __enter__(self) -> StoredLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the fused prefill's side -------------------------------------------------------------------------

    def fetch_kv(self, first_layer: int, again: Sequence[int] = ()) -> None:
        """Begin to load this layer and those above it, and after those the ones that are needed ``again``,
        ascending. Returns at once; called once."""
        self._started = True
        self._turns = [*range(first_layer, self.num_layers), *again]
        self._thread.submit(self._run, first_layer)

    def ready(self, layer: int, wait_s: float = 0.0) -> bool:
        """Return whether :meth:`synchronize` would not have to wait, after waiting so many seconds for the
        layer. Ends the use of the layer before, as :meth:`synchronize` does."""
        if self.failure is None:
            try:
                self._take(layer, wait_s)
            except queue.Empty:
                return False
            except BaseException as error:  # it is raised where the layer is asked for
                self._ready.put(error)
        return True

    def synchronize(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for a layer, and return K before RoPE and V, [cached, kv_heads, head_size] each, on the
        device.

        Layers are asked for in the order of loading; some may be left out. The tensors are the caller's to
        overwrite, until the next call. Raises what loading raised, unless it is ``steady``.
        """
        if self.failure is None:
            try:
                slot = self._take(layer) % self._kind.count
                self._given = True
                key, value = self._slots.receive(slot)[: self._numbers].view(self._shape)
                return key, value
            except Exception as failure:
                if not self.steady:
                    raise
                self.failure = failure
        key, value = torch.zeros(self._shape, dtype=self._layout.dtype, device=self._kind.device)
        return key, value

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
            self._slots.done(self._held % self._kind.count)
            self._held = None
            self._free.release()

    def close(self) -> None:
        """Stop loading what nobody will ask for."""
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
        most = min(self._kind.group, self._kind.count - turn % self._kind.count)
        turns = self._turns[turn : once if turn < once else None][:most]
        return next((n for n, layer in enumerate(turns) if layer != turns[0] + n), len(turns))

    def _load(self, turn: int, count: int, *, again: bool) -> None:
        first = self._turns[turn]
        last = first + count
        name = f"layer {first}" if count == 1 else f"layers {first}-{last - 1}"
        with self._trace.span("load", name):
            rows = self._read(first, last, again=again)
            begin = time.perf_counter()
            self._slots.fill(turn % self._kind.count, rows, self._decode)
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
        rows: dict[int, torch.Tensor] = {}
        by_tier: dict[Tier, list[int]] = {}
        for at, part in enumerate(self._parts):
            if again and part.kept is not None:
                rows[at] = part.kept[first:last]
            else:
                by_tier.setdefault(part.span.opened.tier, []).append(at)
        for tier, members in by_tier.items():
            wanted = [self._parts[at].read(first, last) for at in members]
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

    def _fill(self, first_layer: int, filled: Filled) -> None:
        """Read the layers that nobody asked for, too, and hand the records over."""
        for part in self._parts:
            for first, last in ((0, first_layer), (self.num_layers, part.span.opened.head.num_layers)):
                if first == last or part.kept is None:
                    continue
                read = part.read(first, last)
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
    """Make the calling thread run on any core, without threads of its own, aside from the model's."""
    # For this thread, and for those that begin later. In a worker on a CPU, vLLM has put a function that does
    # nothing in the place of torch.set_num_threads.
    torch._C.set_num_threads(1)
    with suppress(OSError, AttributeError):  # vLLM has bound the worker's main thread to a core
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
