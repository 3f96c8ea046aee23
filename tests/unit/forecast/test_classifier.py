"""A predictor that cannot be used is refused with a reason; what is used is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.errors import PredictorError
from blendrag.forecast.classifier import MANIFEST, Classifier, load_manifest, load_weights, save_weights
from blendrag.forecast.conversation import Window
from blendrag.forecast.folder import FolderStatus
from blendrag.forecast.predictor import Predictor
from blendrag.lab.eviction.learn_predictor import Trained
from word_embedder import WordEmbedder, features

WINDOWS = [Window.of(["how much"]), Window.of(["how much", "thanks bye"])]
Change = Callable[[Classifier], dict[str, Any]]


def spoiled(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy.flat[0] = value
    return copy


def spoiled_all(layer: tuple[np.ndarray[Any, Any], ...]) -> tuple[np.ndarray[Any, Any], ...]:
    return tuple(spoiled(part, np.nan) for part in layer)


def changed(trained: Trained, **fields: Any) -> Classifier:
    kept = {name: getattr(trained.classifier, name) for name in ("columns", "mean", "scale", "layers")}
    return Classifier(**{**kept, **fields})


def test_saved_predictor_says_what_the_trained_one_said(tmp_path: Path, trained: Trained) -> None:
    save_weights(tmp_path / "new", trained.classifier, trained.manifest)
    loaded = Predictor.load(tmp_path / "new", WordEmbedder())  # type: ignore[arg-type]
    before = Predictor(features(), trained.classifier, trained.manifest).probability(WINDOWS)
    assert np.array_equal(loaded.probability(WINDOWS), before)
    assert before[0] > before[1] + 0.2
    assert FolderStatus.of(tmp_path / "new").policy == "lpc"


def test_another_embedder_is_refused_by_name(tmp_path: Path, trained: Trained) -> None:
    save_weights(tmp_path, trained.classifier, trained.manifest)
    with pytest.raises(PredictorError, match="embedder words, not with others"):
        Predictor.load(tmp_path, WordEmbedder("others"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda old: {"layers": (spoiled_all(old.layers[0]), *old.layers[1:])}, "finite"),
        (lambda old: {"mean": spoiled(old.mean, np.inf)}, "finite"),
        (lambda old: {"scale": spoiled(old.scale, 0.0)}, "positive"),
        (lambda old: {"mean": old.mean.astype(np.float64)}, "32-bit"),
        (lambda old: {"layers": old.layers[:-1]}, "shapes"),
        (lambda old: {"layers": ()}, "shapes"),
        (lambda old: {"mean": old.mean[:-1]}, "shapes"),
        (lambda old: {"columns": old.columns + 100}, "columns"),
        (lambda old: {"columns": old.columns - 1}, "columns"),
        (lambda old: {"columns": old.columns.astype(np.float32)}, "columns"),
    ],
    ids=["nan", "inf", "zero", "double", "two layers", "no layers", "short", "far", "negative", "float"],
)
def test_weights_that_cannot_be_right_are_refused(
    tmp_path: Path, trained: Trained, change: Change, says: str
) -> None:
    save_weights(tmp_path, changed(trained, **change(trained.classifier)), trained.manifest)
    with pytest.raises(PredictorError, match=says):
        Predictor.load(tmp_path)
    found = FolderStatus.of(tmp_path)
    assert found.policy == "lru" and says in found.reason


@pytest.mark.parametrize("damage", [b"", b"\xff" * 200, None])
def test_damaged_or_missing_weights_are_refused(
    tmp_path: Path, trained: Trained, damage: bytes | None
) -> None:
    manifest = save_weights(tmp_path, trained.classifier, trained.manifest)
    path = tmp_path / manifest.weights
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(PredictorError, match="train again"):
        Predictor.load(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"version": 99}, {"weights": "../../secret"}, {"layout": "joined"}, {"held_out": 2}, {"width": "x"}],
)
def test_manifest_that_is_not_ours_is_refused(
    tmp_path: Path, trained: Trained, fields: dict[str, Any]
) -> None:
    save_weights(tmp_path, trained.classifier, trained.manifest)
    content = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**content, **fields}))
    with pytest.raises(PredictorError, match="train again"):
        Predictor.load(tmp_path)


def test_no_predictor_and_no_manifest_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="evictor train makes one"):
        Predictor.load(tmp_path / "absent")
    (tmp_path / MANIFEST).write_bytes(b"\x00{")
    with pytest.raises(PredictorError, match="manifest"):
        Predictor.load(tmp_path)


def test_reader_beside_a_writer_finds_a_whole_predictor(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is killed between the two files: the old predictor is still there, and then the new one."""
    from blendrag.forecast import classifier

    save_weights(tmp_path, trained.classifier, trained.manifest)
    newer = changed(trained, mean=trained.classifier.mean + 1)
    real = classifier.write_whole

    def killed(path: Path, data: bytes) -> None:
        if path.name == MANIFEST:
            raise KeyboardInterrupt
        real(path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(classifier, "write_whole", killed)
        save_weights(tmp_path, newer, trained.manifest)
    found = load_weights(tmp_path, load_manifest(tmp_path))
    assert np.array_equal(found.mean, trained.classifier.mean)
    save_weights(tmp_path, newer, trained.manifest)
    assert np.array_equal(load_weights(tmp_path, load_manifest(tmp_path)).mean, newer.mean)
    assert len(list(tmp_path.glob("*"))) == 2


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot write"):
        save_weights(tmp_path / "file", trained.classifier, trained.manifest)
