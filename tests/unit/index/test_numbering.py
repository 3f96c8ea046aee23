"""Numbers of Word's paragraphs: those that it shows."""

from __future__ import annotations

import re

import pytest

from blendrag.index.office import read_archive
from office_files import BOX, CHOICE, FORMS, OLD_SHAPE, W, docx, paragraph


def level(place: int, kind: str, text: str, style: str = "") -> str:
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    return (
        f'<w:lvl w:ilvl="{place}"><w:start w:val="1"/><w:numFmt w:val="{kind}"/>{named}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


def numbered(text: str, number: int, place: int = 0) -> str:
    return paragraph(text, number=number).replace('<w:ilvl w:val="0"/>', f'<w:ilvl w:val="{place}"/>')


def test_numbers_of_word_are_those_that_it_shows() -> None:
    kinds = (
        level(0, "decimal", "%1.", "Heading1") + level(1, "decimal", "%1.%2", "Heading2"),
        level(0, "decimal", "%1.") + level(1, "lowerLetter", "(%2)") + level(2, "upperRoman", "%3."),
        level(0, "bullet", "•"),
        level(0, "none", ""),
        level(0, "decimal", "%1."),
    )
    begun = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
    numbering = "".join(
        f'<w:abstractNum w:abstractNumId="{id}">{levels}</w:abstractNum>' for id, levels in enumerate(kinds)
    ) + "".join(
        f'<w:num w:numId="{id}"><w:abstractNumId w:val="{kind}"/>{override}</w:num>'
        for id, kind, override in ((1, 0, ""), (2, 1, ""), (3, 1, begun), (4, 2, ""), (5, 3, ""), (6, 4, ""))
    )
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{n}"><w:name w:val="heading {n}"/><w:pPr><w:numPr>'
        '<w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
        for n in (1, 2)
    )
    deleted = numbered("gone", 2).replace("</w:pPr>", "<w:rPr><w:del/></w:rPr></w:pPr>").replace("gone", "")
    inside = f"<w:txbxContent>{numbered('inside', 6)}</w:txbxContent>"
    forms = f"{CHOICE}<mc:Fallback>{OLD_SHAPE}</mc:Fallback>".replace(BOX, inside)
    boxed = f"<w:p><w:r><mc:AlternateContent {FORMS}>{forms}</mc:AlternateContent></w:r></w:p>"
    boxed += numbered("outside", 6)
    body = (
        paragraph("Cranes", "Heading1") + paragraph("Loads", "Heading2") + paragraph("Ropes", "Heading2")
        + numbered("close", 2) + deleted + numbered("bare", 5) + boxed
        + numbered("valve", 2, 1) + numbered("tap", 2, 1) + numbered("left", 2, 2)
        + numbered("drain", 2) + paragraph("Wait.") + numbered("go", 2)
        + paragraph("Boats", "Heading1") + numbered("anew", 3) + numbered("then", 3)
        + numbered("any", 4) + paragraph("Oars", "Heading2")
    )  # fmt: skip
    parts = {
        "word/numbering.xml": f"<w:numbering {W}>{numbering}</w:numbering>",
        "word/styles.xml": f"<w:styles {W}>{styles}</w:styles>",
    }
    assert read_archive(docx(body, **parts)).text.split("\n\n") == [
        "# 1. Cranes", "## 1.1 Loads", "## 1.2 Ropes",
        "1. close", "bare", "1. inside\n2. outside",
        "(a) valve", "(b) tap", "I. left", "2. drain", "Wait.", "3. go",
        "# 2. Boats", "7. anew\n8. then\n- any", "## 2.1 Oars",
    ]  # fmt: skip


