"""``bench speculate``: what it asks, and what it says of what was saved."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from rich.console import Console

from blendrag.lab.bench.speculate import (
    ACCEPTED,
    SpeculateOptions,
    SpeculateResults,
    Waited,
    _trials,
    print_speculate,
)
from blendrag.lab.bootstrap import difference
from blendrag.lab.setup import Setup
from blendrag.settings import Settings
from paper_machine import MACHINE


def waited(wait_s: float) -> Waited:
    saved = {0.0: -0.02, 0.5: 0.4, 1.0: 0.9}
    return Waited(wait_s, 1.0, {share: difference([2.0] * 3, [2.0 - s] * 3) for share, s in saved.items()})


def test_savings_are_held_against_more_or_less_than_can_be_saved() -> None:
    assert [waited(2.0).of_most(share) for share in ACCEPTED] == pytest.approx([-0.02, 0.8, 0.9])
    assert [waited(0.9).of_most(share) for share in ACCEPTED] == pytest.approx([-0.02, 0.4 / 0.45, 1.0])


def test_other_share_of_lists_comes_true_or_a_wrong_list_is_the_right_one() -> None:
    trials = _trials([f"text {at}" for at in range(24)], random.Random(0), SpeculateOptions(), 17)
    for share in ACCEPTED:
        assert sum(trial.comes[share] for trial in trials[1:]) == share * 16
    for trial in trials:
        assert trial.final != trial.other
        assert sorted(trial.final.split("\n\n")) == sorted(trial.other.split("\n\n"))


def test_results_are_not_shown_or_no_json() -> None:
    setup = Setup(SpeculateOptions(), Settings(), replace(MACHINE, cpu="A CPU [model]"), "runs", ())
    results = SpeculateResults((waited(2.0),), setup)
    console = Console(record=True, width=120)
    print_speculate(results, console)
    shown = console.export_text()
    assert "-2% of TTFT" in shown and "90%" in shown and "A CPU [model]" in shown
    assert json.loads(json.dumps(results.to_dict()))["waits"][0]["saved_of_most"]["1.0"] == pytest.approx(0.9)
