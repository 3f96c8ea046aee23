"""What ``bench load``, ``bench tree`` and their options print and draw."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.lab.bench.beside import Beside, BesideResults
from blendrag.lab.bench.decode import ARMS, MEASURES, DecodeResults
from blendrag.lab.bench.load import LoadResults
from blendrag.lab.bench.open_loop import Alone, LoadArm, Run
from blendrag.lab.bench.speculate import (
    ACCEPTED,
    SpeculateOptions,
    SpeculateResults,
    Waited,
    _trials,
)
from blendrag.lab.bench.tree import Compared, TreeResults
from blendrag.lab.bootstrap import Interval, difference
from blendrag.lab.options import BesideOptions, DecodeOptions, LoadOptions, TreeOptions
from blendrag.lab.results import Setup
from blendrag.lab.statistics import Percentiles, Spread
from blendrag.settings import Settings
from paper_machine import MACHINE
from shown import Case, check_case, check_table


def setup(options: Any) -> Setup[Any]:
    here = replace(MACHINE, cpu="A CPU [model]")
    return Setup(options, Settings(), here, (1540, 1571))


def spread(median: float) -> Spread:
    return Spread(median, 0.9 * median, 1.1 * median)


def latency(p50: float) -> Percentiles:
    return Percentiles(p50, 2 * p50, 3 * p50)


def load_results() -> LoadResults:
    def run(rate: float, ms: float) -> Run:
        return Run(rate, 9, int(rate), 100.0, 50.0, latency(ms), [ms], rate)

    def arm(rate: float | None, *runs: Run) -> LoadArm:
        return LoadArm(Alone(800.0, 1000.0, [800.0]), list(runs), rate, rate != 3.0, rate, None)

    arms = {
        "full": arm(1.0, run(1.0, 700), run(1.5, 4000)),
        "prefix": arm(None, run(1.5, 1300)),
        "blended": arm(3.0, run(1.5, 300), run(3.0, 600)),
    }
    return LoadResults(arms=arms, bound_ms=1600.0, setup=setup(LoadOptions()))


def tree_results() -> TreeResults:
    load = load_results()
    arms = {**load.arms, "both": load.arms["blended"]}
    compared = [Compared("both", "blended", rate, Interval(0.6, 0.5, 0.7)) for rate in (None, 1.5)]
    options = TreeOptions(Path("squad.json.gz"))
    return TreeResults(
        arms=arms, bound_ms=1600.0, compared=compared, documents=(250, 31_000), setup=setup(options)
    )


def beside_results() -> BesideResults:
    def own(ms: float, short: float, arrival: float | None) -> Beside:
        takes = spread(arrival) if arrival else None
        return Beside(latency(ms), spread(2.5), takes, spread(short), spread(1.6))

    trace = [(0.1 * at, 12.0 + at) for at in range(30)]
    return BesideResults(
        {"alone": own(12, 67, None), "full": own(300, 1700, 2100), "blended": own(25, 120, 600)},
        {name: trace for name in ("alone", "full", "blended")},
        setup=setup(BesideOptions()),
    )


CASES = [
    (load_results(),
     ("8,000 >", "none", "3.00 at least", "3.00x", "7 requests were")),
    (tree_results(),
     ("both / blended", "alone", "0.50-0.70", "squad.json.gz", "250 documents (31,000 tokens)", "rank**-1")),
    (beside_results(), ("blended", "900", "2.5", "1,700", "1.6", "400 ms")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_table_is_whole_and_picture_opaque(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_json_has_the_fields_that_are_promised() -> None:
    load = json.loads(json.dumps(load_results().to_dict(), allow_nan=False))
    assert list(load) == ["arms", "bound_ms", "machine", "config"]
    assert set(load["arms"]["full"]) == {"alone", "runs", "per_s", "past", "vs_full", "vs_prefix"}
    assert load["arms"]["full"]["runs"][0]["ttft_ms"] == {"p50": 700, "p95": 1400, "max": 2100}
    assert {"chunks", "pool", "ratio", "codec", "prompt_tokens"} < set(load["config"])
    beside = json.loads(json.dumps(beside_results().to_dict(), allow_nan=False))
    assert list(beside) == ["conditions", "trace", "machine", "config"]
    assert beside["conditions"]["alone"]["arrival_ms"] is None
    assert set(beside["conditions"]["full"]["short_ratio"]) == {"median", "p10", "p90"}


# -- ``bench load --kv-budget`` -------------------------------------------------------------------------


def test_every_arm_is_shown_with_its_numbers() -> None:
    own, ratio = (2.5, 0.48, 0.031, 0.068), (1.01, 1.1, 0.55, 0.07)
    numbers = dict(zip(MEASURES, own, strict=True))
    numbers |= {f"ratio_{name}": number for name, number in zip(MEASURES, ratio, strict=True)}
    rows = {
        (arm, count): {name: spread(n * number) for name, number in numbers.items()}
        for count in (1, 8)
        for n, arm in enumerate(ARMS, start=1)
    }
    results = DecodeResults(rows, 497, 219, setup(DecodeOptions(512)))
    shown = (*ARMS, "2,500", "5,000", "960", "93.0", "6.8%", "497 tokens a head", "1,571")
    check_table(results.show, *shown)
    assert len(json.loads(json.dumps(results.to_dict()))["rows"]) == 6


# -- ``bench ttft --speculate`` -------------------------------------------------------------------------


def waited(wait_s: float) -> Waited:
    saved = {0.0: -0.02, 0.5: 0.4, 1.0: 0.9}
    return Waited(wait_s, 1.0, {share: difference([2.0] * 3, [2.0 - s] * 3) for share, s in saved.items()})


def test_stated_share_of_lists_comes_true_and_a_wrong_list_is_another() -> None:
    trials = _trials([f"text {at}" for at in range(24)], random.Random(0), 6, 17)
    for share in ACCEPTED:
        assert sum(trial.comes[share] for trial in trials[1:]) == share * 16
    for trial in trials:
        assert trial.final != trial.other
        assert sorted(trial.final.split("\n\n")) == sorted(trial.other.split("\n\n"))


def test_results_are_shown_and_are_json() -> None:
    results = SpeculateResults((waited(2.0),), setup=setup(SpeculateOptions()))
    check_table(results.show, "-2%", "90%", "400 ms", "A CPU [model]")
    (wait,) = json.loads(json.dumps(results.to_dict()))["waits"]
    assert wait["saved_s"]["1.0"]["mean"] == pytest.approx(0.9)
