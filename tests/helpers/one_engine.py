"""Settings with which every test that needs an engine shares one, in whichever package it is.

A module and not only fixtures, because classes of LangChain's suites name their settings outside of tests.

The model is the packaged one's first layers: its tokenizer, template, weights and structure in a third of the
time. float32: what has to be equal is equal to many digits, and greedy texts do not hang on ties. Few tokens
per step: prompts of usual length are prefilled in several chunks.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

LAYERS = 10
MODEL = user_cache_path("blendrag") / "tests" / f"smollm2-{LAYERS}-layers"
ENGINE: dict[str, Any] = {
    "model": str(MODEL),
    "dtype": os.environ.get("TESTS_DTYPE", "float32"),
    "max_model_len": 4096,
    "kv_cache_gib": 1,
    "engine_args": {"max_num_batched_tokens": 512},
    "max_tokens": 256,  # of a request that says nothing: else one that rambles does so for a whole window
}


def variables(options: dict[str, Any]) -> dict[str, str]:
    """Return the same settings as an environment has them."""
    plain = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    return {f"BLENDRAG_{name.upper()}": str(value) for name, value in plain.items()}


@cache
def cut_model() -> Path:
    """``MODEL``, made of the packaged model unless an earlier run did."""
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{MODEL}.lock"):
        if not (MODEL / "config.json").exists():
            _cut(MODEL)
    return MODEL


def _cut(into: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    from blendrag.models import DEFAULT_MODEL, resolve_model

    whole = resolve_model(DEFAULT_MODEL, user_cache_path("blendrag"))
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(whole, into, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with safe_open(whole / "model.safetensors", framework="pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _layer(name) < LAYERS}  # noqa: SIM118
        save_file(kept, into / "model.safetensors", metadata=weights.metadata())
    config = json.loads((whole / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))


def _layer(weight: str) -> int:
    """Of which layer a weight is; -1: of none."""
    parts = weight.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


@cache
def kv_dir() -> Path:
    """One folder of KV for a run's chat models."""
    folder = Path(tempfile.mkdtemp(prefix="blendrag-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
