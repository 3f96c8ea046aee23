"""The counts of requests and tiers, and their way to Prometheus (docs/metrics.md).

Both halves of the connector count into tallies. vLLM carries them to the client's process with the outputs of
the engine's step, where :class:`BlendMetrics` adds them to Prometheus'; a server's front end is such a
process, and counts there (:func:`count`) which requests it did not plan. Values of labels come from this
file, from the names of configured tiers, and from nowhere else.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from blendrag.engine.compat.connector import KVConnectorPromMetrics, KVConnectorStats
from blendrag.engine.wire.report import BlendReport, Cause, Tally
from blendrag.store.record import Reason
from blendrag.store.tiers import Tier
from blendrag.store.tiers.interface import LEVELS

Outcome = Literal["exact", "blended", "computed", "prefix", "plain", "fallback"]
Unplanned = Literal["request", "refused", "text", "window", "error"]

ROLES = ("assistant", "developer", "other", "system", "tool", "user")
"""The roles of messages that are counted by name."""

_PARTS = ("load", "select", "recompute")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_KEPT = 1024  # observations that wait for vLLM's own log, where nobody may ever read them


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. values: those of its label, if they are known beforehand: their series are there from the
    start, at 0."""

    label: str
    help: str
    values: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "counter"


METRICS: Mapping[str, Metric] = {
    "blendrag_requests": Metric("outcome", "Requests, by how their prompt was prefilled.", get_args(Outcome)),
    "blendrag_tokens": Metric(
        "kind",
        "Prompt tokens that vLLM's prefix cache did not have, by how they were prefilled.",
        ("exact", "reused", "recomputed", "fresh", "plain"),
    ),
    "blendrag_blend_seconds": Metric(
        "part", "Time that a fused prefill spent, by what on.", _PARTS, kind="histogram"
    ),
    "blendrag_chunks_loaded": Metric("tier", "Chunks whose stored KV was loaded, by tier."),
    "blendrag_chunks_missing": Metric(
        "reason", "Chunks whose stored KV could not be had, by reason.", get_args(Reason)
    ),
    "blendrag_evictions": Metric(
        "outcome", "Prompts with a budget of KV, by whether some was evicted.", ("evicted", "whole")
    ),
    "blendrag_evicted_blocks": Metric(
        "kind", "KV blocks of prompts some of which were evicted.", ("kept", "freed")
    ),
    "blendrag_fallbacks": Metric(
        "reason", "Requests that should have been blended and were not.", get_args(Cause)
    ),
    "blendrag_unplanned": Metric(
        "reason", "Requests that a server did not plan, and served plainly.", get_args(Unplanned)
    ),
    "blendrag_parts_left_out": Metric(
        "role", "Parts of messages that are neither text nor of a kind that vLLM knows.", ROLES
    ),
    "blendrag_tier_hits": Metric("tier", "Chunks that were asked for and there."),
    "blendrag_tier_misses": Metric("tier", "Chunks that were asked for and not there."),
    "blendrag_tier_puts": Metric("tier", "Chunks that were written."),
    "blendrag_tier_promotions": Metric("tier", "Chunks that came from a slower tier."),
    "blendrag_tier_evictions": Metric("tier", "Chunks that left for others."),
    "blendrag_tier_damaged": Metric("tier", "Records that failed their checksum."),
    "blendrag_tier_errors": Metric("tier", "Calls that failed."),
    "blendrag_tier_refused": Metric("tier", "Calls not made, the tier having just failed."),
    "blendrag_tier_chunks": Metric("tier", "Chunks that a tier holds.", kind="gauge"),
    "blendrag_tier_bytes": Metric("tier", "Bytes that a tier holds.", kind="gauge"),
}


# -- tallies ----------------------------------------------------------------------------------------------


def merge(into: Tally, more: Tally) -> None:
    """Add ``more``, the later one, to ``into``."""
    for name, values in more.items():
        kind, mine = METRICS[name].kind, into.setdefault(name, {})
        for label, value in values.items():
            if label not in mine or kind == "gauge":
                mine[label] = value
            elif kind == "histogram":
                mine[label] = [*mine[label], *value][-_KEPT:]
            else:
                mine[label] += value


