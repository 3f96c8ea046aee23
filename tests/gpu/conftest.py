"""What the stages of `make gpu` share: the engine that is measured, and a file for tables. Without a GPU the
same tests run on small shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from blendrag.models import model_window
from device import DEVICE
from random_model import SHAPES, WINDOW, random_model
from tables import Tables

RAM_BYTES = 16 << 30  # the KV of 32K tokens, and of another 100K


@pytest.fixture(scope="session")
def tables() -> Iterator[Tables]:
    """The stage's."""
    with Path(os.environ.get("GPU_TABLES") or os.devnull).open("a", encoding="utf-8") as file:
        yield Tables(file)


@pytest.fixture(scope="session")
def engine_options(engine_options: dict[str, Any], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """On a GPU: the stage's model, by default the packaged one. Else those of all tests."""
    model = os.environ.get("GPU_MODEL", "")
    large = {"model": model, "tiers": [{"kind": "ram", "bytes": RAM_BYTES}, {"kind": "disk"}]}
    if DEVICE == "cpu":
        yield engine_options
    elif model in SHAPES:
        with TemporaryDirectory(prefix="blendrag-") as folder:
            random_model(model, tokenizer, Path(folder), DEVICE)
            torch.cuda.empty_cache()  # the engine's process takes what there is
            yield large | {"model": folder}
    elif model:
        yield large | {"max_model_len": min(WINDOW, model_window(Path(model)) or WINDOW)}
    else:
        yield {"dtype": "float16"}  # rounds less than bfloat16, and backends for float32 are few
