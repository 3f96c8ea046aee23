"""An index whose KV servers keep and whose questions a server answers, over real connections; the servers are
scripted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blendrag import Document, RemoteChat
from blendrag.cli.app import app
from blendrag.errors import ConfigError, PromptTooLongError, ServerNotFoundError, StoreError, StoreFullError
from blendrag.index.served import ServedIndex
from blendrag.remote import collection
from keeping_server import Keeping
from places import free_port
from scripted_server import EVIDENCE, scripted

SKY, SEA = "The sky is blue because of scattering.", "The sea is salty because of rivers."


@pytest.fixture
def servers() -> Iterator[list[Keeping]]:
    with ExitStack() as stack:
        yield [Keeping(stack.enter_context(scripted())) for _ in range(2)]


def opened(root: Path, *servers: Keeping, **settings: Any) -> ServedIndex:
    return ServedIndex(root, [RemoteChat(server.url, **settings) for server in servers])


def test_server_is_told_once(servers: list[Keeping], tmp_path: Path) -> None:
    first, second = servers
    documents = [Document(f"{SKY}\n{SEA}", "both"), Document("Nothing.", "nothing")]
    with opened(tmp_path, first) as index:
        assert index.ingest(documents).added == 2
        assert first.texts == sorted([SKY, SEA, "Nothing."])
        assert index.ingest(documents).chunks == 0
        assert len(first.puts) == 1
    with opened(tmp_path, first, second) as index:  # another replica, later
        index.ingest(documents)
        assert second.texts == first.texts
        assert len(first.puts) == 1
        index.ingest([Document(f"New.\n{SEA}", "both")])
    assert first.texts == second.texts == sorted(["New.", SEA, "Nothing."])


def test_server_forgets_rows_that_a_list_no_longer_has(servers: list[Keeping], tmp_path: Path) -> None:
    with opened(tmp_path, servers[0]) as index:
        index.ingest([Document(text, "rows") for text in (SKY, SEA, "Nothing.")])
        assert index.ingest([Document(text, "rows") for text in ("New.", SKY)]).removed == 1
    assert servers[0].texts == ["New.", SKY]


def test_what_an_older_reader_read_is_replaced_once(servers: list[Keeping], tmp_path: Path) -> None:
    folder, root = tmp_path / "handbook", tmp_path / "index"
    folder.mkdir()
    markdown, same = folder / "rules.md", folder / "same.txt"
    markdown.write_text("1. close\n2. drain")
    same.write_text(SKY)
    with opened(root, servers[0]) as index:
        index.ingest(
            [Document("close\ndrain", str(markdown)), Document(SKY, str(same)), Document(SEA, "sea")]
        )
    with closing(sqlite3.connect(root / "ledger.sqlite")) as db:  # as the version before left it
        db.execute("ALTER TABLE documents DROP COLUMN reader")
    with opened(root, servers[0]) as index:
        report = index.ingest([folder, Document("New.", "sea")])
        assert (report.added, report.changed, report.reread, report.unchanged) == (0, 2, 1, 1)
        assert servers[0].texts == sorted(["1. close", "2. drain", SKY, "New."])
        assert sorted(hit.text for hit in index._vectors.rows()) == servers[0].texts
        markdown.write_text("3. wait")
        again = index.ingest(folder)
        assert (again.changed, again.reread, again.unchanged) == (1, 0, 1)


def test_failed_ingest_is_taken_up(servers: list[Keeping], tmp_path: Path) -> None:
    first, second = servers
    second.full = True
    with opened(tmp_path, first, second) as index:
        with pytest.raises(StoreFullError, match="full"):
            index.ingest([Document(SKY, "sky")])
        second.full = False
        index.ingest([Document(SKY, "sky")])
    assert second.texts == first.texts == [SKY]


def test_server_that_is_down_keeps_no_other_from_being_told(servers: list[Keeping], tmp_path: Path) -> None:
    first, last = servers
    down = f"http://localhost:{free_port()}"
    chats = [RemoteChat(url) for url in (first.url, down, last.url)]
    with ServedIndex(tmp_path, chats) as index, pytest.raises(ServerNotFoundError, match=down):
        index.ingest([Document(SKY, "sky")])
    assert first.texts == last.texts == [SKY]


def test_requests_do_not_grow_with_the_index(
    servers: list[Keeping], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_AT_ONCE", 40)
    lines = [f"Line {number} of a document." for number in range(6)]
    with opened(tmp_path, servers[0]) as index:
        index.ingest([Document("\n".join(lines), "long"), Document(SKY, "sky")])
    assert servers[0].texts == sorted([*lines, SKY])
    puts = [[id.partition("-")[0] for id in put] for put in servers[0].puts]
    assert all(len(put) <= 3 for put in puts)
    # What a text is prefilled behind is in its request.
    of_long = [put for put in puts if "long" in put[0]]
    assert all(before[-1] == after[0] for before, after in pairwise(of_long))


def test_question_is_asked_with_what_was_found(servers: list[Keeping], tmp_path: Path) -> None:
    with opened(tmp_path, servers[0], similarity_top_k=1, system_prompt="Be brief.") as index:
        index.ingest([Document(SKY, "sky"), Document(SEA, "sea")])
        answer = index.ask("Why is the sea salty?", max_tokens=5)
        assert (answer.text, answer.evidence.reused) == ("Because.", EVIDENCE["reused"])
        assert [(one.source, one.text) for one in answer.sources] == [("sea", SEA)]
        system, user = servers[0].asked()["messages"]
        assert system["content"] == "Be brief."
        assert user["content"] == f"{SEA}\n\nWhy is the sea salty?"
        assert servers[0].asked()["blendrag"]["documents"] == [SEA]
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        assert list(index.stream("Why is the sea salty?", history=history)) == ["Because."]
        assert [one["role"] for one in servers[0].asked()["messages"]][1:3] == ["user", "assistant"]
        assert index.explain("Why?") == [{"kind": "cached"}]
        with pytest.raises(ConfigError, match="did you mean"):
            index.ask("Why?", temprature=1)  # type: ignore[call-arg]


def test_documents_that_do_not_fit_are_left_out(servers: list[Keeping], tmp_path: Path) -> None:
    with opened(tmp_path, servers[0]) as index:
        index.ingest([Document(SKY, "sky"), Document(SEA, "sea")])
        servers[0].room = 80
        assert len(index.ask("Why is the sea salty?").sources) == 1
        servers[0].room = 10
        with pytest.raises(PromptTooLongError, match="512 tokens"):
            index.ask("Why is the sea salty?")


def test_chunks_of_an_index_are_not_replaced(servers: list[Keeping], tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").touch()
    with opened(tmp_path, servers[0]) as index, pytest.raises(StoreError, match="KV of its own"):
        index.ingest([Document(SKY, "sky")])


def test_commands_reach_the_server(servers: list[Keeping], tmp_path: Path) -> None:
    (tmp_path / "sky.txt").write_text(SKY)
    index = str(tmp_path / "index")
    first, second = (server.url for server in servers)

    def run(*words: str, key: str = "s3cret", **more: Any) -> Any:
        return CliRunner(env={"BLENDRAG__API_KEY": key}).invoke(app, [*words, "--index", index], **more)

    assert run("ask", "Why?", "--server", first).exit_code == 1  # no index
    done = run("ingest", str(tmp_path / "sky.txt"), "-s", first, "-s", second)
    assert done.exit_code == 0, done.output
    assert "1 documents added" in done.stdout
    assert servers[0].texts == servers[1].texts == [SKY]
    asked = run("ask", "Why is the sky blue?", "--server", first)
    assert asked.stdout.startswith("Because.\n") and "4 tokens reused" in asked.stdout, asked.output
    told = json.loads(run("ask", "Why?", "--server", first, "--json", "--ratio", "0.5").stdout)
    assert told["evidence"]["reused"] == EVIDENCE["reused"]
    assert servers[0].asked()["blendrag"]["recompute_ratio"] == 0.5
    assert run("ask", "--server", first, input="Why?\nAnd?\n").stdout.count("Because.") == 2
    assert len(servers[0].asked()["messages"]) == 4
    traced = run("ask", "Why?", "--server", first, "--trace", str(tmp_path / "t.json"))
    assert traced.exit_code == 0 and "no trace: nothing was loaded" in traced.stderr
    assert servers[0].asked()["blendrag"]["trace"] is True
    nobody = run("ask", "Why?", "--server", "http://127.0.0.1:1")
    assert nobody.exit_code == 1 and nobody.stderr.startswith("error: no server answers")
    assert set(servers[0].script.keys) == {"Bearer s3cret"}
    assert "s3cret" not in done.output + asked.output + run("ask", "--help").output
