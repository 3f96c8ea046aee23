"""What is shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from blendrag.lab.evaluate.plot import draw
from blendrag.lab.evaluate.report import print_evaluation
from blendrag.lab.report import to_json


def printed(results: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_evaluation(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, arm: str) -> list[list[str]]:
    """The cells of an arm's lines."""
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in text.split("\n") if f"│ {arm} " in line]
    assert len(lines) == 3
    return lines


def test_arm_is_not_left_out_or_shown_with_other_numbers(results: dict[str, Any]) -> None:
    text = printed(results)
    for arm in results["arms"]:
        cells(text, arm)
    (_, _, lost, _, closed, _), (_, _, top1, *_), (_, f1, *_, speedup) = cells(text, "reuse")
    assert (lost, closed, top1, f1, speedup) == ("+1.00", "0%", "0%", "0.00", "10.0x")
    assert results["recommendation"]["why"] in " ".join(text.split())
    assert "60 rows, format squadsplit" in text


def test_difference_within_noise_is_not_shown_as_one(results: dict[str, Any]) -> None:
    text = printed(results)
    assert cells(text, "random@0.15")[0][2].startswith("~")
    assert cells(text, "hkvd_v@0.15")[0][2] == "+0.05"
    assert "is within noise" in " ".join(text.split())
    assert "~" not in "".join(map(str, cells(text, "full")))


def test_gap_within_noise_is_not_shown_without_a_word(results: dict[str, Any]) -> None:
    assert "the gap says little" not in printed(results)
    for arm in results["arms"].values():
        arm["gap"] = "within noise"
    assert "the gap says little here" in " ".join(printed(results).split())
    results["arms"]["full"]["gap"] = "negative"
    assert "gap closed means nothing" in " ".join(printed(results).split())


def test_number_a_run_cannot_have_is_not_shown_as_nought(results: dict[str, Any]) -> None:
    for arm in results["arms"].values():
        arm.update(gap_closed=None, gap=None, decision_agreement=None)
    (*_, closed, interval), (*_, decision), _ = cells(printed(results), "hkvd_v@0.15")
    assert (closed, interval, decision) == ("-", "", "-")


def test_narrow_terminal_does_not_cut_an_arm_short(results: dict[str, Any]) -> None:
    name = "first_k+hkvd_v@0.15:system"
    results["arms"][name] = results["arms"]["reuse"]
    text = printed(results, width=80)
    assert "first_k@0.15" in text
    assert "…" not in text


def test_nothing_lost_is_not_shown_as_less_than_nothing(results: dict[str, Any]) -> None:
    results["arms"]["reuse"]["nll_loss"] = {"mean": -0.001, "low": -0.002, "high": 0.3}
    (_, _, lost, interval, *_), *_ = cells(printed(results), "reuse")
    assert (lost, interval) == ("~+0.00", "0.00 to 0.30")


def test_results_are_not_refused_by_scripts(results: dict[str, Any]) -> None:
    assert json.loads(to_json(results)) == results


def test_picture_is_drawn_whatever_was_measured(results: dict[str, Any], tmp_path: Path) -> None:
    draw(results, tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    for label in ("full prefill", "full reuse", "hkvd_v", "first_k", "gap closed"):
        assert f"<!-- {label}" in text or f"{label} -->" in text
    results["arms"] = {name: results["arms"][name] for name in ("full", "hkvd_v@0.15")}
    draw(results, tmp_path / "few.png")
    assert (tmp_path / "few.png").read_bytes().startswith(b"\x89PNG")