def test_list_of_word_that_overrides_its_kind_has_its_own_numbers() -> None:
    own = f'<w:lvlOverride w:ilvl="0">{level(0, "upperLetter", "(%1)")}</w:lvlOverride>'
    numbering = f'<w:abstractNum w:abstractNumId="0">{level(0, "decimal", "%1.")}</w:abstractNum>'
    for id, override in ((1, own), (2, "")):
        numbering += f'<w:num w:numId="{id}"><w:abstractNumId w:val="0"/>{override}</w:num>'
    parts = {"word/numbering.xml": f"<w:numbering {W}>{numbering}</w:numbering>"}
    body = numbered("close", 1) + numbered("drain", 1) + numbered("go", 2)
    assert read_archive(docx(body, **parts)).text == "(A) close\n\n(B) drain\n\n3. go"


def levels(*kinds: str) -> dict[str, str]:
    numbering = f'<w:abstractNum w:abstractNumId="0">{"".join(kinds)}</w:abstractNum>'
    numbering += '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    return {"word/numbering.xml": f"<w:numbering {W}>{numbering}</w:numbering>"}


@pytest.mark.parametrize(
    ("behind", "shown"), [(0, "1, 1.1, § 1, 1.2, § 2, 2, § 3"), (1, "1, 1.1, § 1, 1.2, § 2, 2, § 1")]
)
def test_level_of_word_begins_anew_where_it_says(behind: int, shown: str) -> None:
    begins = f'<w:lvlRestart w:val="{behind}"/><w:lvlText'
    last = level(2, "decimal", "§ %3").replace("<w:lvlText", begins)
    kinds = levels(level(0, "decimal", "%1-"), level(1, "decimal", "%1.%2-"), last)
    body = "".join(numbered("x", 1, place) for place in (0, 1, 2, 1, 2, 0, 2))
    assert re.sub("-? x", "", read_archive(docx(body, **kinds)).text).split("\n\n") == shown.split(", ")


def test_number_of_word_leaves_out_levels_of_signs() -> None:
    kinds = levels(level(0, "decimal", "%1."), level(1, "bullet", "•"), level(2, "decimal", "%1.%2%3."))
    body = numbered("a", 1) + numbered("b", 1, 2)
    assert read_archive(docx(body, **kinds)).text == "1. a\n\n1.1. b"


def test_bullet_without_a_sign_goes_on_with_its_item() -> None:
    numbering = f'<w:abstractNum w:abstractNumId="0">{level(0, "decimal", "%1.")}</w:abstractNum>'
    numbering += f'<w:abstractNum w:abstractNumId="1">{level(0, "bullet", " ")}</w:abstractNum>'
    for id in (0, 1):
        numbering += f'<w:num w:numId="{id + 1}"><w:abstractNumId w:val="{id}"/></w:num>'
    parts = {"word/numbering.xml": f"<w:numbering {W}>{numbering}</w:numbering>"}
    body = numbered("close", 1) + numbered("the valve", 2) + numbered("drain", 1)
    assert read_archive(docx(body, **parts)).text == "1. close\n\nthe valve\n\n2. drain"


@pytest.mark.parametrize(("sign", "text"), [("☑", "- ☑ close"), ("✗", "- ✗ close"), ("•", "- close")])
def test_bullet_that_says_something_of_its_item_is_kept(sign: str, text: str) -> None:
    assert read_archive(docx(numbered("close", 1), **levels(level(0, "bullet", sign)))).text == text


def test_heading_is_one_whose_style_is_based_on_that_of_headings() -> None:
    based = '<w:style w:styleId="House"><w:name w:val="House"/><w:basedOn w:val="H2"/>{}</w:style>'
    styles = '<w:style/><w:style w:styleId="H2"><w:name w:val="heading 2"/></w:style>'
    given = '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr>'
    for properties, text in (("", "## Loads"), (given, "## 1. Loads")):
        parts = {"word/styles.xml": f"<w:styles {W}>{styles}{based.format(properties)}</w:styles>"}
        parts |= levels(level(0, "decimal", "%1."))
        assert read_archive(docx(paragraph("Loads", "House"), **parts)).text == text
