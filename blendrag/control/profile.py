"""The profile of one machine with one model: measured times, the controller's only knowledge of both."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.choice import Choice
from blendrag.errors import StoreError
from blendrag.files.private import make_folder, write_whole
from blendrag.machine import Machine
from blendrag.store.identity import ALONE, KVIdentity

VERSION = 1
_TIMES = ("cpu", "threads", "device", "dtype", "vllm")  # facts of a machine that times depend on
_REMEDY = "run blendrag profile"
NO_PROFILE = f"there is no profile of this model on this machine: {_REMEDY}"


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PrefillPoint(_Measured):
    """A measurement of vLLM's time to the first token: ``new`` tokens behind ``cached`` ones."""

    cached: int = Field(ge=0)
    new: int = Field(gt=0)
    seconds: float = Field(gt=0)


class BlendPoint(_Measured):
    """A measurement of a blended prompt of ``cached`` tokens, whose KV is in memory, and ``fresh`` ones.

    seconds: of the fused prefill. overhead_s: the rest of the time to the first token, which is the engine's.
    """

    cached: int = Field(gt=0)
    fresh: int = Field(ge=0)
    ratio: float = Field(ge=0, le=1)
    seconds: float = Field(gt=0)
    overhead_s: float = Field(ge=0)


class TierSpeed(_Measured):
    """The speed at which KV comes out of a tier: verified, decoded, ready for the engine.

    latency_s: seconds of a call that brings next to nothing. calls: the calls of one prompt (to find the
    records, then one per group of layers). measured_at: ISO 8601.
    """

    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    calls: int = Field(gt=0)
    measured_at: str


class Profile(_Measured):
    """The profile of one model on one machine. ``tiers``: by label, as the stack has them. ``kv_bytes``: of a
    token's stored KV; 0 in profiles of older versions, which did not say."""

    version: int = VERSION
    identity: str = Field(description="As profile_digest gives it.")
    model: str
    selector: str
    layers: int = Field(gt=0)
    kv_bytes: int = Field(0, ge=0)
    machine: Machine
    date: str
    prefill: tuple[PrefillPoint, ...] = Field(min_length=3)
    blend: tuple[BlendPoint, ...] = Field(min_length=3)
    tiers: dict[str, TierSpeed] = Field(min_length=1)

    def save(self, cache_dir: Path) -> Path:
        """Write the profile where ``load_profile`` looks, wholly or not at all. Raises StoreError."""
        path = profile_path(cache_dir, self.identity, self.machine.device)
        try:
            make_folder(path.parent)
            write_whole(path, f"{self.model_dump_json(indent=2)}\n".encode())
        except OSError as error:
            raise StoreError(f"cannot write the profile {str(path)!r}: {error.strerror}") from error
        return path


class _Any(BaseModel):
    """A profile of whatever version."""

    version: int


def profile_digest(identity: KVIdentity) -> str:
    """Return the name of what times depend on: neither whose KV it is nor what it was prefilled behind."""
    return replace(identity, namespace="", prefix=ALONE).digest()


def profile_path(cache_dir: Path, digest: str, device: str) -> Path:
    """Return the path of a profile: one file per model, codec and device."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return cache_dir.expanduser() / "profiles" / f"{digest}-{name}.json"


def load_profile(cache_dir: Path, digest: str, here: Machine, selector: str | None = None) -> Profile | str:
    """Return the profile of this model on this machine, or why there is none that could be used.

    ``selector``: the one in use, whose arguments make no difference; None: accept a profile of any. A profile
    is a help: nothing about it is an error.
    """
    path = profile_path(cache_dir, digest, here.device)
    profile = _read(path, digest)
    if isinstance(profile, str):
        return profile
    changed = [name for name in _TIMES if getattr(here, name) != getattr(profile.machine, name)]
    whose, name = "", None if selector is None else Choice.read(selector).name
    if changed:
        whose = f"of another machine (different: {', '.join(changed)})"
    elif name not in (None, profile.selector):
        whose = f"of selector {profile.selector!r}, not {name!r}"
    return f"the profile {str(path)!r} is {whose}: {_REMEDY} again" if whose else profile


def any_profile(cache_dir: Path, digest: str) -> bool:
    """Return whether this model was measured at all, wherever that was."""
    return any(profile_path(cache_dir, digest, "any").parent.glob(f"{digest}-*.json"))


def _read(path: Path, digest: str) -> Profile | str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return NO_PROFILE
    except (OSError, UnicodeDecodeError) as error:
        return f"the profile {str(path)!r} cannot be read ({error}): {_REMEDY}"
    try:
        if _Any.model_validate_json(text).version != VERSION:
            return f"the profile {str(path)!r} was made by another version of blendrag: {_REMEDY}"
        profile = Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        return f"the profile {str(path)!r} is damaged ({where}: {first['msg']}): {_REMEDY}"
    if profile.identity != digest:
        return f"the profile {str(path)!r} is of another model ({profile.model}): {_REMEDY}"
    return profile
