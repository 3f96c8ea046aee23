"""Workbooks of Excel as text, read by openpyxl."""

from __future__ import annotations

import contextlib
import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any

from blendrag.index.html import RAISED
from blendrag.index.numbers import written
from blendrag.index.slides import complete, plain_lines, select, stream_of, table_of
from blendrag.index.text import Content, Unusable

_MAX_CELLS = 50_000_000  # cells that a sheet's rows reach over: so many filled ones would unpack to more


def read_xlsx(archive: zipfile.ZipFile) -> Content:
    """Read every sheet as a table: values as last calculated, without rows and columns that are empty."""
    import openpyxl

    with warnings.catch_warnings(action="ignore"):  # it reports all that it would lose in writing
        book = openpyxl.load_workbook(stream_of(archive), read_only=True, data_only=True, rich_text=True)
        sheets = [list(_whole_sheet(archive, sheet)) for sheet in book.worksheets]
    return Content("\n\n".join(part for sheet in sheets for part in sheet), {"sheets": len(sheets)})


_LINK = re.compile(rb"<(?:\w+:)?hyperlink\s[^<>]*>")
_BY_FORMULA = re.compile(
    rb"""<(?:\w+:)?c\s([^<>]*+)>\s*<(?:\w+:)?f\b[^<>]*+>\s*"""
    rb"""HYPERLINK\(\s*("|&quot;)((?!#)(?:(?!"|&quot;)[^<])++)\2\s*[,)]"""
)
_CELL = re.compile(r"[A-Z]{1,3}[1-9]\d{0,6}")
_RELATED = re.compile(rb"<Relationship\s[^<>]*>")
_ATTRIBUTE = re.compile(r"""(?<![\w:])([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")


def _whole_sheet(archive: zipfile.ZipFile, sheet: Any) -> Iterator[str]:
    """Yield a sheet's title, its table with the addresses of links, and what is written in its shapes."""
    path = sheet._worksheet_path.removeprefix("/")
    folder, name = posixpath.split(path)
    about = f"{folder}/_rels/{name}.rels"
    parts = _found(_RELATED, archive.read(about)) if about in archive.namelist() else []
    related = {part.get("Id"): part for part in parts}
    page = archive.read(path)
    links = {
        _attributes(cell).get("r", ""): unescape(address.decode("utf-8", "replace"))
        for cell, _, address in _BY_FORMULA.findall(page)
    }
    links |= {
        cell[0]: related[link["r:id"]].get("Target", "")
        for link in _found(_LINK, page)
        if link.get("r:id") in related and (cell := _CELL.match(link.get("ref", "")))
    }
    yield f"# {sheet.title}\n\n{_sheet(sheet, links)}"
    drawings = (part.get("Target", "") for part in parts if part.get("Type", "").endswith("/drawing"))
    for target in dict.fromkeys(drawings):
        drawn = posixpath.normpath(posixpath.join(folder, target)).removeprefix("/")
        if drawn in archive.namelist():
            yield from _drawn(archive.read(drawn))


def _found(tags: re.Pattern[bytes], part: bytes) -> list[dict[str, str]]:
    """Return the attributes of these tags."""
    return list(map(_attributes, tags.findall(part)))


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
            elif description := " ".join(select(shape, "string(.//*[local-name()='cNvPr']/@descr)").split()):
                yield f"![{description}](<>)"


def _sheet(sheet: Any, links: Mapping[str, str]) -> str:
    from openpyxl.utils import coordinate_to_tuple

    leads_to = {coordinate_to_tuple(cell): target for cell, target in links.items() if _CELL.fullmatch(cell)}
    sheet.reset_dimensions()  # a file may say anything of its size
    rows: list[dict[int, str]] = []
    reached = 0
    for number, row in enumerate(sheet.iter_rows(), 1):
        reached += len(row)
        if reached > _MAX_CELLS:
            raise Unusable(f"sheet {sheet.title!r} reaches over more than {_MAX_CELLS:,} cells")
        values = {column: _value(cell) for column, cell in enumerate(row) if cell.value is not None}
        for column in values if leads_to else ():
            if (target := leads_to.get((number, column + 1))) and values[column].strip():
                values[column] = f"[{values[column].strip()}]({target})"
        if any(value.strip() for value in values.values()):
            rows.append(values)
    return table_of(rows)


def _value(cell: Any) -> str:
    match cell.value:
        case list(parts):  # with runs of their own fonts
            return _CODED.sub(" ", "".join(map(_raised, parts)))
        case str(value):
            return _CODED.sub(" ", value)
        case value:
            format = ""
            with contextlib.suppress(AttributeError, IndexError):  # a style or format that the file lacks
                format = cell.number_format
            return written(value, format)


_CODED = re.compile(r"_x00[01][0-9A-Fa-f]_")  # a sign that XML has not, or not in a value


def _raised(run: Any) -> str:
    raised = getattr(getattr(run, "font", None), "vertAlign", "") == "superscript"
    return f"^{run}" if raised and RAISED.match(str(run)) else str(run)
