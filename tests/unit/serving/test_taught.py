"""What ``lpc+`` learned reaches a running store, and so does what it learns later. There is no engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.eviction import POLICIES, Use
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.hazard_file import load_hazard, save_hazard
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.forecast import background
from blendrag.forecast.folder import default_folder
from blendrag.serving.forecaster import Forecaster
from blendrag.settings import Settings
from blendrag.store.tiers import RamTier, TierSpec
from stores import LAYOUT, RECORD, make_chunk, make_record

A, B, C, D = (make_record(make_chunk(seed)) for seed in range(4))


def hazard(step: float) -> Hazard:
    """What was used twice is used again ``exp(step)`` times as often."""
    return Hazard((0.0, 1e6), {"count": (2.0,)}, np.array([[step]]), np.array([-9.0]), False)


def tier(policy: str = "lpc+") -> tuple[RamTier, list[str]]:
    """One of three chunks; and those that left it."""
    evicted: list[str] = []
    return RamTier(TierSpec(kind="ram", bytes=3 * RECORD, policy=policy), LAYOUT, evicted.append), evicted


def use(one: RamTier, record: Any) -> None:
    one.used([(record.key, Use(at=time.monotonic()))])


def fill(one: RamTier) -> None:
    """A is used twice, B and C once and later."""
    one.put(A)
    use(one, A)
    one.put(B)
    one.put(C)


def decided_by(one: RamTier) -> Hazard | None:
    return one._policy._hazard if isinstance(one._policy, LPCPlus) else None


def test_tier_that_was_taught_is_lru() -> None:
    one, evicted = tier()
    one.learn(hazard(5.0))
    fill(one)
    one.put(D)
    assert evicted == [B.key]
    untaught, evicted = tier()
    fill(untaught)
    untaught.put(D)
    assert evicted == [A.key], "without a model it is LRU"


def test_what_was_counted_before_is_forgotten() -> None:
    one, evicted = tier()
    fill(one)
    one.learn(hazard(5.0))
    assert (policy := one._policy).victim() == B.key and isinstance(policy, LPCPlus)
    one.learn(hazard(-5.0))
    assert one._policy.victim() == A.key and decided_by(one) is not None
    assert not evicted


def test_policy_that_is_chosen_later_has_no_model() -> None:
    one, _ = tier("lru")
    learned = hazard(5.0)
    one.learn(learned)
    assert isinstance(one._policy, POLICIES["lru"])
    one.use_policy("lpc+")
    assert decided_by(one) is learned
    one.use_policy("lru")
    one.use_policy("lpc+")
    assert decided_by(one) is learned


class Session:
    """An engine's session as far as forecaster sees it, over a tier in this process."""

    def __init__(self, one: RamTier) -> None:
        self.stack, self._tier = (one.spec,), one
        self.store = self  # its client

    def learn(self, folder: Path) -> None:
        self._tier.learn(load_hazard(folder)[0])


Begin = Callable[[RamTier], Forecaster]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(cache_dir=tmp_path / "cache")


@pytest.fixture
def begin(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.setattr(background, "_LOOK_S", 0.01)
    begun: list[Forecaster] = []

    def one(of: RamTier) -> Forecaster:
        begun.append(Forecaster(Session(of), settings))  # type: ignore[arg-type]
        return begun[-1]

    yield one
    for each in begun:
        each.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_model_waits_for_the_next_engine(settings: Settings, begin: Begin) -> None:
    folder, (one, _) = default_folder(settings), tier()
    save_hazard(folder, hazard(5.0), {})
    begin(one)
    until(lambda: decided_by(one) is not None)
    save_hazard(folder, hazard(-5.0), {})  # with no request in between
    until(lambda: (now := decided_by(one)) is not None and now.weights[0, 0] == -5.0)


def test_model_that_is_damaged_takes_the_place_of_a_good_one(
    settings: Settings, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    folder, (one, _) = default_folder(settings), tier()
    save_hazard(folder, hazard(5.0), {})
    forecaster = begin(one)
    until(lambda: decided_by(one) is not None)
    with caplog.at_level(logging.WARNING):
        (folder / "hazard.safetensors").write_bytes(b"damaged")
        until(lambda: "lpc+ goes by LRU" in caplog.text)
    assert (kept := decided_by(one)) is not None and kept.weights[0, 0] == 5.0
    assert forecaster.counts.asked == 0


def test_missing_model_is_warned_of_where_nobody_wants_it(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        forecaster = begin(tier("lpc")[0])
        until(lambda: bool(forecaster.counts.reason))  # of the predictor, which is missing as well
        assert "lpc+" not in caplog.text
        begin(tier("lpc+")[0])
        until(lambda: "lpc+ goes by LRU" in caplog.text)
