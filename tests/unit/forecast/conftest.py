"""What the tests of forecasts share: a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.models import DEFAULT_EMBEDDER, resolve_embedder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The packaged embedder's own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_embedder(DEFAULT_EMBEDDER))
