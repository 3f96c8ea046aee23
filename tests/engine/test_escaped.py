"""A document that prompts hold escaped is reused so from the second prompt on, and leaves with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag import Chat, Settings
from workbench import Bench

pytestmark = pytest.mark.engine

DOCUMENTS = {
    name: f"The handbook's chapter {name}\n\n" + "".join(
        f"{at}. \"{what}\" is read by the {name} team & nobody else, once in {at + 2} weeks.\n"
        for at, what in enumerate(("Minutes", "The log", "Any report", "The plan", "A letter", "The list"))
    ).strip()
    for name in ("first", "second", "third")
}  # fmt: skip


@pytest.fixture
def chat(engine_options: dict[str, Any], bench: Bench, tmp_path: Path) -> Iterator[Chat]:
    opened = Chat(Settings.load(**engine_options, min_cached_tokens=16), tmp_path / "kv")
    yield opened
    opened.close()


def asked(chat: Chat, question: str) -> Any:
    answer = json.dumps([{"content": text, "score": 0.5} for text in DOCUMENTS.values()])
    messages = [{"role": "user", "content": f"The tool says: {answer}\n\n{question}"}]
    return chat.complete(chat.request(messages, max_tokens=4)).evidence


def test_json_is_reused_from_the_second_prompt_on_and_not_when_its_document_has_gone(
    chat: Chat, bench: Bench
) -> None:
    collection = chat.collection("handbook")
    collection.add(DOCUMENTS)
    first = asked(chat, "Who reads the log?")
    told = [row["reason"] for row in first.documents if row["reason"]]
    assert first.reused == 0 and len(told) == 3 and all("from the next prompt on" in one for one in told)
    chat.library.session.settle()

    second = asked(chat, "Who reads the plan?")
    cached = [row for row in second.documents if row["kind"] == "cached"]
    assert second.plain is None and second.missing == {} and len(cached) == len(DOCUMENTS)
    assert second.reused + second.recomputed + second.prefix > 0.9 * sum(row["tokens"] for row in cached)
    collection.add(DOCUMENTS)  # nothing has changed, and the forms stay
    assert len(chat.library.catalogue.known()) == 2 * len(DOCUMENTS)
    collection.remove(["second"])
    assert len(chat.library.catalogue.known()) == 2 * (len(DOCUMENTS) - 1)
    kinds = [row["kind"] for row in asked(chat, "Who reads a letter?").documents]
    assert kinds.count("cached") == 2
