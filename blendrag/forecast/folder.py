"""The folder of a user's models and logs: where it is, and what it holds, without loading an embedder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import check_for_store
from blendrag.eviction.hazard_file import load_hazard
from blendrag.forecast.classifier import Manifest, load_manifest, load_weights
from blendrag.settings import Settings


def default_folder(settings: Settings | None = None) -> Path:
    """Where this user's are, unless another folder is named."""
    return (settings or Settings.load()).cache_dir.expanduser() / "evictor"


@dataclass(frozen=True, slots=True)
class FolderStatus:
    """What a folder holds. policy: what ``lpc`` is; reason: why it is LRU. manifest: the predictor's.
    lpc_plus: what that one learned from, or why it is LRU. traffic_logs: files, which ``bench eviction
    --trace`` reads."""

    folder: str
    policy: Literal["lpc", "lru"]
    reason: str
    manifest: Manifest | None
    log_bytes: int
    vector_bytes: int
    lpc_plus: str
    traffic_logs: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> Self:
        manifest, reason = None, ""
        try:
            manifest = load_manifest(folder)
            load_weights(folder, manifest)
        except PredictorError as error:
            reason = str(error)
        try:
            hazard, learned = load_hazard(folder)
            check_for_store(hazard)
            lpc_plus = learned.get("source", "")
        except PredictorError as error:
            lpc_plus = f"lru: {error}"
        return cls(
            folder=str(folder),
            policy="lru" if reason else "lpc",
            reason=reason,
            manifest=manifest,
            log_bytes=_bytes_of(folder, "outcomes-*.sqlite"),
            vector_bytes=_bytes_of(folder, "vectors-*.sqlite"),
            lpc_plus=lpc_plus,
            traffic_logs=tuple(map(str, sorted(folder.glob("trace-*.jsonl")))),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with what the manifest says."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "manifest"}
        made = self.manifest.model_dump(exclude={"version"}) if self.manifest else {"metrics": None}
        return own | made


def _bytes_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))
