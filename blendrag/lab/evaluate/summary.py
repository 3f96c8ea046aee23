"""From the samples of a run to the numbers of each arm, every one with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blendrag.errors import ConfigError
from blendrag.lab.evaluate import bootstrap
from blendrag.lab.evaluate.bootstrap import Interval
from blendrag.lab.evaluate.rows import Row
from blendrag.lab.evaluate.samples import Sample
from blendrag.lab.evaluate.scores import f1, rouge_l, same_text
from blendrag.lab.statistics import first_token_kl

FULL, REUSE = "full", "reuse"
WITHIN_NOISE, CLEAR, NEGATIVE = "within noise", "clear", "negative"

_Samples = Sequence[Sample]


def summarise(samples: Iterable[Sample], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The numbers of each arm, in the order the arms were first measured in.

    Only rows count that every arm has answered, ``n`` of them; what was measured twice counts once. Each
    number is {"mean", "low", "high"}, or None where there is nothing it could be of.

    f1, rouge_l: of the free answer against the right ones; f1_loss, rouge_l_loss: full - arm, row by row.
    nll_gold: nats per token of the right answer; nll_loss: arm - full, row by row.
    gap_closed: the share of full reuse's loss that the arm does not have; gap: "clear", "within noise" if
        full reuse itself may have lost nothing, so that the share says little, "negative" if it is better
        than full prefill, so that the share means nothing.
    kl_first_token (nats), top1_agreement: the first token against full prefill's.
    exact_text, f1_vs_full: the free answer against full prefill's.
    decision_agreement: the same choice as full prefill's; of the rows that have choices.
    ttft_ms: with its "median" besides; speedup: full / arm, row by row.
    recomputed: share of the reused tokens that was computed again.

    Raises ConfigError if no row was answered by all arms, ``full`` among them.
    """
    by_arm: dict[str, dict[str, Sample]] = {}
    for sample in samples:
        by_arm.setdefault(sample.arm, {})[sample.row] = sample
    common = [row for row in rows if all(row.id in answered for answered in by_arm.values())]
    if not common or FULL not in by_arm:
        raise ConfigError("no row was answered by all arms, full prefill among them: nothing can be compared")
    table = {arm: [answered[row.id] for row in common] for arm, answered in by_arm.items()}
    full, reuse = table[FULL], table.get(REUSE)
    return {
        arm: {
            "n": len(common),
            **_likelihood(own, full, reuse),
            **_answers(common, own, full),
            **_times(own, full),
        }
        for arm, own in table.items()
    }


def _likelihood(own: _Samples, full: _Samples, reuse: _Samples | None) -> dict[str, Any]:
    nll, reference = _nll(own), _nll(full)
    worst = _nll(reuse) if reuse else None
    kl = [first_token_kl(b.logprobs, a.logprobs) for a, b in zip(own, full, strict=True)]
    top1 = [a.first_token == b.first_token for a, b in zip(own, full, strict=True)]
    return {
        "nll_gold": _shown(bootstrap.mean(nll)),
        "nll_loss": _shown(bootstrap.difference(nll, reference)),
        "gap_closed": _shown(bootstrap.gap_closed(nll, reference, worst) if worst else None),
        "gap": _verdict(bootstrap.difference(worst, reference)) if worst else None,
        "kl_first_token": _shown(bootstrap.mean(kl)),
        "top1_agreement": _shown(bootstrap.mean(top1)),
    }


def _nll(samples: _Samples) -> list[float]:
    return [sample.nll for sample in samples]


def _verdict(gap: Interval) -> str:
    if gap.within_noise:
        return WITHIN_NOISE
    return CLEAR if gap.low > 0.0 else NEGATIVE


def _answers(rows: Sequence[Row], own: _Samples, full: _Samples) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, score in {"f1": f1, "rouge_l": rouge_l}.items():
        ours, theirs = (
            [score(sample.text, row.answers) for sample, row in zip(side, rows, strict=True)]
            for side in (own, full)
        )
        numbers[name] = _shown(bootstrap.mean(ours))
        numbers[f"{name}_loss"] = _shown(bootstrap.difference(theirs, ours))
    pairs = list(zip(rows, own, full, strict=True))
    decided = [a.decision == b.decision for row, a, b in pairs if row.choices]
    return numbers | {
        "exact_text": _shown(bootstrap.mean([same_text(a.text, b.text) for _, a, b in pairs])),
        "f1_vs_full": _shown(bootstrap.mean([f1(a.text, [b.text]) for _, a, b in pairs])),
        "decision_agreement": _shown(bootstrap.mean(decided) if decided else None),
    }


def _times(own: _Samples, full: _Samples) -> dict[str, Any]:
    ttft = [sample.ttft_ms for sample in own]
    speedup = [b.ttft_ms / a.ttft_ms for a, b in zip(own, full, strict=True)]
    shares = [sample.recomputed / sample.cached for sample in own if sample.cached]
    return {
        "ttft_ms": bootstrap.mean(ttft).to_dict() | {"median": float(np.median(ttft))},
        "speedup": _shown(bootstrap.mean(speedup)),
        "recomputed": _shown(bootstrap.mean(shares) if shares else None),
    }


def _shown(interval: Interval | None) -> dict[str, float] | None:
    return interval.to_dict() if interval else None
