"""The folder of a user's models and logs: where it is, and what it holds, without loading an embedder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import check_for_store
from blendrag.eviction.hazard_file import load_hazard
from blendrag.forecast.classifier import load_manifest, load_weights
from blendrag.settings import Settings


def default_folder(settings: Settings | None = None) -> Path:
    """Where this user's are, unless another folder is named."""
    return (settings or Settings.load()).cache_dir.expanduser() / "evictor"


def describe(folder: Path) -> dict[str, Any]:
    """JSON-able. policy: what ``lpc`` is, "lpc" or "lru"; reason: why it is LRU. lpc_plus: what that one
    learned from, or why it is LRU. traffic_logs: files, which ``bench eviction --trace`` reads."""
    facts: dict[str, Any] = {"folder": str(folder), "policy": "lpc", "reason": "", "metrics": {}}
    try:
        manifest = load_manifest(folder)
        facts |= manifest.model_dump(exclude={"version"})
        load_weights(folder, manifest)
    except PredictorError as error:
        facts |= {"policy": "lru", "reason": str(error)}
    logs = sorted(folder.glob("outcomes-*.sqlite"))
    vectors = sorted(folder.glob("vectors-*.sqlite"))
    facts["log_bytes"] = sum(path.stat().st_size for path in logs)
    facts["vector_bytes"] = sum(path.stat().st_size for path in vectors)
    try:
        hazard, learned = load_hazard(folder)
        check_for_store(hazard)
        facts["lpc_plus"] = learned.get("source", "")
    except PredictorError as error:
        facts["lpc_plus"] = f"lru: {error}"
    facts["traffic_logs"] = [str(log) for log in sorted(folder.glob("trace-*.jsonl"))]
    return facts
