"""Serving from tiers on real servers, which go away, hang and come back; and two stores that share one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from proxy import Proxy
from servers import BUCKET, S3_OPTIONS, Process, redis_server, running, s3_server
from workbench import Bench, distance

pytestmark = pytest.mark.engine

Kind = Literal["redis", "object"]
CLOSE = 0.01
COOLDOWN_S = 0.3


@pytest.fixture(params=["redis", "object"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def proxy(kind: Kind, tmp_path: Path) -> Iterator[Proxy]:
    server: Process = redis_server(tmp_path) if kind == "redis" else s3_server(tmp_path)
    with running(server), Proxy(("127.0.0.1", server.port)) as between:
        yield between


def tier(kind: Kind, port: int, **options: Any) -> dict[str, Any]:
    common = {"kind": kind, "write": "through", "timeout_s": 2.0, "cooldown_s": COOLDOWN_S, **options}
    if kind == "redis":
        return {"url": f"redis://127.0.0.1:{port}", **common}
    endpoint = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
    return {"url": f"s3://{BUCKET}/kv", "options": endpoint, **common}


@pytest.fixture
def remote_bench(
    engine: Engine,
    tokenizer: Any,
    identity: KVIdentity,
    chunks: list[Chunk],
    tmp_path: Path,
    kind: Kind,
    proxy: Proxy,
) -> Iterator[Bench]:
    """Four chunks whose only home is the server."""
    bench = Bench(engine, tokenizer, identity, tmp_path / "kb", chunks[:4])
    yield bench.open(stack=[tier(kind, proxy.port)])
    proxy.mode = "pass"
    bench.close()


@pytest.mark.parametrize("trouble", ["hang", "garbage"])
def test_server_in_trouble_costs_time_and_no_answer_and_its_recovery_is_noticed(
    remote_bench: Bench, proxy: Proxy, kind: Kind, trouble: Literal["hang", "garbage"]
) -> None:
    """Others, as the tier sees them: tests/unit/store/test_remote_tiers.py."""
    bench = remote_bench
    prompt = bench.prompt(bench.pieces)
    whole = bench.blended(prompt, ratio=0.0)
    assert whole.report and whole.report.tiers == {kind: 4}
    proxy.mode = trouble
    full = bench.plain(prompt)
    for _ in range(2):  # the second is refused by the breaker, without waiting
        lonely = bench.blended(prompt, ratio=0.0)
        assert lonely.report and lonely.report.cached == 0 and len(lonely.report.missing) == 4
        assert distance(full, lonely) < CLOSE
    stats = bench.client.stats().tiers[kind]
    assert stats["errors"] >= 1
    proxy.mode = "pass"
    time.sleep(2 * COOLDOWN_S)
    bench.ingest(bench.pieces)  # what garbage was taken for damage was deleted
    again = bench.blended(prompt, ratio=0.0)
    assert again.report and again.report.missing == {} and again.report.tiers == {kind: 4}
    assert again.logprobs == whole.logprobs


def test_two_stores_on_one_server_reuse_each_others_chunks(
    remote_bench: Bench, proxy: Proxy, kind: Kind, tmp_path: Path
) -> None:
    first = remote_bench
    second = Bench(first.engine, first.tokenizer, first.identity, tmp_path / "other", first.pieces)
    second.open(stack=[{"kind": "ram"}, {"kind": "disk"}, tier(kind, proxy.port)])
    third = Bench(first.engine, first.tokenizer, first.identity, tmp_path / "third", first.pieces)
    try:
        assert len(list((tmp_path / "other").glob("kv/??/*.safetensors"))) == len(
            first.pieces
        )  # copied, and home
        stats = second.client.stats().tiers
        assert stats[kind]["hits"] == stats["disk"]["promotions"] == len(first.pieces)
        prompt = second.prompt(second.pieces)
        assert second.blended(prompt, ratio=0.0).logprobs == first.blended(prompt, ratio=0.0).logprobs
    finally:
        second.close()
    third.open(stack=[{"kind": "disk"}])  # and without it, they are prefilled
    try:
        done = third.client.ingest(third.pieces)
        assert done.adopted == 0 and done.tokens == sum(len(piece.token_ids) for piece in third.pieces)
    finally:
        third.close()
