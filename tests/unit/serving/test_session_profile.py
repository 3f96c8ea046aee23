"""Whether the profile that the controller gets is of this machine. No engine is started."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.control.profile import profile_digest
from blendrag.engine.wire.operations import EngineFacts
from blendrag.errors import BlendragWarning
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from paper_machine import make_profile
from stores import IDENTITY

DIGEST = profile_digest(IDENTITY)
MACHINE_FACTS = EngineFacts("Tiny", "cpu", "bfloat16", "0.32", threads=2, block_size=16, reason=None)

Save = Callable[..., None]


@pytest.fixture
def session(tmp_path: Path) -> EngineSession:
    return EngineSession(tmp_path / "index", Settings(cache_dir=tmp_path / "cache"), IDENTITY)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(selector: str = Settings().blending.selector, **machine: Any) -> None:
        here = replace(MACHINE_FACTS.machine("tiny"), **machine)
        make_profile(identity=DIGEST, machine=here, selector=selector).save(tmp_path / "cache")

    return save


def test_profile_of_this_machine_is_taken(session: EngineSession, save: Save) -> None:
    save()
    with warnings.catch_warnings(action="error"):
        found = session._profile(MACHINE_FACTS)
    assert found is not None and found.identity == DIGEST


@pytest.mark.parametrize(("fact", "other"), [("cpu", "x"), ("threads", 9), ("dtype", "x"), ("vllm", "x")])
def test_profile_of_another_machine_is_not_used_and_warned_about(
    session: EngineSession, save: Save, fact: str, other: object
) -> None:
    save(**{fact: other})
    with pytest.warns(BlendragWarning, match=f"different: {fact}"):
        assert session._profile(MACHINE_FACTS) is None
    with warnings.catch_warnings(action="error"):
        assert session._profile(MACHINE_FACTS) is None, "said once"


def test_profile_of_another_selector_is_not_used_and_warned_about(session: EngineSession, save: Save) -> None:
    save(selector="hkvd")
    with pytest.warns(BlendragWarning, match="of selector 'hkvd'.*run blendrag profile again"):
        assert session._profile(MACHINE_FACTS) is None


def test_machine_without_a_profile_is_not_warned_about(session: EngineSession) -> None:
    with warnings.catch_warnings(action="error"):
        assert session._profile(MACHINE_FACTS) is None
