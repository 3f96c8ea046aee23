"""What an index is asked, and how often. The engine is stood in for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag import Answer, BlendIndex
from blendrag.engine.client.generation import Delta
from blendrag.errors import ConfigError, EngineClosedError, EngineError, EngineStartError, StoreFullError
from blendrag.index.ingest import IngestReport
from blendrag.index.loaders import Document
from blendrag.index.vectors import VectorStore
from blendrag.progress import SILENT
from engine_facts import FACTS

HELLO = [{"role": "user", "content": "Hello?"}]


class Failing:
    """An engine that dies ``deaths`` times, and then answers."""

    blends, max_model_len, facts = True, 512, FACTS

    def __init__(self) -> None:
        self.deaths, self.asked = 1, 0
        self.error: EngineError = EngineError("it died")

    def stream(self, *request: Any) -> Generator[Delta]:
        self.asked += 1
        if self.asked <= self.deaths:
            raise self.error
        yield Delta("Good ", [1], 0.1)
        yield Delta("day.", [2], 0.1, finish_reason="stop")

    async def astream(self, *request: Any) -> AsyncGenerator[Delta]:
        for delta in self.stream(*request):
            yield delta


@pytest.fixture
def engine() -> Failing:
    return Failing()


@pytest.fixture
def index(
    tmp_path: Path, model_dir: Path, engine: Failing, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlendIndex]:
    with BlendIndex.open(tmp_path / "index", model=str(model_dir)) as opened:
        monkeypatch.setattr(opened._library.session, "start", lambda progress=None: engine)
        yield opened


def streamed(index: BlendIndex) -> Answer | None:
    stream = index.stream(HELLO)
    assert list(stream) == ["Good ", "day."]
    return stream.answer


async def drained(index: BlendIndex) -> Any:
    pieces = [piece async for piece in index.astream(HELLO)]
    assert pieces[:-1] == ["Good ", "day."]
    return pieces[-1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda index: index.ask(HELLO),
        streamed,
        lambda index: asyncio.run(index.aask(HELLO)),
        lambda index: asyncio.run(drained(index)),
    ],
    ids=["ask", "stream", "aask", "astream"],
)
def test_answer_is_given_though_the_engine_died(
    index: BlendIndex, engine: Failing, ask: Callable[[BlendIndex], Any]
) -> None:
    answer = ask(index)
    assert (str(answer), answer.tokens, answer.finish_reason, engine.asked) == ("Good day.", 2, "stop", 2)
    assert answer.to_dict()["tokens"] == 2 and answer.to_dict()["sources"] == ()


def test_failure_is_shown_without_retries_and_at_once_when_it_is_final(
    index: BlendIndex, engine: Failing
) -> None:
    with pytest.raises(EngineError, match="it died"):
        index.ask(HELLO, max_retries=0)
    for final in (EngineClosedError("by the program"), EngineStartError("does not fit")):
        engine.asked, engine.error = 0, final
        with pytest.raises(type(final)):
            index.ask(HELLO)
        assert engine.asked == 1, final


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (
            HELLO,
            {"recompute_ration": 0.3},
            "unknown option 'recompute_ration'; did you mean recompute_ratio?",
        ),
        (HELLO, {"similarity_tpo_k": 3}, "did you mean similarity_top_k?"),
        (HELLO, {"hints": []}, "hints is called documents now"),
        (HELLO, {"mode": "off"}, "mode is called blend now: blend=False"),
        (HELLO, {"blend": "off"}, "blend must be True or False, not 'off'"),
        (HELLO, {"recompute_ratio": 2}, "recompute_ratio must be between 0 and 1, not 2"),
        (" \n", {}, "the question is empty"),
        (5, {}, "a prompt is a text, or messages, not 5"),
    ],
)
def test_wrong_question_is_refused_in_one_line(
    index: BlendIndex, engine: Failing, prompt: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        index.ask(prompt, **options)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert engine.asked == 0


@pytest.mark.parametrize("wanted", [0, -1, 2.5, "2"])
def test_number_of_chunks_that_cannot_be_is_not_taken_for_an_empty_index(
    index: BlendIndex, wanted: Any
) -> None:
    with pytest.raises(ConfigError, match="similarity_top_k has to be"):
        index.retrieve("Where?", wanted)
    with pytest.raises(ConfigError, match="similarity_top_k has to be"):
        index.ask("Where?", similarity_top_k=wanted)


def test_question_shows_tools_schema_and_earlier_calls_to_the_model(index: BlendIndex) -> None:
    index._pipeline().take([Document("Lunch is at noon.", "lunch")], IngestReport(), SILENT)
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    call = {"id": "a", "type": "function", "function": {"name": "menu", "arguments": '{"day": "Friday"}'}}
    history = [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Soup.", "tool_call_id": "a"},
    ]
    schema = {"type": "object", "properties": {"hour": {"type": "integer"}}}
    request = index._request("When is lunch?", {"tools": [tool], "schema": schema, "history": history})
    assert request.plan and len(request.plan.cached_keys) == 1
    for shown in ("clock", "hour", "menu", "Friday", "Soup.", "Lunch is at noon.", "When is lunch?"):
        assert shown in request.plan.text


def test_index_without_a_name_does_not_fill_the_folder_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no name"):
        BlendIndex.open("")
    assert not [*tmp_path.iterdir()]


def test_closed_index_says_so_to_whoever_asks(index: BlendIndex) -> None:
    """A stream that is read behind the ``with`` retrieves only then."""
    index._pipeline().take([Document("Lunch is at noon.", "lunch")], IngestReport(), SILENT)
    begun = index.stream("When is lunch?")
    index.close()
    for ask in (lambda: list(begun), lambda: index.ask("When?"), lambda: index.retrieve("When?")):
        with pytest.raises(EngineClosedError, match="was closed: open it again"):
            ask()


@pytest.mark.parametrize("how", ["its vectors are not stored", "an old catalogue is taken back"])
def test_document_in_doubt_is_answered_from_and_done_again(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As after a killed ingest, or a full disk; and after what is done about a damaged catalogue."""
    old, new = Document("Lunch is at noon.", "lunch"), Document("Lunch is at one.", "lunch")

    def refused(*_: object) -> None:
        raise StoreFullError("no room")

    root = tmp_path / "index"
    with BlendIndex.open(root, model=str(model_dir)) as index:
        index._pipeline().take([old], IngestReport(), SILENT)
        if how.startswith("its vectors"):
            with monkeypatch.context() as patch, pytest.raises(StoreFullError):
                patch.setattr(VectorStore, "put", refused)
                index._pipeline().take([new], IngestReport(), SILENT)
    if how.startswith("an old"):
        for file in root.glob("catalogue.sqlite*"):
            file.unlink()
    with BlendIndex.open(root, model=str(model_dir)) as index:
        monkeypatch.setattr(index._library.session, "start", lambda progress=None: Failing())
        plan = index._request("When is lunch?", {}).plan
        assert plan and "Lunch is at noon." in [segment.text for segment in plan.segments]
        report = IngestReport()
        index._pipeline().take([new if how.startswith("its") else old], report, SILENT)
        assert (report.changed, report.unchanged) == (1, 0)
        (row,) = index._vectors.rows()
        assert index._library.catalogue.known() == {row.key}
