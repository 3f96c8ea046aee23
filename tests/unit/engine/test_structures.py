"""Which structures are blended, and how, or with which reason they are not: the table of docs/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bound_models import bound
from model_shapes import SHAPES
from models_page import check_page, rows
from small_model import Shape, provide_torchvision

# What neither the shared engine's model nor another test has: latents, layers of two shapes, those that share
# KV, and what the page does not have yet.
_OTHER = ("DeepSeek V3", "Gemma 4 26B", "Gemma 4 E2B")
OTHER = [shape for shape in SHAPES if shape.title.startswith(_OTHER) or shape.title not in rows()]


@pytest.mark.parametrize(
    "shapes", [OTHER, pytest.param(SHAPES, marks=pytest.mark.nightly(part="models"))], ids=["other", "all"]
)
def test_structure_is_run_as_listed_or_refused_with_its_reason(
    shapes: Sequence[Shape], tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_torchvision(monkeypatch)
    folders = [tmp_path / str(number) for number in range(len(shapes))]
    for shape, folder in zip(shapes, folders, strict=True):
        shape.settings(folder, tokenizer)
    for shape, report in zip(shapes, bound(folders, tmp_path / "found"), strict=True):
        found = report.unsupported or ""
        assert shape.reason in found if shape.reason else report.passed, (shape, report)
        check_page(shape, report)
