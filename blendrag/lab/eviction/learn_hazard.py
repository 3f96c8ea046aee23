"""Learn ``lpc+`` from the log of a store's traffic or from a trace, and keep the better model."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from blendrag.errors import PredictorError
from blendrag.eviction import EvictionPolicy
from blendrag.eviction.gdsf import GDSF
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.hazard_file import load_hazard, save_hazard
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.eviction.lru import LRU
from blendrag.forecast.trace_log import parts
from blendrag.lab.eviction.fit_hazard import learned
from blendrag.lab.eviction.replay import replay
from blendrag.lab.eviction.source import read_trace
from blendrag.lab.eviction.trace import RequestTrace, weights
from blendrag.progress import Progress

LATEST_SHARE = 0.2
MOST = 20_000  # prompts that are looked at, the latest: a minute or two of work
LEAST = 200
SIZES = (0.125, 0.25, 0.5)  # of caches, as shares of what is asked for more than once


@dataclass(frozen=True, slots=True)
class HazardComparison:
    """Of a new model with the old one, with LRU and with GDSF, on the latest part of a trace: tokens that
    were found, as a share of those of all chunks asked for; the mean over caches of :data:`SIZES`.

    old: None where there was no model that could be used. prompts: learned from, and measured on. source:
    what they are from. prefix: whether they are those of a prefix cache, and not of a store.
    """

    live: bool
    new: float
    old: float | None
    lru: float
    gdsf: float
    prompts: int
    source: str
    prefix: bool

    @property
    def kept(self) -> float | None:
        """What the model finds that is in place now; None if none is."""
        return self.new if self.live else self.old


def largest_log(folder: Path) -> Path:
    """Of the store that had the most traffic. Raises PredictorError where there is none."""
    logs = sorted(folder.glob("trace-*.jsonl"))
    if not logs:
        raise PredictorError(f"no traffic of a store is logged in {str(folder)!r} (setting outcome_log)")
    return max(logs, key=lambda log: sum(part.stat().st_size for part in parts(log)))


def learn_from_trace(path: Path, folder: Path, progress: Progress) -> HazardComparison:
    """:func:`learn_hazard` from a block trace or a store's log. Raises SourceError for what is none."""
    progress.note("reading")
    return learn_hazard(read_trace(path), f"{path}", folder, progress)


def learn_hazard(trace: RequestTrace, source: str, folder: Path, progress: Progress) -> HazardComparison:
    """Learn from the older part of a trace. The new model is put into ``folder`` only if a cache finds more
    with it, in the latest part, than with the old one and than with LRU, which ``lpc+`` is without one.

    The old one may have learned from that part; that is in its favour. Raises PredictorError where the trace
    teaches too little; and for one of prefixes, where a model for stores is in ``folder``.
    """
    trace = replace(trace, requests=trace.requests[-MOST:])
    count = len(trace.requests)
    former = _former(folder, trace.prefix)
    progress.total(1 + len(SIZES) * (4 if former else 3))
    progress.note(f"learning from {count:,} prompts")
    taught = learned(trace, 1.0 - LATEST_SHARE) if count >= LEAST else None
    if taught is None:
        raise PredictorError(f"{count:,} prompts in {source!r} are too few to learn from")
    progress.advance()
    found = partial(_found, trace, progress)
    new = found("the new model", lambda: LPCPlus(taught))
    old = found("the model of before", lambda: LPCPlus(former)) if former else None
    lru, gdsf = found("LRU", LRU), found("GDSF", GDSF)
    live = new > max(lru, old or 0.0)
    compared = HazardComparison(live, new, old, lru, gdsf, count, source, trace.prefix)
    if live:
        save_hazard(folder, taught, _facts(compared))
    return compared


def _former(folder: Path, prefix: bool) -> Hazard | None:
    """The model before; None where there is none, or where it is of no use to this kind of cache."""
    try:
        former, facts = load_hazard(folder)
    except PredictorError:
        return None
    if prefix and not former.prefix:
        raise PredictorError(
            f"a trace of prefixes has no model for the stores that go by the one in {str(folder)!r}, from"
            f" {facts.get('source', 'another trace')}: give another folder (--out)"
        )
    return former if former.prefix == prefix else None


def _found(trace: RequestTrace, progress: Progress, name: str, make: Callable[[], EvictionPolicy]) -> float:
    """The share of tokens that a policy found after the part that was learned from."""
    first = int((1.0 - LATEST_SHARE) * len(trace.requests))
    again = _asked_again(trace)
    ratios = []
    for share in SIZES:
        progress.note(f"comparing: {name}")
        capacity = max(1, round(share * again))
        ratios.append(replay(trace, make(), capacity).hit_ratio(first))
        progress.advance()
    return sum(ratios) / len(ratios)


def _asked_again(trace: RequestTrace) -> int:
    """What the chunks that were asked for more than once take of a cache, in its unit."""
    times = Counter(key for request in trace.requests for key in request.keys)
    sizes: dict[str, int] = {}
    for request in trace.requests:
        sizes.update(zip(request.keys, weights(trace, request), strict=True))
    return sum(size for key, size in sizes.items() if times[key] > 1)


def _facts(compared: HazardComparison) -> dict[str, str]:
    return {
        "source": compared.source,
        "prompts": str(compared.prompts),
        "found": f"{compared.new:.4f}",
        "found_by_lru": f"{compared.lru:.4f}",
        "found_by_gdsf": f"{compared.gdsf:.4f}",
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