def of_report(report: BlendReport) -> Tally:
    """Return what one request adds."""
    if report.cause:
        loaded = {"blendrag_tokens": {"exact": report.exact}} if report.exact else {}
        return {**of_outcome("fallback"), "blendrag_fallbacks": {report.cause: 1}, **loaded}
    if report.exact and not report.cached:
        loaded = {"blendrag_chunks_loaded": dict(report.tiers)}
        return {**of_outcome("exact"), "blendrag_tokens": {"exact": report.exact}, **loaded}
    return {
        **of_outcome("blended" if report.cached else "computed"),
        "blendrag_tokens": {
            "exact": report.exact,
            "reused": report.cached - report.recomputed,
            "recomputed": report.recomputed,
            "fresh": report.fresh,
        },
        "blendrag_blend_seconds": {part: [report.ms[part] / 1e3] for part in _PARTS},
        "blendrag_chunks_loaded": dict(report.tiers),
        "blendrag_chunks_missing": dict(Counter(report.missing.values())),
    }


def of_outcome(outcome: Outcome) -> Tally:
    return {"blendrag_requests": {outcome: 1}}


def summary(tally: Tally) -> dict[str, float]:
    """Return a number per metric and label, as vLLM logs it: the median of observations."""
    numbers: dict[str, float] = {}
    for name, values in tally.items():
        for label, value in values.items():
            seen = sorted(value) if METRICS[name].kind == "histogram" else [value]
            numbers[f"{name}.{label}"] = seen[len(seen) // 2]
    return numbers


class TierMeter:
    """A meter of how tiers' statistics have grown since the last look."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Tier, dict[str, int]] = WeakKeyDictionary()
        self._held: Tally = {}

    def growth(self, tiers: Iterable[Tier]) -> Tally:
        """Return the growth since the last look, at the first one of all counters: what grows for the first
        time has grown from 0. Tiers of the same name, of several stores, are counted together. The levels are
        given only of tiers that know them, and when they have changed."""
        tally: Tally = {}
        held: Tally = {name: dict.fromkeys(values, 0) for name, values in self._held.items()}
        for tier in tiers:
            now, before = tier.stats(), self._before.get(tier)
            self._before[tier] = now
            for name, value in now.items():
                if name in LEVELS:
                    into, by = held, value if tier.counted else None
                else:
                    into, by = tally, value if before is None else value - before[name] or None
                if by is not None:
                    values = into.setdefault(f"blendrag_tier_{name}", {})
                    values[tier.name] = values.get(tier.name, 0) + by
        if held != self._held:
            self._held = held
            merge(tally, held)
        return tally


@dataclass
class BlendStats(KVConnectorStats):
    """The tallies on their way from both halves to the client's process."""

    data: Tally = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**summary(self.data)}

    def is_empty(self) -> bool:
        return not self.data


# -- Prometheus -------------------------------------------------------------------------------------------

_latest: list[BlendMetrics] = []


class BlendMetrics(KVConnectorPromMetrics):
    """The metrics in Prometheus' registry, in the client's process. New ones take the former's place, as
    vLLM's own do: an engine that is closed and started again counts from 0.

    metric_types: vLLM's classes for prometheus_client's Counter, Gauge and Histogram. labelnames: vLLM's own
    labels, with their values by number of engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self.first = min(labelvalues)
        _unregister()
        self._metrics = {
            name: _make(name, metric, metric_types, labelnames) for name, metric in METRICS.items()
        }
        _latest.append(self)
        for engine in labelvalues:
            for name, metric in METRICS.items():
                for value in metric.values:
                    self._series(engine, name, value)

    def observe(self, transfer_stats_data: Tally, engine_idx: int = 0) -> None:
        """Add a tally of one engine."""
        for name, values in transfer_stats_data.items():
            kind = METRICS[name].kind
            for label, value in values.items():
                series = self._series(engine_idx, name, label)
                if kind == "counter":
                    series.inc(value)
                elif kind == "gauge":
                    series.set(value)
                else:
                    for one in value:
                        series.observe(one)

    def _series(self, engine: int, name: str, label: str) -> Any:
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], label)


def count(tally: Tally) -> None:
    """Add what the client's process itself knows to the first engine's metrics. Does nothing where metrics
    are off."""
    for metrics in _latest:
        metrics.observe(tally, metrics.first)


def _make(
    name: str, metric: Metric, metric_types: Mapping[type[Any], type[Any]], labelnames: Sequence[str]
) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    kinds: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
        "counter": (Counter, {}),
        "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),
        "histogram": (Histogram, {"buckets": _BUCKETS}),
    }
    kind, more = kinds[metric.kind]
    labels = [*labelnames, metric.label]
    return metric_types[kind](name=name, documentation=metric.help, labelnames=labels, **more)


def _unregister() -> None:
    from prometheus_client import REGISTRY

    while _latest:
        for metric in _latest.pop()._metrics.values():
            with contextlib.suppress(KeyError):  # Ray's metrics are not in this registry
                REGISTRY.unregister(metric)
