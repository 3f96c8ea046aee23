"""Real tiers, read as the engine reads them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from blendrag.control.profile import TierSpeed
from blendrag.errors import ConfigError, StoreError
from blendrag.lab.profiling import tier_speed
from blendrag.lab.profiling.tier_speed import measure_tier, measure_tiers
from blendrag.progress import SILENT
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity
from blendrag.store.record import Layout
from blendrag.store.tiers import DiskTier, Read, TierError, TierSpec

IDENTITY = KVIdentity("small", "weights-1", "bfloat16", num_layers=4, num_kv_heads=2, head_size=64)
DISK = TierSpec(kind="disk")
SLOW, WAIT_S = 50e6, 0.01  # bytes per second, seconds per call


class SlowDisk(DiskTier):
    def read(self, wanted: Sequence[Read]) -> list[torch.Tensor]:
        time.sleep(WAIT_S + sum(one.into.numel() for one in wanted) / SLOW)
        return super().read(wanted)


def measured_as(kind: type[DiskTier], folder: Path, monkeypatch: pytest.MonkeyPatch) -> TierSpeed:
    monkeypatch.setattr(
        tier_speed, "make_tier", lambda spec, layout, context: kind(spec, layout, context.folder)
    )
    return measure_tier(DISK, Layout(IDENTITY, "bfloat16"), folder)


def test_slow_tier_is_not_taken_for_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = measured_as(SlowDisk, tmp_path, monkeypatch)
    assert 0.4 * SLOW < speed.bytes_per_s < 1.1 * SLOW
    assert speed.latency_s > 0.7 * WAIT_S
    assert speed.calls == 1 + IDENTITY.num_layers


def test_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", tiers=(TierSpec(kind="ram", bytes=1), DISK))
    found = measure_tiers(settings, IDENTITY, "bfloat16", SILENT)
    assert list(found) == ["ram", "disk"], "a limit of the user's is no reason not to measure"
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_disk_that_the_user_names_is_the_one_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    real = tier_speed.measure_tier
    monkeypatch.setattr(tier_speed, "measure_tier", lambda *args: (folders.append(args[2]), real(*args))[1])
    spec = TierSpec(kind="disk", path=tmp_path / "big")
    settings = Settings(cache_dir=tmp_path / "cache", tiers=(spec,))
    measure_tiers(settings, IDENTITY, "bfloat16", SILENT)
    assert folders[0].is_relative_to(tmp_path / "big")


def test_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = TierSpec(kind="redis", url="redis://127.0.0.1:1", timeout_s=0.2)
    with pytest.raises(StoreError, match="'redis' cannot be measured"):
        measure_tiers(Settings(cache_dir=tmp_path, tiers=(spec,)), IDENTITY, "bfloat16", SILENT)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        measure_tiers(Settings(cache_dir=tmp_path / "file"), IDENTITY, "bfloat16", SILENT)


class FailingDisk(DiskTier):
    def read(self, wanted: Sequence[Read]) -> list[torch.Tensor]:
        raise TierError("gone")


def test_tier_that_fails_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="'disk' cannot be measured"):
        measured_as(FailingDisk, tmp_path, monkeypatch)


def test_tier_that_is_only_read_is_not_written_to_be_measured(tmp_path: Path) -> None:
    library = TierSpec(kind="disk", path=tmp_path / "library", write="never")
    server = TierSpec(kind="redis", url="redis://127.0.0.1:1", write="never")
    settings = Settings(cache_dir=tmp_path / "cache", tiers=(TierSpec(kind="ram"), library, server))
    assert list(measure_tiers(settings, IDENTITY, "bfloat16", SILENT)) == ["ram"]
    assert not (tmp_path / "library").exists()


def test_stack_without_a_tier_to_measure_is_refused(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, tiers=(TierSpec(kind="disk", write="never"),))
    with pytest.raises(ConfigError, match="none of the tiers may be written"):
        measure_tiers(settings, IDENTITY, "bfloat16", SILENT)
