"""Workbooks of Excel: all that their sheets show, as text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from xml.etree import ElementTree

import pytest

from blendrag.index.numbers import written
from blendrag.index.office import read_archive
from blendrag.index.text import Unusable
from office_files import DRAWN, M, archive, parts_of, png, renamed, saved, xlsx


def workbook(drawing: str) -> bytes:
    """A workbook with a link in a cell, and this drawing."""
    from openpyxl import Workbook
    from openpyxl.drawing.image import Image

    book = Workbook()
    sheet: Any = book.active
    sheet.append([None, "form"])
    sheet["B1"].hyperlink = "https://example.com/b7.pdf?a=1&b=2"
    sheet.add_image(Image(io.BytesIO(png())))
    return archive(parts_of(saved(book)) | {"xl/drawings/drawing1.xml": drawing})


CELLS = "# Sheet\n\n| [form](https://example.com/b7.pdf?a=1&b=2) |\n| --- |"
SAID = "<xdr:nv><xdr:cNvPr descr='{}'/></xdr:nv>"
CHART = "<xdr:graphicFrame><xdr:nv><xdr:cNvPr descr='costs'/></xdr:nv></xdr:graphicFrame>"
IN_CHOICE = "<x><y:AlternateContent xmlns:y='z'><y:Choice>{}</y:Choice><y:Fallback>{}</y:Fallback>"
IN_CHOICE += "</y:AlternateContent></x>"


def one_cell(value: Any, number_format: str) -> bytes:
    from openpyxl import Workbook
    from openpyxl.styles import Alignment

    book = Workbook()
    cell: Any = book.active["A1"]
    cell.value, cell.number_format, cell.alignment = value, number_format, Alignment(horizontal="left")
    return saved(book)


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
        (
            f"<xdr:grpSp>{SAID.format('group')}<xdr:pic>{SAID.format('pump')}</xdr:pic><xdr:sp>"
            f"{SAID.format('box')}<xdr:txBody>{lines('in')}</xdr:txBody></xdr:sp></xdr:grpSp>",
            "in\n\n![group](<>)\n\n![pump](<>)",
        ),
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
            "000-0000": (5551234, "555-1234"),
            "000-00-0000": (12345678, "012-34-5678"),
            '0#" "##" "##': (61234, "06 12 34"),
            '"v"0"."0': (12, "v1.2"),
            '00":"00': (1.5, "1.5"),
            '"Yes";"Yes";"No"': (0, "No"),
            '0;"neg"': (-5, "neg"),
            '0.0 "€";-0.0 "€";"-"?? "€"': (0, "0 €"),
            '0;-0;"CHF"* "-"': (0, "0"),
            "0;;": (-5, "-5"),
            "yyyy-mm-dd": (20240105, "20240105"),
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
            "0.00": (0.00005, "0.00005"),
            "#,##0.0": (12345678901234567.0, "12345678901234600"),
            "0E+00": (1e-30, "1e-30"),
        }
        for row, (format, (value, _)) in enumerate(shown.items()):
            sheet.write_number(row, 0, value, book.add_format({"num_format": format}))
        raised = book.add_format({"font_script": 1})
        sheet.write_rich_string(len(shown), 0, "10", raised, "3", " kg")
        out = [book.add_format({"font_strikeout": 1, "bold": bold}) for bold in (0, 1)]
        sheet.write_rich_string(len(shown) + 4, 0, "Fee ", out[0], "3", out[1], "0", " 40")
        sheet.write_number(len(shown) + 5, 0, 30, out[1])
        sheet.write_string(len(shown) + 1, 0, "two\r\nlines")
        sheet.write_string(len(shown) + 2, 0, "Due_x0020_Date")
        sheet.write_string(len(shown) + 3, 0, "B", book.add_format({"num_format": '"Item "@'}))
    rows = [line.strip("| ") for line in read_archive(file.getvalue()).text.split("\n")[2:]]
    texts = [text for _, text in shown.values()]
    assert rows[:1] + rows[2:] == [
        *texts,
        "10^3 kg",
        "two lines",
        "Due_x0020_Date",
        "Item B",
        "Fee ~~30~~ 40",
        "~~30~~",
    ]


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(hours=-1, minutes=-30), "-1:30:00"),
        (timedelta(days=1, milliseconds=50), "24:00:00.05"),
        (timedelta(seconds=59, microseconds=999_900), "0:01:00"),
    ],
)
def test_workbook_keeps_signs_and_fractions_of_spans_of_time(span: timedelta, text: str) -> None:
    assert written(span, "") == text


@pytest.mark.parametrize(
    "lost", [b'<numFmts count="1"><numFmt numFmtId="164" formatCode="0.0 t"/></numFmts>', b""]
)
def test_workbook_without_the_styles_that_its_cells_name_keeps_their_numbers(lost: bytes) -> None:
    file = one_cell(40, "0.0 t")
    names = ((lost, b""),) if lost else ((b's="1"', b's="99"'),)
    broken = renamed(file, *names)
    assert broken != renamed(file)
    assert read_archive(broken).text == "# Sheet\n\n| 40 |\n| --- |"


@pytest.mark.parametrize(
    ("part", "before", "flawed"),
    [
        ("xl/styles.xml", b"<patternFill/>", b""),
        ("xl/styles.xml", b"<cellXfs", b"<cellStyles><cellStyle xfId='9'/></cellStyles><cellXfs"),
        ("xl/styles.xml", b'horizontal="left"', b'horizontal="centre"'),
        ("xl/worksheets/sheet1.xml", b"<pageMargins", b"<pageSetup orientation='wide'/><pageMargins"),
        (
            "xl/worksheets/sheet1.xml",
            b"<sheetData",
            b"<sheetViews><sheetView view='x'/></sheetViews><sheetData",
        ),
        ("docProps/core.xml", b">20", b">in 20"),
        ("xl/workbook.xml", b"</sheets>", b"</sheets><calcPr calcMode='never'/>"),
        ("xl/workbook.xml", b"</sheets>", b"<sheet name='lost' sheetId='9' id='rId99'/></sheets>"),
        ("xl/worksheets/sheet1.xml", b"<sheetData", b"<!-- <sheetData/> --><sheetData"),
        ("xl/worksheets/sheet1.xml", b"</sheetData>", b"<!-- </sheetData> --></sheetData>"),
        ("xl/worksheets/sheet1.xml", b"<worksheet ", b"<worksheet a='>' "),
        ("xl/_rels/workbook.xml.rels", b"</Relationships>", b"<!-- > --></Relationships>"),
    ],
)
def test_flaw_of_a_workbook_that_no_cell_needs_costs_no_cell(part: str, before: bytes, flawed: bytes) -> None:
    parts = parts_of(one_cell(45000, "d mmm yyyy"))
    broken = parts[part].replace(before, flawed)
    assert broken != parts[part]
    assert read_archive(archive(parts | {part: broken})).text == "# Sheet\n\n| 2023-03-15 |\n| --- |"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("<c r='A1'><v>NaN</v></c>", "NaN"),
        ("<c r='A1' t='n'><f>1/0</f><v>INF</v></c>", "INF"),
        ("<c r='A1' t='b'><v>true</v></c>", "true"),
        ("<c t='s'><v>99</v></c>", ""),
    ],
)
def test_value_that_is_not_of_its_kind_costs_no_other_cell(cell: str, text: str) -> None:
    parts = parts_of(one_cell(40, "General"))
    name = "xl/worksheets/sheet1.xml"
    cell += "<c r='B1' t='str'><v>1,5</v></c><c r='C1'><v>-1.5E3</v></c>"
    broken = re.sub(rb"<c .*</c>", cell.encode(), parts[name])
    text = f"# Sheet\n\n| {text} | 1,5 | -1500 |\n| --- | --- | --- |"
    assert read_archive(archive(parts | {name: broken})).text == text


def in_utf_16(part: bytes) -> bytes:
    return b"<?xml version='1.0' encoding='UTF-16'?>".decode().encode("utf-16") + (
        part[part.find(b"?>") + 2 if part.startswith(b"<?") else 0 :].decode().encode("utf-16-le")
    )


def with_prefixes(part: bytes) -> bytes:
    root = ElementTree.fromstring(part)
    return ElementTree.tostring(root)  # ns0: by itself


@pytest.mark.parametrize("written", [in_utf_16, with_prefixes])
@pytest.mark.parametrize("of", [".rels", "xml"])
def test_workbook_is_read_however_its_parts_are_written(written: Callable[[bytes], bytes], of: str) -> None:
    parts = {name: written(part) if name.endswith(of) else part for name, part in parts_of(xlsx()).items()}
    assert read_archive(archive(parts)) == read_archive(xlsx())


@pytest.mark.parametrize(
    "about", [b"<Relationships/>", b"<Relationships", b"<Relationship Id='rId1' Target='lost.xml'/>"]
)
def test_workbook_whose_sheets_are_not_found_is_refused(about: bytes) -> None:
    with pytest.raises(Unusable, match="without the sheets"):
        read_archive(archive(parts_of(xlsx()) | {"xl/_rels/workbook.xml.rels": about}))


@pytest.mark.parametrize(("id", "text"), [(31, "2023-03-15"), (57, "2023-03-15"), (37, "45000")])
def test_date_in_a_format_of_east_asia_is_a_date(id: int, text: str) -> None:
    file = renamed(one_cell(45000, "0.0 t"), (b'numFmtId="164" fontId', b'numFmtId="%d" fontId' % id))
    assert read_archive(file).text == f"# Sheet\n\n| {text} |\n| --- |"


def test_workbook_keeps_addresses_that_formulas_lead_to() -> None:
    import xlsxwriter

    file = io.BytesIO()
    with xlsxwriter.Workbook(file) as book:
        sheet = book.add_worksheet("S")
        for row, address in enumerate(('"https://example.com/?a=1&b=2"', '"#S!A1"', "A1")):
            sheet.write_formula(row, 0, f'=HYPERLINK({address},"form")', None, "form")
        sheet.write_formula(3, 0, '="HYPERLINK(""x"")"', None, "plain")
    shown = "| [form](https://example.com/?a=1&b=2) |\n| --- |\n| form |\n| form |\n| plain |"
    assert read_archive(file.getvalue()).text == f"# S\n\n{shown}"


@pytest.mark.parametrize(
    "drawing", ["<xdr:broken", f"<x xmlns:a='{DRAWN[1:-1]}'><y><a:p><a:r/></a:p></y></x>"]
)
def test_workbook_with_a_broken_drawing_or_links_is_read_without_them(drawing: str) -> None:
    assert read_archive(workbook(drawing)).text == CELLS
    parts = parts_of(workbook(drawing)) | {"xl/worksheets/_rels/sheet1.xml.rels": "<Relationships"}
    assert read_archive(archive(parts)).text == "# Sheet\n\n| form |\n| --- |"


def test_sheets_share_their_texts() -> None:
    """A dictionary of all texts for each of a hundred sheets took most of a gigabyte."""
    import tracemalloc

    import xlsxwriter

    file = io.BytesIO()
    with xlsxwriter.Workbook(file) as book:
        for sheet in [book.add_worksheet() for _ in range(50)]:
            sheet.write_string(0, 0, "text 1")
        for row in range(5_000):
            sheet.write_string(row, 1, f"text {row}")
    tracemalloc.start()
    text = read_archive(file.getvalue()).text
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text.count("\n\n| text 1 |") == 50 and most < 18_000_000


def test_letters_in_place_of_a_link_take_no_time() -> None:
    """To part them at each letter, and look on from there, took hours."""
    from openpyxl import Workbook

    parts = parts_of(saved(Workbook()))
    parts["xl/worksheets/sheet1.xml"] += b"<!--<hyperlink " + b"a" * 400_000 + b">-->"
    assert read_archive(archive(parts)).text.strip() == "# Sheet"


@pytest.mark.parametrize("letters", [b"1", b" ", b"<c><v>"])
def test_letters_in_place_of_a_value_take_no_time(letters: bytes) -> None:
    written = b"<!--<c><v>" + letters * 400_000 + b"--></sheetData>"
    file = renamed(one_cell(40, "General"), (b"</sheetData>", written))
    assert read_archive(file).text == "# Sheet\n\n| 40 |\n| --- |"


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
    text = read_archive(saved(book)).text
    assert all(f"v{place}." in text for place in range(1, 1_001)) and len(text) < 20_000
