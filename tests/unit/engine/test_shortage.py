"""What is said of an engine that memory does not suffice for. No engine is started here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine.client.launch import SERVING, engine_args, engine_environment
from blendrag.engine.client.shortage import shortage
from blendrag.engine.compat import start
from blendrag.engine.compat.start import memory_plan
from blendrag.settings import Settings


def arguments(model_dir: Path, **options: Any) -> dict[str, Any]:
    return engine_args(Settings.load(dtype="float32", **options), model_dir, SERVING)


def said_of(model_dir: Path, **options: Any) -> str | None:
    with engine_environment(Settings.load(**options), "sockets", None):
        return shortage(model_dir, arguments(model_dir, **options))


def test_model_that_fits_is_not_blamed(model_dir: Path) -> None:
    assert said_of(model_dir) is None
    assert said_of(model_dir, max_model_len=10**9) is None, "what is wrong is something else"


def test_window_that_the_cache_cannot_hold_is_named(model_dir: Path, tmp_path: Path) -> None:
    long = shutil.copytree(model_dir, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 18}))
    short = said_of(long)
    assert short and "262,144 tokens 3.8 GiB, and all KV may take 2.0 GiB" in short
    assert "lower max_model_len, or raise kv_cache_gib" in short
    assert said_of(long, kv_cache_gib=4) is None and said_of(long, max_model_len=1 << 17) is None


def test_layers_with_windows_count_with_their_last_one(model_dir: Path, tmp_path: Path) -> None:
    made = shutil.copytree(model_dir, tmp_path / "windows")
    config = json.loads((made / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    windows = {"sliding_window": 1024, "layer_types": kinds}
    (made / "config.json").write_text(json.dumps(config | windows))

    def prompt(folder: Path, **options: Any) -> int:
        known = {"max_model_len": 8192, "engine_args": {"max_num_batched_tokens": 512, **options}}
        return memory_plan(arguments(folder, **known)).prompt

    whole, kept = prompt(model_dir), prompt(made)
    assert kept * 2 * 8192 == whole * (8192 + 1024 + 512)
    assert prompt(made, disable_hybrid_kv_cache_manager=True) == whole
    shared = {"num_kv_shared_layers": 2}  # one of each kind
    (made / "config.json").write_text(json.dumps(config | windows | shared))
    assert prompt(made) * len(kinds) == kept * (len(kinds) - 2), "they read the KV of others"


@pytest.mark.parametrize(
    ("gib", "cache", "said"),
    [
        (0.1, None, "choose a smaller model"),
        (0.18, None, "raise gpu_memory_utilization"),
        (0.18, 1 << 29, "lower kv_cache_gib"),
        (8, None, None),
        (8, 1 << 29, None),
    ],
)
def test_device_that_is_too_small_is_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, gib: float, cache: int | None, said: str | None
) -> None:
    known = memory_plan(arguments(model_dir, max_model_len=8192))
    device = int(gib * (1 << 30))
    small = known._replace(device=device, share=device * 9 // 10, cache=cache)
    monkeypatch.setattr(start, "memory_plan", lambda _: small)
    short = shortage(model_dir, {})
    assert (said in short) if short and said else (short is said)
