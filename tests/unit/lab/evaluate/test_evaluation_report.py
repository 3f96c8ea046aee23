"""What is shown."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.report import Evaluation


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
