"""The engine's report on one request's blend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from blendrag.load.trace import Event

Cause = Literal["recipe", "salt", "memory", "loading", "error"]

# Increments, a level, or observations, by metric and value of its label. Plain data, as vLLM sends it.
Tally = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Eviction:
    """The result of evicting a prompt's KV after its first token.

    tokens: how many a head has kept, on average. first, last: the request's blocks [first, last) are free
    now. first_block: the id of its very first block. whole: why nothing was evicted; None if it was.
    """

    tokens: int = 0
    first: int = 0
    last: int = 0
    first_block: int = -1
    whole: str | None = None

    @property
    def freed(self) -> int:
        return self.last - self.first


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, a device's too, does not suffice."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """The facts of a prompt's prefill that the worker reports and whoever asked is told.

    exact: tokens whose KV the tree of prefixes had, as full prefill makes it. recomputed: tokens whose KV was
    loaded and repaired, mean over the layers from the selector's first choice on, or computed in the block of
    the paged cache in which the documents end. computed_at: the positions that were computed in the last
    layer, as :mod:`blendrag.ranges` has them; a worker's ends with what it leaves to the engine, ``900-``.
    missing: why chunks could not be had, by key. decision: why the controller loaded these chunks and no
    others. prefill_s: its estimate of plain prefill in seconds, behind what the prefix cache had; None
    without a profile. tiers: chunks loaded, by the tier they came from. attention: by key, a chunk's share of
    the attention that the question pays to all cached tokens, where the question was read. ms: time by part:
    load, select, recompute. kv_kept: tokens that a head decoded the answer from, on average, where KV was
    evicted. kv_freed: blocks freed by that. kv_whole: why nothing was evicted, where it should have been.
    trace: what was loaded and computed when (see ``load.trace``), if asked for.
    """

    exact: int = 0
    recomputed: int = 0
    computed_at: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    decision: str = ""
    prefill_s: float | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    kv_kept: int = 0
    kv_freed: int = 0
    kv_whole: str = ""
    trace: tuple[Event, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return these facts by name, without what a subclass adds."""
        return {one.name: getattr(self, one.name) for one in fields(PrefillFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendReport(PrefillFacts):
    """The report on one request, made by the worker, or by the scheduler for a request that is not blended.

    prefix: leading prompt tokens that were left as the engine's prefix cache had them; the exact ones are
    behind them. cached: tokens behind these whose KV was loaded. fresh: tokens without stored KV. selector,
    ratio: what was blended with. slices: in how many parts the blend was done. fallback: why the prompt was
    prefilled plainly instead, in words; None if it was blended. cause: the same as a metric's label.
    """

    prefix: int = 0
    cached: int = 0
    fresh: int = 0
    selector: str = ""
    ratio: float = 0.0
    slices: int = 1
    fallback: str | None = None
    cause: Cause | None = None

    @classmethod
    def failed(cls, error: Exception, prefix: int = 0) -> Self:
        """Return the report of a request whose blend raised this error."""
        cause: Cause = "memory" if out_of_memory(error) else "error"
        return cls(prefix=prefix, fallback=f"{type(error).__name__}: {error}", cause=cause)

    @classmethod
    def refused(cls, why: str, prefix: int, load_ms: float = 0.0) -> Self:
        """Return the report of a request that is not loaded, since prefilling is sooner done."""
        ms = {"load": load_ms, "select": 0.0, "recompute": 0.0}
        return cls(prefix=prefix, fallback=why, cause="loading", ms=ms)

    def evicted(self, eviction: Eviction) -> Self:
        """Return this report with what was done with the prompt's KV."""
        return replace(self, kv_kept=eviction.tokens, kv_freed=eviction.freed, kv_whole=eviction.whole or "")

    @property
    def problem(self) -> str | None:
        """Return why not all that was asked for was blended; None if it was."""
        return self.fallback or (f"chunks are missing: {self.missing}" if self.missing else None)

    def to_plain(self) -> dict[str, Any]:
        """Return this report as plain data, which crosses between processes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> Self | None:
        if plain is None:
            return None
        trace = tuple((str(lane), str(name), begin, end) for lane, name, begin, end in plain["trace"])
        return cls(**{**plain, "trace": trace})
