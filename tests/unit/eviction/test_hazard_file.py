"""A model of ``lpc+`` that is saved, damaged, or another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.hazard_file import NAME, load_hazard, save_hazard


def small() -> Hazard:
    return Hazard((0.0, 1.0, 9.0), {"count": (2.0, 3.0)}, np.ones((2, 2)), np.zeros(2), True)


def test_a_model_that_is_another_after_saving(tmp_path: Path) -> None:
    save_hazard(tmp_path / "new", small(), {"source": "here"})
    found, facts = load_hazard(tmp_path / "new")
    assert facts == {"source": "here"} and found.prefix
    assert (found.ages, found.borders) == (small().ages, small().borders)
    assert np.array_equal(found.weights, small().weights) and np.array_equal(found.bias, small().bias)


@pytest.mark.parametrize(
    "damaged",
    [
        Hazard((0.0, 9.0, 1.0), {"count": (2.0, 3.0)}, np.ones((2, 2)), np.zeros(2), True),
        Hazard((0.0, 1.0, 9.0), {"count": (2.0, 3.0)}, np.full((2, 2), np.nan), np.zeros(2), True),
        Hazard((0.0, 1.0, 9.0), {"count": (2.0,)}, np.ones((2, 2)), np.zeros(2), True),
        Hazard((0.0, 1.0, 9.0), {"count": (2.0, 3.0)}, np.ones((2, 2)), np.zeros(3), True),
        Hazard((0.0,), {}, np.ones((0, 0)), np.zeros(0), True),
    ],
)
def test_a_model_that_cannot_be_one(tmp_path: Path, damaged: Hazard) -> None:
    save_hazard(tmp_path, damaged, {})
    with pytest.raises(PredictorError, match="no hazard model"):
        load_hazard(tmp_path)


def test_a_file_that_is_missing_cut_or_not_one(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="no hazard model in"):
        load_hazard(tmp_path)
    save_hazard(tmp_path, small(), {})
    whole = (tmp_path / NAME).read_bytes()
    for damaged in (b"", b"nonsense", whole[:-9]):
        (tmp_path / NAME).write_bytes(damaged)
        with pytest.raises(PredictorError):
            load_hazard(tmp_path)
