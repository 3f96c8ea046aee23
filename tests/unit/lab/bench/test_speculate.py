"""``bench ttft --speculate``: what it asks, and what it says of what was saved."""

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
)
from blendrag.lab.bootstrap import difference
from blendrag.lab.results import Setup
from blendrag.settings import Settings
from paper_machine import MACHINE


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
    setup = Setup(SpeculateOptions(), Settings(), replace(MACHINE, cpu="A CPU [model]"), ())
    results = SpeculateResults((waited(2.0),), setup=setup)
    console = Console(record=True, width=120)
    results.show(console)
    shown = console.export_text()
    assert "-2%" in shown and "90%" in shown and "400 ms" in shown and "A CPU [model]" in shown
    (wait,) = json.loads(json.dumps(results.to_dict()))["waits"]
    assert wait["saved_s"]["1.0"]["mean"] == pytest.approx(0.9)
