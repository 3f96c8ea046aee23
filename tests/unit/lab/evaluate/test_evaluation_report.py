"""What a user is told to do, and what is shown."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.recommend import recommend
from blendrag.lab.evaluate.report import Evaluation
from blendrag.lab.evaluate.summary import ArmSummary

Numbers = Callable[..., ArmSummary]


def test_fastest_arm_is_not_taken_if_it_loses_too_much(results: Evaluation) -> None:
    found = results.recommendation
    assert found.blend
    assert (found.arm, found.ratio, found.selector) == ("hkvd@0.15", 0.15, "hkvd")
    assert found.loss and found.loss.high <= 0.1
    assert found.speedup and found.speedup.mean == pytest.approx(400 / 90)
    assert "blend with hkvd@0.15: it loses 0.05" in found.why
    assert "4.4 times" in found.why


@pytest.mark.parametrize(("tolerance", "arm"), [(2.0, "reuse"), (0.5, "hkvd@0.05"), (0.1, "hkvd@0.15")])
def test_higher_tolerance_does_not_cost_time(results: Evaluation, tolerance: float, arm: str) -> None:
    assert recommend(results.arms, tolerance).arm == arm


def test_model_that_no_arm_keeps_is_not_blended(results: Evaluation) -> None:
    found = recommend(results.arms, 0.01)
    assert not found.blend
    assert found.arm == "hkvd@0.15"
    assert found.why.startswith("do not blend this model: hkvd@0.15 came closest, and loses 0.05")


def test_slower_arm_is_not_recommended_for_its_answers(arm_numbers: Numbers) -> None:
    found = recommend({"full": arm_numbers(0.0, 100.0), "hkvd@0.3": arm_numbers(0.0, 130.0)})
    assert not found.blend
    assert "takes 130 ms, full prefill's 100" in found.why


def test_mean_within_the_tolerance_does_not_hide_its_upper_end(arm_numbers: Numbers) -> None:
    arms = {"full": arm_numbers(0.0, 400.0), "hkvd@0.1": arm_numbers(0.05, 50.0, spread=0.1)}
    assert not recommend(arms).blend
    assert recommend(arms, 0.16).blend


def test_arm_that_begins_another_answer_is_not_recommended_for_the_right_one(arm_numbers: Numbers) -> None:
    arms = {"full": arm_numbers(0.0, 400.0), "reuse": arm_numbers(0.0, 40.0, kl=0.4)}
    found = recommend(arms)
    assert not found.blend and "0.40 (to 0.40) at the first" in found.why
    assert recommend(arms, 0.5).blend


def test_higher_ratio_is_not_taken_for_being_faster(arm_numbers: Numbers) -> None:
    times = {"hkvd@0.3": 40.0, "first_k@0.05": 60.0, "hkvd@0.05:int8": 50.0, "hkvd@0.1": 45.0}
    arms = {name: arm_numbers(0.0, ttft_ms) for name, ttft_ms in times.items()}
    found = recommend({"full": arm_numbers(0.0, 400.0), **arms})
    assert (found.arm, found.ratio, found.selector) == ("hkvd@0.05:int8", 0.05, "hkvd")


def test_arm_that_saves_time_is_not_passed_over_for_a_slower_one_of_less_ratio(arm_numbers: Numbers) -> None:
    arms = {"query@0.05": arm_numbers(0.0, 500.0), "hkvd@0.1": arm_numbers(0.0, 50.0)}
    assert recommend({"full": arm_numbers(0.0, 400.0), **arms}).arm == "hkvd@0.1"


@pytest.mark.parametrize("name", ["random@0.15", "lmcache@0.15", "reordered", "prefix"])
def test_arm_that_is_there_for_comparison_is_not_recommended(arm_numbers: Numbers, name: str) -> None:
    found = recommend({"full": arm_numbers(0.0, 400.0), name: arm_numbers(0.0, 10.0)})
    assert (found.blend, found.arm, found.loss) == (False, None, None)


def test_few_rows_are_not_passed_over(arm_numbers: Numbers) -> None:
    for n, told in ((10, True), (29, True), (30, False)):
        arms = {"full": arm_numbers(0.0, 400.0, n), "reuse": arm_numbers(0.0, 40.0, n)}
        found = recommend(arms)
        assert found.blend and (f"{n} questions are few" in found.why) is told


@pytest.mark.parametrize("n", [1, 9])
def test_rows_too_few_to_tell_recommend_nothing(arm_numbers: Numbers, n: int) -> None:
    found = recommend({"full": arm_numbers(0.0, 400.0, n), "reuse": arm_numbers(0.0, 40.0, n)})
    assert (found.blend, found.arm) == (False, None)
    assert f"{n} questions tell too little, measure at least 10" in found.why


# -- what is shown --------------------------------------------------------------------------------------


def printed(results: Evaluation, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    results.show(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def change(results: Evaluation, **numbers: Any) -> None:
    """Of all arms."""
    results.arms.update({name: replace(arm, **numbers) for name, arm in results.arms.items()})


def cells(text: str, arm: str) -> list[list[str]]:
    """The cells of an arm's lines."""
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in text.split("\n") if f"│ {arm} " in line]
    assert len(lines) == 3
    return lines


