from __future__ import annotations

import copy
import html
import json
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from blendrag.errors import BlendragWarning
from blendrag.prompt import Recogniser, encode_document, escaped, plan_chat, render_chat
from blendrag.prompt.escaped import find_escaped

TEXTS = {
    "d1.md": "Battery warranty\n\nThe battery is covered for eight years or 160,000 km, whichever comes "
    "first; it is replaced when less than 70 % of the capacity is left.",
    "d2.md": 'The dealer\'s "mobility" guarantee:\n\ttowing & a hire car < 48 hours, café breakfast '
    "included.\\",
    "d3.md": "Tyres are not part of any warranty, and neither are brake pads, wiper blades or light bulbs.",
    "d4.md": 'Research & Development says: keep the charge > 20 % and < 80 %, and "never" charge it when '
    "below −10 °C.",
}


class Document:
    """Written as langchain_core's Document is."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def __repr__(self) -> str:
        metadata = {"source": f"{self.name}.md"}
        return f"Document(id={self.name!r}, metadata={metadata!r}, page_content={self.text!r})"


@pytest.fixture
def known(tokenizer: Any) -> Recogniser:
    recogniser = Recogniser(tokenizer, min_tokens=8)
    for source, text in TEXTS.items():
        recogniser.add(source[:2], text, encode_document(tokenizer, text), source)
    return recogniser


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(escaped, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BlendragWarning)
        yield


def as_langchain_list(texts: dict[str, str]) -> str:
    documents = [Document(source[:2], text) for source, text in texts.items()]
    return f"Answer the question based only on the following context:\n{documents}\n\nQuestion: How long?\n"


def as_simple_summarize(texts: dict[str, str]) -> str:
    stuffed = "\n".join(f"file_name: {source}\npage: 3\n\n{text}" for source, text in texts.items())
    return (
        f"Context information is below.\n---------------------\n{[stuffed]}\n---------------------\n"
        "Given the context information and not prior knowledge, answer the query.\nQuery: How long?\nAnswer: "
    )


def as_json(texts: dict[str, str]) -> str:
    return json.dumps([{"source": source, "text": text} for source, text in texts.items()])


def as_mustache(texts: dict[str, str]) -> str:
    stuffed = "\n\n".join(texts.values())
    for sign, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        stuffed = stuffed.replace(sign, entity)
    return f"Context: {stuffed}\nQ: How long?"


@pytest.mark.parametrize("shape", [as_langchain_list, as_simple_summarize, as_json])
def test_documents_in_a_list_that_became_a_string_are_reported(shape: Any, known: Recogniser) -> None:
    found = {document.source: document for document in find_escaped(shape(TEXTS), known)}
    multi_line = {"d1.md", "d2.md"} | ({"d4.md"} if shape is as_json else set())  # JSON escapes every quote
    assert found.keys() == multi_line, "d3 is in the prompt as it is, and needs no remedy"
    assert {document.how for document in found.values()} == {"repr"}
    assert "format_docs" in found["d1.md"].remedy and 'response_mode="compact"' in found["d1.md"].remedy


@pytest.mark.parametrize("shape", [as_mustache, lambda texts: html.escape("\n".join(texts.values()))])
def test_html_escaped_documents_are_reported(shape: Any, known: Recogniser) -> None:
    found = {document.source: document for document in find_escaped(shape(TEXTS), known)}
    assert found.keys() == {"d2.md", "d4.md"}
    assert {document.how for document in found.values()} == {"html"}
    assert "{{{context}}}" in found["d2.md"].remedy


def test_document_that_is_in_the_prompt_as_well_is_not_reported(known: Recogniser) -> None:
    stuffed = "\n\n".join(TEXTS.values())
    assert find_escaped(stuffed + r"\n\t&amp;", known) == []
    assert find_escaped(stuffed + as_json(TEXTS) + as_mustache(TEXTS), known) == []


def test_plan_notes_the_remedy_and_keeps_the_prompt(known: Recogniser, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": as_langchain_list(TEXTS)}]
    plan = plan_chat(messages, tokenizer, known, [TEXTS["d2.md"], "d1"])
    assert plan.text == render_chat(tokenizer, messages)
    notes = {note.source: note for note in plan.notes}
    assert len(notes) == len(plan.notes), "a hint that is noted once is not noted again"
    assert notes["d3.md"].found and notes["d3.md"].reason == "found"
    assert not notes["d2.md"].found and notes["d2.md"].reused == 0
    assert notes["d2.md"].reason.startswith("its text is in the prompt only as part of a list")
    assert notes["d2.md"].tokens == len(encode_document(tokenizer, TEXTS["d2.md"]))


def test_document_found_up_to_its_first_escape_is_noted_once(known: Recogniser, tokenizer: Any) -> None:
    long_first_line = TEXTS["d3.md"] + "\nThe second line is escaped, and so are all that follow it."
    known.add("d5", long_first_line, encode_document(tokenizer, long_first_line), "d5.md")
    known.remove("d3")
    plan = plan_chat([{"role": "user", "content": repr([long_first_line])}], tokenizer, known)
    (note,) = plan.notes
    assert note.found and 0 < note.reused < note.tokens
    assert note.reason.startswith("found in part") and "; the rest is in the prompt only as" in note.reason


def test_document_that_another_message_holds_whole_is_not_called_escaped(
    known: Recogniser, tokenizer: Any
) -> None:
    messages = [
        {"role": "system", "content": TEXTS["d1.md"]},
        {"role": "user", "content": repr([TEXTS["d1.md"]])},
    ]
    assert [note.reason for note in plan_chat(messages, tokenizer, known).notes] == ["found"]


def test_each_kind_of_escape_does_not_warn_twice(known: Recogniser, tokenizer: Any) -> None:
    def ask(content: str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan_chat([{"role": "user", "content": content}], tokenizer, known)
        return [str(each.message) for each in caught if issubclass(each.category, BlendragWarning)]

    (first,) = ask(as_langchain_list(TEXTS))
    assert first.startswith("d1.md was not recognised") and "format_docs" in first
    (second,) = ask(as_mustache(TEXTS))
    assert "{{{context}}}" in second
    assert ask(as_simple_summarize(TEXTS)) == ask(as_mustache(TEXTS)) == []


pieces = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\\", "'", '"', "[", "\\x", "\\U0011ffff", "\\u12", "&", "&#", "&amp", "&amp;amp;"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(pieces).map("".join), st.lists(pieces).map("".join), st.booleans())
@example("\ud800\\ud800", "&#" + 5000 * "9" + ";", True)
def test_hostile_text_never_raises_and_never_hides_a_document(
    known: Recogniser, before: str, after: str, as_repr: bool
) -> None:
    text = TEXTS["d2.md"]
    hidden = repr(text)[1:-1] if as_repr else html.escape(text)
    (found,) = find_escaped(f"{before} |{hidden}| {after}", known)
    assert (found.source, found.how) == ("d2.md", "repr" if as_repr else "html")


@given(st.text())
def test_repr_is_never_undone_wrongly(text: str) -> None:
    for how, unescaped in escaped._unescaped(f"[{text!r}]"):
        if how == "repr":
            quote = repr(text)[0]
            assert unescaped == f"[{quote}{text}{quote}]"


@pytest.mark.parametrize("unit", ["\\", "\\'", "\\U0010", "&", "&amp;", "['", "&#9"])
def test_time_does_not_grow_faster_than_the_prompt(unit: str, known: Recogniser) -> None:
    def took(size: int) -> float:
        begin = time.perf_counter()
        assert find_escaped((unit * size)[:size], known) == []
        return time.perf_counter() - begin

    small, large = (min(took(size) for _ in range(3)) for size in (50_000, 1_000_000))
    assert large < 100 * small + 0.1  # 20 times as much text


def test_prompt_without_marks_is_not_searched_twice(known: Recogniser, monkeypatch: Any) -> None:
    def find(*_: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(known, "find", find)
    assert find_escaped("An ordinary prompt, R&D & C:\\Users and all. " * 300, known) == []
    with pytest.raises(AssertionError):
        find_escaped("&amp;", known)


def test_a_chat_template_that_escapes_is_named(tokenizer: Any, known: Recogniser) -> None:
    """What the caller joined well is escaped behind its back: to join it again would not help."""
    template = copy.copy(tokenizer)
    template.chat_template = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content | tojson if m.role == 'tool' else m.content }}\n{% endfor %}"
    )
    found = "\n\n".join(TEXTS.values())
    plan = plan_chat([{"role": "user", "content": "?"}, {"role": "tool", "content": found}], template, known)
    reasons = {note.reason for note in plan.notes if not note.reused}
    assert reasons and all("chat template" in reason for reason in reasons)
    listed = plan_chat([{"role": "user", "content": as_langchain_list(TEXTS)}], template, known)
    assert any("format_docs" in note.reason for note in listed.notes)
