"""A stack of tiers, as settings describe it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blendrag.errors import ConfigError

Kind = Literal["ram", "disk", "redis", "object"]
Write = Literal["through", "behind", "never"]
DEFAULT_POLICY = "gdsf"  # the best untaught policy on retrieved chunks (docs/eviction.md)

# The settings of each kind of tier, besides those that all have.
_ALLOWED: dict[Kind, set[str]] = {
    "ram": {"bytes", "chunks", "policy", "tree_bytes"},
    "disk": {"bytes", "chunks", "policy", "tree_bytes", "path"},
    "redis": {"url", "timeout_s", "cooldown_s", "expire_s"},
    "object": {"url", "timeout_s", "cooldown_s", "options"},
}


class TierSpec(BaseModel):
    """A tier of a stack. A stack is a list of these, fastest first.

    write: "through": a chunk counts as stored when it is there; "behind": it is written in the background;
        "never": the tier is only read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field(description="Where the tier keeps records.")
    write: Write | None = Field(
        default=None, description="When a chunk counts as stored; None: through, or behind for servers."
    )
    bytes: int | None = Field(default=None, ge=0, description="Most bytes in the tier; None: no limit.")
    chunks: int | None = Field(default=None, ge=0, description="Most chunks in the tier; None: no limit.")
    policy: str = Field(default=DEFAULT_POLICY, description="Which chunk leaves a full tier.")
    tree_bytes: int = Field(default=0, ge=0, description="Room for exact prefixes beside chunks; 0: none.")
    path: Path | None = Field(default=None, description="Folder of a disk tier; None: the index's own.")
    url: str | None = Field(
        default=None, repr=False, description="Server: redis://..., s3://bucket/prefix, ..."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Options of the object store's client."
    )
    throttle: int | None = Field(
        default=None, gt=0, description="Most bytes read per second, to try a slower device."
    )
    timeout_s: float = Field(default=1.0, gt=0, description="Seconds until a call to a server has failed.")
    cooldown_s: float = Field(default=5.0, gt=0, description="Seconds a server that failed is left alone.")
    expire_s: int | None = Field(default=None, gt=0, description="Seconds after which Redis drops a chunk.")

    @model_validator(mode="after")
    def _check(self) -> TierSpec:
        common = {"kind", "write", "throttle"}
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        wrong = sorted(given - common - _ALLOWED[self.kind])
        if wrong:
            raise ValueError(f"a tier of kind {self.kind!r} has no {', '.join(wrong)}")
        if self.on_server and not self.url:
            raise ValueError(f"a tier of kind {self.kind!r} needs a url")
        return self

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for the engine's worker."""
        return self.model_dump(mode="json", exclude_unset=True)

    def share(self, part: float) -> TierSpec:
        """Return a tier in this process's memory with room for this part of every record."""
        if self.kind != "ram" or self.bytes is None:
            return self
        return self.model_copy(update={"bytes": round(self.bytes * part)})

    @property
    def on_server(self) -> bool:
        """Return whether the tier is a server, which is asked by its url."""
        return "url" in _ALLOWED[self.kind]

    @property
    def elsewhere(self) -> bool:
        """Return whether the tier is a server, or a folder besides the index's own."""
        return self.on_server or self.path is not None

    @property
    def writes(self) -> Write:
        return self.write or ("behind" if self.on_server else "through")

    @property
    def evicts(self) -> bool:
        """Return whether the tier has limits, so that chunks have to leave."""
        return self.bytes is not None or self.chunks is not None

    @property
    def label(self) -> str:
        """Return the tier's name in statistics, without what may be secret."""
        return self.kind if self.kind != "disk" or self.path is None else f"disk {self.path}"


OWN_FOLDER = (TierSpec(kind="disk"),)  # the stack of an index that has its KV in its own folder


def primary_at(stack: Sequence[TierSpec]) -> int:
    """Return the place of a stack's primary tier, where a chunk counts as stored: the first that is not RAM
    and may be written, else the first that may be.

    Raises ConfigError if none may be written, or two are the same.
    """
    if len({spec.label for spec in stack}) < len(stack):
        raise ConfigError("two tiers of a stack are the same")
    writable = [at for at, spec in enumerate(stack) if spec.writes != "never"]
    if not writable:
        raise ConfigError("none of the tiers may be written")
    return next((at for at in writable if stack[at].kind != "ram"), writable[0])
