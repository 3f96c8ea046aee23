"""Workbooks of Excel as text, read by openpyxl."""

from __future__ import annotations

import contextlib
import posixpath
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from html import unescape
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from blendrag.index.numbers import in_format, written
from blendrag.index.package import TYPES, Parts, packed
from blendrag.index.signs import RAISED
from blendrag.index.slides import complete, described, plain_lines, select, table_of
from blendrag.index.text import Content, Unusable

_MAX_CELLS = 50_000_000  # cells that a sheet's rows reach over: so many filled ones would unpack to more


def read_xlsx(parts: Parts) -> Content:
    """Read every sheet as a table: values as last calculated, without rows and columns that are empty."""
    import openpyxl

    with warnings.catch_warnings(action="ignore"):  # it reports all that it would lose in writing
        book = openpyxl.load_workbook(
            packed(_of_cells(parts)), read_only=True, data_only=True, rich_text=True
        )
        book._date_formats = set()  # which makes errors of numbers that are no dates
        strings = _Strings()
        for sheet in book.worksheets:  # which share them
            strings = strings or _Strings(enumerate(sheet._shared_strings))
            sheet._shared_strings = strings
        sheets = [list(_whole_sheet(parts, sheet)) for sheet in book.worksheets]
    return Content("\n\n".join(part for sheet in sheets for part in sheet), {"sheets": len(sheets)})


class _Strings(dict[int, str]):
    """Texts by their places, none where there is none."""

    def __missing__(self, place: int) -> str:
        return ""


_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_KIND = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_CONTENT_TYPES = (
    f'<Types xmlns="{_PACKAGE}/content-types">'
    f'<Override PartName="/xl/workbook.xml" ContentType="{_KIND}.sheet.main+xml"/>'
    f'<Override PartName="/xl/sharedStrings.xml" ContentType="{_KIND}.sharedStrings+xml"/></Types>'
)


def _of_cells(parts: Parts) -> dict[str, bytes | str]:
    """Return a workbook with nothing but its cells: openpyxl refuses it for a flaw of anything else."""
    books = (part.target for part in _related(parts, "").values() if part.kind == "officeDocument")
    path = _path("", next(books, "xl/workbook.xml"))
    related = {id: (part.kind, _path(path, part.target)) for id, part in _related(parts, path).items()}
    of = {kind: target for kind, target in related.values() if target in parts}
    made: dict[str, bytes | str] = {"xl/sharedStrings.xml": f'<sst xmlns="{_MAIN}"/>'}
    if (strings := of.get("sharedStrings", "xl/sharedstrings.xml")) in parts:
        made["xl/sharedStrings.xml"] = parts[strings]
    if (styles := of.get("styles", "xl/styles.xml")) in parts:
        with contextlib.suppress(ElementTree.ParseError):  # numbers are there without them
            made["xl/styles.xml"] = _formats(parts[styles])
    book = ElementTree.fromstring(parts[path])
    since = next((one.get("date1904", "0") for one in book.iter(f"{{{_MAIN}}}workbookPr")), "0")
    sheets = targets = ""
    named = [
        (sheet, *related.get(sheet.get(f"{{{_OFFICE}}}id", ""), ("", "")))
        for sheet in book.iter(f"{{{_MAIN}}}sheet")
    ]
    if named and not any(target in parts for *_, target in named):
        raise Unusable("workbook without the sheets that it names")
    for place, (sheet, kind, target) in enumerate(named):
        if target in parts and kind != "chartsheet":
            made[target] = _ODD.sub(_as_text, _cells(parts[target]))
            sheets += f'<sheet name={quoteattr(sheet.get("name", ""))} sheetId="{place}" r:id="r{place}"/>'
            targets += (
                f'<Relationship Id="r{place}" Type="{_OFFICE}/worksheet" Target={quoteattr(f"/{target}")}/>'
            )
    made[TYPES] = _CONTENT_TYPES
    made["xl/workbook.xml"] = (
        f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><workbookPr date1904={quoteattr(since)}/>'
        f"<sheets>{sheets}</sheets></workbook>"
    )
    made["xl/_rels/workbook.xml.rels"] = (
        f'<Relationships xmlns="{_PACKAGE}/relationships">{targets}</Relationships>'
    )
    return made


_ROOT = re.compile(rb"<((?:\w+:)?\w+)(?:\s[^<>]*)?>")
_DATA = re.compile(rb"<((?:\w+:)?)sheetData\b[^<>]*>")
_END = re.compile(rb"sheetData(?:\s[^<>]*)?/>|/(?:\w+:)?sheetData\s*>")


