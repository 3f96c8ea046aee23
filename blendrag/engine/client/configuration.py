"""What makes two engines the same one: a process has one engine for all settings that agree in this."""

from __future__ import annotations

from typing import Any

from blendrag.errors import EngineBusyError
from blendrag.settings import Settings

# Settings that an engine is started with; the others may differ from request to request.
_ENGINE_SETTINGS = (
    "model", "revision", "dtype", "max_model_len", "kv_cache_gib", "max_num_seqs", "max_num_batched_tokens",
    "mask", "prefix_caching", "prefix_forecasts", "enforce_eager", "layers_in_flight", "blend_share",
    "cache_dir",
)  # fmt: skip


def engine_key(settings: Settings) -> tuple[Any, ...]:
    """What two settings must have in common to share an engine."""
    return tuple(getattr(settings, name) for name in _ENGINE_SETTINGS)


def busy(running: Settings, wanted: Settings) -> EngineBusyError:
    """What is said when an engine is wanted while another configuration's has the device."""

    def describe(one: Settings, other: Settings) -> str:
        pairs = ((name, getattr(one, name), getattr(other, name)) for name in _ENGINE_SETTINGS)
        return ", ".join(f"{name}={mine!r}" for name, mine, theirs in pairs if mine != theirs)

    return EngineBusyError(
        f"an engine with {describe(running, wanted)} has this device, so none with"
        f" {describe(wanted, running)} can start: close the first, or use its settings"
    )
