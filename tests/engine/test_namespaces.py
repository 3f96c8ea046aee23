"""Two namespaces on one engine: neither reads the other's KV, nor sees from the time whether it is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.generation import Sampling
from blendrag.settings import Settings
from workbench import FIRST, Bench, files

pytestmark = pytest.mark.engine

QUESTION = "What is described here?"


def test_plain_prompt_is_answered_from_its_own_namespaces_prefix_cache_only(bench: Bench) -> None:
    bench.reset()
    ids = bench.prompt(bench.pieces[:5]).token_ids
    found = {
        (namespace, time): bench.engine.generate(ids, FIRST, None, namespace).prefix_tokens
        for time in (1, 2)
        for namespace in ("", "a", "b")
    }
    assert [found[namespace, 1] for namespace in ("", "a", "b")] == [0, 0, 0]
    assert all(found[namespace, 2] for namespace in ("", "a", "b")), "the test could not tell"


def test_blended_prompt_is_answered_from_its_own_namespaces_prefix_cache_only(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    bench.reset()
    for namespace in ("a", "b"):
        delta = bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt), namespace)
        assert delta.report and delta.report.cached, "taken from the prefix cache"


def test_index_of_a_namespace_uses_its_own_kv(open_index: Any, bench: Bench, folder: Path) -> None:
    indexes = [open_index(name, namespace=name) for name in ("a", "b")]
    assert indexes[0].start() is indexes[1].start() is bench.engine
    for index in indexes:
        index.ingest(folder)
    mine, theirs = map(files, indexes)
    assert mine and len(mine) == len(theirs) and not mine & theirs
    bench.reset()
    for blend in (False, True):
        answers = [index.ask(QUESTION, blend=blend) for index in indexes]
        assert answers[0].evidence.prompt == answers[1].evidence.prompt
        assert [answer.evidence.prefix for answer in answers] == [0, 0]
        assert [bool(answer.evidence.reused) for answer in answers] == [blend, blend]
    assert indexes[0].ask(QUESTION, blend=False).evidence.prefix, "the test could not tell"


@pytest.fixture
def chats(engine_options: dict[str, Any], bench: Bench, tmp_path: Path) -> Iterator[list[Chat]]:
    made = [Chat(Settings.load(**engine_options, namespace=name), tmp_path / name) for name in ("a", "b")]
    yield made
    for chat in made:
        chat.close()


def test_chat_of_a_namespace_sees_only_what_it_has_asked(
    chats: list[Chat], bench: Bench, texts: list[str]
) -> None:
    bench.reset()
    request = ChatRequest([{"role": "user", "content": "\n".join(texts[:3])}], Sampling(max_tokens=1))
    assert [chat.complete(request).usage.cache_read for chat in chats] == [0, 0]
    assert all(chat.complete(request).usage.cache_read for chat in chats), "the test could not tell"
