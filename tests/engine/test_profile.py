"""A profile of the engine that the other tests use, tiny, and a plan's estimates beside measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.control.estimate import Estimator
from blendrag.control.plan import Corpus, record_bytes
from blendrag.control.profile import Profile, load_profile, profile_digest
from blendrag.engine.client.engine import Engine
from blendrag.lab.profiling.check import check_plan
from blendrag.lab.profiling.measure import Grid, measure_profile
from blendrag.progress import SILENT
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity
from paper_machine import times_of

pytestmark = pytest.mark.engine

TINY = Grid((0, 128), (64, 256), ((1, 0), (2, 1)), (0.0, 1.0), 1)


@pytest.mark.slow
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
    found = load_profile(tmp_path, profile_digest(identity), **times_of(measured.machine))
    assert isinstance(found, Profile), found
    estimate = Estimator.of(found)
    nbytes = record_bytes(identity, engine.facts.dtype, 128)
    checked = check_plan(settings, estimate, Corpus(10, 128, nbytes, 2), 0.15, SILENT)
    assert {(one.tier, one.what) for one in checked} >= {
        ("", "plain prefill"), ("ram", "ratio 0.15"), ("disk", "ratio 0.15")
    }  # fmt: skip
    assert all(one.estimated_s > 0 and one.measured_s > 0 for one in checked)
