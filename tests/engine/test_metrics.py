"""What a Prometheus server is told, over HTTP, while the engine works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from urllib.request import urlopen

import pytest
from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.wire.recipe import Recipe
from workbench import FIRST, Bench

pytestmark = pytest.mark.engine

Series = dict[tuple[str, str], float]
Growth = Callable[[str, str], float]


@pytest.fixture(scope="module")
def scrape() -> Iterator[Callable[[], Series]]:
    """The page as it is now, by name and the value of our own label."""
    server, thread = start_http_server(0, addr="127.0.0.1")

    def now() -> Series:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        found = {}
        for sample in (sample for family in families for sample in family.samples):
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if sample.name.startswith("blendrag_") and "le" not in labels:
                assert labels.pop("engine") == "0"
                found[sample.name, *labels.values()] = sample.value
        return found

    yield now
    server.shutdown()
    thread.join()


@pytest.fixture
def growth(scrape: Callable[[], Series], bench: Bench) -> Growth:
    """How much a series has grown since the test began. The numbers of an answer follow it at once, but
    they follow it: growth that is expected is waited for, none is not."""
    bench.plain(bench.prompt(bench.pieces[:1]))  # what went before has been told
    time.sleep(0.1)
    before = scrape()

    def grown(name: str, label: str) -> float:
        ends = time.monotonic() + 5
        while (by := scrape().get((name, label), 0) - before.get((name, label), 0)) == 0:
            if time.monotonic() > ends:
                break
            time.sleep(0.02)
        return by

    return grown


def test_blend_is_in_the_metrics(bench: Bench, growth: Growth) -> None:
    report = bench.blended(bench.prompt(bench.pieces[:5]), ratio=0.5).report
    assert report is not None
    assert growth("blendrag_requests_total", "blended") == 1
    assert growth("blendrag_tokens_total", "reused") == report.cached - report.recomputed > 0
    assert growth("blendrag_tokens_total", "recomputed") == report.recomputed > 0
    assert growth("blendrag_tokens_total", "fresh") == report.fresh > 0
    assert growth("blendrag_chunks_loaded_total", "ram") == growth("blendrag_tier_hits_total", "ram") == 5
    for part, ms in report.ms.items():
        assert growth("blendrag_blend_seconds_sum", part) == pytest.approx(ms / 1e3)
        assert growth("blendrag_blend_seconds_count", part) == 1


def test_request_counts_as_the_kind_that_it_is(bench: Bench, growth: Growth) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    bench.plain(prompt)
    assert growth("blendrag_requests_total", "plain") == 1
    bench.blended(prompt)
    again = bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt))
    assert again.prefix_tokens
    assert growth("blendrag_requests_total", "prefix") == 1
    unknown = bench.prompt([bench.piece(f"A chunk that nobody has stored, number {n}. ") for n in range(2)])
    bench.blended(unknown)
    assert growth("blendrag_requests_total", "computed") == 1
    assert growth("blendrag_chunks_missing_total", "missing") == 2
    assert growth("blendrag_requests_total", "blended") == 1


def test_fallback_is_counted_and_its_text_is_not_shown(
    bench: Bench, growth: Growth, scrape: Callable[[], Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    bench.reset()
    closed = bench.engine.generate(prompt.token_ids, FIRST, Recipe("a store nobody opened", prompt.spans))
    assert closed.report and "a store nobody opened" in closed.report.fallback
    assert growth("blendrag_fallbacks_total", "error") == 1
    with monkeypatch.context() as patch:
        patch.setattr(PriorTurns, "salt", lambda *_: None)
        bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt))
    assert growth("blendrag_fallbacks_total", "salt") == 1
    assert growth("blendrag_requests_total", "fallback") == 2
    assert not [series for series in scrape() if "nobody" in str(series)]


def test_request_that_ends_with_its_first_token_is_counted_once(bench: Bench, growth: Growth) -> None:
    for sampling in (FIRST, Sampling(max_tokens=8)):
        bench.blended(bench.prompt(bench.pieces[:5]), sampling)
    bench.plain(bench.prompt(bench.pieces[:5]))
    assert growth("blendrag_requests_total", "plain") == 1
    assert growth("blendrag_requests_total", "blended") == 2


def test_reads_from_disk_count_as_the_disks(own_bench: Bench, growth: Growth) -> None:
    own_bench.blended(own_bench.prompt(own_bench.pieces[:3]))
    assert growth("blendrag_chunks_loaded_total", "disk") == growth("blendrag_tier_hits_total", "disk") == 3
    assert growth("blendrag_tier_misses_total", "ram") == 3
