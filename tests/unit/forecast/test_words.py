"""Word vectors of the packaged embedder, without its layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from blendrag.embedder import Embedder
from blendrag.errors import ModelNotFoundError
from blendrag.forecast.classifier import save_weights
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Features
from blendrag.forecast.predictor import Predictor
from blendrag.forecast.words import WordVectors, open_embedder
from blendrag.lab.eviction.learn_predictor import train_on_file
from blendrag.models import DEFAULT_EMBEDDER, resolve_embedder
from word_embedder import write_dialogs

pytestmark = pytest.mark.slow

NAME = f"words:{DEFAULT_EMBEDDER}"


@pytest.fixture(scope="module")
def words() -> Embedder:
    return open_embedder(NAME)


def test_a_forward_pass_is_done(words: Embedder) -> None:
    first, turned, other = words.embed(["thanks a lot bye", "bye thanks a lot", "three trains to Rome"])
    assert first == pytest.approx(turned, abs=1e-6)
    assert np.dot(first, other) < 0.5
    assert words._model is None and isinstance(words, WordVectors)


def test_words_all_point_one_way(words: Embedder) -> None:
    bye, hotel = words.embed(["bye", "hotel"])
    assert abs(np.dot(bye, hotel)) < 0.3


@pytest.mark.parametrize("text", ["", " ", "ሰላም", "😀", "x" * 100_000, "\u0000"])
def test_odd_text_has_no_vector(words: Embedder, text: str) -> None:
    (vector,) = words.embed([text])
    assert len(vector) == 384
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-3) or not any(vector)


def test_predictor_is_opened_again_with_another_embedder(tmp_path: Path) -> None:
    data = write_dialogs(tmp_path / "dialogs.jsonl")
    trained = train_on_file(data, Features(open_embedder(NAME)), held_out=0.3)
    assert trained.manifest.embedder == NAME
    assert trained.manifest.metrics and trained.manifest.metrics.lpc.auc > 0.8
    save_weights(tmp_path, trained.classifier, trained.manifest)
    predictor = Predictor.load(tmp_path)
    assert isinstance(predictor.features.embedder, WordVectors)
    goes_on, over = predictor.probability([Window.of(["where is the train"]), Window.of(["thanks bye"])])
    assert over < 0.5 < goes_on


def test_model_without_word_vectors_is_not_named(tmp_path: Path) -> None:
    for file in Path(resolve_embedder(DEFAULT_EMBEDDER)).glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    made = open_embedder(f"words:{tmp_path}")
    with pytest.raises(ModelNotFoundError, match=tmp_path.name):
        made.embed(["hi"])
    save_file({"dense.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFoundError, match="no table of words"):
        made.embed(["hi"])
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelNotFoundError, match="no word vectors"):
        made.embed(["hi"])
