"""Fixtures shared by all tests: the packaged default model and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the packaged default model, unpacked once per user and not once per test run."""
    from blendrag.models import resolve_model
    from blendrag.settings import DEFAULT_MODEL, Settings

    return resolve_model(
        DEFAULT_MODEL, Settings.model_fields["cache_dir"].get_default(call_default_factory=True)
    )


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    """The packaged default model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)
