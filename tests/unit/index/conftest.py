"""The real tokenizer and the real embedding model, each loaded once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from blendrag.embedder import Embedder
from blendrag.models import DEFAULT_EMBEDDER, DEFAULT_MODEL, load_tokenizer, resolve_embedder, resolve_model
from blendrag.settings import Settings


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Of the packaged model, or of the folder that BLENDRAG_TEST_MODEL names."""
    folder = os.environ.get("BLENDRAG_TEST_MODEL") or DEFAULT_MODEL
    return load_tokenizer(resolve_model(folder, Settings.load().cache_dir))


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder(resolve_embedder(DEFAULT_EMBEDDER), name=DEFAULT_EMBEDDER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, apart from what else a test writes."""
    path = tmp_path / "handbook"
    path.mkdir()
    return path