def test_every_arm_is_shown_with_its_numbers(results: Evaluation) -> None:
    text = printed(results)
    for arm in results.arms:
        cells(text, arm)
    (_, _, lost, _, closed, _), (_, _, _, top1, *_), (_, f1, *_, speedup) = cells(text, "reuse")
    assert (lost, closed, top1, f1, speedup) == ("+1.00", "0%", "0%", "0.00", "10.0x")
    assert results.recommendation.why in " ".join(text.split())
    assert "60 questions, format squadsplit" in text


def test_difference_within_noise_is_not_shown_as_one(results: Evaluation) -> None:
    text = printed(results)
    assert cells(text, "random@0.15")[0][2].startswith("~")
    assert cells(text, "hkvd@0.15")[0][2] == "+0.05"
    assert "is within noise" in " ".join(text.split())
    assert "~" not in "".join(map(str, cells(text, "full")))


def test_gap_within_noise_is_told_of(results: Evaluation) -> None:
    assert "the gap says little" not in printed(results)
    change(results, gap="within noise")
    assert "the gap says little here" in " ".join(printed(results).split())
    change(results, gap="negative")
    assert "gap closed means nothing" in " ".join(printed(results).split())


def test_number_a_run_cannot_have_is_not_shown_as_nought(results: Evaluation) -> None:
    change(results, gap_closed=None, gap=None, decision_agreement=None)
    (*_, closed, interval), (*_, decision), _ = cells(printed(results), "hkvd@0.15")
    assert (closed, interval, decision) == ("-", "", "-")


def test_narrow_terminal_does_not_cut_an_arm_short(results: Evaluation) -> None:
    name = "gradual@0.15:metric=kv:system:int8"
    results.arms[name] = results.arms["reuse"]
    text = printed(results, width=80)
    assert "first_k@0.15" in text
    assert "…" not in text


def test_nothing_lost_is_not_shown_as_less_than_nothing(results: Evaluation) -> None:
    change(results, nll_loss=Interval(-0.001, -0.002, 0.3))
    (_, _, lost, interval, *_), *_ = cells(printed(results), "reuse")
    assert (lost, interval) == ("~+0.00", "0.00 to 0.30")


def test_results_can_be_read_by_scripts(results: Evaluation) -> None:
    assert json.loads(json.dumps(results.to_dict(), allow_nan=False)) == asdict(results)


def test_picture_is_drawn_whatever_was_measured(results: Evaluation, tmp_path: Path) -> None:
    results.draw(tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    for label in ("full prefill", "full reuse", "hkvd", "first_k", "gap closed"):
        assert f"<!-- {label}" in text or f"{label} -->" in text
    few = {name: results.arms[name] for name in ("full", "hkvd@0.15")}
    replace(results, arms=few).draw(tmp_path / "few.png")
    assert (tmp_path / "few.png").read_bytes().startswith(b"\x89PNG")
