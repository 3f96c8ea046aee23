"""Workbooks of Excel as text, read by openpyxl."""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from html import unescape
from typing import Any, NamedTuple

from blendrag.index.html import RAISED
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
    links = {
        cell[0]: related[link["r:id"]].get("Target", "")
        for link in _found(_LINK, archive.read(path))
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
    return [
        {
            name: unescape(one or other)
            for name, one, other in _ATTRIBUTE.findall(tag.decode("utf-8", "replace"))
        }
        for tag in tags.findall(part)
    ]


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

    leads_to = {coordinate_to_tuple(cell): target for cell, target in links.items()}
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
        case bool(value):
            return str(value).upper()
        case datetime() as value if value.time() == datetime.min.time():
            return str(value.date())
        case timedelta() as value:
            seconds, thousandths = divmod(round(abs(value.total_seconds()) * 1000), 1000)
            whole = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            return f"{'-' * (value < timedelta())}{whole}" + f".{thousandths:03}".rstrip("0.")
        case int() | float() as value:
            format = ""
            with contextlib.suppress(IndexError):  # a style or format that the file lacks
                format = cell.number_format[:_LONGEST_FORMAT]
            return _shown(value, format)
        case list(parts):  # with runs of their own fonts
            return _CODED.sub(" ", "".join(map(_raised, parts)))
        case value:
            return _CODED.sub(" ", str(value))


_LONGEST_FORMAT = 255  # that Excel takes
_CODED = re.compile(r"_x00[01][0-9A-Fa-f]_")  # a sign that XML has not, or not in a value


def _raised(run: Any) -> str:
    raised = getattr(getattr(run, "font", None), "vertAlign", "") == "superscript"
    return f"^{run}" if raised and RAISED.match(str(run)) else str(run)


def _shown(number: float, format: str) -> str:
    """Return a number with the digits that Excel keeps, and the signs, units and zeros that it shows."""
    sections = _parts_of(format)
    shown = sections[min(number < 0, len(sections) - 1)]
    if shown.scale != 1:
        number *= shown.scale
    digits = f"{abs(number):.15g}" if isinstance(number, float) else str(abs(number))
    return f"{'-' * (number < 0)}{shown.before}{digits.zfill(shown.digits)}{shown.behind}"


class _Shown(NamedTuple):
    before: str = ""
    behind: str = ""
    scale: float = 1
    digits: int = 0


# Text in quotes, a sign, a currency; what shows nothing; digits; anything else.
_OF_FORMATS = re.compile(
    r'"([^"]*)"|\\(.)|\[\$([^\]-]*+)[^\]]*+\]|(\[[^\]]*\]|[_*].)'
    r"|(General|[.,]*[0#?][0#?.,]*(?:E[+-]0+)?)|(.)",
    re.S,
)


@functools.lru_cache
def _parts_of(format: str) -> list[_Shown]:
    """Return what each section of a format of Excel's writes around a number."""
    texts, digits, known, scale = ["", ""], "", True, 1.0
    sections: list[_Shown] = []
    for quoted, sign, currency, _, places, other in [*_OF_FORMATS.findall(format), ("",) * 5 + (";",)]:
        if other == ";":
            before, behind = (text.strip("()+-" if sections else "") for text in texts)
            scale /= 1000.0 ** len(re.findall(r",(?=,*(?:\.|$))", digits))
            zeros = len(digits) if digits.strip("0") == "" else 0
            sections.append(_Shown(before, behind, scale, zeros) if digits and known else _Shown())
            texts, digits, known, scale = ["", ""], "", True, 1.0
        elif places:
            known, digits = known and not digits, places
        else:
            scale *= 100 if other == "%" else 1
            texts[bool(digits)] += quoted or sign or currency or other
            known = known and not (other.isalpha() or other == "@")
    return [_Shown()] if re.search(r"\[[<>=]", format) else sections  # which it is, a condition says
