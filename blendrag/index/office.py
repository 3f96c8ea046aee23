"""Readers of documents that are ZIP archives: Word, PowerPoint, Excel (all three by libraries of the extra
``documents``) and EPUB."""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from html import unescape
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from blendrag.index.html import RAISED, markdown, markup
from blendrag.index.text import Content, Unusable

if TYPE_CHECKING:
    from pptx.slide import Slide

MAX_UNPACKED_BYTES = 100 << 20
_MAX_TAGS = 1_000_000  # tags of a Word document: each costs up to a kilobyte and a tenth of a millisecond
_MAX_CELLS = 50_000_000  # cells that a sheet's rows reach over: so many filled ones would unpack to more


def read_archive(data: bytes) -> Content:
    """Read a document of Word, PowerPoint or Excel, or an EPUB: which of them, its parts tell."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if (size := sum(member.file_size for member in members)) > MAX_UNPACKED_BYTES:
            raise Unusable(f"unpacks to more than the limit of {MAX_UNPACKED_BYTES:,} bytes ({size:,})")
        read = _reader({member.filename for member in members})
        if any(member.flag_bits & 1 for member in members):
            raise Unusable("encrypted ZIP archive")
        if damaged := archive.testzip():
            raise Unusable(f"broken ZIP archive (damaged in {damaged!r})")
        try:
            return read(_plain(archive))
        except ModuleNotFoundError as error:
            raise Unusable(f"needs blendrag[documents] ({error.name} is not installed)") from None


def _reader(names: set[str]) -> Callable[[zipfile.ZipFile], Content]:
    if _CONTAINER in names:
        return _read_epub
    folders = {name.partition("/")[0] for name in names if "[Content_Types].xml" in names}
    for folder, read in (("word", _read_docx), ("ppt", _read_pptx), ("xl", _read_xlsx)):
        if folder in folders:
            return read
    raise Unusable("ZIP archive that is neither Word, PowerPoint, Excel nor EPUB")


# The strict form of Office's formats, and shows, differ from what is read in names only.
_PLAIN = (
    (re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/"), rb"http://schemas.openxmlformats.org/\1/2006/"),
    (re.compile(rb"(presentationml|powerpoint)\.(slideshow|template)\."), rb"\1.presentation."),
)


def _plain(archive: zipfile.ZipFile) -> zipfile.ZipFile:
    """Return a document of Office's under the names that its readers know."""
    names = {"[Content_Types].xml", "_rels/.rels"} & set(archive.namelist())
    if not any(kind.search(archive.read(name)) for kind, _ in _PLAIN for name in names):
        return archive
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name in archive.namelist():
            part = archive.read(name)
            for kind, known in _PLAIN if name.endswith((".xml", ".rels")) else ():
                part = kind.sub(known, part)
            written.writestr(name, part)
    return zipfile.ZipFile(file)


def _stream(archive: zipfile.ZipFile) -> IO[bytes]:
    stream = archive.fp
    assert stream
    stream.seek(0)
    return stream


def _read_docx(archive: zipfile.ZipFile) -> Content:
    """Read headings, lists, tables, links, boxes, formulas, notes, comments and pictures' descriptions."""
    import mammoth

    from blendrag.index.word import CODE_STYLES, for_mammoth, numbered

    parts = (member for member in archive.infolist() if member.filename.endswith(".xml"))
    if sum(archive.read(part).count(b"<") for part in parts) > _MAX_TAGS:
        raise Unusable(f"Word document of more than {_MAX_TAGS:,} tags")
    codes = (f"p[style-name='{name}'] => pre:separator('\\n')" for name in CODE_STYLES)
    styles = "\n".join(("p[style-name='Title'] => h1:fresh", "comment-reference => sup", *codes))
    pictures = mammoth.images.img_element(lambda picture: {"src": ""})
    page = mammoth.convert_to_html(
        for_mammoth(archive), style_map=styles, include_embedded_style_map=False, convert_image=pictures
    )
    return markdown(numbered(page.value))


def _read_pptx(archive: zipfile.ZipFile) -> Content:
    """Read slides in their order: titles, texts, tables, pictures' descriptions, and the speaker's notes."""
    import pptx

    slides = pptx.Presentation(_stream(archive)).slides
    texts = ["\n\n".join(filter(None, _slide(slide))) for slide in slides]
    return Content("\n\n".join(texts), {"slides": len(texts)})


def _slide(slide: Slide) -> Iterator[str]:
    _complete(slide.shapes._spTree, slide.part.rels)
    title = slide.shapes.title
    if title is not None and (words := title.text_frame.text.split()):
        yield f"# {' '.join(words)}"
    yield from _shapes(shape for shape in slide.shapes if shape != title)
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
        yield _lines(notes.text)


