"""What is counted, and what Prometheus is told. No engine is started here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blendrag.engine.budget.freeing import of_eviction
from blendrag.engine.wire.report import BlendReport, Eviction
from blendrag.engine.worker import metrics
from blendrag.engine.worker.metrics import (
    METRICS,
    BlendMetrics,
    Tally,
    TierMeter,
    merge,
    of_report,
    summary,
)
from blendrag.store.tiers import RamTier, TierSpec
from places import DOCS
from stores import LAYOUT, make_chunk, make_record

TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
CONFIG = SimpleNamespace(kv_transfer_config=None)
ENGINES = {0: ["model", "0"], 1: ["model", "1"]}
REPORT = BlendReport(
    cached=100,
    fresh=20,
    recomputed=15,
    missing={"k1": "damaged", "k2": "missing", "k3": "missing"},
    tiers={"ram": 2, "disk": 1},
    ms={"load": 3.0, "select": 4.0, "recompute": 5000.0},
    decision="said by the controller",
)


@pytest.fixture
def recorder() -> Iterator[BlendMetrics]:
    yield BlendMetrics(CONFIG, TYPES, ["model_name", "engine"], ENGINES)
    metrics._unregister()


def shown() -> dict[tuple[str, ...], float]:
    """By name, value of our label, and engine."""
    found = {}
    for family in text_string_to_metric_families(generate_latest().decode()):
        if family.name.startswith("blendrag_"):
            for sample in family.samples:
                if not sample.name.endswith(("_created", "_bucket")):
                    ours = sample.labels.keys() - {"model_name", "engine"}
                    values = [sample.labels[label] for label in (*ours, "engine")]
                    found[(sample.name, *values)] = sample.value
    return found


def test_eviction_is_counted(recorder: BlendMetrics) -> None:
    recorder.observe(of_eviction(Eviction(tokens=480, first=15, last=226, first_block=3)))
    recorder.observe(of_eviction(Eviction(whole="the prompt is no longer than the budget")))
    now = shown()
    assert (
        now["blendrag_evictions_total", "evicted", "0"] == now["blendrag_evictions_total", "whole", "0"] == 1
    )
    assert now["blendrag_evicted_blocks_total", "kept", "0"] == 16
    assert now["blendrag_evicted_blocks_total", "freed", "0"] == 211


def test_report_is_counted(recorder: BlendMetrics) -> None:
    recorder.observe(of_report(REPORT))
    recorder.observe(of_report(replace(REPORT, cached=0, recomputed=0, missing={}, tiers={})))
    now = shown()
    assert now["blendrag_requests_total", "blended", "0"] == 1
    assert now["blendrag_requests_total", "computed", "0"] == 1
    assert now["blendrag_tokens_total", "reused", "0"] == 85
    assert now["blendrag_tokens_total", "recomputed", "0"] == 15
    assert now["blendrag_tokens_total", "fresh", "0"] == 40
    assert now["blendrag_chunks_loaded_total", "ram", "0"] == 2
    assert now["blendrag_chunks_missing_total", "missing", "0"] == 2
    assert now["blendrag_blend_seconds_count", "recompute", "0"] == 2
    assert now["blendrag_blend_seconds_sum", "recompute", "0"] == 10
    assert not any(value for (*_, engine), value in now.items() if engine == "1")


def test_exact_prefix_is_not_counted_as_a_blend(recorder: BlendMetrics) -> None:
    recorder.observe(
        of_report(BlendReport(exact=80, tiers={"tree ram": 3}, ms=dict.fromkeys(REPORT.ms, 0.0)))
    )
    recorder.observe(of_report(replace(REPORT, exact=40)))
    now = shown()
    assert now["blendrag_requests_total", "exact", "0"] == now["blendrag_requests_total", "blended", "0"] == 1
    assert now["blendrag_tokens_total", "exact", "0"] == 120
    assert now["blendrag_chunks_loaded_total", "tree ram", "0"] == 3
    assert now["blendrag_blend_seconds_count", "load", "0"] == 1


def test_every_series_is_there_from_the_beginning(recorder: BlendMetrics) -> None:
    now = shown()
    for name, metric in METRICS.items():
        ending = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        assert all(now[name + ending, value, "1"] == 0 for value in metric.values)


@pytest.mark.parametrize(
    ("error", "reason"), [(MemoryError("a secret"), "memory"), (KeyError("a secret"), "error")]
)
def test_text_of_an_error_is_no_label(error: Exception, reason: str, recorder: BlendMetrics) -> None:
    tally = of_report(BlendReport.failed(error))
    assert tally == {"blendrag_requests": {"fallback": 1}, "blendrag_fallbacks": {reason: 1}}
    recorder.observe(tally)
    assert b"secret" not in generate_latest()


def test_second_engine_of_a_process_registers_its_metrics(recorder: BlendMetrics) -> None:
    recorder.observe(of_report(REPORT))
    second = BlendMetrics(CONFIG, TYPES, ["model_name", "engine"], {0: ["other", "0"]})
    second.observe(of_report(REPORT))
    recorder.observe(of_report(REPORT))  # of an engine that was closed: nobody sees it, nothing fails
    assert shown()["blendrag_requests_total", "blended", "0"] == 1
    assert b'model_name="model"' not in generate_latest(REGISTRY)


def test_metric_classes_that_are_not_in_the_registry_can_be_replaced() -> None:
    elsewhere: Any = partial(Counter, registry=None)
    for _ in range(2):
        BlendMetrics(CONFIG, TYPES | {Counter: elsewhere}, ["model_name", "engine"], ENGINES)
    metrics._unregister()


def test_page_of_the_metrics_names_those_that_there_are() -> None:
    page = (DOCS / "metrics.md").read_text()
    ending = {"counter": "_total", "histogram": "", "gauge": ""}
    there = {(name + ending[metric.kind], metric.label) for name, metric in METRICS.items()}
    assert set(re.findall(r"^\| `(blendrag_\w+)` \| `(\w+)` \|", page, re.MULTILINE)) == there
    for metric in METRICS.values():
        assert all(f"`{value}`" in page for value in metric.values)


NUMBERS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 9))
LISTS = st.dictionaries(st.sampled_from("ab"), st.lists(st.floats(0, 9), min_size=1))
TALLIES = st.fixed_dictionaries(
    {},
    optional={
        "blendrag_requests": NUMBERS,
        "blendrag_tier_bytes": NUMBERS,
        "blendrag_blend_seconds": LISTS,
    },
)


@given(st.lists(TALLIES))
def test_tallies_that_travel_together_count_the_same(tallies: list[Tally]) -> None:
    before = json.dumps(tallies)
    whole: Tally = {}
    for tally in tallies:
        merge(whole, tally)
    assert json.dumps(tallies) == before, "a tally that was added is changed"
    for name, kind in (("blendrag_requests", sum), ("blendrag_tier_bytes", lambda seen: seen[-1])):
        for label in "ab":
            seen = [tally[name][label] for tally in tallies if label in tally.get(name, {})]
            assert whole.get(name, {}).get(label) == (kind(seen) if seen else None)
    for label in "ab":
        seen = [one for tally in tallies for one in tally.get("blendrag_blend_seconds", {}).get(label, [])]
        assert whole.get("blendrag_blend_seconds", {}).get(label, []) == seen
    assert all(isinstance(number, int | float) for number in summary(whole).values())


def test_observations_that_nobody_reads_take_little_memory() -> None:
    whole: Tally = {}
    for _ in range(5000):
        merge(whole, of_report(REPORT))
    assert len(whole["blendrag_blend_seconds"]["load"]) <= 1024
    assert whole["blendrag_requests"] == {"blended": 5000}


def test_counters_of_a_tier_are_there_from_its_first_look() -> None:
    """``rate()`` sees no first increment of a series that begins with it."""
    tally = TierMeter().growth([RamTier(TierSpec(kind="ram"), LAYOUT)])
    assert tally == {name: {"ram": 0} for name in METRICS if name.startswith("blendrag_tier")}


def test_tiers_of_two_stores_are_counted_once_and_added() -> None:
    one, other = (RamTier(TierSpec(kind="ram"), LAYOUT) for _ in range(2))
    meter = TierMeter()
    chunk = make_chunk(1)
    record = make_record(chunk)
    for tier in (one, other):
        tier.put(record)
    first = meter.growth([one, other])
    assert first["blendrag_tier_puts"] == first["blendrag_tier_chunks"] == {"ram": 2}
    assert first["blendrag_tier_bytes"] == {"ram": 2 * record.head.nbytes}
    assert meter.growth([one, other]) == {}, "nothing has happened"
    one.open([chunk.key, "0" * 32])
    asked = {"blendrag_tier_hits": {"ram": 1}, "blendrag_tier_misses": {"ram": 1}}
    assert meter.growth([one, other]) == asked
    assert meter.growth([]) == {"blendrag_tier_chunks": {"ram": 0}, "blendrag_tier_bytes": {"ram": 0}}
    assert "blendrag_tier_puts" not in meter.growth([one]), "counted when the store was open before"
