"""Documents that are ZIP archives: all their text in order, and no harm from what is inside."""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.index import office
from blendrag.index.formats import read
from blendrag.index.office import read_archive
from blendrag.index.text import Unusable
from office_files import FORMS, MATH, M, W, archive, docx, epub, paragraph, png, pptx, xlsx

DRAWN = "{http://schemas.openxmlformats.org/drawingml/2006/main}"


def test_presentation_keeps_shapes_of_several_forms_formulas_and_links() -> None:
    from pptx import Presentation

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    box = slide.shapes.add_textbox(0, 0, 9, 9)
    link = box.text_frame.paragraphs[0].add_run()
    link.text, link.hyperlink.address = "form", "https://example.com/b7.pdf"
    file = io.BytesIO()
    presentation.save(file)
    with zipfile.ZipFile(file) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
    shape = parts["ppt/slides/slide1.xml"].decode()  # type: ignore[union-attr]
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
    from pptx import Presentation

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    frame = slide.placeholders[1].text_frame
    frame.text = "close\ndrain\nlower\nopen\nplain\nanew"
    kinds = ("arabicPeriod", "arabicPeriod", "alphaLcParenR", "arabicPeriod", "", "romanUcPeriod")
    for line, kind in zip(frame.paragraphs, kinds, strict=True):
        line.level = int(line.text == "lower")
        if kind:
            properties = line._p.get_or_add_pPr()
            properties.append(properties.makeelement(f"{DRAWN}buAutoNum", {"type": kind}))
    raised = frame.add_paragraph()
    for text in ("10", "2"):
        raised.add_run().text = text
    raised.runs[1].font._rPr.set("baseline", "30000")
    arrow = slide.shapes.add_shape(1, 0, 0, 9, 9)
    arrow._element.xpath(".//p:cNvPr")[0].set("descr", "from A to B")
    file = io.BytesIO()
    presentation.save(file)
    assert read_archive(file.getvalue()).text == (
        "1. close\n2. drain\na) lower\n3. open\nplain\nI. anew\n10^2\n\n![from A to B](<>)"
    )


