"""Which structures are blended, and how, or with which reason they are not: the table of docs/models.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bound_models import bound
from model_shapes import SHAPES, check_page, provide_torchvision


@pytest.mark.nightly(part="models")
def test_structure_is_run_as_listed_or_refused_with_its_reason(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_torchvision(monkeypatch)
    folders = [tmp_path / str(number) for number in range(len(SHAPES))]
    for shape, folder in zip(SHAPES, folders, strict=True):
        shape.settings(folder, tokenizer)
    for shape, report in zip(SHAPES, bound(folders, tmp_path / "found"), strict=True):
        found = report.unsupported or ""
        assert shape.reason in found if shape.reason else report.passed, (shape, report)
        check_page(shape, report)
