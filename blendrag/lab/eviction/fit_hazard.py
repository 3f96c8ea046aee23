"""Fit the table of ``lpc+`` to the uses of a trace, and say what it would find there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from blendrag.errors import PredictorError
from blendrag.eviction import EvictionPolicy, Use, make_policy
from blendrag.eviction.hazard import FEATURES, Cases, Floats, Hazard, History, passed
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.eviction.replay import replay
from blendrag.lab.eviction.trace import RequestTrace

_STEPS = 24  # steps of age
_LADDER = (1.0, *(float(round(2.0 ** (i / 2))) for i in range(2, 21)))  # 1, 2, 3, 4, 6, 8, 11, ... 1024
_SHARES = tuple(i / 10 for i in range(1, 10))
_PENALTY = 1e-2  # on what a border adds to all steps of age, and on what it adds to one of them
_FIRST = 2.0 / 3.0  # share of the time that is learned from, to see on the rest which features hold
_LEAST = 20  # uses that were followed by another; fewer teach nothing
LEAST = 200  # prompts
MOST = 20_000  # prompts that are looked at, the latest: a minute or two of work
LATEST_SHARE = 0.2  # share of prompts that is only measured on
SIZES = (0.125, 0.25, 0.5)  # sizes of caches, as shares of what is asked for more than once


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """A table that was learned, and what it, LRU and GDSF find in the latest part of a trace: tokens, as a
    share of those of all chunks asked for; the mean over caches of :data:`SIZES`. prompts: learned from, and
    measured on."""

    hazard: Hazard
    found: float
    lru: float
    gdsf: float
    prompts: int

    def to_dict(self) -> dict[str, float]:
        return {"found": self.found, "lru": self.lru, "gdsf": self.gdsf, "prompts": self.prompts}


def learn_table(trace: RequestTrace) -> Learned:
    """Learn a table from the older part of a trace. Raises PredictorError where that teaches too little."""
    trace = replace(trace, requests=trace.requests[-MOST:])
    count = len(trace.requests)
    hazard = learned(trace, 1.0 - LATEST_SHARE) if count >= LEAST else None
    if hazard is None:
        raise PredictorError(f"{count:,} prompts in {trace.name!r} are too few to learn from")
    lru, gdsf = (_found(trace, partial(make_policy, name)) for name in ("lru", "gdsf"))
    return Learned(hazard, _found(trace, lambda: LPCPlus(hazard)), lru, gdsf, count)


def _found(trace: RequestTrace, make: Callable[[], EvictionPolicy]) -> float:
    times = Counter(key for request in trace.requests for key in request.keys)
    sizes: dict[str, int] = {}
    for request in trace.requests:
        sizes.update(zip(request.keys, trace.weights(request), strict=True))
    again = sum(size for key, size in sizes.items() if times[key] > 1)
    first = int((1.0 - LATEST_SHARE) * len(trace.requests))
    rooms = [max(1, round(share * again)) for share in SIZES]
    return sum(replay(trace, make(), room).hit_ratio(first) for room in rooms) / len(rooms)


def learned(trace: RequestTrace, share: float, forecasts: Sequence[float] | None = None) -> Hazard | None:
    """Return the model of the first ``share`` of a trace's requests; None if they teach too little.

    Nothing is used that was not known when the first of the other requests came.
    """
    first = int(share * len(trace.requests))
    if not 0 < first < len(trace.requests):
        return None
    return fit_hazard(uses_of(trace, forecasts).before(trace.requests[first].at), trace.prefix)


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Uses of chunks, in the order in which the policy hears of them.

    features: [n, len(FEATURES)], as the policy sees them. at: [n] seconds. next: [n] seconds until the chunk
    is asked for again; inf: never, as far as the trace goes. weights: [n]; chunks of one prompt share their
    fate in a prefix cache, so that n of them count like sqrt(n) uses. until: when the trace ends, seconds.
    """

    features: NDArray[np.float64]
    at: NDArray[np.float64]
    next: NDArray[np.float64]
    weights: NDArray[np.float64]
    until: float

    def before(self, until: float) -> Uses:
        """Return the uses as they were known at that time."""
        after = np.where(self.at + self.next < until, self.next, np.inf)
        return replace(self, next=after, until=until)._where(self.at < until)

    def since(self, start: float) -> Uses:
        """Return the uses from that time on."""
        return self._where(self.at >= start)

    def _where(self, rows: NDArray[np.bool_]) -> Uses:
        return Uses(self.features[rows], self.at[rows], self.next[rows], self.weights[rows], self.until)


def uses_of(trace: RequestTrace, forecasts: Sequence[float] | None = None) -> Uses:
    """Return all uses in a trace. forecasts: by request, the chance that its conversation goes on; from a
    predictor that did not learn from these conversations."""
    history = History(most=2**62)
    seen: set[str] = set()
    known: dict[int, int] = {}
    last: dict[str, int] = {}
    features: list[tuple[float, ...]] = []
    times: list[float] = []
    after: list[float] = []
    weights: list[float] = []
    for number, over in trace.events():
        request = trace.requests[number]
        if not over:
            asked = request.asked
            known[number] = next((i for i, key in enumerate(asked) if key not in seen), len(asked))
            seen.update(asked)
            for key in asked:
                if (row := last.pop(key, None)) is not None:
                    after[row] = request.at - times[row]
            continue
        at, length, leading = request.over, len(request.keys), known.pop(number)
        for depth in range(length - 1, -1, -1):
            key = request.keys[depth]
            told = history.used(key, Use(at, None, depth, length, leading), at)
            if forecasts is not None and request.conversation is not None:
                told = (*told[:-1], float(forecasts[number]))
            last[key] = len(features)
            features.append(told)
            times.append(at)
            after.append(np.inf)
            weights.append(length**-0.5 if trace.prefix else 1.0)
        seen.update(request.keys)
    end = max(times, default=0.0)
    rows = np.array(features, np.float64).reshape(-1, len(FEATURES))
    return Uses(rows, np.array(times), np.array(after), np.array(weights), end)


