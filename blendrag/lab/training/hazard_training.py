"""Fit the hazard model of ``lpc+`` to the uses of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from blendrag.eviction.hazard import Array, Cases, Hazard, passed
from blendrag.eviction.history import FEATURES
from blendrag.lab.training.hazard_rows import Uses

_STEPS = 24  # of age
_LADDER = (1.0, *(float(round(2.0 ** (i / 2))) for i in range(2, 21)))  # 1, 2, 3, 4, 6, 8, 11, ... 1024
_SHARES = tuple(i / 10 for i in range(1, 10))
_PENALTY = 1e-2  # on what a border adds to all steps, and on what to one of them
_FIRST = 2.0 / 3.0  # of the time is learned from, to see on the rest which features hold
_LEAST = 20  # uses that were followed by another; fewer teach nothing


def fit_hazard(uses: Uses, prefix: bool) -> Hazard | None:
    """The model of all uses, by the features that hold over time; None if there is too little.

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
    """Uses by case: [cases, borders' features]; seconds waited and uses seen in each step of age, weighted,
    [cases, K]."""

    cases: Cases
    waited: Array
    seen: Array

    @classmethod
    def of(cls, uses: Uses, borders: Mapping[str, tuple[float, ...]], ages: tuple[float, ...]) -> _Table:
        every = np.zeros((len(uses.at), len(borders)), np.int64)
        for place, (name, these) in enumerate(borders.items()):
            every[:, place] = np.searchsorted(these, uses.features[:, FEATURES.index(name)], side="right")
        cases, of = np.unique(every, axis=0, return_inverse=True)
        of = of.ravel()
        waited = np.zeros((len(cases), len(ages) - 1))
        seen = np.zeros_like(waited)
        shown = np.minimum(uses.next, uses.until - uses.at)
        again = uses.next <= uses.until - uses.at
        for step, (start, end) in enumerate(pairwise(ages)):
            here = again & (uses.next >= start) & (uses.next < end)
            seconds = np.clip(shown - start, 0.0, end - start)
            waited[:, step] = np.bincount(of, uses.weights * seconds, len(cases))
            seen[:, step] = np.bincount(of[here], uses.weights[here], len(cases))
        return cls(cases, waited, seen)

    def loss(self, hazard: Hazard) -> float:
        """Negative log likelihood, per use that was followed by another."""
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
    """Steps in which about equally many uses fall, and one more to twice the longest wait."""
    waits = uses.next[np.isfinite(uses.next) & (uses.next > 0.0)]
    cuts = np.unique(np.quantile(waits, np.arange(1, _STEPS) / _STEPS).round(3)) if len(waits) else ()
    longest = 2.0 * float(waits.max(initial=0.5))
    return (0.0, *(float(cut) for cut in cuts if 0.0 < cut < longest), longest)


def _borders(uses: Uses) -> dict[str, tuple[float, ...]]:
    """Of each feature that varies, borders between values that occur."""
    found = {}
    for place, name in enumerate(FEATURES):
        values = uses.features[:, place]
        if name in ("similarity", "continues"):
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
