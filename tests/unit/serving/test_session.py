"""What a session tells its engine and its controller: fitted policies, a profile. There is no engine here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blendrag.control.profile import profile_digest
from blendrag.engine.wire.operations import EngineFacts
from blendrag.errors import BlendragWarning
from blendrag.eviction.fitted import Fitted, fitted_file, save_fitted
from blendrag.eviction.hazard import Hazard
from blendrag.serving import session as module
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.tiers import RamTier, TierSpec
from engine_facts import FACTS
from paper_machine import make_profile
from stores import IDENTITY, LAYOUT, RECORD, make_chunk, make_record

A, B, C, D = (make_record(make_chunk(seed)) for seed in range(4))


def opened_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> list[TierSpec]:
    """The tiers that the worker is told to open."""
    told: list[TierSpec] = []

    def opened(engine: Any, root: Path, identity: Any, stack: list[TierSpec], *_: Any, **__: Any) -> None:
        told.extend(TierSpec.model_validate(spec.plain()) for spec in stack)

    monkeypatch.setattr(module.StoreClient, "open", opened)
    limited = {"kind": "ram", "bytes": 3 * RECORD, "policy": policy}
    settings = Settings.load(
        cache_dir=tmp_path / "cache", tiers=[limited, {"kind": "disk", "policy": policy}]
    )
    engine: Any = SimpleNamespace(blends=True, facts=FACTS, release=lambda: None, alive=True)
    session = EngineSession(tmp_path / "kv", settings, LAYOUT.identity, engine=lambda *_: engine)
    session.start()
    assert [spec.policy for spec in session.stack] == [policy] * 2, "statistics know it by its name"
    return told


def fitted(tmp_path: Path) -> Path:
    """What was used twice is used again soon."""
    hazard = Hazard((0.0, 1e6), {"count": (2.0,)}, np.array([[5.0]]), np.array([-9.0]), False)
    save_fitted(fitted_file(tmp_path / "cache"), Fitted(hazard=hazard))
    return fitted_file(tmp_path / "cache")


def left(spec: TierSpec) -> list[str]:
    """Which chunk leaves for D: A was used twice, B and C once and later."""
    evicted: list[str] = []
    tier = RamTier(spec, LAYOUT, evicted.append)
    for record in (A, A, B, C, D):
        tier.put(record)
    return evicted


def test_tier_goes_by_what_was_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fitted(tmp_path)
    with warnings.catch_warnings(action="error"):
        ram, disk = opened_with(tmp_path, monkeypatch, "lpc+")
    assert ram.policy == f"lpc+@{file}" and disk.policy == "lpc+", "nothing leaves a tier without limits"
    assert left(ram) == [B.key]


def test_without_a_table_it_is_lru_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(BlendragWarning, match=r"lpc\+ is LRU: .*blendrag fit"):
        ram, _ = opened_with(tmp_path, monkeypatch, "lpc+")
    assert ram.policy == "lpc+" and left(ram) == [A.key]
    fitted(tmp_path).write_bytes(b"damaged")
    with pytest.warns(BlendragWarning, match="cannot read"):
        ram, _ = opened_with(tmp_path, monkeypatch, "lpc+")
    assert ram.policy == "lpc+"


def test_other_policies_go_by_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(action="error"):
        assert [spec.policy for spec in opened_with(tmp_path, monkeypatch, "lpc")] == ["lpc", "lpc"]


# -- whether the profile that the controller gets is of this machine ------------------------------------

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


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"cpu": "x"}, "different: cpu"),
        ({"threads": 9}, "different: threads"),
        ({"dtype": "x"}, "different: dtype"),
        ({"vllm": "x"}, "different: vllm"),
        ({"selector": "hkvd"}, "of selector 'hkvd'.*run blendrag profile again"),
    ],
)
def test_profile_of_another_machine_or_selector_is_not_used_and_warned_about(
    session: EngineSession, save: Save, other: dict[str, Any], said: str
) -> None:
    save(**other)
    with pytest.warns(BlendragWarning, match=said):
        assert session._profile(MACHINE_FACTS) is None
    with warnings.catch_warnings(action="error"):
        assert session._profile(MACHINE_FACTS) is None, "said once"


def test_machine_without_a_profile_is_not_warned_about(session: EngineSession) -> None:
    with warnings.catch_warnings(action="error"):
        assert session._profile(MACHINE_FACTS) is None