def test_presentation_keeps_what_charts_and_diagrams_show() -> None:
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData, XyChartData
    from pptx.enum.chart import XL_CHART_TYPE

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
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
    file = io.BytesIO()
    presentation.save(file)
    assert read_archive(file.getvalue()).text == (
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
    with zipfile.ZipFile(file) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
    charts = [name for name in parts if name.startswith("ppt/charts/chart")]
    parts[charts[0]] = model
    name = "ppt/slides/slide1.xml"
    shown = parts[name].decode().replace('/chart">', '/diagram">', 1)  # type: ignore[union-attr]
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
    text = "".join(office._chart(fromstring(f"<chart>{series}</chart>")))
    assert all(f"s{place}." in text for place in range(1_000)) and len(text) < 20_000


def test_numbers_of_a_slides_list_begin_anew_with_another_kind_or_first_number() -> None:
    from pptx import Presentation

    presentation = Presentation()
    frame = presentation.slides.add_slide(presentation.slide_layouts[1]).placeholders[1].text_frame
    frame.text = "one\ntwo\nother\nfar\nfurther\nodd"
    kinds = [{}, {}, {"type": "alphaLcParenR"}, {"startAt": "7"}, {"startAt": "7"}, {"startAt": "x"}]
    for line, kind in zip(frame.paragraphs, kinds, strict=True):
        properties = line._p.get_or_add_pPr()
        properties.append(properties.makeelement(f"{DRAWN}buAutoNum", {"type": "arabicPeriod", **kind}))
    note = frame.add_paragraph()
    for text in ("1", " Source"):
        note.add_run().text = text
    note.runs[0].font._rPr.set("baseline", "30000")
    file = io.BytesIO()
    presentation.save(file)
    lines = "1. one\n2. two\na) other\n7. far\n8. further\n1. odd\n1 Source"
    assert read_archive(file.getvalue()).text == lines


def workbook(drawing: str) -> bytes:
    """A workbook with a link in a cell, and this drawing."""
    from openpyxl import Workbook
    from openpyxl.drawing.image import Image

    book = Workbook()
    sheet: object = book.active
    sheet.append([None, "form"])  # type: ignore[attr-defined]
    sheet["B1"].hyperlink = "https://example.com/b7.pdf?a=1&b=2"  # type: ignore[index]
    sheet.add_image(Image(io.BytesIO(png())))  # type: ignore[attr-defined]
    file = io.BytesIO()
    book.save(file)
    with zipfile.ZipFile(file) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
    parts["xl/drawings/drawing1.xml"] = drawing
    return archive(parts)


CELLS = "# Sheet\n\n| [form](https://example.com/b7.pdf?a=1&b=2) |\n| --- |"
CHART = "<xdr:graphicFrame><xdr:nv><xdr:cNvPr descr='costs'/></xdr:nv></xdr:graphicFrame>"
IN_CHOICE = "<x><y:AlternateContent xmlns:y='z'><y:Choice>{}</y:Choice><y:Fallback>{}</y:Fallback>"
IN_CHOICE += "</y:AlternateContent></x>"


def lines(*texts: str) -> str:
    return "".join(f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>" for text in texts)


@pytest.mark.parametrize(
    ("drawing", "text"),
    [
        (
            f"<xdr:sp>{lines('boxed', 'twice')}</xdr:sp><xdr:pic><xdr:cNvPr descr='crane, 40 t'/></xdr:pic>",
            "boxed\ntwice\n\n![crane, 40 t](<>)",
        ),
        ("<xdr:sp><a:p><a:r><a:t>by</a:t></a:r><a:br/><a:r><a:t>Anna</a:t></a:r></a:p></xdr:sp>", "by\nAnna"),
        (
            "<a:x><a:p><a:r><a:t>10</a:t></a:r><a:r><a:rPr baseline='30000'/><a:t>2</a:t></a:r></a:p></a:x>",
            "10^2",
        ),
        (IN_CHOICE.format(CHART, lines("not available")), "![costs](<>)"),
        (IN_CHOICE.format("<b/>", lines("older")), "older"),
        (
            "<xdr:sp><xdr:txBody><a:p><a:pPr><a:buAutoNum type='arabicPeriod'/></a:pPr>"
            "<a:r><a:t>close</a:t></a:r></a:p></xdr:txBody></xdr:sp>",
            "1. close",
        ),
        (IN_CHOICE.format(f"<a:p><a:m><a:oMath {M}><m:r><m:t>x</m:t></m:r></a:oMath></a:m></a:p>", "y"), "x"),
    ],
)
def test_workbook_keeps_addresses_of_links_and_what_its_shapes_show(drawing: str, text: str) -> None:
    drawing = f"<xdr:wsDr xmlns:xdr='x' xmlns:a='{DRAWN[1:-1]}'>{drawing}</xdr:wsDr>"
    assert read_archive(workbook(drawing)).text == f"{CELLS}\n\n{text}"


def test_workbook_keeps_the_signs_that_its_numbers_are_shown_with() -> None:
    import xlsxwriter

    file = io.BytesIO()
    with xlsxwriter.Workbook(file) as book:
        sheet = book.add_worksheet("S")
        shown = {
            "0.0%": (0.153, "15.3%"),
            "00000": (1234, "01234"),
            "0.0\\%": (0.25, "0.25%"),
            "#,##0.00\\ [$€-407]": (1200, "1200 €"),
            '_("$"* #,##0_);("$"#,##0)': (-1200, "-$1200"),
            '0.0,"K"': (1500, "1.5K"),
            'General" t"': (40, "40 t"),
            '"a"0;"b"0;"none"': (-5, "-b5"),
            "# ?/?": (0.5, "0.5"),
            '[=1]"Yes";0': (1, "1"),
            "000-0000": (5551234, "5551234"),
            "[h]:mm": (1.5, "36:00:00"),
            "d mmm yyyy": (45000, "2023-03-15"),
            "[m]:ss.00": (83.45 / 86_400, "0:01:23.45"),
            '[>=1000000]0.0,,"M";[>=1000]0.0,"K";0': (5, "5"),
            '[=1]0" day";0" days"': (3, "3"),
            '"INV-"00000': (123, "INV-00123"),
            '0.0" (est.)"': (3.5, "3.5 (est.)"),
            ".000": (0.312, "0.312"),
            "$.00": (0.5, "$0.5"),
            "+0.0%;-0.0%": (0.1, "+10%"),
            "(0)": (3, "(3)"),
            '0"-"': (4, "4-"),
            '#,##0,.0"K"': (1500, "1.5K"),
            "#,##0,,": (1_500_000, "1.5"),
        }
        for row, (format, (value, _)) in enumerate(shown.items()):
            sheet.write_number(row, 0, value, book.add_format({"num_format": format}))
        raised = book.add_format({"font_script": 1})
        sheet.write_rich_string(len(shown), 0, "10", raised, "3", " kg")
        sheet.write_string(len(shown) + 1, 0, "two\r\nlines")
        sheet.write_string(len(shown) + 2, 0, "Due_x0020_Date")
    rows = [line.strip("| ") for line in read_archive(file.getvalue()).text.split("\n")[2:]]
    texts = [text for _, text in shown.values()]
    assert rows[:1] + rows[2:] == [*texts, "10^3 kg", "two lines", "Due_x0020_Date"]


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(hours=-1, minutes=-30), "-1:30:00"),
        (timedelta(days=1, milliseconds=50), "24:00:00.05"),
        (timedelta(seconds=59, microseconds=999_900), "0:01:00"),
    ],
)
def test_workbook_keeps_signs_and_fractions_of_spans_of_time(span: timedelta, text: str) -> None:
    assert office._value(SimpleNamespace(value=span)) == text


