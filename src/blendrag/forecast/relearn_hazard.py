"""Learn ``lpc+`` again from the log of a store's traffic, and keep the better model."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.bench.progress import BenchProgress
from blendrag.errors import PredictorError, SourceError
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.forecast.hazard_file import load_hazard, save_hazard
from blendrag.forecast.trace_log import parts
from blendrag.replay.learned import learned
from blendrag.replay.mooncake import read_mooncake
from blendrag.replay.request import Trace
from blendrag.replay.run import replay

LATEST_SHARE = 0.2
MOST = 20_000  # prompts that are looked at, the latest: half a minute of work
LEAST = 200
SIZES = (0.125, 0.25, 0.5)  # of caches, as shares of what is asked for more than once


@dataclass(frozen=True, slots=True)
class HazardComparison:
    """Of a new model with the old one and with LRU, on the latest part of a log: tokens that were found, as a
    share of those of all chunks asked for; the mean over caches of :data:`SIZES`.

    old: None where there was no model that could be used. prompts: learned from, and measured on.
    """

    live: bool
    new: float
    old: float | None
    lru: float
    prompts: int
    log: Path


def largest_log(folder: Path) -> Path:
    """Of the store that had the most traffic. Raises PredictorError where there is none."""
    logs = sorted(folder.glob("trace-*.jsonl"))
    if not logs:
        raise PredictorError(f"no traffic of a store is logged in {str(folder)!r} (setting outcome_log)")
    return max(logs, key=lambda log: sum(part.stat().st_size for part in parts(log)))


def relearn_hazard(log: Path, folder: Path, progress: BenchProgress) -> HazardComparison:
    """Learn from the older part of a log. The new model is put into ``folder`` only if a cache finds more
    with it, in the latest part, than with the old one and than with LRU.

    The old one may have learned from that part; that is in its favour. Raises PredictorError where the log
    teaches nothing yet.
    """
    trace = _latest(log)
    count = len(trace.requests)
    former = _former(folder)
    progress.total(1 + len(SIZES) * (3 if former else 2))
    progress.note(f"learning from {count:,} prompts")
    fitted = learned(trace, 1.0 - LATEST_SHARE) if count >= LEAST else None
    if fitted is None:
        raise PredictorError(f"{count:,} prompts in the log {str(log)!r} are too few to learn from")
    progress.step()
    new, lru = _found(trace, fitted.hazard, progress), _found(trace, None, progress)
    old = _found(trace, former, progress) if former else None
    compared = HazardComparison(new > max(lru, old or 0.0), new, old, lru, count, log)
    if compared.live:
        save_hazard(folder, fitted.hazard, _facts(compared))
    return compared


def _latest(log: Path) -> Trace:
    """As a running store's policies hear of prompts: before they are answered."""
    try:
        trace = read_mooncake(*parts(log))
    except SourceError as error:
        raise PredictorError(f"nothing can be learned from the log: {error}") from error
    return replace(trace, requests=[replace(request, answered=0) for request in trace.requests[-MOST:]])


def _former(folder: Path) -> Hazard | None:
    try:
        return load_hazard(folder)[0]
    except PredictorError:
        return None


def _found(trace: Trace, hazard: Hazard | None, progress: BenchProgress) -> float:
    """The share of tokens that was found, with a model or by LRU, after the part that was learned from."""
    first = int((1.0 - LATEST_SHARE) * len(trace.requests))
    again = _asked_again(trace)
    ratios = []
    for share in SIZES:
        progress.note("comparing with the model of before" if hazard else "comparing with LRU")
        capacity = max(1, round(share * again))
        outcome = replay(trace, LPCPlus(hazard), capacity)
        ratios.append(float(outcome.found[first:].sum() / outcome.asked[first:].sum()))
        progress.step()
    return sum(ratios) / len(ratios)


def _asked_again(trace: Trace) -> int:
    """Tokens of the chunks that were asked for more than once."""
    times = Counter(key for request in trace.requests for key in request.keys)
    sizes = {
        key: size for request in trace.requests for key, size in zip(request.keys, request.sizes, strict=True)
    }
    return sum(size for key, size in sizes.items() if times[key] > 1)


def _facts(compared: HazardComparison) -> dict[str, str]:
    return {
        "source": str(compared.log),
        "prompts": str(compared.prompts),
        "found": f"{compared.new:.4f}",
        "found_by_lru": f"{compared.lru:.4f}",
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
