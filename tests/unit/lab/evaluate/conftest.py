"""Samples of arms whose losses are known, since they were put in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from blendrag.lab.evaluate.recommend import recommend
from blendrag.lab.evaluate.rows import Row
from blendrag.lab.evaluate.samples import Sample
from blendrag.lab.evaluate.summary import summarise

# name: nats lost per token, probability of the first token, ms, tokens of 100 recomputed
KNOWN = {
    "full": (0.0, 0.9, 400.0, 0),
    "reuse": (1.0, 0.3, 40.0, 0),
    "hkvd_v@0.05": (0.3, 0.6, 60.0, 5),
    "hkvd_v@0.15": (0.05, 0.85, 90.0, 15),
    "first_k@0.15": (0.2, 0.7, 80.0, 15),
    "random@0.15": (0.0, 0.9, 10.0, 15),
    "lmcache@0.15": (0.0, 0.9, 10.0, 15),
}


@pytest.fixture
def rows() -> list[Row]:
    choices = ((), ("yes", "no"))
    return [Row(str(n), "Where?", ("Paris",), ("In Paris.",), choices[n % 2]) for n in range(60)]


@pytest.fixture
def samples(rows: list[Row]) -> list[Sample]:
    """All arms on all rows. A right answer costs each row another amount; noise is 0.02 nats."""
    rng = random.Random(0)
    base = {row.id: rng.uniform(1.0, 5.0) for row in rows}
    return [
        make_sample(row, arm, base[row.id] + lost + rng.gauss(0.0, 0.02) * (arm != "full"), *facts)
        for row in rows
        for arm, (lost, *facts) in KNOWN.items()
    ]


def make_sample(row: Row, arm: str, nll: float, p: float, ttft_ms: float, recomputed: int) -> Sample:
    right = p > 0.5
    return Sample(
        row=row.id, arm=arm, nll=nll, gold_tokens=2, first_token=7 if right else 8,
        logprobs={7: math.log(p), 8: math.log(0.95 - p)}, text="In Paris" if right else "London",
        decision=("yes" if right else "no") if row.choices else None, ttft_ms=ttft_ms,
        cached=0 if arm == "full" else 100, recomputed=recomputed, split_ms={},
    )  # fmt: skip


@pytest.fixture
def results(samples: list[Sample], rows: list[Row]) -> dict[str, Any]:
    arms = summarise(samples, rows)
    return {
        "arms": arms,
        "recommendation": recommend(arms),
        "machine": {"model": "models/tiny", "cpu": "a CPU", "threads": 2},
        "config": {"format": "squadsplit"},
    }


@pytest.fixture
def arm_numbers() -> Callable[..., Mapping[str, Any]]:
    """The part of an arm's summary that a recommendation is made from."""

    def make(
        loss: float, ttft_ms: float, n: int = 60, spread: float = 0.01, kl: float = 0.0
    ) -> Mapping[str, Any]:
        interval = {"mean": loss, "low": loss - spread, "high": loss + spread}
        first = {"mean": kl, "low": kl, "high": kl}
        speedup = {"mean": 400 / ttft_ms, "low": 1.0, "high": 1e3}
        losses = {"nll_loss": interval, "kl_first_token": first}
        return {"n": n, **losses, "ttft_ms": {"median": ttft_ms}, "speedup": speedup}

    return make