_SPACES = {
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
}
# What a form of a shape says: its text, or what is said of a chart.
_SAYS = ".//*[local-name()='t' or (local-name()='graphicFrame' and */*[local-name()='cNvPr']/@descr!='')]"


def _select(tree: Any, path: str) -> Any:
    """Return what an XPath finds in any element, also of a kind that pptx does not know."""
    from lxml.etree import XPath

    return XPath(path, namespaces=_SPACES)(tree)


def _complete(tree: Any, rels: Mapping[str, Any]) -> None:
    """Put formulas, addresses of links, exponents, and shapes that are there in several forms where pptx
    reads them."""
    from blendrag.index.word import formula

    for forms in _select(tree, ".//*[local-name()='AlternateContent']"):
        that_say = (form for form in forms if _select(form, _SAYS))
        for shape in next(that_say, forms[-1] if len(forms) else forms):
            forms.addprevious(shape)
        forms.getparent().remove(forms)
    for math in _select(tree, ".//a:p/*[local-name()='m'][*]"):
        math.addprevious(math.getparent().add_r(formula(math[0])))
    for link in _select(tree, ".//a:r/a:rPr/a:hlinkClick[@r:id!='']"):
        run, leads_to = link.getparent().getparent(), rels.get(link.rId)
        if leads_to is not None and leads_to.is_external:
            run.t.text = f"[{run.t.text}]({leads_to.target_ref})"
    for run in _select(tree, ".//a:p/a:r[a:rPr/@baseline > 0]"):
        before = run.getprevious()  # none, or the paragraph's properties: a note's number
        if before is not None and not str(before.tag).endswith("}pPr") and RAISED.match(run.t.text or ""):
            run.t.text = f"^{run.t.text}"
    for body in _select(tree, ".//*[a:p/a:pPr/a:buAutoNum]"):
        _number(body)


_NUMBERED = {
    "alphaLc": "lowerLetter",
    "alphaUc": "upperLetter",
    "romanLc": "lowerRoman",
    "romanUc": "upperRoman",
}


def _number(body: Any) -> None:
    """Write before each paragraph of a shape the number that it is shown with, if there is one."""
    from blendrag.index.word import formatted

    counts: dict[int, int] = {}
    kinds: dict[int, tuple[str, str]] = {}  # by level: another kind, or another first number, begins anew
    for paragraph in _select(body, "a:p[.//a:t]"):
        level = paragraph.pPr.lvl if paragraph.pPr is not None else 0
        counts = {above: count for above, count in counts.items() if above <= level}
        numbered = paragraph.xpath("a:pPr/a:buAutoNum")
        if not numbered:
            counts.pop(level, None)
            continue
        kind, first_number = numbered[0].get("type", ""), numbered[0].get("startAt", "1")
        if kinds.get(level) != (kind, first_number) or level not in counts:
            counts[level] = int(first_number) - 1 if first_number.isdecimal() else 0
        kinds[level] = kind, first_number
        counts[level] += 1
        number = formatted(counts[level], _NUMBERED.get(kind.partition("P")[0], "decimal"))
        first = paragraph.add_r(f"{number}) " if kind.endswith(("ParenR", "ParenBoth")) else f"{number}. ")
        paragraph.xpath("a:r|a:fld|a:br")[0].addprevious(first)


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        elif getattr(shape, "has_table", False):
            yield _table([[cell.text for cell in row.cells] for row in shape.table.rows])
        elif shape.has_text_frame and (text := shape.text_frame.text).strip():
            yield _lines(text)
        else:
            yield from _graphic(shape)
            if description := shape._element.xpath("string(.//*[local-name()='cNvPr']/@descr)"):
                yield f"![{' '.join(description.split())}](<>)"


def _graphic(shape: Any) -> Iterator[str]:
    """Yield what a chart or a diagram shows, if the file has it."""
    from lxml.etree import XMLSyntaxError
    from pptx.exc import InvalidXmlError

    with contextlib.suppress(AttributeError, KeyError, ValueError, XMLSyntaxError, InvalidXmlError):
        if getattr(shape, "has_chart", False):
            yield from _chart(shape.chart._chartSpace)
        elif about := _select(shape._element, "string(.//*[local-name()='relIds']/@r:dm)"):
            yield "\n".join(_diagram(shape.part.related_part(about).blob))


