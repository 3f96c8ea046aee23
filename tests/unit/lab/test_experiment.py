"""The one loop of everything that is measured: its order, its warm-up, what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta
from blendrag.lab.arms import Arm
from blendrag.lab.experiment import in_turn, measure
from blendrag.lab.prompts import Prompt, Trial
from blendrag.progress import SILENT, Progress


class Counted(Progress):
    def __init__(self) -> None:
        self.expected, self.done, self.notes = 0, 0, list[str]()

    def total(self, steps: int) -> None:
        self.expected += steps

    def note(self, message: str) -> None:
        self.notes.append(message)

    def advance(self, amount: int = 1) -> None:
        self.done += 1


def test_every_arm_has_every_trial_and_none_always_goes_first() -> None:
    progress = Counted()
    turns = list(in_turn({"a": 1, "b": 2, "c": 3}, range(4), progress))
    assert [turn.trial for turn in turns] == sorted(turn.trial for turn in turns)
    assert len({(turn.trial, turn.key) for turn in turns}) == 12
    assert len({turn.key for turn in turns[::3]}) == 3, "every trial begins with the same arm"
    assert [turn.warms_up for turn in turns[2:4]] == [True, False] and turns[3].number == 0
    assert all({"a": 1, "b": 2, "c": 3}[turn.key] == turn.arm for turn in turns)
    assert progress.expected == progress.done == 12
    assert progress.notes[0] == "warm-up: a" and progress.notes[-1].startswith("3 of 3: ")


@pytest.mark.parametrize(("arms", "trials"), [(3, 3), (20, 3), (6, 60), (2, 1)])
def test_few_trials_of_many_arms_begin_with_different_arms(arms: int, trials: int) -> None:
    turns = list(in_turn(dict.fromkeys(range(arms)), range(trials), Counted()))
    assert len({turn.key for turn in turns[::arms]}) == min(arms, trials)


def test_what_is_done_is_not_asked_again_and_is_no_step() -> None:
    progress = Counted()
    done = {(0, "a"), (1, "a"), (1, "b")}
    turns = list(
        in_turn({"a": 1, "b": 2}, range(2), progress, warm_up=0, done=lambda trial, key: (trial, key) in done)
    )
    assert [(turn.trial, turn.key) for turn in turns] == [(0, "b")]
    assert not turns[0].warms_up and progress.expected == progress.done == 1


def test_turn_is_over_when_its_work_is_done() -> None:
    progress = Counted()
    turns = in_turn({"a": 1, "b": 2}, range(2), progress)
    next(turns)
    assert progress.done == 0
    next(turns)
    assert progress.done == 1


def test_warm_up_is_dropped_and_every_trial_is_prepared_just_before_it_is_asked() -> None:
    log: list[str] = []

    class Logging:
        def generate(self, token_ids: Sequence[int], sampling: Any, recipe: Any) -> Delta:
            log.append(f"asked {token_ids[0]}")
            return Delta("", [5], len(log), logprobs=[{5: -0.1, 6: -3.0}])

    def prepare(engine: Any, trial: Trial) -> None:
        log.append(f"prepared {trial.prompt.token_ids[0]}")

    engine: Any = Logging()
    arms = {}
    for arm, name in enumerate(("full", "b")):
        trials = [Trial(Prompt((10 * arm + number,), ()), Prompt((), ())) for number in range(3)]
        arms[name] = Arm(name, trials, prepare=prepare)
    samples = measure(engine, arms, SILENT)
    asked = [0, 10, 11, 1, 2, 12]
    assert log == [line for number in asked for line in (f"prepared {number}", f"asked {number}")]
    assert [[sample.ttft_ms for sample in own] for own in samples.values()] == [[8e3, 10e3], [6e3, 12e3]]
