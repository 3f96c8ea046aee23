"""The most that can be found without knowing the future, where requests are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from blendrag.eviction import make_policy
from blendrag.lab.progress import BenchProgress
from blendrag.lab.replay.compare import EvictionOptions, run_eviction
from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.joined import joined
from blendrag.lab.replay.request import Request, Trace
from blendrag.lab.replay.run import replay
from blendrag.lab.replay.source import Source
from blendrag.lab.replay.static import static
from blendrag.lab.replay.workload_retrieval import Embedded, RetrievalLoad, retrieval_trace


def corpus() -> Embedded:
    """Forty chunks of different sizes, and four questions to each article of four."""
    vectors = np.random.default_rng(0).normal(size=(80, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return Embedded(vectors[:40], vectors[40:], np.repeat(np.arange(10), 4), tuple(range(60, 100)))


LOAD = RetrievalLoad(rate=20.0, seconds=300.0, top_k=3)


def share(found: Sequence[int], asked: Sequence[int]) -> float:
    half = len(found) // 2
    return float(np.sum(found[half:]) / np.sum(asked[half:]))


def test_popularity_is_not_that_of_the_requests() -> None:
    trace = retrieval_trace(corpus(), LOAD)
    assert sum(chance for chance, _ in trace.popularity.values()) == pytest.approx(LOAD.top_k)
    asked = [key for request in trace.requests for key in request.keys]
    count = len(trace.requests)
    for key, (chance, size) in trace.popularity.items():
        assert asked.count(key) / count == pytest.approx(chance, abs=5.0 * (chance / count) ** 0.5)
        assert {size} == {s for r in trace.requests for k, s in zip(r.keys, r.sizes, strict=True) if k == key}


@pytest.mark.parametrize("capacity", [1000, 2000, 2800])
def test_policy_finds_more_than_can_be_found_or_the_bound_is_far_off(capacity: int) -> None:
    trace = retrieval_trace(corpus(), LOAD)
    bound = static(trace, capacity)
    best = share(bound.found.tolist(), bound.asked.tolist())
    for name in ("lru", "gdsf"):
        outcome = replay(trace, make_policy(name), capacity)
        assert share(outcome.found.tolist(), outcome.asked.tolist()) < 1.02 * best
    lfu = replay(trace, make_policy("lfu"), capacity)
    assert 0.9 * best < share(lfu.found.tolist(), lfu.asked.tolist()) < 1.02 * best


def test_more_is_held_than_there_is_room_for() -> None:
    popularity = {"rare": (0.1, 10), "usual": (0.9, 10), "never asked": (0.5, 4)}
    requests = [Request(0.0, ("usual", "rare"), (10, 10)), Request(1.0, ("rare",), (10,))]
    trace = Trace("a", requests, prefix=False, unit="tokens", popularity=popularity)
    for capacity, found in ((6, [6, 0]), (14, [10, 0]), (17, [13, 3]), (99, [20, 10])):
        outcome = static(trace, capacity)
        assert outcome.found.tolist() == found and not outcome.written.any()


def test_bound_is_shown_where_it_is_none() -> None:
    """Where the popularity changes, it may be beaten."""
    assert not retrieval_trace(corpus(), replace(LOAD, drift=0.5)).popularity
    trace = retrieval_trace(corpus(), replace(LOAD, seconds=20.0))
    both = joined([trace, trace])
    for made, shown in ((trace, True), (both, False)):
        source = Source(lambda seed, made=made: made, generated=True)  # type: ignore[misc]
        results = run_eviction(source, EvictionOptions((500,), ("lru",), seeds=1), Costs(), BenchProgress())
        assert list(results["policies"]) == ["lru", *(["static"] if shown else []), "optimal"]
        assert ("static" in results["behind"]) == shown
