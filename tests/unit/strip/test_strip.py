"""A prompt's strip, from evidence alone, and whatever stands in it."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag import Answer, Strip
from blendrag.chat.answer import Usage
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.prompt import PromptPlan, Segment
from blendrag.prompt.plan import DocumentNote
from blendrag.ranges import read_ranges, write_ranges
from blendrag.serving.evidence import Evidence, PlannedPrompt
from blendrag.strip.strip import COLOURS

PLAN = PromptPlan(
    (
        Segment("root", (1,) * 10),
        Segment("a", (2,) * 30, "a", "leave.md"),
        Segment("b", (3,) * 40, "b", "pay.md"),
        Segment("question", (4,) * 20),
    ),
    (
        DocumentNote("leave.md", True, "found", 30, 30),
        DocumentNote("pay.md", True, "found", 40, 40),
        DocumentNote("lost.md", False, "its text is not in the prompt", 50, 0),
    ),
)
BLENDED = BlendReport(cached=70, fresh=30, recomputed=3, computed_at="0-9,12,41-42,80-95,96-")


def evidence(report: BlendReport | None = BLENDED, *, plain: str | None = None, prefix: int = 0) -> Evidence:
    recipe = None if plain else Recipe("store", PLAN.spans)
    return PlannedPrompt(PLAN, recipe, None, plain).evidence(report, prefix)


def answer(found: Evidence, text: str = "Yes.") -> Answer:
    usage = Usage(100, 2, 67, 0, 3)
    return Answer(text, None, (), "stop", 0.25, 1.0, usage, found, (), (), (), "model")


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def drawn(self) -> list[tuple[str | None, int, int]]:
        """Colour, place and tokens of what the strip shows."""
        return [
            (found["fill"], int(found["x"] or 0), int(found["width"] or 0))
            for tag, found in self.elements
            if tag == "rect" and "x" in found
        ]


def test_answer_shows_itself_with_its_documents_reused_repaired_and_fresh() -> None:
    found = replace(evidence(), prefill_s=1.5)
    page = Page(answer(found, "Yes:\nboth.")._repr_html_())
    fresh, reused = COLOURS["fresh"], COLOURS["reused"]
    assert page.drawn() == [(fresh, 0, 10), (reused, 10, 30), (reused, 40, 40), (fresh, 80, 20)]
    for told in (
        "Yes:",
        "both.",
        "leave.md, 30 tokens: 29 reused, 1 repaired (found)",
        "pay.md, 40 tokens: 38 reused, 2 repaired (found)",
        "its text is not in the prompt",
        "67 reused",
        "3 repaired",
        "30 fresh",
        "100 tokens:",
        "first token after 0.25 s; plain prefill is estimated at 1.50 s",
    ):
        assert told in re.sub(r"\s+", " ", page.text), told
    (marks,) = [found["d"] for tag, found in page.elements if tag == "path"]
    assert marks == "M12 32v-32h1v32zM41 32v-32h2v32z", "the very tokens"


def test_document_that_was_computed_whole_says_why() -> None:
    lost = BlendReport(cached=40, fresh=60, missing={"a": "damaged"}, computed_at="0-39,80-95,96-")
    html = Strip(answer(evidence(lost)).facts()).html()
    assert "leave.md, 30 tokens: computed (found; damaged)" in html
    assert (COLOURS["fresh"], 10, 30) in Page(html).drawn()
    dropped = BlendReport(cached=0, fresh=100, decision="plain prefill is faster", computed_at="0-95,96-")
    assert "computed (found; plain prefill is faster)" in Strip(answer(evidence(dropped)).facts()).html()
    plain = Strip(answer(evidence(None, plain="blending is switched off")).facts()).html()
    assert "not blended: blending is switched off" in plain
    assert {colour for colour, _, _ in Page(plain).drawn()} == {COLOURS["fresh"]}


def test_what_the_prefix_cache_had_is_not_called_computed() -> None:
    found = evidence(None, prefix=96)
    page = Page(Strip(answer(found).facts()).html())
    prefix, reused, fresh = COLOURS["prefix"], COLOURS["reused"], COLOURS["fresh"]
    assert page.drawn() == [
        (prefix, 0, 10), (reused, 10, 30), (reused, 40, 40), (prefix, 80, 16), (fresh, 96, 4),
    ]  # fmt: skip


def test_plan_is_shown_as_one() -> None:
    rows = PLAN.describe()
    page = Page(Strip({"documents": rows}).html())
    assert (COLOURS["reused"], 10, 30) in page.drawn() and "(a plan)" in page.text
    rows[1] |= {
        "kind": "fresh",
        "reused": 0,
        "reason": "its KV is not stored now: if it stays so, ingest again",
    }
    html = Strip({"documents": rows}).html()
    assert "leave.md, 30 tokens: computed (its KV is not stored now: if it stays so, ingest again)" in html
    switched_off = Strip({"documents": rows, "plain": "blending is switched off"})
    assert COLOURS["reused"] not in {colour for colour, _, _ in Page(switched_off.html()).drawn()}


HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202egnp.exe\x00\ud800\n"
ELEMENTS = {*"p br div svg rect title path details summary table tr th td".split()}  # noqa: SIM905


@given(st.text() | st.just(HOSTILE), st.text() | st.just(HOSTILE))
def test_no_name_or_text_becomes_markup(name: str, text: str) -> None:
    segments = (Segment(text, (1,) * 5), Segment(text, (2,) * 5, name, name))
    notes = DocumentNote(name, True, text, 5, 5), DocumentNote(text, False, name, 5, 0)
    rows, lost = tuple(PromptPlan(segments, notes).describe()), {name: text}
    found = replace(evidence(), prompt=10, documents=rows, plain=text, missing=lost)
    html = answer(found, text)._repr_html_()
    html.encode()
    page = Page(html)
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    attributes = {attribute for _, attributes in page.elements for attribute in attributes}
    assert not any(attribute.startswith("on") or attribute in ("style", "href") for attribute in attributes)
    if name == HOSTILE:
        assert "<script>alert(1)</script>" in page.text
        assert "\u202e" not in Strip(answer(found).facts()).html()


@pytest.mark.parametrize("name", ["می\u200cخواهم", "क\u094d\u200dष", "👩\u200d👧 \U0001fae8", "\ue000"])
def test_name_is_shown_with_the_signs_that_its_script_needs(name: str) -> None:
    row = {"kind": "cached", "source": name, "chunk_key": "a", "start": 0, "tokens": 9, "reused": 9}
    assert name in Strip({"documents": [row | {"reason": "", "text": name}], "prompt": 9}).html()


def test_strip_stays_small_and_is_whole_in_itself() -> None:
    row = {"kind": "cached", "tokens": 500, "reused": 500, "reason": "", "text": ""}
    rows = [row | {"source": f"page {n}", "chunk_key": str(n), "start": 500 * n} for n in range(64)]
    computed = write_ranges(range(0, 32_000, 7))
    page = Strip({"documents": rows, "prompt": 32_000, "computed_at": computed, "reused": 27_428}).page()
    assert len(page) < 64_000
    assert not any(found in page for found in ("http:", "https:", "url(", "<script", "<style", "style="))
    assert page.startswith("<!doctype html>") and 'content="light dark"' in page


def test_framework_users_show_the_same_strip_of_what_an_answer_carries() -> None:
    found = answer(evidence())
    carried: dict[str, Any] = found.facts()
    assert len(carried["documents"]) < len(asdict(found.evidence)["documents"])
    assert Page(Strip(carried)._repr_html_()).drawn() == Page(found._repr_html_()).drawn()


@given(st.sets(st.integers(0, 200)))
def test_ranges_are_read_as_they_were_written(positions: set[int]) -> None:
    runs = read_ranges(write_ranges(sorted(positions)))
    assert {at for first, end in runs for at in range(first, end)} == positions
    assert all(end < first for (_, end), (first, _) in pairwise(runs))


@pytest.mark.parametrize("text", ["a", "1-b", "-", "1,,2"])
def test_what_are_no_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_ranges(text)
