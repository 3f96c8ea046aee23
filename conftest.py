"""Fixtures of all three packages' tests: one model, its tokenizer, one engine; how thorough a run is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from one_engine import ENGINE, cut_model
from thinking_model import thinking_model

if TYPE_CHECKING:
    from blendrag.engine.client.engine import Engine
    from blendrag.settings import Settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers have the cores among them
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else an engine's threads wait for one core
# No test asserts on absolute time. `--hypothesis-profile=thorough` looks for what few examples do not find.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("quick")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the model that tests use (see ``one_engine``)."""
    return cut_model()


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    """That model's, shared with whatever runs in this process: a test that changes it takes a copy."""
    from blendrag.models import load_tokenizer

    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def thinking_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same model with tags for thinking (see ``thinking_model``)."""
    return thinking_model(tmp_path_factory.mktemp("thinking"))


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
    from blendrag.lab.running import lab_engine

    shared = lab_engine(settings)
    yield shared
    shared.release()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The conversations of what the frameworks' classes ask, in their order."""
    from blendrag.chat.chat import Chat

    seen: list[str | None] = []
    turn = Chat._turn

    def noted(chat: Chat, request: Any) -> Any:
        seen.append(request.conversation)
        return turn(chat, request)

    monkeypatch.setattr(Chat, "_turn", noted)
    return seen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("engine") or item.get_closest_marker("own_engine"):
        cut_model()  # some suites name it without asking for a fixture


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: to search it for garbage every time takes longer than many tests."""
    gc.freeze()
    gc.enable()


def _turn(item: pytest.Item) -> int:
    """A process has one engine at a time, so the run's comes after those that tests start in it. A server has
    a process of its own, and what needs no engine fills the other workers."""
    if item.get_closest_marker("engine"):
        return 1
    if item.get_closest_marker("own_engine"):
        group = item.get_closest_marker("xdist_group")
        return 2 if group is not None and group.args[0].startswith("server") else 0
    return 3


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has all tests of the run's engine."""
    items.sort(key=_turn)
    for item in items:
        if item.get_closest_marker("engine"):
            item.fixturenames.insert(0, "engine")  # type: ignore[attr-defined]  # else some suite would start one that serves only
            item.add_marker(pytest.mark.xdist_group("engine"))