def _chart(tree: Any) -> Iterator[str]:
    """Yield the title of a chart, and what it shows as a table: a row for each place, a column for each
    series."""
    if title := "".join(_select(tree, "*/*[local-name()='title']//a:t/text()")).strip():
        yield title
    head, rows = [""], dict[str, dict[int, str]]()
    for series in _select(tree, ".//*[local-name()='ser']"):
        head.append(_select(series, "string(*[local-name()='tx']//*[local-name()='v'])"))
        for kinds, column in ((("cat", "xVal"), 0), (("val", "yVal"), len(head) - 1)):
            named = " or ".join(f"local-name()='{kind}'" for kind in kinds)
            said: dict[str, list[str]] = {}
            for point in _select(series, f"*[{named}]//*[local-name()='pt']"):
                said.setdefault(point.get("idx", ""), []).append(_select(point, "string(*)"))
            for place, texts in said.items():
                rows.setdefault(place, {})[column] = " ".join(reversed(texts))
    if len(head) * len(rows) > 100 * (len(head) + sum(map(len, rows.values()))):
        yield "\n\n".join(map(" | ".join, (head[1:], *(row.values() for row in rows.values()))))
    elif rows:
        yield _table([head, *([row.get(place, "") for place in range(len(head))] for row in rows.values())])


def _diagram(part: bytes) -> Iterator[str]:
    """Yield the texts of a diagram (SmartArt), each above those that it leads to."""
    from pptx.oxml import parse_xml

    tree = parse_xml(part)
    points = {point.get("modelId"): point for point in _select(tree, "*[local-name()='ptLst']/*")}
    leads_to: dict[str, list[Any]] = {}
    for line in _select(tree, "*[local-name()='cxnLst']/*[not(@type) or @type='parOf']"):
        leads_to.setdefault(line.get("srcId"), []).append(line)
    waiting = [id for id, point in points.items() if point.get("type") == "doc"]
    while waiting:
        point = points.pop(id := waiting.pop(), None)  # at once: it may lead to itself
        if point is None:
            continue
        yield from filter(
            str.strip, ("".join(_select(line, ".//a:t/text()")) for line in _select(point, ".//a:p"))
        )
        below = sorted(leads_to.get(id, ()), key=lambda line: -int(line.get("srcOrd", "0")))
        waiting += [line.get("destId") for line in below]


def _lines(text: str) -> str:
    return text.replace("\v", "\n").strip()


def _read_xlsx(archive: zipfile.ZipFile) -> Content:
    """Read every sheet as a table: values as last calculated, without rows and columns that are empty."""
    import openpyxl

    with warnings.catch_warnings(action="ignore"):  # it reports all that it would lose in writing
        book = openpyxl.load_workbook(_stream(archive), read_only=True, data_only=True, rich_text=True)
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
        _complete(tree, {})
        for shape in tree:
            lines = [line.text for line in _select(shape, ".//a:p")]
            if text := _lines("\n".join(filter(str.strip, lines))):
                yield text
            elif description := " ".join(_select(shape, "string(.//*[local-name()='cNvPr']/@descr)").split()):
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
    columns = sorted({column for row in rows for column in row})
    if len(columns) * len(rows) > 100 * sum(len(row) for row in rows):
        return "\n\n".join(" | ".join(row.values()) for row in rows)
    return _table([[row.get(column, "") for column in columns] for row in rows])


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


def _table(rows: list[list[str]]) -> str:
    """Return cells as a table of Markdown; the first row is its head."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines[1:1] = [["---"] * len(row) for row in lines[:1]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_CONTAINER = "META-INF/container.xml"


def _read_epub(archive: zipfile.ZipFile) -> Content:
    """Read chapters in the order in which they are read."""
    import turbohtml

    def parts(name: str, tag: str) -> list[Any]:
        page = turbohtml.parse_xml(archive.read(name).decode("utf-8-sig", "replace"))
        return [each for each in page.iter_elements() if each.tag.rpartition(":")[2] == tag]

    package = parts(_CONTAINER, "rootfile")[0].attr("full-path")
    folder, there = posixpath.dirname(package), set(archive.namelist())
    hrefs = {item.attr("id"): item.attr("href") for item in parts(package, "item") if _is_page(item)}
    spine = (hrefs.get(item.attr("idref"), "") for item in parts(package, "itemref"))
    names = dict.fromkeys(posixpath.normpath(posixpath.join(folder, unquote(href))) for href in spine)
    chapters = [markdown(markup(archive.read(name))) for name in names if name in there]
    title = next((" ".join(each.text.split()) for each in parts(package, "title")), "")
    text = "\n\n".join(chapter.text for chapter in chapters if chapter.text.strip())
    return Content(text, {"title": title} if title else {})


def _is_page(item: Any) -> bool:
    return "html" in item.attr("media-type", "html")
