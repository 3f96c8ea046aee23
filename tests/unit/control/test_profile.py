"""A profile is a help: what is wrong with it is said, and never an error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendrag.control.profile import Profile, load_profile, profile_digest, profile_path
from blendrag.errors import StoreError
from paper_machine import MACHINE, make_profile
from stores import IDENTITY

DIGEST = profile_digest(IDENTITY)


def saved(folder: Path) -> Path:
    return make_profile(identity=DIGEST).save(folder)


def reason(folder: Path, **machine: Any) -> str:
    found = load_profile(folder, DIGEST, replace(MACHINE, **machine))
    assert isinstance(found, str), "the profile was accepted"
    assert "blendrag profile" in found, "the reason says no remedy"
    return found


def test_profile_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    saved(tmp_path)
    assert load_profile(tmp_path, DIGEST, MACHINE) == make_profile(identity=DIGEST)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == [f"{DIGEST}-cpu.json"]


def test_missing_profile_is_a_reason(tmp_path: Path) -> None:
    assert "no profile" in reason(tmp_path)


@pytest.mark.parametrize("key", ["cpu", "threads", "dtype", "vllm"])
def test_profile_of_another_machine_is_ignored(tmp_path: Path, key: str) -> None:
    saved(tmp_path)
    assert f"different: {key}" in reason(tmp_path, **{key: "other"})


def test_profile_of_another_selector_is_ignored(tmp_path: Path) -> None:
    saved(tmp_path)
    for same in ("hkvd", "hkvd:metric=k:auto_ratio=yes"):
        assert isinstance(load_profile(tmp_path, DIGEST, MACHINE, same), Profile)
    found = load_profile(tmp_path, DIGEST, MACHINE, "query")
    assert isinstance(found, str)
    assert "'hkvd', not 'query': run blendrag profile again" in found


def test_profile_of_another_model_under_this_ones_name_is_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = make_profile(identity="0" * 32).save(tmp_path)
    os.replace(other, path)
    assert "another model" in reason(tmp_path)


def test_profile_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(json.dumps({"version": 99, "points": []}))
    assert "another version" in reason(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"prefill": []},
        {"tiers": {}},
        {"layers": 0},
        {"prefill": [{"cached": 0, "new": 64, "seconds": -1.0}] * 3},
        {"tiers": {"ram": {"bytes_per_s": 0, "latency_s": 0, "calls": 1, "measured_at": ""}}},
        {"surprise": 1},
        {"machine": {"cpu": "paper"}},
    ],
    ids=str,
)
def test_profile_that_cannot_be_estimated_with_is_ignored(tmp_path: Path, change: dict[str, object]) -> None:
    path = saved(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "damaged" in reason(tmp_path)


_JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_broken_profile_is_never_an_error(tmp_path: Path, content: bytes) -> None:
    path = profile_path(tmp_path, DIGEST, "cpu")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert reason(tmp_path)


@given(at=st.integers(min_value=0, max_value=10_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_profile_cut_off_by_a_crash_is_ignored(tmp_path: Path, at: int) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: at % (len(whole) - 2)])
    assert "damaged" in reason(tmp_path)


def test_tenants_are_not_measured_one_by_one() -> None:
    assert profile_digest(replace(IDENTITY, namespace="tenant")) == DIGEST
    assert profile_digest(replace(IDENTITY, codec="int8")) != DIGEST


def test_device_cannot_leave_the_folder(tmp_path: Path) -> None:
    path = profile_path(tmp_path, DIGEST, "../../cuda:0 (NVIDIA H200)")
    assert path == tmp_path / "profiles" / f"{DIGEST}-cuda-0-nvidia-h200.json"


def test_profile_that_cannot_be_written_is_a_user_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    profile_path(tmp_path, DIGEST, "cpu").mkdir()
    with pytest.raises(StoreError, match="cannot write the profile"):
        saved(tmp_path)
    assert len(list((tmp_path / "profiles").iterdir())) == 1