def _cells(page: bytes) -> bytes:
    """Return a sheet without what stands around its cells, as it is where that is not sure."""
    root, begin = _ROOT.search(page), _DATA.search(page)
    if not root or not begin or not (end := _END.search(page, begin.start())):
        return page
    if b"<!--" in page[: begin.start()]:
        return page
    size = b'<%bdimension ref="A1"/>' % begin[1]  # else openpyxl reads all the cells to find it
    cells = b"%b%b%b</%b>" % (page[: root.end()], size, page[begin.start() : end.end()], root[1])
    try:
        expat.ParserCreate().Parse(cells, True)
    except expat.ExpatError:  # other signs look like these tags
        return page
    return cells


# A cell whose value is no number.
_ODD = re.compile(
    rb"""<((?:\w+:)?c)\b([^<>]*+)>"""
    rb"""(\s*+(?:<(?:\w+:)?f\b[^<>]*+>(?:[^<]*+</(?:\w+:)?f\s*+>\s*+)?)?<(?:\w+:)?v>)"""
    rb"""(?!\s*+[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?\s*+<)"""
)
_ODD_KINDS = {"n", "b", "s"}  # of values that are numbers


def _as_text(cell: re.Match[bytes]) -> bytes:
    """Return the begin of a cell whose value is not of its kind, such as NaN, as that of text."""
    about = _attributes(cell[2])
    if about.get("t", "n") not in _ODD_KINDS:
        return cell[0]
    place = about.get("r", "")
    return b"<%b%b t='str'>%b" % (cell[1], f" r={quoteattr(place)}".encode() if place else b"", cell[3])


_DATES = {*map(str, (*range(27, 37), *range(50, 59)))}  # formats of East Asia that openpyxl does not know
_DATE = "14"


def _formats(styles: bytes) -> bytes:
    """Return the formats of numbers, which of them each style has, and whether its font strikes out."""
    tree = ElementTree.fromstring(styles)
    fonts = (font for part in tree if part.tag.endswith("}fonts") for font in part)
    struck = {str(place) for place, font in enumerate(fonts) if _strikes_out(font)}
    tree[:] = [part for part in tree if part.tag.endswith(("}numFmts", "}cellXfs"))]
    own = {one.get("numFmtId") for one in tree.iter(f"{{{_MAIN}}}numFmt")}
    for part in tree:
        part[:] = [one for one in part if one.tag.endswith("}xf") or one.get("formatCode")]
        for one in part:
            id, code, font = one.get("numFmtId", "0"), one.get("formatCode", ""), one.get("fontId", "")
            one.clear()
            one.set("numFmtId", _DATE if id in _DATES - own else id)
            if code:
                one.set("formatCode", code)
            else:
                one.set("fontId", str(int(font in struck)))
    return ElementTree.tostring(tree)


def _strikes_out(font: ElementTree.Element) -> bool:
    return any(one.tag.endswith("}strike") and one.get("val") not in ("0", "false") for one in font)


_LINK = re.compile(rb"<(?:\w+:)?hyperlink\s[^<>]*>")
_BY_FORMULA = re.compile(
    rb"""<(?:\w+:)?c\s([^<>]*+)>\s*<(?:\w+:)?f\b[^<>]*+>\s*"""
    rb"""HYPERLINK\(\s*("|&quot;)((?!#)(?:(?!"|&quot;)[^<])++)\2\s*[,)]"""
)
_CELL = re.compile(r"[A-Z]{1,3}[1-9]\d{0,6}")
_ATTRIBUTE = re.compile(r"""(?<![\w:])([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")


def _whole_sheet(parts: Parts, sheet: Any) -> Iterator[str]:
    """Yield a sheet's title, its table with the addresses of links, and what is written in its shapes."""
    path = sheet._worksheet_path
    related, page = _related(parts, path), parts[path]
    links = {
        _attributes(cell).get("r", ""): unescape(address.decode("utf-8", "replace"))
        for cell, _, address in _BY_FORMULA.findall(page)
    }
    links |= {
        cell[0]: related[link["r:id"]].target
        for link in map(_attributes, _LINK.findall(page))
        if link.get("r:id") in related and (cell := _CELL.match(link.get("ref", "")))
    }
    yield f"# {sheet.title}\n\n{_sheet(sheet, links)}"
    drawings = (_path(path, part.target) for part in related.values() if part.kind == "drawing")
    for drawn in dict.fromkeys(drawings):
        if drawn in parts:
            yield from _drawn(parts[drawn])


class _Part(NamedTuple):
    kind: str
    target: str


def _related(parts: Parts, path: str) -> dict[str, _Part]:
    """Return what a part of a workbook names, by what it calls it."""
    folder, name = posixpath.split(path)
    about: Iterable[ElementTree.Element] = ()
    with contextlib.suppress(KeyError, ElementTree.ParseError):  # what it leads to is missing, or not needed
        about = ElementTree.fromstring(parts[f"{folder}/_rels/{name}.rels".lstrip("/")])
    return {
        part.get("Id", ""): _Part(posixpath.basename(part.get("Type", "")), part.get("Target", ""))
        for part in about
    }


def _path(path: str, target: str) -> str:
    """Return where the part lies that another one names so."""
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target)).lstrip("/")


