"""Which way to blend a model, or that it should not be blended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blendrag.lab.evaluate.summary import FULL, REUSE

DEFAULT_TOLERANCE = 0.10  # nats: the right answer's tokens are 10 % less likely
_ONLY_COMPARED = ("lmcache", "random")  # a re-implementation, and the control: not to be used
_FEW_ROWS, _TOO_FEW_ROWS = 30, 10

Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A blended arm with its summary. ``selector``: None of full reuse, which selects nothing."""

    name: str
    selector: str | None
    ratio: float
    numbers: Mapping[str, Any]

    @property
    def most_lost(self) -> float:
        """Nats, by either measure: an arm may keep the right answer likely and yet begin another."""
        return max(float(self.numbers[name]["high"]) for name in ("nll_loss", "kl_first_token"))

    @property
    def ttft_ms(self) -> float:
        return float(self.numbers["ttft_ms"]["median"])


def recommend(arms: Arms, tolerance: float = DEFAULT_TOLERANCE) -> dict[str, Any]:
    """The arm of the least ratio that loses no more than is tolerated; of equal ones the fastest.

    arms: the numbers of ``summarise``. tolerance: nats that may be lost at most, per token of the right
    answer (``nll_loss``) and as the first token's divergence (``kl_first_token``), by the upper ends of the
    intervals. An interval of few rows is itself in doubt: of fewer than 10 nothing is recommended, and fewer
    than 30 are remarked on.

    Returns {"blend": bool, "arm", "ratio", "selector", "loss": interval, "speedup": interval, "why": one
    sentence}; where nothing is recommended, of the arm that came closest, or None.
    """
    blended = _candidates(arms)
    if not blended:
        return _result(False, None, "do not blend this model: no blended arm was measured")
    rows = int(arms[FULL]["n"])
    if rows < _TOO_FEW_ROWS:
        least = f"measure at least {_TOO_FEW_ROWS}, better {_FEW_ROWS}"
        return _result(False, None, f"do not blend this model yet: {rows} rows tell too little, {least}")
    good = [arm for arm in blended if arm.most_lost <= tolerance]
    if not good:
        closest = min(blended, key=lambda arm: arm.most_lost)
        why = f"do not blend this model: {closest.name} came closest, and {_loss(closest, tolerance)}"
        return _result(False, closest, why)
    full_ms = float(arms[FULL]["ttft_ms"]["median"])
    best = min(good, key=lambda arm: (arm.ttft_ms >= full_ms, arm.ratio, arm.ttft_ms))
    if best.ttft_ms >= full_ms:
        why = (
            f"do not blend this model: {best.name} {_loss(best, tolerance)}, but its first token takes"
            f" {best.ttft_ms:,.0f} ms, full prefill's {full_ms:,.0f}"
        )
        return _result(False, best, why)
    why = (
        f"blend with {best.name}: it {_loss(best, tolerance)}, and its first token comes"
        f" {full_ms / best.ttft_ms:.1f} times as fast as full prefill's"
    )
    return _result(True, best, why)


def _candidates(arms: Arms) -> list[_Candidate]:
    found = []
    for name, numbers in arms.items():
        selector, _, ratio = name.partition(":")[0].partition("@")
        offered = selector == REUSE or (ratio and selector not in _ONLY_COMPARED)
        if offered:
            chosen = None if selector == REUSE else selector
            found.append(_Candidate(name, chosen, float(ratio or 0.0), numbers))
    return found


def _result(blend: bool, arm: _Candidate | None, why: str) -> dict[str, Any]:
    return {
        "blend": blend,
        "arm": arm.name if arm else None,
        "ratio": arm.ratio if arm else None,
        "selector": arm.selector if arm else None,
        "loss": dict(arm.numbers["nll_loss"]) if arm else None,
        "speedup": dict(arm.numbers["speedup"]) if arm else None,
        "why": why,
    }


def _loss(arm: _Candidate, tolerance: float) -> str:
    loss, first, rows = arm.numbers["nll_loss"], arm.numbers["kl_first_token"], int(arm.numbers["n"])
    few = f" ({rows} rows are few: measure {_FEW_ROWS} or more)" if rows < _FEW_ROWS else ""
    return (
        f"loses {loss['mean']:.2f} ({loss['low']:.2f} to {loss['high']:.2f}) nats per token of the right"
        f" answer and {first['mean']:.2f} (to {first['high']:.2f}) at the first,"
        f" of {tolerance:g} allowed{few}"
    )