@pytest.mark.parametrize(
    "lost", [b'<numFmts count="1"><numFmt numFmtId="164" formatCode="0.0 t"/></numFmts>', b""]
)
def test_workbook_without_the_styles_that_its_cells_name_keeps_their_numbers(lost: bytes) -> None:
    from openpyxl import Workbook

    book = Workbook()
    cell: Any = book.active["A1"]
    cell.value, cell.number_format = 40, "0.0 t"
    file = io.BytesIO()
    book.save(file)
    names = ((lost, b""),) if lost else ((b's="1"', b's="99"'),)
    broken = renamed(file.getvalue(), *names)
    assert broken != renamed(file.getvalue())
    assert read_archive(broken).text == "# Sheet\n\n| 40 |\n| --- |"


@pytest.mark.parametrize(
    "drawing", ["<xdr:broken", f"<x xmlns:a='{DRAWN[1:-1]}'><y><a:p><a:r/></a:p></y></x>"]
)
def test_workbook_with_a_broken_drawing_is_read_without_it(drawing: str) -> None:
    assert read_archive(workbook(drawing)).text == CELLS


def test_letters_in_place_of_a_link_take_no_time() -> None:
    """To part them at each letter, and look on from there, took hours."""
    from openpyxl import Workbook

    file = io.BytesIO()
    Workbook().save(file)
    with zipfile.ZipFile(file) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
    sheet = parts["xl/worksheets/sheet1.xml"]
    assert isinstance(sheet, bytes)
    parts["xl/worksheets/sheet1.xml"] = sheet + b"<!--<hyperlink " + b"a" * 400_000 + b">-->"
    assert read_archive(archive(parts)).text.strip() == "# Sheet"


def test_workbook_keeps_sheets_dates_and_numbers_without_empty_rows_and_columns() -> None:
    assert read_archive(xlsx()).text.strip() == (
        "# Loads\n\n| Part | Since | Load | Ready |\n| --- | --- | --- | --- |\n"
        "| a\\|b c | 2026-01-02 | 1.5 | TRUE |\n| crane | 2026-01-02 | 40 | 03:04:00 |\n\n# Empty"
    )


def test_cell_at_the_end_of_a_sheet_costs_neither_memory_nor_text() -> None:
    text = read_archive(xlsx(far="XFD1048576")).text
    assert text.endswith("# Far\n\n| far |\n| --- |") and len(text) < 500


def test_sheet_whose_cells_lie_on_a_diagonal_stays_small() -> None:
    from openpyxl import Workbook

    book = Workbook()
    for place in range(1, 1_001):
        book.active.cell(place, place, f"v{place}.")  # type: ignore[union-attr]
    file = io.BytesIO()
    book.save(file)
    text = read_archive(file.getvalue()).text
    assert all(f"v{place}." in text for place in range(1, 1_001)) and len(text) < 20_000


def test_chapters_of_an_epub_are_in_reading_order() -> None:
    content = read_archive(epub())
    assert content.text == "# One\n\nfirst\n\n# Two\n\nsecond"
    assert content.metadata == {"title": "Cranes"}


def test_epub_whose_spine_names_pictures_missing_parts_and_chapters_twice_is_read() -> None:
    with zipfile.ZipFile(io.BytesIO(epub())) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
        package = old.read("book/b.opf").decode()
    more = "".join(f'<itemref idref="{name}"/>' for name in ("c0", "nowhere", "cover", "lost")) + "</spine>"
    items = (
        '<item id="cover" href="b.png" media-type="image/png"/><item id="lost" href="lost.html"/></manifest>'
    )
    parts["book/b.opf"] = package.replace("</spine>", more).replace("</manifest>", items)
    parts["book/b.png"] = png()
    assert read_archive(archive(parts)).text == read_archive(epub()).text


@pytest.mark.parametrize("package", ["mammoth", "pptx", "openpyxl"])
def test_without_the_extra_the_reason_names_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"mammoth": docx, "pptx": pptx, "openpyxl": xlsx}[package]()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unusable, match=r"blendrag\[documents\]"):
        read_archive(file)


def test_archive_of_anything_else_is_refused() -> None:
    with pytest.raises(Unusable, match="ZIP archive that is neither"):
        read_archive(archive({"a.txt": "text", "word/b.txt": "text"}))


