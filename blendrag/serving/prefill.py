"""Prefilling what is registered and not stored yet. Interrupted, it goes on where it stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from blendrag.errors import BlendragError
from blendrag.progress import Progress

if TYPE_CHECKING:  # they import torch, which clients of a server do without
    from blendrag.engine.client.stores import StoreClient
    from blendrag.store.contexts import Chunk


INGEST_BATCH_TOKENS = 512  # prefilled per call of the worker, which goes on by slices beside answers

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class PrefillReport:
    """A report of what was prefilled and stored.

    prefill_s: seconds the engine computed. nbytes: KV written. too_long: texts left out because they do not
    fit the model's window, of those of the collection. not_blended: why this model's KV is not kept at all.
    """

    chunks: int = 0
    tokens: int = 0
    nbytes: int = 0
    prefill_s: float = 0.0
    too_long: int = 0
    not_blended: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens prefilled per second."""
        return self.tokens / self.prefill_s if self.prefill_s else 0.0

    def count(self, more: PrefillReport) -> None:
        """Add what was done next. Each report counts all texts that are too long, earlier ones again."""
        self.chunks += more.chunks
        self.tokens += more.tokens
        self.nbytes += more.nbytes
        self.prefill_s += more.prefill_s
        self.too_long = max(self.too_long, more.too_long)
        self.not_blended = more.not_blended or self.not_blended


def prefill_pending(
    entries: Sequence[Chunk],
    store: StoreClient,
    report: PrefillReport,
    progress: Progress,
    go_on: Callable[[], None] = lambda: None,
) -> None:
    """Have the engine prefill and store ``entries``, several per call; other requests run between calls.

    ``go_on``: called before each, to raise what ends it. Raises StoreFullError; what is stored stays.
    """
    progress.total(sum(len(entry.token_ids) for entry in entries))
    begin = time.perf_counter()
    try:
        for batch in batches(entries):
            go_on()
            done = store.ingest(batch)
            report.chunks += len(batch)
            report.tokens += done.tokens
            report.prefill_s += done.seconds
            report.nbytes += done.nbytes
            rate = report.tokens / (time.perf_counter() - begin)
            progress.advance(sum(len(entry.token_ids) for entry in batch))  # a shared tier may have had some
            progress.note(f"prefill: {rate:,.0f} tokens/s, {report.nbytes / 2**20:,.0f} MiB of KV")
    except BaseException:  # an interrupt too leaves complete records behind
        with contextlib.suppress(BlendragError):  # the first error is the one that is told
            store.flush()
        raise
    report.nbytes += store.flush()


def batches(entries: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Yield the entries as many together as one call of the worker prefills."""
    return grouped(entries, lambda entry: len(entry.token_ids), INGEST_BATCH_TOKENS)


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in groups of at most ``most`` in size, or of one item."""
    group: list[T] = []
    left = most
    for item in items:
        if group and size(item) > left:
            yield group
            group, left = [], most
        group.append(item)
        left -= size(item)
    if group:
        yield group
