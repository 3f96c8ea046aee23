from __future__ import annotations

import html
import json
import textwrap
import time
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from blendrag.prompt import Form, Recogniser, encode_document, escaped, plan_chat, render_chat
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


def as_simple_summarize(texts: dict[str, str]) -> str:
    stuffed = "\n".join(f"file_name: {source}\npage: 3\n\n{text}" for source, text in texts.items())
    return f"Context information is below.\n-----\n{[stuffed]}\n-----\nQuery: How long?\nAnswer: "


def as_json(texts: dict[str, str]) -> str:
    return json.dumps([{"source": source, "text": text} for source, text in texts.items()])


def as_mustache(texts: dict[str, str]) -> str:
    stuffed = "\n\n".join(texts.values())
    for sign, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        stuffed = stuffed.replace(sign, entity)
    return f"Context: {stuffed}\nQ: How long?"


def as_handlebars(texts: dict[str, str]) -> str:
    escaped = html.escape("\n".join(texts.values()))
    return escaped.replace("=", "&#x3D;").replace("/", "&#x2F;").replace("'", "&#39;").replace("`", "&#x60;")


def as_xml(texts: dict[str, str]) -> str:
    """With numbers for all signs beyond ASCII."""
    documents = ElementTree.Element("documents")
    for source, text in texts.items():
        ElementTree.SubElement(documents, "document", title=text, source=source)
    return ElementTree.tostring(documents).decode()


def joined(texts: dict[str, str], separator: str = "\n") -> str:
    return separator.join(texts.values())


SHAPES: dict[str, Callable[[dict[str, str]], str]] = {
    "LangChain's list": lambda texts: f"Context:\n{[Document(key[:2], texts[key]) for key in texts]}\nHow?\n",
    "simple_summarize": as_simple_summarize,
    "JSON": as_json,
    "JSON, Unicode": lambda texts: json.dumps(list(texts.values()), ensure_ascii=False),
    "JSON in JSON, as templates write a tool's answer": lambda texts: json.dumps({"output": as_json(texts)}),
    "Mustache": as_mustache,
    "HTML": lambda texts: html.escape(joined(texts)),
    "Handlebars": as_handlebars,
    "XML": as_xml,
    "indented": lambda texts: "documents:\n" + textwrap.indent(joined(texts), "    "),
    "Markdown's list": lambda texts: "".join(
        f"{n}. {textwrap.indent(text, '   ').strip()}\n" for n, text in enumerate(texts.values(), 1)
    ),
    "nested in YAML": lambda texts: "- documents:\n    - |\n" + textwrap.indent(joined(texts), " " * 6),
    "CSV": lambda texts: "".join('"' + text.replace('"', '""') + '",1\n' for text in texts.values()),
    "list of code": lambda texts: "".join(
        f"- {textwrap.indent(text, '  ').strip()}\n" for text in texts.values()
    ),
    "quoted": lambda texts: "".join(f"> {line}\n" for line in ["", *joined(texts, "\n\n").split("\n")]),
    "loosely quoted": lambda texts: "documents:\n" + textwrap.indent(joined(texts), ">", lambda line: True),
    "Windows": lambda texts: joined(texts).replace("\n", "\r\n"),
    "web": lambda texts: "\n".join(text.replace(" ", "\u00a0", 9) for text in texts.values()),
}


def learn(known: Recogniser, tokenizer: Any, prompt: str) -> list[Form]:
    """What serving does with the forms in a prompt."""
    forms = find_escaped(prompt, known, known.find(prompt))
    for form in forms:
        key = f"{form.key} in a prompt of {len(prompt)}"
        known.add(key, form.text, encode_document(tokenizer, form.text), form.source)
    return forms


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_documents_are_found_whole_once_their_form_is_known(
    shape: Any, known: Recogniser, tokenizer: Any
) -> None:
    prompt = shape(TEXTS)
    plain = {match.known.source for match in known.find(prompt) if match.whole}
    forms = learn(known, tokenizer, prompt)
    assert {form.source for form in forms} | plain == TEXTS.keys()
    assert all(form.text in prompt for form in forms) and len(forms) == len(TEXTS) - len(plain)
    found = known.find(prompt)
    assert [match.known.source for match in found] == list(TEXTS) and all(match.whole for match in found)
    assert not find_escaped(prompt, known, found), "there is nothing left to learn"


def test_document_that_is_in_the_prompt_as_it_is_teaches_nothing(known: Recogniser) -> None:
    stuffed = "\n\n".join(TEXTS.values()) + r"\n\t&amp;"
    assert find_escaped(stuffed, known, known.find(stuffed)) == []


def test_document_in_two_forms_teaches_both(known: Recogniser) -> None:
    prompt = as_json(TEXTS) + as_mustache(TEXTS)
    forms = find_escaped(prompt, known, known.find(prompt))
    assert sum(form.source == "d4.md" for form in forms) == 2


def test_document_that_is_cut_short_teaches_nothing(known: Recogniser) -> None:
    prompt = json.dumps(TEXTS["d1.md"][:-20])
    assert find_escaped(prompt, known, known.find(prompt)) == []


