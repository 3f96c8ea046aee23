"""What the tests of forecasts share: a tokenizer, and a predictor that has learned a rule."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.lab.training.study import Trained, train_on_file
from blendrag.models import DEFAULT_EMBEDDER, resolve_embedder
from word_embedder import features, write_dialogs


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The packaged embedder's own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_embedder(DEFAULT_EMBEDDER))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = write_dialogs(tmp_path_factory.mktemp("dialogs") / "dialogs.jsonl")
    return train_on_file(path, features(), held_out=0.3)
