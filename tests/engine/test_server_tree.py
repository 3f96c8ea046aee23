"""Exact prefixes and budgets of KV behind ``blendrag serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from served import KB, TEXTS, Server, text_of
from stored_trees import tree_tiers
from waiting import until

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("server-tree"),
]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server") / "kv"
    more = ("--tiers", json.dumps(tree_tiers(10**9)), "--no-enable-prefix-caching", "--kv-budget", "4096")
    running = Server(folder, *more).wait()
    assert running.put(TEXTS)["chunks"] == len(TEXTS)
    yield running
    assert running.end() == [], "what grows is not waited for"


def asked(server: Server, question: str = "When was Alpha2 founded?", **said: Any) -> dict[str, Any]:
    answer = server.ask(question, blendrag={"evidence": True, **said})
    return {**answer.json()["blendrag"], "text": text_of(answer)}


def tree(server: Server) -> dict[str, Any]:
    """When nothing is left to grow."""

    def stats() -> dict[str, Any]:
        return server.client.get("/v1/kb/stats").json()["tree"]

    until(lambda: not stats()["waiting"], 120, "it does not end to grow", every_s=0.1)
    return stats()


def test_prompt_that_comes_again_is_answered_from_the_tree(server: Server) -> None:
    plain = asked(server, blend=False)
    assert (plain["mode"], plain["exact"]) == ("plain", 0)
    assert asked(server)["mode"] == "blended"
    assert tree(server)["nodes"] == 1 + len(TEXTS), "what stands before the first is one, too"
    found = asked(server)
    assert (found["mode"], found["recomputed"], found["text"]) == ("exact", 0, plain["text"])
    assert found["exact"] == found["reused"] > 0.8 * found["prompt"]
    assert sum(found[part] for part in ("reused", "fresh", "prefix")) == found["prompt"]
    other = asked(server, "Who founded Alpha1?", blend=False)
    assert (other["mode"], other["plain"]) == ("exact", None)
    streamed = server.ask(stream=True, blendrag={"evidence": True}).text
    assert '"mode": "exact"' in streamed


def test_document_that_was_forgotten_leaves_the_tree(server: Server) -> None:
    assert server.client.delete(KB, params={"id": "city-1"}).json() == {"removed": 1}
    assert tree(server)["nodes"] == 2
    server.put(TEXTS)
    assert asked(server)["mode"] == "mixed"


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_that_it_was_decoded_from_a_part(server: Server, stream: bool) -> None:
    """Behind blended documents: in an order that the tree has not grown yet."""
    texts = [*TEXTS.values()][::-1]
    messages = [{"role": "user", "content": "\n\n".join([*texts[stream:], "When was Alpha2 founded?"])}]
    body = {"evidence": True, "kv_budget": 128}
    answer = server.ask(messages=messages, stream=stream, max_tokens=16, ignore_eos=True, blendrag=body)
    said = [line for line in answer.text.splitlines() if '"kv_kept"' in line][-1].removeprefix("data: ")
    evidence = json.loads(said)["blendrag"]
    assert evidence["kv_whole"] == "" and evidence["kv_freed"] > 10
    assert 64 <= evidence["kv_kept"] <= 128
