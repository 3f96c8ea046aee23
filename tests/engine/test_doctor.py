"""What doctor checks is what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.stores import StoreClient
from blendrag.lab.doctor import run_doctor
from blendrag.serving.identity import prefix_ids
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity

pytestmark = pytest.mark.engine


@pytest.mark.nightly
@pytest.mark.parametrize("shared", ["none", "system"])
def test_doctor_checks_the_chunks_of_the_setting(
    shared: str, settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[KVIdentity, tuple[int, ...]]] = []
    real = StoreClient.open

    def spy(engine: Engine, root: Path, identity: KVIdentity, stack: Any, prefix: Any = ()) -> StoreClient:
        opened.append((identity, tuple(prefix)))
        return real(engine, root, identity, stack, prefix)

    monkeypatch.setattr(StoreClient, "open", spy)
    own = settings.model_copy(update={"shared_prefix": shared})
    report = run_doctor(own)
    assert report.passed, report
    ((identity, prefix),) = opened
    assert identity.prefix_kind == shared and prefix == prefix_ids(own, engine.model_path)
    checked = [row for row in report.rows if "shared prefix" in row.check]
    assert len(checked) == (shared == "system")
