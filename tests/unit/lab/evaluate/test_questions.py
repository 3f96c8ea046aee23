"""From the public sets, and from users' own files, to questions."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import ConfigError, SourceError
from blendrag.lab.evaluate.formats import FORMATS, Question, find_format, read_questions, read_records
from blendrag.lab.evaluate.measure import cut
from blendrag.prompt import encode_document
from places import DOCS, public

FILES = {  # the whole sets or parts of them, gzipped or not
    "musique": "musique_s*.json*",
    "hotpot": "hotpot_distractor*.json*",
    "squad": "squad_dev_v1.1*.json*",
    "squadsplit": "squad_dev_v1.1*.json*",
    "xquad": "xquad_zh*.json*",
    "kv": "kv_retrieval_75*.jsonl*",
}
# Of the answers of each set, at least so many occur in the documents; MuSiQue's text was tokenised before.
ANSWERED = {"musique": 0.8, "hotpot": 0.85}


def data(name: str) -> Path:
    return public(f"qa/{FILES[name.partition(':')[0]]}")


@cache
def read(name: str, limit: int | None = 40, seed: int = 0) -> list[Question]:
    return read_questions(data(name), find_format(name), limit, seed)


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


OWN = {"question": "Who?", "answer": "Ada", "documents": ["Ada was here.", {"title": "B", "text": "b"}]}


# -- the public sets -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_answer_that_no_document_has_is_not_asked_for(name: str) -> None:
    rows = read(name)
    found = [any(answer.lower() in " ".join(row.documents).lower() for answer in row.answers) for row in rows]
    decided = [bool(row.choices) for row in rows]
    assert sum(map(max, found, decided)) >= ANSWERED.get(name, 1.0) * len(rows)


@pytest.mark.parametrize("name", FILES)
def test_same_seed_gives_the_same_rows(name: str) -> None:
    rows = read(name)
    assert rows[:7] == read_questions(data(name), find_format(name), 7)
    assert rows != read(name, seed=1)


@pytest.mark.parametrize(
    ("name", "documents"),
    [("musique", 10), ("hotpot", 10), ("squad", 6), ("squadsplit", 4), ("xquad", 5), ("kv", 12),
     ("kv:3", 3), ("squad:9", 9)],
)  # fmt: skip
def test_prompt_has_the_stated_number_of_documents(name: str, documents: int) -> None:
    rows = read(name)
    assert {len(row.documents) for row in rows} == {documents}
    if name != "musique":  # its contexts overlap
        assert all(len(set(row.documents)) == documents for row in rows)


def test_few_articles_do_not_make_up_the_sample() -> None:
    articles = {
        question["id"]: article["title"]
        for _, article in read_records(data("squad"))
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }
    count = len(set(articles.values()))
    counts = Counter(articles[row.id] for row in read("squadsplit", 2 * count))
    assert set(counts.values()) == {2}
    assert len(counts) == count > 1


def test_answer_is_not_always_in_the_same_place() -> None:
    for name in ("squadsplit", "kv:4"):
        texts = [(row.answers[0], row.documents) for row in read(name)]
        places = {next(n for n in range(4) if answer in documents[n]) for answer, documents in texts}
        assert places == {0, 1, 2, 3}


def test_only_squadsplit_is_cut() -> None:
    assert {name: format.cut for name, format in FORMATS.items() if format.cut} == {"squadsplit": 48}


def test_musique_is_not_asked_for_long_answers() -> None:
    assert all(row.text.endswith("? Answer within 5 words.") for row in read("musique"))


def test_yes_or_no_question_keeps_its_choices() -> None:
    decided = {row.answers[0]: row.choices for row in read("hotpot")}
    assert decided["yes"] == decided["no"] == ("yes", "no")
    assert sum(map(bool, decided.values())) == 2


@pytest.mark.parametrize(
    ("name", "other", "fits"),
    [
        ("kv", "squad", "squad or squadsplit or xquad"),
        ("hotpot", "musique", "musique"),
        ("jsonl", "kv", "kv"),
        ("squad", "hotpot", "hotpot or musique"),
    ],
)
def test_file_in_another_format_is_told_which(name: str, other: str, fits: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_questions(data(other), find_format(name))
    message = str(caught.value)
    assert f"is not in the format {name}" in message
    assert set(message.partition("it fits --format ")[2].split(" or ")) == set(fits.split(" or "))


# -- as their publishers write them ----------------------------------------------------------------


def test_published_hotpot_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.json"
    record = {
        "_id": "5a", "type": "comparison", "question": "Which?", "answer": "A",
        "supporting_facts": [["T", 0]], "context": [["T", ["One. ", "Two."]], ["U", ["Three."]]],
    }  # fmt: skip
    path.write_text(json.dumps([record], indent=1))
    row = Question("5a", "Which?", ("A",), ("T\nOne. Two.", "U\nThree."))
    assert read_questions(path, find_format("hotpot")) == [row]


def test_published_musique_is_read(tmp_path: Path) -> None:
    record = {
        "id": "2hop__1", "question": "Which?", "answer": "A", "answer_aliases": ["a"], "answerable": True,
        "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "One.", "is_supporting": True}],
    }  # fmt: skip
    path = write(tmp_path / "musique.jsonl", record, record | {"id": "2", "answerable": False})
    row = Question("2hop__1", "Which? Answer within 5 words.", ("A", "a"), ("T\nOne.",))
    assert read_questions(path, find_format("musique")) == [row]


@pytest.mark.parametrize("indent", [None, 2])
def test_published_squad_is_read(tmp_path: Path, indent: int | None) -> None:
    answers = [{"text": "A", "answer_start": 0}, {"text": "A", "answer_start": 0}]
    questions = [
        {"id": "1", "question": "Q?", "answers": answers},
        {"id": "2", "question": "Unanswerable?", "answers": [], "is_impossible": True},
    ]
    paragraphs = [{"context": "Before.", "qas": []}, {"context": "A b.", "qas": questions}]
    article = {"title": "T", "paragraphs": paragraphs}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [article]}, indent=indent))
    (row,) = read_questions(path, find_format("squad"))
    assert (row.id, row.text, row.answers) == ("1", "Q?", ("A",))
    assert dict(zip(row.documents, row.before, strict=True)) == {"Before.": "", "A b.": "Before."}


# -- the user's own --------------------------------------------------------------------------------


def test_own_file_is_read_in_all_its_variants(tmp_path: Path) -> None:
    other = {"id": 7, "question": "是吗?", "answers": ["是", "对"], "documents": ["是的。"]}
    other["choices"] = ["是", "否"]
    path = write(tmp_path / "mine.jsonl", OWN, other)
    rows = read_questions(path, find_format("jsonl"))
    assert set(rows) == {
        Question("1", "Who?", ("Ada",), ("Ada was here.", "B\nb")),
        Question("7", "是吗?", ("是", "对"), ("是的。",), ("是", "否")),
    }
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_questions(packed, find_format("jsonl")) == rows


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"documents": []}, "documents: Tuple should have at least 1 item"),
        ({"documents": ["  "]}, "documents.0: Value error, is blank"),
        ({"documents": [{"body": "x"}]}, "documents.0: Input should be a valid string"),
        ({"question": None}, "question: Input should be a valid string"),
        ({"answer": []}, "answer"),
    ],
)
def test_unusable_line_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "mine.jsonl", OWN, OWN | change)
    with pytest.raises(SourceError, match=f"mine.jsonl', line 2, is not in the format jsonl: .*{told}"):
        read_questions(path, find_format("jsonl"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: not JSON"),
        (b'{"question": "?"}\n\n{"quest', "line 3: not JSON"),
        (b"[{},\n 1,]", "line 2: not JSON"),
        (b"[" * 700 + b"]" * 700, "line 1: not JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "line 1: not JSON"),
        (b'"text"', "neither a list nor lines"),
        (b"[]", "no question with an answer"),
        (gzip.compress(b"[]", mtime=0)[:-9], "cannot read"),
        (bytes(range(256)) * 9, "cannot read"),
    ],
)
def test_file_without_records_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=told) as caught:
        read_questions(path, find_format("jsonl"))
    assert "mine.jsonl" in str(caught.value)


def test_half_of_a_surrogate_pair_is_replaced_before_a_tokenizer_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(OWN | {"question": "Who is \ud83d?"}))
    (row,) = read_questions(path, find_format("jsonl"))
    assert row.text == "Who is \ufffd?"


def test_two_rows_of_one_id_are_not_taken_for_one(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", OWN | {"id": "a"}, OWN | {"id": "a"})
    with pytest.raises(SourceError, match="two questions have the id 'a'"):
        read_questions(path, find_format("jsonl"))


@pytest.mark.parametrize("name", ["sqad", "musique:4", "jsonl:2", "kv:0", "kv:", "kv:x", "kv:-1"])
def test_format_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown format|format '"):
        find_format(name)


def test_example_of_the_documentation_is_taken(tmp_path: Path) -> None:
    page = (DOCS / "evaluation.md").read_text()
    (tmp_path / "mine.jsonl").write_text(page.partition("```jsonl\n")[2].partition("```")[0])
    rows = {row.id: row for row in read_questions(tmp_path / "mine.jsonl", find_format("jsonl"))}
    assert rows["visa-2"].choices == ("yes", "no")
    assert rows["1"].documents[1].startswith("Offices\n")


@pytest.mark.parametrize(("name", "tokens"), [("squadsplit", 48), ("jsonl", 16)])
def test_documents_are_cut_as_the_format_says(tokenizer: Any, name: str, tokens: int) -> None:
    question = Question("1", "Who?", ("her",), ("It was her. " * 40, "Short."))
    whole, short = cut(tokenizer, question, find_format(name), 16)
    assert [len(piece) for piece in whole[:-1]] == [tokens] * (len(whole) - 1) and len(short) == 1
    assert tuple(i for piece in whole for i in piece) == encode_document(tokenizer, question.documents[0])