def test_text_that_is_another_ones_escape_stays_itself(known: Recogniser, tokenizer: Any) -> None:
    written = json.dumps(TEXTS["d1.md"])[1:-1]
    known.add("d6", written, encode_document(tokenizer, written), "d6.md")
    (match,) = known.find(written)
    assert match.known.source == "d6.md" and find_escaped(written, known, [match]) == []


def test_plan_notes_what_it_learns_and_keeps_the_prompt(known: Recogniser, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": SHAPES["LangChain's list"](TEXTS)}]
    plan = plan_chat(messages, tokenizer, known, [TEXTS["d2.md"], "d1"])
    assert plan.text == render_chat(tokenizer, messages)
    notes = {note.source: note for note in plan.notes}
    assert len(notes) == len(plan.notes), "a hint that is noted once is not noted again"
    assert notes["d3.md"].found and notes["d3.md"].reason == "found"
    assert not notes["d2.md"].found and notes["d2.md"].reused == 0
    assert "reused from the next prompt on" in notes["d2.md"].reason
    assert notes["d2.md"].tokens == len(encode_document(tokenizer, TEXTS["d2.md"]))
    assert {form.source for form in plan.forms} == {"d1.md", "d2.md"}


def test_document_found_up_to_its_first_escape_is_noted_once(known: Recogniser, tokenizer: Any) -> None:
    long_first_line = TEXTS["d3.md"] + "\nThe second line is escaped, and so are all that follow it."
    known.add("d5", long_first_line, encode_document(tokenizer, long_first_line), "d5.md")
    known.remove("d3")
    plan = plan_chat([{"role": "user", "content": repr([long_first_line])}], tokenizer, known)
    (note,) = plan.notes
    assert note.found and 0 < note.reused < note.tokens
    assert note.reason.startswith("found in part") and "from the next prompt on" in note.reason


pieces = st.text(max_size=20) | st.sampled_from(
    ["\\", "'", '"', "[", "\\x", "\\U0011ffff", "\\u12", "&", "&#", "&amp", "&amp;amp;", "&#0;&#1;&#x110000;"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(pieces).map("".join), st.lists(pieces).map("".join), st.booleans())
@example("\ud800\\ud800", "&#" + 5000 * "9" + ";&#1;&#xd800;", True)
def test_hostile_text_never_raises_and_never_hides_a_document(
    known: Recogniser, before: str, after: str, as_repr: bool
) -> None:
    text = TEXTS["d2.md"]
    hidden = repr(text)[1:-1] if as_repr else html.escape(text)
    prompt = f"{before} |{hidden}| {after}"
    (form,) = find_escaped(prompt, known, known.find(prompt))
    assert (form.source, form.text) == ("d2.md", hidden)


@given(st.text(), st.sampled_from(["repr", "json", "unicode"]))
@example("😀 é", "json")
def test_string_is_never_undone_wrongly(text: str, how: str) -> None:
    if how == "repr":
        written = repr(text)
    else:
        written = json.dumps(text, ensure_ascii=how == "json")
        assume(not any("\ud800" <= sign <= "\udfff" for sign in text))
    undone = escaped._Unescaped(f"[{written}]", escaped._IN_STRING)
    assert undone.text == f"[{written[0]}{text}{written[0]}]"
    assert undone.before(0) == 0 and undone.before(len(undone.text)) == len(written) + 2


@pytest.mark.parametrize("unit", ["\\", "\\'", "\\U0010", "&", "&amp;", "['", "&#9", "\n    "])
def test_time_does_not_grow_faster_than_the_prompt(unit: str, known: Recogniser) -> None:
    def took(size: int) -> float:
        begin = time.perf_counter()
        assert find_escaped((unit * size)[:size], known, ()) == []
        return time.perf_counter() - begin

    small, large = (min(took(size) for _ in range(3)) for size in (50_000, 1_000_000))
    assert large < 100 * small + 0.1  # 20 times as much text


def test_prompt_without_marks_is_not_searched_twice(known: Recogniser, monkeypatch: Any) -> None:
    def find(*_: Any, **__: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(known, "find", find)
    assert find_escaped("An ordinary prompt, R&D & C:\\Users and all. " * 300, known, ()) == []
    with pytest.raises(AssertionError):
        find_escaped("&amp;" * 4, known, ())


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("if it:\n        go()\n" * 30, 3), ('def f():\n    """Go there."""\n' * 30, 2),
        ('1,"",x\n' * 30, 0), ('1,"it is ""never"" said",x\n' * 30, 1), ('"""So!"" he said.",1\n' * 30, 1),
    ],
)  # fmt: skip
def test_prompt_is_searched_for_what_its_lines_show_alone(
    text: str, times: int, known: Recogniser, monkeypatch: Any
) -> None:
    searched = list[str]()
    monkeypatch.setattr(known, "find", lambda text, **_: searched.append(text) or [])
    find_escaped(text, known, ())
    assert len(searched) == times
