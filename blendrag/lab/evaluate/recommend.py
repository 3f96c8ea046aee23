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


def recommend(arms: Mapping[str, ArmSummary], tolerance: float = DEFAULT_TOLERANCE) -> Recommendation:
    """Return the arm of the least ratio that loses no more than is tolerated; of equal ones the fastest.

    tolerance: nats that may be lost at most, per token of the right answer (``nll_loss``) and as the first
    token's divergence (``kl_first_token``), by the upper ends of the intervals: a likely right answer may yet
    begin otherwise. An interval of few questions is itself in doubt: of fewer than 10 nothing is recommended,
    and fewer than 30 are remarked on.
    """
    choices = {name: Choice.read(name) for name in arms}
    blended = {
        name: arms[name]
        for name, choice in choices.items()
        if choice.name == REUSE or (choice.at is not None and choice.name not in _ONLY_COMPARED)
    }
    if not blended:
        return Recommendation(False, "do not blend this model: no blended arm was measured")
    full = arms[FULL]
    if full.n < _TOO_FEW:
        least = f"measure at least {_TOO_FEW}, better {_FEW}"
        return Recommendation(
            False, f"do not blend this model yet: {full.n} questions tell too little, {least}"
        )

    def result(name: str, blend: bool, why: str) -> Recommendation:
        choice, own = choices[name], arms[name]
        selector = None if choice.name == REUSE else str(Choice(choice.name, arguments=choice.arguments))
        return Recommendation(blend, why, name, choice.at or 0.0, selector, own.nll_loss, own.speedup)

    most_lost = {name: max(own.nll_loss.high, own.kl_first_token.high) for name, own in blended.items()}
    good = [name for name in blended if most_lost[name] <= tolerance]
    if not good:
        closest = min(blended, key=most_lost.__getitem__)
        lost = _lost(arms[closest], tolerance)
        return result(closest, False, f"do not blend this model: {closest} came closest, and {lost}")
    full_ms, ms = full.ttft_ms.median, {name: arms[name].ttft_ms.median for name in good}
    best = min(good, key=lambda name: (ms[name] >= full_ms, choices[name].at or 0.0, ms[name]))
    lost = _lost(arms[best], tolerance)
    if ms[best] >= full_ms:
        slow = f"its first token takes {ms[best]:,.0f} ms, full prefill's {full_ms:,.0f}"
        return result(best, False, f"do not blend this model: {best} {lost}, but {slow}")
    fast = f"its first token comes {full_ms / ms[best]:.1f} times as fast as full prefill's"
    return result(best, True, f"blend with {best}: it {lost}, and {fast}")


def _lost(arm: ArmSummary, tolerance: float) -> str:
    loss, first = arm.nll_loss, arm.kl_first_token
    few = f" ({arm.n} questions are few: measure {_FEW} or more)" if arm.n < _FEW else ""
    return (
        f"loses {loss.mean:.2f} ({loss.low:.2f} to {loss.high:.2f}) nats per token of the right"
        f" answer and {first.mean:.2f} (to {first.high:.2f}) at the first,"
        f" of {tolerance:g} allowed{few}"
    )
