"""What a folder holds of predictors: facts for people and scripts, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blendrag.errors import PredictorError
from blendrag.forecast.weights import load_manifest, load_weights


def describe(folder: Path) -> dict[str, Any]:
    """JSON-able. policy: what eviction can be at best; reason: why it is LRU where it is."""
    facts: dict[str, Any] = {"folder": str(folder), "policy": "lpc", "reason": "", "metrics": {}}
    try:
        manifest = load_manifest(folder)
        facts |= manifest.model_dump(exclude={"version", "turn_rates"})
        load_weights(folder, manifest)
    except PredictorError as error:
        facts |= {"policy": "lru", "reason": str(error)}
    logs = sorted(folder.glob("outcomes-*.sqlite"))
    vectors = sorted(folder.glob("vectors-*.sqlite"))
    facts["log_bytes"] = sum(path.stat().st_size for path in logs)
    facts["vector_bytes"] = sum(path.stat().st_size for path in vectors)
    return facts