def _attributes(tag: bytes) -> dict[str, str]:
    found = _ATTRIBUTE.findall(tag.decode("utf-8", "replace"))
    return {name: unescape(one or other) for name, one, other in found}


def _drawn(part: bytes) -> Iterator[str]:
    """Yield the texts of a sheet's shapes, and what is said of its pictures and charts."""
    from lxml.etree import XMLSyntaxError
    from pptx.exc import InvalidXmlError
    from pptx.oxml import parse_xml

    with contextlib.suppress(XMLSyntaxError, InvalidXmlError):  # no cell needs it
        tree = parse_xml(part)
        complete(tree, {})
        for shape in tree:
            lines = [line.text for line in select(shape, ".//a:p")]
            if text := plain_lines("\n".join(filter(str.strip, lines))):
                yield text
            for said in dict.fromkeys(select(shape, _SAID)):
                yield from described(said)


# What is said of groups and of shapes that have no text.
_SAID = ".//*[local-name()='cNvPr'][normalize-space(../../*[local-name()='txBody'])='']/@descr"


def _sheet(sheet: Any, links: Mapping[str, str]) -> str:
    from openpyxl.utils import coordinate_to_tuple
    from openpyxl.utils.datetime import MAC_EPOCH

    leads_to = {coordinate_to_tuple(cell): target for cell, target in links.items() if _CELL.fullmatch(cell)}
    since_1904 = sheet.parent.epoch == MAC_EPOCH
    sheet.reset_dimensions()  # a file may say anything of its size
    rows: list[dict[int, str]] = []
    reached = 0
    for number, row in enumerate(sheet.iter_rows(), 1):
        reached += len(row)
        if reached > _MAX_CELLS:
            raise Unusable(f"sheet {sheet.title!r} reaches over more than {_MAX_CELLS:,} cells")
        values = {
            column: _value(cell, since_1904) for column, cell in enumerate(row) if cell.value is not None
        }
        for column in values if leads_to else ():
            if (target := leads_to.get((number, column + 1))) and values[column].strip():
                values[column] = f"[{values[column].strip()}]({target})"
        if any(value.strip() for value in values.values()):
            rows.append(values)
    return table_of(rows)


def _value(cell: Any, since_1904: bool) -> str:
    text, struck = _shown(cell, since_1904), False
    with contextlib.suppress(AttributeError, IndexError):  # a style that the file lacks
        struck = cell.style_array.fontId == 1
    return f"~~{text.strip()}~~" if struck and text.strip() and "~~" not in text else text


def _shown(cell: Any, since_1904: bool) -> str:
    value, format = cell.value, ""
    with contextlib.suppress(AttributeError, IndexError):  # a style or format that the file lacks
        format = cell.number_format
    match value:
        case list(parts):  # with runs of their own fonts
            return _CODED.sub(" ", "".join(map(_of_run, parts)).replace("~~~~", ""))
        case str(text):
            return written(_CODED.sub(" ", text), format)
        case int() | float() if not isinstance(value, bool):
            return in_format(value, format, since_1904=since_1904)
    return written(value, format)


_CODED = re.compile(r"_x00[01][0-9A-Fa-f]_")  # a sign that XML has not, or not in a value


def _of_run(run: Any) -> str:
    font, text = getattr(run, "font", None), str(run)
    raised = getattr(font, "vertAlign", "") == "superscript" and RAISED.match(text)
    return f"^{text}" if raised else f"~~{text}~~" if getattr(font, "strike", None) else text
