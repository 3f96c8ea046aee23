"""Asking an index: what is answered adds up, whichever way it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from blendrag import Answer, BlendIndex, Document, Evidence
from blendrag.errors import PromptTooLongError
from workbench import Bench, assert_adds_up, assert_consistent

pytestmark = pytest.mark.engine

QUESTION = "What is the package for?"
Open = Callable[..., BlendIndex]


# -- questions --------------------------------------------------------------------------------------------


@pytest.fixture
def filled(open_index: Open, folder: Path) -> BlendIndex:
    index = open_index()
    index.ingest(folder)
    return index


def test_an_answers_evidence_adds_up_blended_cached_and_plain(filled: BlendIndex, bench: Bench) -> None:
    bench.reset()
    blended = filled.ask(QUESTION)
    assert blended.text and len(blended.sources) == 4
    assert blended.evidence.plain is None and blended.evidence.missing == {}
    assert blended.evidence.reused > blended.evidence.recomputed > 0
    assert_adds_up(blended)

    again = filled.ask(QUESTION)
    assert again.evidence.prefix > 0
    assert_adds_up(again)

    bench.reset()
    plain = filled.ask(QUESTION, blend=False)
    assert plain.evidence.plain and plain.evidence.fresh == plain.evidence.prompt
    assert_adds_up(plain)


def test_every_way_of_asking_gives_the_same_answer(filled: BlendIndex, bench: Bench) -> None:
    def alone(ask: Callable[[], Answer | None]) -> Answer | None:
        bench.reset()
        return ask()

    def streamed() -> Answer | None:
        stream = filled.stream(QUESTION)
        assert "".join(stream) == getattr(stream.answer, "text", None)
        return stream.answer

    answers = [
        alone(lambda: filled.ask(QUESTION)),
        alone(streamed),
        alone(lambda: asyncio.run(filled.aask(QUESTION))),
    ]
    texts = {answer.text for answer in answers if answer}
    assert len(texts) == 1 and None not in answers


def test_explain_tells_of_every_token_and_agrees_with_the_answer(filled: BlendIndex, bench: Bench) -> None:
    rows = filled.explain(QUESTION)
    bench.reset()
    evidence = filled.ask(QUESTION).evidence
    cached = [row for row in rows if row["kind"] == "cached"]
    assert len(cached) == 4 and all(row["source"].endswith(".txt") for row in cached)
    assert sum(row["tokens"] for row in rows) == evidence.prompt
    assert sum(row["reused"] for row in cached) == evidence.reused + evidence.recomputed


def test_a_damaged_chunk_is_reported_and_repaired_behind_the_answer(
    filled: BlendIndex, open_index: Open, bench: Bench
) -> None:
    hit = filled.retrieve(QUESTION)[0]
    filled.close()
    (file,) = filled.root.glob(f"kv/*/{hit.key}.safetensors")
    record = bytearray(file.read_bytes())
    record[-100] ^= 1
    file.write_bytes(record)
    bench.reset()
    with open_index() as index:
        hurt = index.ask(QUESTION)
        assert hurt.text and hurt.evidence.missing == {hit.key: "damaged"}
        assert_adds_up(hurt)
    bench.reset()
    with open_index() as index:
        assert_consistent(index)
        assert index.ask(QUESTION).evidence.missing == {}


def test_documents_that_do_not_fit_the_window_are_left_out_and_named(filled: BlendIndex) -> None:
    window = filled.start().max_model_len
    question = filled.tokenizer.decode(filled.tokenizer.encode("why? " * window)[: window - 250])
    rows = filled.explain(question)
    inside = [row for row in rows if row["kind"] == "cached"]
    left_out = [row for row in rows if row["kind"] == "not found"]
    assert 0 < len(inside) < 4 and len(inside) + len(left_out) == 4
    assert all("no room" in row["reason"] for row in left_out)
    assert window - 100 < sum(row["tokens"] for row in rows if row["kind"] != "not found") < window


def test_a_prompt_of_ones_own_reuses_the_documents_in_it(
    filled: BlendIndex, texts: list[str], bench: Bench
) -> None:
    def evidence(text: str) -> Evidence:
        bench.reset()
        answer = filled.ask([{"role": "user", "content": f"{text}\n\nIn short?"}])
        assert_adds_up(answer)
        return answer.evidence

    known, unknown = evidence(texts[0]), evidence(texts[6])
    tokens = {entry.key: len(entry.token_ids) for entry in filled._library.catalogue.entries()}
    owned = next(
        keys for source, keys in filled._library.catalogue.owners().items() if source.endswith("0.txt")
    )
    assert known.reused + known.recomputed == sum(tokens[key] for key in owned)
    assert unknown.plain and unknown.reused == 0
    filled.ingest(Document(texts[6], "late"))
    assert evidence(texts[6]).reused > 0
    filled.delete("late")
    assert evidence(texts[6]).reused == 0


def test_a_question_longer_than_the_window_is_refused(filled: BlendIndex) -> None:
    with pytest.raises(PromptTooLongError, match="no room"):
        filled.ask("why? " * 5000)
