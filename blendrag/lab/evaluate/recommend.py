"""Recommendation of a way to blend a model, or not to blend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blendrag.choice import Choice
from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.arms import FULL, LMCACHE, REUSE
from blendrag.lab.evaluate.summary import ArmSummary

DEFAULT_TOLERANCE = 0.10  # nats: the right answer's tokens are 10 % less likely
_ONLY_COMPARED = (LMCACHE, "random")  # a re-implementation, and the control: not to be used
_FEW, _TOO_FEW = 30, 10  # questions


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation. why: one sentence. The rest is of the arm recommended; where none is (``blend``
    False), of the one that came closest, if any did. selector: None also of full reuse."""

    blend: bool
    why: str
    arm: str | None = None
    ratio: float | None = None
    selector: str | None = None
    loss: Interval | None = None
    speedup: Interval | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A blended arm. ``selector``: None of full reuse, which selects nothing."""

    name: str
    selector: str | None
    ratio: float
    numbers: ArmSummary

    @property
    def most_lost(self) -> float:
        """Nats that are lost at most, by either measure: a likely right answer may yet begin otherwise."""
        return max(self.numbers.nll_loss.high, self.numbers.kl_first_token.high)

    @property
    def ttft_ms(self) -> float:
        return self.numbers.ttft_ms.median

    def result(self, blend: bool, why: str) -> Recommendation:
        loss, speedup = self.numbers.nll_loss, self.numbers.speedup
        return Recommendation(blend, why, self.name, self.ratio, self.selector, loss, speedup)


def recommend(arms: Mapping[str, ArmSummary], tolerance: float = DEFAULT_TOLERANCE) -> Recommendation:
    """Return the arm of the least ratio that loses no more than is tolerated; of equal ones the fastest.

    tolerance: nats that may be lost at most, per token of the right answer (``nll_loss``) and as the first
    token's divergence (``kl_first_token``), by the upper ends of the intervals. An interval of few questions
    is itself in doubt: of fewer than 10 nothing is recommended, and fewer than 30 are remarked on.
    """
    blended = _candidates(arms)
    if not blended:
        return Recommendation(False, "do not blend this model: no blended arm was measured")
    full = arms[FULL]
    if full.n < _TOO_FEW:
        least = f"measure at least {_TOO_FEW}, better {_FEW}"
        return Recommendation(
            False, f"do not blend this model yet: {full.n} questions tell too little, {least}"
        )
    good = [arm for arm in blended if arm.most_lost <= tolerance]
    if not good:
        closest = min(blended, key=lambda arm: arm.most_lost)
        lost = _lost(closest.numbers, tolerance)
        return closest.result(False, f"do not blend this model: {closest.name} came closest, and {lost}")
    full_ms = full.ttft_ms.median
    best = min(good, key=lambda arm: (arm.ttft_ms >= full_ms, arm.ratio, arm.ttft_ms))
    lost = _lost(best.numbers, tolerance)
    if best.ttft_ms >= full_ms:
        slow = f"its first token takes {best.ttft_ms:,.0f} ms, full prefill's {full_ms:,.0f}"
        return best.result(False, f"do not blend this model: {best.name} {lost}, but {slow}")
    fast = f"its first token comes {full_ms / best.ttft_ms:.1f} times as fast as full prefill's"
    return best.result(True, f"blend with {best.name}: it {lost}, and {fast}")


def _candidates(arms: Mapping[str, ArmSummary]) -> list[_Candidate]:
    found = []
    for name, numbers in arms.items():
        choice = Choice.read(name)
        if choice.name == REUSE:
            found.append(_Candidate(name, None, 0.0, numbers))
        elif choice.at is not None and choice.name not in _ONLY_COMPARED:
            selector = str(Choice(choice.name, arguments=choice.arguments))
            found.append(_Candidate(name, selector, choice.at, numbers))
    return found


def _lost(arm: ArmSummary, tolerance: float) -> str:
    loss, first = arm.nll_loss, arm.kl_first_token
    few = f" ({arm.n} questions are few: measure {_FEW} or more)" if arm.n < _FEW else ""
    return (
        f"loses {loss.mean:.2f} ({loss.low:.2f} to {loss.high:.2f}) nats per token of the right"
        f" answer and {first.mean:.2f} (to {first.high:.2f}) at the first,"
        f" of {tolerance:g} allowed{few}"
    )
