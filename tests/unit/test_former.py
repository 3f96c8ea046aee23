"""Settings by the names of the version before are taken, and whoever writes them hears of the new ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import BlendragWarning, ConfigError
from blendrag.former import FORMER
from blendrag.options import BlendOverrides
from blendrag.settings import RENAMED, Settings

TIERS = [{"kind": "ram", "bytes": 2 << 30}, {"kind": "disk"}]
RAM, DISK = TIERS
OF_VLLM = {
    "revision": "main", "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.5, "tensor_parallel_size": 2,
    "max_num_batched_tokens": 512, "enforce_eager": True,
}  # fmt: skip
GONE = {
    "trace": True, "controller": True, "claim": "async", "mask": "dense", "prefix_forecasts": True,
    "prices": {"ram": 1}, "layers_in_flight": 4, "ingest_batch_tokens": 64, "call_timeout_s": 60,
    "start_timeout_s": 60,
}  # fmt: skip
NOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, {"engine_args": {name: value}}) for name, value in OF_VLLM.items()),
    (
        {"max_num_seqs": 8, "engine_args": {"max_logprobs": 50}},
        {"engine_args": {"max_logprobs": 50, "max_num_seqs": 8}},
    ),
    ({"prefix_caching": False}, {"engine_args": {"enable_prefix_caching": False}}),
    ({"metric": "k", "selector": "hkvd@0.2"}, {"selector": "hkvd@0.2:metric=k"}),
    ({"metric": "k"}, {}),  # the default selector measures nothing
    ({"check_layers": [1, 4], "selector": "gradual"}, {"selector": "gradual:check_layers=1+4"}),
    ({"check_layers": [1], "selector": "gradual"}, {"selector": "gradual"}),  # it had layers of its own
    ({"threshold": 0.25, "selector": "hkvd"}, {"selector": "hkvd:threshold=0.25"}),
    ({"auto_ratio": True, "selector": "first_k"}, {"selector": "first_k:auto_ratio=yes"}),
    ({"kv_budget": 512, "kv_allocator": "uniform"}, {"kv_budget": "512:uniform"}),
    ({"kv_budget": 512, "kv_scorer": "critical"}, {"kv_budget": "512:critical"}),
    ({"kv_budget": 512, "kv_alpha": 0.2, "kv_window": 16}, {"kv_budget": "512:alpha=0.2:window=16"}),
    ({"kv_allocator": "uniform"}, {}),  # without a budget
    ({"ram_bytes": 5}, {"tiers": [{"kind": "ram", "bytes": 5}, DISK]}),
    ({"disk_bytes": 5}, {"tiers": [RAM, {"kind": "disk", "bytes": 5}]}),
    ({"eviction": "lru"}, {"tiers": [{**RAM, "policy": "lru"}, {**DISK, "policy": "lru"}]}),
    (
        {"ram_bytes": 5, "disk_bytes": 7, "eviction": "lru"},
        {"tiers": [{**RAM, "bytes": 5, "policy": "lru"}, {**DISK, "bytes": 7, "policy": "lru"}]},
    ),
    ({"eviction": "lru", "tiers": [DISK]}, {"tiers": [DISK]}),  # which have policies of their own
    ({"tree_ram_bytes": 5}, {"tiers": [{**RAM, "tree_bytes": 5}, DISK]}),
    ({"tree_disk_bytes": 5, "ram_bytes": 7}, {"tiers": [{**RAM, "bytes": 7}, {**DISK, "tree_bytes": 5}]}),
    (
        {"tree_ram_bytes": 5, "tiers": [DISK]},
        {"tiers": [DISK, {"kind": "ram", "bytes": 0, "write": "never", "tree_bytes": 5}]},
    ),
    ({"reorder_window": 8}, {"order": "retrieved:window=8"}),
    ({"reorder_window": 8, "order": "tree"}, {"order": "tree:window=8"}),
    *(({name: value}, {}) for name, value in GONE.items()),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("former", "now"), NOW)
def test_former_setting_means_what_it_did_and_says_what_to_write(
    former: dict[str, Any], now: dict[str, Any], empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Settings.load(**now)
    old = former.keys() & FORMER.keys()
    with pytest.warns(BlendragWarning) as said:
        assert Settings.load(**former) == expected
    assert {str(each.message) for each in said if each.category is BlendragWarning} == {
        FORMER[name].now for name in old
    }
    (empty_folder / "blendrag.yaml").write_text(json.dumps(former))  # YAML as well
    with pytest.warns(BlendragWarning):
        assert Settings.load() == expected
    (empty_folder / "blendrag.yaml").unlink()
    for name, value in former.items():
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv(f"BLENDRAG_{name.upper()}", text)
    with pytest.warns(BlendragWarning):
        assert Settings.load() == expected


def test_each_former_setting_is_shown_and_no_setting_of_now_is_one() -> None:
    assert {name for former, _ in NOW for name in former} >= FORMER.keys()
    assert not FORMER.keys() & (Settings.model_fields.keys() | BlendOverrides.model_fields.keys())
    assert {name for name, former in FORMER.items() if former.of_blending} < RENAMED.keys()


def test_settings_of_now_are_taken_without_a_warning() -> None:
    with warnings.catch_warnings(action="error"):
        for _, now in NOW:
            Settings.load(**now)


@pytest.mark.parametrize("former", [{"max_num_seqs": "many"}, {"ram_bytes": "all"}, {"check_layers": "x"}])
def test_wrong_value_of_a_former_setting_is_named(former: dict[str, Any]) -> None:
    with pytest.warns(BlendragWarning), pytest.raises(ConfigError, match=f"setting '{next(iter(former))}'"):
        Settings.load(**former)
