"""Summary of the samples of a run: the numbers of each arm, every one with its interval."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from blendrag.errors import ConfigError
from blendrag.lab.bootstrap import Interval, difference, gap_closed, mean
from blendrag.lab.evaluate.arms import FULL, REUSE
from blendrag.lab.evaluate.formats import Question
from blendrag.lab.evaluate.samples import AnswerSample, by_arm
from blendrag.lab.statistics import next_token_kl

Verdict = Literal["clear", "within noise", "negative"]


@dataclass(frozen=True, slots=True)
class Times(Interval):
    """A ``mean`` and its interval, with the median besides."""

    median: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The numbers of an arm over ``n`` questions; None where there is nothing a number could be of.

    nll_gold: nats per token of the right answer; nll_loss: arm - full, question by question.
    gap_closed: the share of full reuse's loss that the arm does not have; gap: "clear", "within noise" if
        full reuse itself may have lost nothing, so that the share says little, "negative" if it is better
        than full prefill, so that the share means nothing.
    kl_first_token, kl_answer: nats, from full prefill, of the first token and mean over the right answer's.
    top1_agreement: the first token against full prefill's.
    f1: of the free answer against the right ones; f1_loss: full - arm.
    exact_text, f1_vs_full: the free answer against full prefill's.
    decision_agreement: the same choice as full prefill's; of the questions that have choices.
    ttft_ms: milliseconds; speedup: full / arm, question by question.
    recomputed: share of the reused tokens that was computed again.
    """

    n: int
    nll_gold: Interval
    nll_loss: Interval
    gap_closed: Interval | None
    gap: Verdict | None
    kl_first_token: Interval
    kl_answer: Interval
    top1_agreement: Interval
    f1: Interval
    f1_loss: Interval
    exact_text: Interval
    f1_vs_full: Interval
    decision_agreement: Interval | None
    ttft_ms: Times
    speedup: Interval
    recomputed: Interval | None


def summarise(samples: Iterable[AnswerSample], questions: Sequence[Question]) -> dict[str, ArmSummary]:
    """Return the numbers of each arm, in the order the arms were first measured in.

    Only questions count that every arm has answered; what was measured twice counts once.
    Raises ConfigError if no question was answered by all arms, ``full`` among them.
    """
    arms = by_arm(samples)
    common = [asked for asked in questions if all(asked.id in answered for answered in arms.values())]
    if not common or FULL not in arms:
        raise ConfigError(
            "no question was answered by all arms, full prefill among them: nothing can be compared"
        )
    table = {arm: [answered[asked.id] for asked in common] for arm, answered in arms.items()}
    return {arm: _summary(common, own, table[FULL], table.get(REUSE)) for arm, own in table.items()}


def _summary(
    questions: Sequence[Question],
    own: Sequence[AnswerSample],
    full: Sequence[AnswerSample],
    reuse: Sequence[AnswerSample] | None,
) -> ArmSummary:
    pairs = list(zip(own, full, strict=True))
    nll, reference, worst = ([sample.nll for sample in side] for side in (own, full, reuse or []))
    kl = [
        [next_token_kl(b, a) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        for one, other in pairs
    ]
    decided = [
        a.decision == b.decision for asked, (a, b) in zip(questions, pairs, strict=True) if asked.choices
    ]
    ttft = [sample.ttft_ms for sample in own]
    times = mean(ttft)
    shares = [sample.recomputed / sample.cached for sample in own if sample.cached]
    f1_own, f1_full = (
        [f1(sample.text, asked.answers) for sample, asked in zip(side, questions, strict=True)]
        for side in (own, full)
    )
    return ArmSummary(
        n=len(questions),
        nll_gold=mean(nll),
        nll_loss=difference(nll, reference),
        gap_closed=gap_closed(nll, reference, worst) if worst else None,
        gap=_verdict(difference(worst, reference)) if worst else None,
        kl_first_token=mean([of_token[0] for of_token in kl]),
        kl_answer=mean([float(np.mean(of_token)) for of_token in kl]),
        top1_agreement=mean([a.first_token == b.first_token for a, b in pairs]),
        f1=mean(f1_own),
        f1_loss=difference(f1_full, f1_own),
        exact_text=mean([same_text(a.text, b.text) for a, b in pairs]),
        f1_vs_full=mean([f1(a.text, [b.text]) for a, b in pairs]),
        decision_agreement=mean(decided) if decided else None,
        ttft_ms=Times(times.mean, times.low, times.high, float(np.median(ttft))),
        speedup=mean([b.ttft_ms / a.ttft_ms for a, b in pairs]),
        recomputed=mean(shares) if shares else None,
    )


def _verdict(gap: Interval) -> Verdict:
    if gap.within_noise:
        return "within noise"
    return "clear" if gap.low > 0.0 else "negative"


# Kana, and Han with its extensions.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_ARTICLES = {"a", "an", "the"}


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the largest overlap of words with one of ``answers``, 0 to 1. Blank texts are equal."""
    return max(_f1(_words(text), _words(answer)) for answer in answers)


def same_text(text: str, other: str) -> bool:
    """Return whether nothing differs but case, punctuation, articles and spaces."""
    return _words(text) == _words(other)


def _f1(words: list[str], answer: list[str]) -> float:
    if not words or not answer:
        return float(words == answer)
    shared = (Counter(words) & Counter(answer)).total()
    return 2 * shared / (len(words) + len(answer))


def _words(text: str) -> list[str]:
    kept = "".join(sign for sign in text.lower() if not _is_punctuation(sign))
    return [word for word in _UNSPACED.sub(r" \g<0> ", kept).split() if word not in _ARTICLES]


def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")
