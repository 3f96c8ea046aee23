"""What the tests of forecasts, of their use and of their training share: a predictor that learned a rule."""

from __future__ import annotations

import pytest

from blendrag.lab.eviction.learn_predictor import Trained, train_on_file
from word_embedder import features, write_dialogs


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = write_dialogs(tmp_path_factory.mktemp("dialogs") / "dialogs.jsonl")
    return train_on_file(path, features(), held_out=0.3)
