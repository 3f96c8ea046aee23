"""Fixtures of all three packages' tests: the packaged default model, its tokenizer, one engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from one_engine import ENGINE

if TYPE_CHECKING:
    from blendrag.engine.client.engine import Engine
    from blendrag.settings import Settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hypothesis.settings.register_profile("busy machine", deadline=None)  # no test asserts on absolute time
hypothesis.settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the packaged default model, unpacked once per user and not once per test run."""
    from blendrag.models import DEFAULT_MODEL, resolve_model
    from blendrag.settings import Settings

    return resolve_model(
        DEFAULT_MODEL, Settings.model_fields["cache_dir"].get_default(call_default_factory=True)
    )


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    """The packaged default model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    """Settings with which every test, and every class of the integrations, gets the one engine of the run."""
    return dict(ENGINE)


@pytest.fixture(scope="session")
def settings(engine_options: dict[str, Any]) -> Settings:
    from blendrag.settings import Settings

    return Settings.load(**engine_options)


@pytest.fixture(scope="session")
def engine(settings: Settings, model_dir: Path) -> Iterator[Engine]:
    """Kept until the last test: what is opened and closed on it in between starts no other."""
    from blendrag.engine.client.engine import Engine

    shared = Engine.shared(settings)
    yield shared
    shared.release()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines of their own go first: later, the run's one engine has the device."""
    items.sort(key=lambda item: item.path.name != "test_architectures.py")
