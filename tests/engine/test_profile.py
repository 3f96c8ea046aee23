"""A profile of the engine that the other tests use, tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.control.estimate import Estimator
from blendrag.control.profile import Profile, load_profile, profile_digest
from blendrag.engine.client.engine import Engine
from blendrag.lab.profiling.measure import Grid, measure_profile
from blendrag.progress import SILENT
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TINY = Grid((0, 128), (64, 256), ((1, 0), (2, 1)), (0.0, 1.0), 1)


def test_profile_of_this_engine_is_used_and_leaves_nothing_behind(
    engine: Engine, settings: Settings, identity: KVIdentity, tmp_path: Path
) -> None:
    before = set(settings.cache_dir.rglob("*"))
    measured = measure_profile(settings, TINY, SILENT)
    assert set(settings.cache_dir.rglob("*")) == before
    assert {(point.cached, point.new) for point in measured.prefill} == {
        (0, 64), (0, 256), (128, 64), (128, 256)
    }  # fmt: skip
    assert {(point.cached, point.ratio) for point in measured.blend} == {
        (512, 0.0), (512, 1.0), (1024, 0.0), (1024, 1.0)
    }  # fmt: skip
    assert set(measured.tiers) == {spec.label for spec in settings.stack}

    measured.save(tmp_path)
    found = load_profile(tmp_path, profile_digest(identity), measured.machine)
    assert isinstance(found, Profile), found
    estimate = Estimator.of(found)
    assert all(estimate.load_s(512 * found.kv_bytes, tier) > 0 for tier in found.tiers)