def renamed(file: bytes, *names: tuple[bytes, bytes]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(file)) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    for before, now in names:
        parts = {name: part.replace(before, now) for name, part in parts.items()}
    return archive({**parts})


@pytest.mark.parametrize("file", [docx(), pptx(), xlsx()], ids=["docx", "pptx", "xlsx"])
def test_document_in_the_strict_form_of_its_format_has_the_same_text(file: bytes) -> None:
    strict = renamed(
        file,
        *(
            (
                f"http://schemas.openxmlformats.org/{kind}/2006/".encode(),
                f"http://purl.oclc.org/ooxml/{kind}/".encode(),
            )
            for kind in (
                "drawingml",
                "officeDocument",
                "presentationml",
                "spreadsheetml",
                "wordprocessingml",
            )
        ),
    )
    assert strict != file
    assert read_archive(strict) == read_archive(file)


@pytest.mark.parametrize("kind", ["slideshow", "template", "presentation"])
def test_presentation_with_macros_is_read_as_one_without(kind: str) -> None:
    plain = b"application/vnd.openxmlformats-officedocument.presentationml.presentation.main+xml"
    with zipfile.ZipFile(io.BytesIO(pptx())) as made:
        parts: dict[str, str | bytes] = {name: made.read(name) for name in made.namelist()}
    named = f"application/vnd.ms-powerpoint.{kind}.macroEnabled.main+xml".encode()
    parts["[Content_Types].xml"] = parts["[Content_Types].xml"].replace(plain, named)
    assert read_archive(archive(parts)) == read_archive(pptx())


def test_show_is_read_as_the_presentation_that_it_is() -> None:
    show = renamed(pptx(), (b"presentationml.presentation.main", b"presentationml.slideshow.main"))
    assert read_archive(show) == read_archive(pptx())


def test_link_that_leads_to_nothing_costs_no_text() -> None:
    broken = renamed(docx(), (b'Id="rId2"', b'Id="rId99"'))
    assert read_archive(broken).text == read_archive(docx()).text.replace("[form](forms/b7.pdf)", "form")


# -- hostile archives --------------------------------------------------------------------------------------


def test_bomb_is_refused_unread() -> None:
    bomb = docx(**{"word/media/zeros": "\0" * 10_000})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(office, "MAX_UNPACKED_BYTES", 5_000)
        patch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("read"))
        with pytest.raises(Unusable, match=r"more than the limit of 5,000 bytes"):
            read_archive(bomb)


def test_small_file_that_would_take_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match="1,000,000 tags"):
        read_archive(docx("<w:p/>" * 1_000_000))
    monkeypatch.setattr(office, "_MAX_CELLS", 16_000)
    with pytest.raises(Unusable, match="reaches over more than 16,000 cells"):
        read_archive(xlsx(far="XFD1"))


def test_archive_that_lies_about_its_sizes_is_refused() -> None:
    data = bytearray(docx(**{"word/media/zeros": "\0" * 1_000_000}))
    entry = data.rindex(b"word/media/zeros") - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    data[entry + 24 : entry + 28] = struct.pack("<I", 10)
    with pytest.raises((Unusable, zipfile.BadZipFile)):
        read_archive(bytes(data))


def test_encrypted_part_is_refused() -> None:
    data = bytearray(epub())
    entry = data.rindex(b"PK\1\2")
    data[entry + 8] |= 1
    with pytest.raises(Unusable, match="encrypted"):
        read_archive(bytes(data))


def test_entities_do_not_unfold_into_a_bomb() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    body = f"<w:document {W}><w:body>{paragraph('&e9;')}</w:body></w:document>"
    with pytest.raises(Exception, match=r"entit|amplification"):
        read_archive(docx(**{"word/document.xml": f'<!DOCTYPE x [<!ENTITY e0 "lol">{entities}]>{body}'}))


@pytest.mark.parametrize("tag", ["w:tbl><w:tr><w:tc", "w:ins", "w:sdt><w:sdtContent"])
def test_document_nested_100000_deep_is_read_or_refused(tag: str) -> None:
    names = tag.split("><")
    begin = "".join(f"<{name}>" for name in names) * 100_000
    end = "".join(f"</{name}>" for name in reversed(names)) * 100_000
    with suppress(Unusable):
        read(read_archive, docx(f"{paragraph('before')}{begin}{paragraph('deep')}{end}"))


def test_external_entity_is_not_read() -> None:
    with zipfile.ZipFile(io.BytesIO(epub("<p>x</p>"))) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
        package = old.read("book/b.opf").decode().replace("Cranes", "&e;")
    parts["book/b.opf"] = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>{package}'
    with suppress(Unusable):
        assert "root:" not in str(read(read_archive, archive(parts)))
