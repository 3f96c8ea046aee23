"""Samples of arms whose losses are known, since they were put in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.formats import Question
from blendrag.lab.evaluate.recommend import recommend
from blendrag.lab.evaluate.report import Evaluation
from blendrag.lab.evaluate.samples import AnswerSample
from blendrag.lab.evaluate.summary import ArmSummary, Times, summarise
from paper_machine import MACHINE

# name: nats lost per token, probability of the first token, ms, tokens of 100 recomputed
KNOWN = {
    "full": (0.0, 0.9, 400.0, 0),
    "reuse": (1.0, 0.3, 40.0, 0),
    "hkvd@0.05": (0.3, 0.6, 60.0, 5),
    "hkvd@0.15": (0.05, 0.85, 90.0, 15),
    "first_k@0.15": (0.2, 0.7, 80.0, 15),
    "random@0.15": (0.0, 0.9, 10.0, 15),
    "lmcache@0.15": (0.0, 0.9, 10.0, 15),
}


@pytest.fixture
def rows() -> list[Question]:
    choices = ((), ("yes", "no"))
    return [Question(str(n), "Where?", ("Paris",), ("In Paris.",), choices[n % 2]) for n in range(60)]


@pytest.fixture
def samples(rows: list[Question]) -> list[AnswerSample]:
    """All arms on all rows. A right answer costs each row another amount; noise is 0.02 nats."""
    rng = random.Random(0)
    base = {row.id: rng.uniform(1.0, 5.0) for row in rows}
    return [
        make_sample(row, arm, base[row.id] + lost + rng.gauss(0.0, 0.02) * (arm != "full"), *facts)
        for row in rows
        for arm, (lost, *facts) in KNOWN.items()
    ]


def make_sample(
    row: Question, arm: str, nll: float, p: float, ttft_ms: float, recomputed: int
) -> AnswerSample:
    right = p > 0.5
    return AnswerSample(
        question=row.id, arm=arm, nll=nll,
        logprobs=[{7: math.log(p), 8: math.log(0.95 - p)}, {9: math.log(0.9), 7: math.log(0.05)}],
        text="In Paris" if right else "London",
        decision=("yes" if right else "no") if row.choices else None, ttft_ms=ttft_ms,
        cached=0 if arm == "full" else 100, recomputed=recomputed, split_ms={},
    )  # fmt: skip


@pytest.fixture
def results(samples: list[AnswerSample], rows: list[Question]) -> Evaluation:
    arms = summarise(samples, rows)
    return Evaluation(arms, recommend(arms), replace(MACHINE, cpu="a CPU"), {"format": "squadsplit"})


@pytest.fixture
def arm_numbers() -> Callable[..., ArmSummary]:
    """An arm's summary; what a recommendation does not depend on is 0."""

    def make(loss: float, ttft_ms: float, n: int = 60, spread: float = 0.01, kl: float = 0.0) -> ArmSummary:
        nothing = Interval(0.0, 0.0, 0.0)
        numbers = dict.fromkeys(ArmSummary.__dataclass_fields__, nothing) | {
            "n": n,
            "nll_loss": Interval(loss, loss - spread, loss + spread),
            "kl_first_token": Interval(kl, kl, kl),
            "ttft_ms": Times(ttft_ms, ttft_ms, ttft_ms, ttft_ms),
            "speedup": Interval(400 / ttft_ms, 1.0, 1e3),
        }
        return ArmSummary(**numbers)  # type: ignore[arg-type]

    return make
