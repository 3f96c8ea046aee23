"""What was fitted is refused with a reason where it cannot be used; what is used is what was fitted."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import BlendragWarning, ConfigError, PredictorError
from blendrag.eviction import fitted, make_policy
from blendrag.eviction.fitted import Fitted, fitted_file, load_fitted, save_fitted, with_file
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.eviction.fit_predictor import Trained


def table() -> Hazard:
    return Hazard((0.0, 1.0, 9.0), {"count": (2.0, 3.0)}, np.ones((2, 2)), np.zeros(2), False)


def test_both_parts_are_what_was_saved(tmp_path: Path, trained: Trained) -> None:
    file = tmp_path / "new" / "fitted.safetensors"
    save_fitted(file, Fitted(trained.classifier, "words", table(), {"lpc": {"source": "here"}}))
    found = load_fitted(file)
    assert found.embedder == "words" and found.facts == {"lpc": {"source": "here"}}
    assert found.classifier is not None and found.hazard is not None
    rows = np.random.default_rng(0).normal(size=(9, len(trained.classifier.mean))).astype(np.float32)
    assert np.array_equal(found.classifier.logits(rows), trained.classifier.logits(rows))
    assert (found.hazard.ages, found.hazard.borders) == (table().ages, table().borders)
    assert np.array_equal(found.hazard.weights, table().weights) and not found.hazard.prefix
    assert file.stat().st_mode & 0o077 == 0
    for one in (replace(found, hazard=None), replace(found, classifier=None), Fitted()):
        save_fitted(file, one)
        again = load_fitted(file)
        assert (again.classifier is None, again.hazard is None) == (
            one.classifier is None,
            one.hazard is None,
        )


def test_missing_cut_damaged_and_foreign_files_are_refused(tmp_path: Path, trained: Trained) -> None:
    file = tmp_path / "f"
    with pytest.raises(PredictorError, match="blendrag fit makes one"):
        load_fitted(file)
    save_fitted(file, Fitted(trained.classifier, "words", table()))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for damaged in (
        b"",
        b"\xff" * 200,
        whole[:-9],
        bytes(flipped),
        whole.replace(b'"version":"3"', b'"version":"9"'),
    ):
        file.write_bytes(damaged)
        with pytest.raises(PredictorError, match="fit again"):
            load_fitted(file)


def test_writer_that_is_killed_leaves_the_old_file(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    save_fitted(file, Fitted(trained.classifier, "words"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("blendrag.files.private.os.replace", killed)
        save_fitted(file, Fitted(hazard=table()))
    assert load_fitted(file).classifier is not None
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot write"):
        save_fitted(tmp_path / "file" / "f", Fitted())


def test_rows_of_another_width_are_refused(trained: Trained) -> None:
    with pytest.raises(PredictorError, match="rows of 5 numbers"):
        trained.classifier.logits(np.zeros((1, 5), np.float32))


def test_policies_are_named_with_the_file_that_they_go_by(tmp_path: Path, trained: Trained) -> None:
    file = fitted_file(tmp_path)
    for given, says in ((None, "blendrag fit makes one"), (Fitted(trained.classifier, "words"), "no table")):
        if given:
            save_fitted(file, given)
        with pytest.warns(BlendragWarning, match=says):
            assert with_file("lpc+", tmp_path) == "lpc+"
    save_fitted(file, Fitted(hazard=table()))
    with warnings.catch_warnings(action="error"):
        name = with_file("lpc+", tmp_path)
        assert [with_file(policy, tmp_path / "nowhere") for policy in ("lru", "lpc")] == ["lru", "lpc"]
    policy = make_policy(name)
    assert isinstance(policy, LPCPlus) and policy._hazard is not None and policy.learned
    assert not make_policy("lpc+").learned  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no file"):
        make_policy(f"gdsf@{file}")
    assert fitted.VERSION == "3"