def fit_hazard(uses: Uses, prefix: bool) -> Hazard | None:
    """Return the model of all uses, by the features that hold over time; None if there is too little.

    A feature is kept if, learned from the earlier part, all features together tell more of the later part
    than all but this one: what changes in the course of a trace would mislead.

    Deterministic: the likelihood of a piecewise exponential model with a quadratic penalty is convex. A chunk
    whose next use lies behind the end of the trace counts as not used until then (censored).
    """
    split = float(uses.at[0] + _FIRST * (uses.until - uses.at[0])) if len(uses.at) else 0.0
    early, late = uses.before(split), uses.since(split)
    if min(np.isfinite(part.next).sum() for part in (early, late)) < _LEAST:
        return None
    ages, every = _ages(early), _borders(early)

    def loss(left_out: str) -> float:
        borders = {name: these for name, these in every.items() if name != left_out}
        fitted = _fit(_Table.of(early, borders, ages), borders, ages, prefix)
        return _Table.of(late, borders, ages).loss(fitted)

    best = loss("")
    kept = {name for name in every if loss(name) > best}
    ages, borders = _ages(uses), {name: these for name, these in _borders(uses).items() if name in kept}
    return _fit(_Table.of(uses, borders, ages), borders, ages, prefix)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A table of uses by case: [cases, borders' features]; seconds waited and uses seen in each step of age,
    weighted, [cases, K]."""

    cases: Cases
    waited: Floats
    seen: Floats

    @classmethod
    def of(cls, uses: Uses, borders: Mapping[str, tuple[float, ...]], ages: tuple[float, ...]) -> _Table:
        every = np.zeros((len(uses.at), len(borders)), np.int64)
        for place, (name, these) in enumerate(borders.items()):
            every[:, place] = np.searchsorted(these, uses.features[:, FEATURES.index(name)], side="right")
        cases, of = np.unique(every, axis=0, return_inverse=True)
        of = of.ravel()
        waited = np.zeros((len(cases), len(ages) - 1))
        seen = np.zeros_like(waited)
        known = uses.until - uses.at
        seconds = np.clip(np.minimum(uses.next, known)[:, None] - ages[:-1], 0.0, np.diff(ages))
        np.add.at(waited, of, uses.weights[:, None] * seconds)
        again = (uses.next <= known) & (uses.next < ages[-1])
        steps = np.searchsorted(ages, uses.next[again], side="right") - 1
        np.add.at(seen, (of[again], steps), uses.weights[again])
        return cls(cases, waited, seen)

    def loss(self, hazard: Hazard) -> float:
        """Return the negative log likelihood, per use that was followed by another."""
        rates = hazard.rates(self.cases)
        return float((rates * self.waited - self.seen * np.log(rates)).sum() / self.seen.sum())


def _fit(
    table: _Table, borders: Mapping[str, tuple[float, ...]], ages: tuple[float, ...], prefix: bool
) -> Hazard:
    total = table.seen.sum()
    bias = np.log((table.seen.sum(0) + 1e-3 * total) / (table.waited.sum(0) + 1e-3 * table.waited.sum()))
    inputs = torch.from_numpy(passed(table.cases, borders))
    waited, seen = torch.from_numpy(table.waited / total), torch.from_numpy(table.seen / total)
    start = torch.from_numpy(bias)
    shared = torch.zeros((inputs.shape[1], 1), dtype=torch.float64, requires_grad=True)
    own = torch.zeros((inputs.shape[1], len(bias)), dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(len(bias), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([shared, own, shift], max_iter=100, line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        optimiser.zero_grad()
        logs = (inputs @ (shared + own) + start + shift).clamp(-20.0, 5.0)
        loss = (waited * logs.exp() - seen * logs).sum()
        loss = loss + _PENALTY * ((shared**2).sum() + (own**2).sum())
        loss.backward()
        return loss

    optimiser.step(objective)
    with torch.no_grad():
        return Hazard(ages, dict(borders), (shared + own).numpy(), (start + shift).numpy(), prefix)


def _ages(uses: Uses) -> tuple[float, ...]:
    """Return steps of age in which about equally many uses fall, and one more to twice the longest wait."""
    waits = uses.next[np.isfinite(uses.next) & (uses.next > 0.0)]
    cuts = np.unique(np.quantile(waits, np.arange(1, _STEPS) / _STEPS).round(3)) if len(waits) else ()
    longest = 2.0 * float(waits.max(initial=0.5))
    return (0.0, *(float(cut) for cut in cuts if 0.0 < cut < longest), longest)


def _borders(uses: Uses) -> dict[str, tuple[float, ...]]:
    """Return, for each feature that varies, borders between values that occur."""
    found = {}
    for place, name in enumerate(FEATURES):
        values = uses.features[:, place]
        if name == "continues":
            marks = np.unique(np.quantile(values, _SHARES))
        elif name in ("gap", "first"):
            known = values[values >= 0.0] if name == "gap" else values[values > 0.0]
            marks = np.unique([0.0, *np.quantile(known, _SHARES)]) if len(known) else values[:0]
        else:
            marks = np.array(_LADDER)
        used = sorted({float(mark) for mark in marks if values.min() < mark <= values.max()})
        if used:
            found[name] = tuple(used)
    return found
