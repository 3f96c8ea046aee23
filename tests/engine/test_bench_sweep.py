"""``blendrag bench ttft --axis``, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from blendrag.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

Sweep = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measured(command: Callable[..., Result], settings: Settings) -> Callable[..., dict[str, Any]]:
    """The results of a sweep over prompts of two chunks; no folder of it may stay behind."""

    def run(axis: str, values: str, repeats: int = 1, **environment: str) -> dict[str, Any]:
        before = set(settings.cache_dir.glob(".blendrag-*"))
        result = command(
            "bench", "ttft", "--axis", axis, "--values", values, "--chunks", "2", "--chunk-tokens", "64",
            "--repeats", str(repeats), "--json", **environment,
        )  # fmt: skip
        assert axis in result.stderr and set(settings.cache_dir.glob(".blendrag-*")) <= before
        results: dict[str, Any] = json.loads(result.stdout)
        assert results["machine"]["vllm"] and "commit" in results["machine"]
        points = results["points"]
        assert all(list(point["arms"]) == ["full", "prefix", "reuse", "blended"] for point in points)
        assert [str(point["value"]) for point in points] == values.split(",")
        return results

    return run


@pytest.fixture
def sweep(measured: Callable[..., dict[str, Any]]) -> Sweep:
    """Its points."""
    return lambda *words, **options: measured(*words, **options)["points"]


def test_ratio_changes_only_what_depends_on_it(sweep: Sweep) -> None:
    quarter, whole = sweep("ratio", "0.25,1.0", repeats=2)
    assert quarter["arms"]["full"] == whole["arms"]["full"], "measured twice"
    assert quarter["arms"]["reuse"]["each_ms"] == whole["arms"]["reuse"]["each_ms"]
    reuse, some, everything = (
        point["arms"][arm]["tokens_recomputed"]
        for point, arm in ((quarter, "reuse"), (quarter, "blended"), (whole, "blended"))
    )
    assert (some, everything) == (reuse + round(0.25 * (128 - reuse)), 128)
    assert whole["arms"]["blended"]["kl_first_token"] < 1e-4 < quarter["arms"]["reuse"]["kl_first_token"]


def test_prompts_have_the_chunks_that_the_axis_says(sweep: Sweep) -> None:
    two, three = sweep("chunks", "2,3")
    assert [point["arms"]["full"]["tokens_recomputed"] for point in (two, three)] == [128, 192]
    (short,) = sweep("chunk_tokens", "32")
    assert short["arms"]["full"]["tokens_recomputed"] == 64


def test_codec_and_tier_have_their_stores(sweep: Sweep) -> None:
    raw, int4 = sweep("codec", "raw,int4")
    assert raw["arms"]["full"] == int4["arms"]["full"]
    assert raw["arms"]["reuse"]["kl_first_token"] != int4["arms"]["reuse"]["kl_first_token"]
    ram, disk = sweep("tier", "ram,disk")
    assert ram["arms"]["reuse"]["kl_first_token"] == pytest.approx(disk["arms"]["reuse"]["kl_first_token"])
    assert ram["arms"]["reuse"]["each_ms"] != disk["arms"]["reuse"]["each_ms"]


def test_codec_changes_only_what_is_reused(measured: Callable[..., dict[str, Any]]) -> None:
    results = measured("codec", "raw,int8,int4", BLENDRAG_RECOMPUTE_RATIO="1.0")
    for point in results["points"]:
        assert point["arms"]["blended"]["kl_first_token"] < 1e-4, point["value"]
    costs = [results["codecs"][name] for name in ("raw", "int8", "int4")]
    sizes, errors = ([cost[name] for cost in costs] for name in ("bytes_per_token", "k_error"))
    assert sizes == sorted(sizes, reverse=True) and errors[0] == 0 < errors[1] < errors[2]
