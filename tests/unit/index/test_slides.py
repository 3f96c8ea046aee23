"""Presentations of PowerPoint: all that their slides show, as text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from blendrag.index import slides
from blendrag.index.office import read_archive
from office_files import DRAWN, FORMS, MATH, archive, parts_of, pptx, renamed, saved


def one_slide(layout: int = 6) -> tuple[Any, Any]:
    """A presentation and its only slide, which is empty unless a layout is named."""
    from pptx import Presentation

    presentation = Presentation()
    return presentation, presentation.slides.add_slide(presentation.slide_layouts[layout])


def number(line: Any, **kind: str) -> None:
    properties = line._p.get_or_add_pPr()
    properties.append(properties.makeelement(f"{DRAWN}buAutoNum", {"type": "arabicPeriod", **kind}))


def text_of(presentation: Any) -> str:
    return read_archive(saved(presentation)).text


def add_raised(frame: Any, *texts: str, raised: int) -> None:
    """A paragraph of these runs, one of which is an exponent or the sign of a note."""
    line = frame.add_paragraph()
    for text in texts:
        line.add_run().text = text
    line.runs[raised].font._rPr.set("baseline", "30000")


def test_presentation_keeps_shapes_of_several_forms_formulas_and_links() -> None:
    presentation, slide = one_slide()
    box = slide.shapes.add_textbox(0, 0, 9, 9)
    link = box.text_frame.paragraphs[0].add_run()
    link.text, link.hyperlink.address = "form", "https://example.com/b7.pdf"
    box.text_frame.paragraphs[0].add_run().hyperlink.address = "https://example.com/of-no-text"
    parts = parts_of(saved(presentation))
    shape = parts["ppt/slides/slide1.xml"].decode()
    begin, end = shape.index("<p:sp>"), shape.index("</p:sp>") + len("</p:sp>")
    math = f'<a14:m xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main">{MATH}</a14:m>'
    shown = shape[begin:end].replace("</a:r>", f"</a:r>{math}", 1)
    parts["ppt/slides/slide1.xml"] = (
        f"{shape[:begin]}<mc:AlternateContent {FORMS}><mc:Choice Requires='a14'>{shown}</mc:Choice>"
        f"<mc:Fallback>{shape[begin:end]}</mc:Fallback></mc:AlternateContent>{shape[end:]}"
    )
    assert read_archive(archive(parts)).text == "[form](https://example.com/b7.pdf)(a+b)/2(x)^2∑√(y)"


def test_presentation_keeps_slides_tables_pictures_groups_and_notes() -> None:
    content = read_archive(pptx())
    assert content.text == (
        "# Cranes\n\nclose\ndrain\n\n| Part | Load |\n| --- | --- |\n| a\\|b | 40 t |\n\n"
        "![crane, 40 t](<>)\n\ngrouped\n\nspoken\n\nlast"
    )
    assert content.metadata == {"slides": 2}


def test_presentation_keeps_numbers_exponents_and_what_is_said_of_shapes() -> None:
    presentation, slide = one_slide(layout=1)
    frame = slide.placeholders[1].text_frame
    frame.text = "close\ndrain\nlower\nopen\nplain\nanew"
    kinds = ("arabicPeriod", "arabicPeriod", "alphaLcParenR", "arabicPeriod", "", "romanUcPeriod")
    for line, kind in zip(frame.paragraphs, kinds, strict=True):
        line.level = int(line.text == "lower")
        if kind:
            number(line, type=kind)
    add_raised(frame, "10", "2", raised=1)
    group = slide.shapes.add_group_shape()
    for shape, description in ((group, "ways"), (group.shapes.add_shape(1, 0, 0, 9, 9), "from A to B")):
        shape._element.xpath(".//p:cNvPr")[0].set("descr", description)
    assert text_of(presentation) == (
        "1. close\n2. drain\na) lower\n3. open\nplain\nI. anew\n10^2\n\n![ways](<>)\n\n![from A to B](<>)"
    )


def test_presentation_keeps_what_is_struck_out() -> None:
    presentation, slide = one_slide()
    line = slide.shapes.add_textbox(0, 0, 9, 9).text_frame.paragraphs[0]
    for text, kind in (("Fee ", "noStrike"), ("3", "sngStrike"), ("0", "dblStrike"), (" 40", "")):
        line.add_run().text = text
        if kind:
            line.runs[-1].font._rPr.set("strike", kind)
    assert text_of(presentation) == "Fee ~~30~~ 40"


def test_index_of_a_slide_that_would_be_a_digit_is_marked_and_lines_keep_their_blanks() -> None:
    presentation, slide = one_slide()
    frame = slide.shapes.add_textbox(0, 0, 9, 9).text_frame
    frame.text = "    if x:\n        y"
    paragraph = frame.add_paragraph()
    for text, height in (("log", 0), ("2", -25_000), ("8 H", 0), ("2", -25_000), ("O", 0)):
        paragraph.add_run().text = text
        paragraph.runs[-1].font._rPr.set("baseline", str(height))
    assert text_of(presentation) == "    if x:\n        y\nlog_(2)8 H2O"


def test_notes_of_a_slide_keep_numbers_links_and_exponents() -> None:
    presentation, slide = one_slide()
    frame = slide.notes_slide.notes_text_frame
    frame.text = "close\ndrain"
    for line in frame.paragraphs:
        number(line)
    link = frame.add_paragraph().add_run()
    link.text, link.hyperlink.address = "form", "https://example.com/b7.pdf"
    add_raised(frame, "10", "2", raised=1)
    slide.notes_slide.shapes._spTree.append(slide.shapes.add_textbox(0, 0, 9, 9)._element)
    slide.notes_slide.shapes[-1].text_frame.text = "beside"
    text = "1. close\n2. drain\n[form](https://example.com/b7.pdf)\n10^2\n\nbeside"
    assert text_of(presentation) == text


def test_presentation_keeps_where_whole_shapes_lead_and_signs_of_fonts() -> None:
    presentation, slide = one_slide()
    button, other = (slide.shapes.add_shape(1, 0, 0, 9, 9) for _ in range(2))
    button.text_frame.text = "A \uf0e0\xe0 B"
    font = button.text_frame.paragraphs[0].runs[0]._r.get_or_add_rPr()
    font.append(font.makeelement(f"{DRAWN}sym", {"typeface": "Wingdings"}))
    button.click_action.hyperlink.address = "https://example.com/b7.pdf"
    other.text_frame.text = "next"
    other.click_action.target_slide = presentation.slides[0]
    text = "A 🡪🡪 B\n\n<https://example.com/b7.pdf>\n\nnext"
    assert text_of(presentation) == text


@pytest.mark.parametrize(
    ("fonts", "text", "shown"),
    [
        ({"sym": "Wingdings"}, "à l'école où", "à l'école où"),
        ({"latin": "Arial", "sym": "Wingdings"}, "café \uf0fc", "café ✓"),
        ({"latin": "Symbol", "sym": "Symbol"}, "5 \xb4 m", "5 × μ"),
        ({"latin": "Wingdings"}, "\xfc\xfc", "✓✓"),
    ],
)
def test_letters_of_words_on_a_slide_are_no_signs(fonts: dict[str, str], text: str, shown: str) -> None:
    presentation, slide = one_slide()
    frame = slide.shapes.add_textbox(0, 0, 9, 9).text_frame
    frame.text = text
    about = frame.paragraphs[0].runs[0]._r.get_or_add_rPr()
    about.extend(about.makeelement(f"{DRAWN}{kind}", {"typeface": font}) for kind, font in fonts.items())
    assert text_of(presentation) == shown


@pytest.mark.parametrize(
    ("height", "shown"), [("30%", "10^3"), ("-25%", "10_3"), ("-25000", "10_3"), ("0%", "103"), ("", "103")]
)
def test_exponent_on_a_slide_is_one_in_percent_too(height: str, shown: str) -> None:
    presentation, slide = one_slide()
    line = slide.shapes.add_textbox(0, 0, 9, 9).text_frame.paragraphs[0]
    for text in ("10", "3"):
        line.add_run().text = text
    line.runs[1].font._rPr.set("baseline", height)
    assert text_of(presentation) == shown


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("<c:cmLst xmlns:c='c'><c:cm><c:text>Which crane?</c:text></c:cm></c:cmLst>", "Which crane?"),
        (
            f"<c:cmLst xmlns:c='c' xmlns:a='{DRAWN[1:-1]}'><c:cm><c:replyLst><c:reply><c:txBody><a:p><a:r>"
            "<a:t>B</a:t></a:r><a:r><a:t>7</a:t></a:r></a:p></c:txBody></c:reply></c:replyLst></c:cm></c:cmLst>",
            "B7",
        ),
        ("<c:broken", ""),
    ],
)
def test_presentation_keeps_comments(part: str, text: str) -> None:
    presentation, slide = one_slide()
    slide.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "lift"
    parts = parts_of(saved(presentation)) | {"ppt/comments/comment1.xml": part}
    name = "ppt/slides/_rels/slide1.xml.rels"
    related = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/comments"
    link = f'<Relationship Id="rId99" Type="{related}" Target="../comments/comment1.xml"/></Relationships>'
    parts[name] = parts[name].decode().replace("</Relationships>", link)
    assert read_archive(archive(parts)).text == f"lift\n\n{text}".strip()


def test_chart_keeps_titles_of_axes_labels_dates_and_signs_of_numbers() -> None:
    from datetime import date

    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    presentation, slide = one_slide()
    loads = CategoryChartData(number_format="0%")
    loads.categories = [date(2026, 1, 31), date(2026, 2, 28)]
    loads.add_series("North", (0.5, 0.25))
    chart = slide.shapes.add_chart(XL_CHART_TYPE.LINE, 0, 0, 9, 9, loads).chart
    chart.chart_title.text_frame.text = "Loads"
    chart.value_axis.axis_title.text_frame.text = "of 40 t"
    chart.plots[0].series[0].points[1].data_label.text_frame.text = "repaired"
    assert text_of(presentation) == (
        "Loads\n\nrepaired\n\nof 40 t\n\n"
        "|  | North |\n| --- | --- |\n| 2026-01-31 | 50% |\n| 2026-02-28 | 25% |"
    )


def test_presentation_keeps_what_charts_and_diagrams_show() -> None:
    from pptx.chart.data import CategoryChartData, XyChartData
    from pptx.enum.chart import XL_CHART_TYPE

    presentation, slide = one_slide()
    loads, places = CategoryChartData(), XyChartData()
    year = loads.add_category("2026")
    for quarter in ("Q1", "Q2"):
        year.add_sub_category(quarter)
    loads.add_series("North", (1.5, 2))
    loads.add_series("South", (3, None))
    places.add_series("crane").add_data_point(0.5, 40)
    kinds = ((XL_CHART_TYPE.COLUMN_CLUSTERED, loads), (XL_CHART_TYPE.XY_SCATTER, places))
    first, *_ = (slide.shapes.add_chart(kind, 0, 0, 9, 9, data) for kind, data in kinds)
    first.chart.chart_title.text_frame.text = "Loads"
    file = saved(presentation)
    assert read_archive(file).text == (
        "Loads\n\n|  | North | South |\n| --- | --- | --- |\n| 2026 Q1 | 1.5 | 3 |\n| Q2 | 2 |  |"
        "\n\n|  | crane |\n| --- | --- |\n| 0.5 | 40 |"
    )
    points = "".join(
        f'<d:pt modelId="{id}"{kind}><d:t><a:p><a:r><a:t>{text}</a:t></a:r></a:p></d:t></d:pt>'
        for id, text, kind in ((0, "", ' type="doc"'), (2, "drain", ""), (1, "close", ""), (3, "valve", ""))
    )
    lines = "".join(
        f'<d:cxn srcId="{above}" destId="{below}" srcOrd="{order}"/>'
        for above, below, order in ((0, 2, 1), (0, 1, 0), (1, 3, 0), (3, 1, 0))
    )
    spaces = f'xmlns:a="{DRAWN[1:-1]}" xmlns:d="http://schemas.openxmlformats.org/drawingml/2006/diagram"'
    model = f"<d:dataModel {spaces}><d:ptLst>{points}</d:ptLst><d:cxnLst>{lines}</d:cxnLst></d:dataModel>"
    parts = parts_of(file)
    charts = [name for name in parts if name.startswith("ppt/charts/chart")]
    parts[charts[0]] = model
    name = "ppt/slides/slide1.xml"
    shown = parts[name].decode().replace('/chart">', '/diagram">', 1)
    parts[name] = re.sub("<c:chart (.*?)r:id=", r"<c:relIds \1r:dm=", shown, count=1)
    assert read_archive(archive(parts)).text.startswith("close\nvalve\ndrain\n\n")
    unlike_charts = renamed(archive(parts), (b"drawingml.chart+", b"drawingml.other+"))
    assert read_archive(unlike_charts).text == "close\nvalve\ndrain"


def test_chart_of_many_series_that_share_no_place_stays_small() -> None:
    from lxml.etree import fromstring

    series = "".join(
        f'<ser><tx><v>s{place}.</v></tx><val><pt idx="{place}"><v>{place}</v></pt></val></ser>'
        for place in range(1_000)
    )
    text = "".join(slides._chart(fromstring(f"<chart>{series}</chart>")))
    assert all(f"s{place}." in text for place in range(1_000)) and len(text) < 20_000


def test_numbers_of_a_slides_list_begin_anew_with_another_kind_or_first_number() -> None:
    presentation, slide = one_slide(layout=1)
    frame = slide.placeholders[1].text_frame
    frame.text = "one\ntwo\nother\nfar\nfurther\nodd"
    kinds = [{}, {}, {"type": "alphaLcParenR"}, {"startAt": "7"}, {"startAt": "7"}, {"startAt": "x"}]
    for line, kind in zip(frame.paragraphs, kinds, strict=True):
        number(line, **kind)
    add_raised(frame, "1", " Source", raised=0)
    lines = "1. one\n2. two\na) other\n7. far\n8. further\n1. odd\n1 Source"
    assert text_of(presentation) == lines


@pytest.mark.parametrize(
    "kind",
    [
        *(f"vnd.ms-powerpoint.{kind}.macroEnabled" for kind in ("slideshow", "template", "presentation")),
        "vnd.openxmlformats-officedocument.presentationml.slideshow",
    ],
)
def test_presentation_of_another_kind_is_read_as_one_without_macros(kind: str) -> None:
    plain = b"application/vnd.openxmlformats-officedocument.presentationml.presentation.main"
    other = renamed(pptx(), (plain, f"application/{kind}.main".encode()))
    assert other != renamed(pptx()) and read_archive(other) == read_archive(pptx())


@pytest.mark.parametrize("name", ["docProps/core", "ppt/notesSlides/notesSlide1", "ppt/slides/slide2"])
def test_broken_part_of_a_presentation_costs_no_text_before_the_break(name: str) -> None:
    parts = parts_of(pptx())
    parts[f"{name}.xml"] = parts[f"{name}.xml"][:-15]
    assert read_archive(archive(parts)) == read_archive(pptx())


def test_empty_part_and_picture_of_no_kind_cost_a_presentation_nothing() -> None:
    parts = parts_of(pptx()) | {"ppt/presProps.xml": b""}
    kinds = parts["[Content_Types].xml"]
    parts["[Content_Types].xml"] = re.sub(rb'<Default Extension="png"[^<>]*>', b"", kinds)
    assert parts["[Content_Types].xml"] != kinds
    assert read_archive(archive(parts)) == read_archive(pptx())
