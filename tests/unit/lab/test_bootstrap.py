"""What every claim rests on: intervals, and the one loop of all that is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.client.generation import Delta
from blendrag.lab.arms import Arm
from blendrag.lab.bootstrap import Interval, difference, gap_closed, mean, ratio
from blendrag.lab.experiment import in_turn, measure
from blendrag.lab.prompts import Prompt, Trial
from blendrag.progress import SILENT
from noted import Noted

numbers = st.floats(-1e3, 1e3).map(lambda x: round(x, 6))
rows = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=40)


def columns(table: list[tuple[float, float, float]]) -> tuple[list[float], ...]:
    return tuple(map(list, zip(*table, strict=True)))


@given(rows)
def test_interval_includes_what_it_is_of(table: list[tuple[float, float, float]]) -> None:
    arm, full, reuse = columns(table)
    closed = gap_closed(arm, full, reuse)
    for interval in (mean(arm), difference(arm, full), *([closed] if closed else [])):
        assert interval.low <= interval.mean <= interval.high
    assert mean(arm).mean == pytest.approx(np.mean(arm), abs=1e-9)
    assert min(arm) - 1e-9 <= mean(arm).low <= mean(arm).high <= max(arm) + 1e-9


@given(rows)
def test_arm_that_is_full_prefill_does_not_differ_from_it(table: list[tuple[float, float, float]]) -> None:
    arm, _, reuse = columns(table)
    assert difference(arm, arm) == Interval(0.0, 0.0, 0.0)
    assert difference(arm, arm).within_noise
    closed = gap_closed(arm, arm, reuse)
    if closed:
        assert closed == Interval(1.0, 1.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), min_size=1, max_size=40))
def test_ratio_is_that_of_the_means(table: list[tuple[float, float]]) -> None:
    arm, full = map(list, zip(*table, strict=True))
    found = ratio(arm, full)
    assert found.mean == pytest.approx(np.mean(arm) / np.mean(full))
    assert found.low <= found.mean <= found.high
    assert ratio(arm, arm) == Interval(1.0, 1.0, 1.0)


@given(rows)
def test_full_reuse_does_not_close_its_own_gap(table: list[tuple[float, float, float]]) -> None:
    _, full, reuse = columns(table)
    closed = gap_closed(reuse, full, reuse)
    if closed:
        assert closed == Interval(0.0, 0.0, 0.0)


@given(rows, st.randoms())
def test_order_of_the_rows_does_not_matter(
    table: list[tuple[float, float, float]], rng: random.Random
) -> None:
    mixed = table.copy()
    rng.shuffle(mixed)
    (arm, full, reuse), (arm2, full2, reuse2) = columns(table), columns(mixed)
    assert mean(arm) == mean(arm2)
    assert difference(arm, full) == difference(arm2, full2)
    assert gap_closed(arm, full, reuse) == gap_closed(arm2, full2, reuse2)


def test_gap_that_is_none_is_not_divided_by() -> None:
    assert gap_closed([1.0, 2.0], [0.5, 0.5], [0.5, 0.5]) is None
    assert gap_closed([1.0], [0.0], [2.0]) == Interval(0.5, 0.5, 0.5)


def test_draws_without_a_gap_do_not_make_the_interval_infinite() -> None:
    closed = gap_closed([0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert closed is not None
    assert closed.mean == pytest.approx(0.5)
    assert np.isfinite([closed.low, closed.high]).all()


def test_what_rows_have_in_common_is_not_counted_as_noise() -> None:
    rng = np.random.default_rng(1)
    full = rng.normal(3.0, 2.0, 60)
    arm = full + rng.normal(0.2, 0.1, 60)
    assert not difference(arm, full).within_noise
    assert mean(arm).low < mean(full).high  # unpaired, the two cannot be told apart
    closed = gap_closed(arm, full, full + 1.0)
    assert closed is not None
    assert closed.high - closed.low < 0.1


def test_interval_is_as_wide_as_theory_says() -> None:
    """Of the mean of 60 standard normal rows: 1.96 / sqrt(60) on either side, and right 95 times in 100."""
    rng = np.random.default_rng(2)
    samples = rng.normal(0.0, 1.0, (400, 60))
    intervals = [mean(sample) for sample in samples]
    width = np.mean([(interval.high - interval.low) / 2 for interval in intervals])
    assert width == pytest.approx(1.96 / 60**0.5, rel=0.05)
    assert 0.91 < np.mean([interval.within_noise for interval in intervals]) < 0.98


# -- the loop of everything that is measured ------------------------------------------------------------


def test_every_arm_has_every_trial_and_none_always_goes_first() -> None:
    progress = Noted()
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
    turns = list(in_turn(dict.fromkeys(range(arms)), range(trials), Noted()))
    assert len({turn.key for turn in turns[::arms]}) == min(arms, trials)


def test_what_is_done_is_not_asked_again_and_is_no_step() -> None:
    progress = Noted()
    done = {(0, "a"), (1, "a"), (1, "b")}
    turns = list(
        in_turn({"a": 1, "b": 2}, range(2), progress, warm_up=0, done=lambda trial, key: (trial, key) in done)
    )
    assert [(turn.trial, turn.key) for turn in turns] == [(0, "b")]
    assert not turns[0].warms_up and progress.expected == progress.done == 1


def test_turn_is_over_when_its_work_is_done() -> None:
    progress = Noted()
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
