"""Presentations of PowerPoint as text, read by pptx."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.parsers import expat

from blendrag.index.formulas import formula
from blendrag.index.numbers import formatted, in_format
from blendrag.index.package import Parts, packed
from blendrag.index.signs import RAISED
from blendrag.index.text import Content
from blendrag.index.word import in_letters

if TYPE_CHECKING:
    from pptx.slide import Slide


def read_pptx(parts: Parts) -> Content:
    """Read slides in their order: titles, texts, tables, pictures' descriptions, the speaker's notes, and
    comments."""
    import pptx

    whole = {name: _mended(part) if name.endswith(".xml") else part for name, part in parts.items()}
    slides = pptx.Presentation(packed(whole)).slides
    texts = ["\n\n".join(filter(None, _slide(slide))) for slide in slides]
    return Content("\n\n".join(texts), {"slides": len(texts)})


def _mended(part: bytes) -> bytes:
    """Return a part of which no flaw costs the whole presentation: as much of it as can be read."""
    from lxml.etree import XMLParser, fromstring, tostring

    try:
        expat.ParserCreate().Parse(part, True)
    except expat.ExpatError:
        tree = fromstring(part or b"<none/>", XMLParser(recover=True, resolve_entities=False))
        return part if tree is None else tostring(tree)
    return part


def _slide(slide: Slide) -> Iterator[str]:
    complete(slide.shapes._spTree, slide.part.rels)
    title = slide.shapes.title
    if title is not None and (words := title.text_frame.text.split()):
        yield f"# {' '.join(words)}"
    yield from _shapes(shape for shape in slide.shapes if shape != title)
    if slide.has_notes_slide:
        page = slide.notes_slide
        complete(page.shapes._spTree, page.part.rels)
        notes = page.notes_placeholder
        yield from _shapes(shape for shape in page.shapes if shape == notes or not shape.is_placeholder)
    for about in slide.part.rels.values():
        if about.reltype.endswith("/comments") and not about.is_external:
            yield from _comments(about.target_part.blob)


def _comments(part: bytes) -> Iterator[str]:
    """Yield what was said of a slide, each before its replies."""
    from lxml.etree import XMLSyntaxError
    from pptx.oxml import parse_xml

    with contextlib.suppress(XMLSyntaxError):  # no shape needs it
        lines = select(parse_xml(part), ".//*[local-name()='text'] | .//a:p")
        yield "\n".join(filter(str.strip, (select(line, "string()") for line in lines)))


_SPACES = {
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
}
# What a form of a shape says: its text, or what is said of a chart.
_SAYS = ".//*[local-name()='t' or (local-name()='graphicFrame' and */*[local-name()='cNvPr']/@descr!='')]"


_STRUCK = "a:rPr/@strike[.!='noStrike']"
_ACCENTED = re.compile(r"\w[\xc0-\xff]|[\xc0-\xff]\w")


def select(tree: Any, path: str) -> Any:
    """Return what an XPath finds in any element, also of a kind that pptx does not know."""
    from lxml.etree import XPath

    return XPath(path, namespaces=_SPACES)(tree)


def complete(tree: Any, rels: Mapping[str, Any]) -> None:
    """Put formulas, addresses of links, exponents, letters of fonts of signs, and shapes that are there in
    several forms where pptx reads them."""
    for forms in select(tree, ".//*[local-name()='AlternateContent']"):
        that_say = (form for form in forms if select(form, _SAYS))
        for shape in next(that_say, forms[-1] if len(forms) else forms):
            forms.addprevious(shape)
        forms.getparent().remove(forms)
    for math in select(tree, ".//a:p/*[local-name()='m'][*]"):
        math.addprevious(math.getparent().add_r(formula(math[0])))
    for run in select(tree, ".//a:r[a:rPr/a:sym or a:rPr/a:latin]"):
        text = run.t.text or ""
        latin, sym = (select(run, f"string(a:rPr/a:{font}/@typeface)") for font in ("latin", "sym"))
        plain = latin if _ACCENTED.search(text) else sym or latin  # in words, they are letters
        run.t.text = in_letters(text, latin, plain, sym or latin)
    for link in select(tree, ".//a:r[a:t!='']/a:rPr/a:hlinkClick[@r:id!='']"):
        run, leads_to = link.getparent().getparent(), rels.get(link.rId)
        if leads_to is not None and leads_to.is_external:
            run.t.text = f"[{run.t.text}]({leads_to.target_ref})"
    for run in select(tree, ".//a:p/a:r[a:rPr/@baseline]"):
        height, text = select(run, "number(translate(a:rPr/@baseline, '%', ''))"), run.t.text or ""
        raised = height > 0
        before, behind = (
            select(run, f"string({side}-sibling::*[1]/a:t)") for side in ("preceding", "following")
        )
        as_digits = height < 0 and text[:1].isdigit() and (before[-1:].isdigit() or behind[:1].isdigit())
        if (before and RAISED.match(text)) if raised else as_digits:  # no note's number: nothing is before it
            run.t.text = ("^" if raised else "_") + (f"({text})" if behind[:1].isdigit() else text)
    for run in select(tree, f".//a:r[a:t!=''][{_STRUCK}]"):
        before, behind = (
            select(run, f"{side}-sibling::*[1]/{_STRUCK}") for side in ("preceding", "following")
        )
        run.t.text = "~~" * (not before) + run.t.text + "~~" * (not behind)
    for body in select(tree, ".//*[a:p/a:pPr/a:buAutoNum]"):
        _number(body)


_NUMBERED = {
    "alphaLc": "lowerLetter",
    "alphaUc": "upperLetter",
    "romanLc": "lowerRoman",
    "romanUc": "upperRoman",
    "arabicDb": "decimalFullWidth",
    "circleNumDb": "decimalEnclosedCircle",
    "ea1Chs": "chineseCounting",
    "ea1Cht": "chineseCounting",
    "ea1JpnChsDb": "japaneseCounting",
    "ea1JpnKor": "japaneseCounting",
    "hindiNum": "hindiNumbers",
    "thaiNum": "thaiNumbers",
    "thaiAlpha": "thaiLetters",
    "arabic1Minus": "arabicAlpha",
    "arabic2Minus": "arabicAbjad",
    "hebrew2Minus": "hebrew2",
}


def _number(body: Any) -> None:
    """Write before each paragraph of a shape the number that it is shown with, if there is one."""
    counts: dict[int, int] = {}
    kinds: dict[int, tuple[str, str]] = {}  # by level: another kind, or another first number, begins anew
    for paragraph in select(body, "a:p[.//a:t]"):
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
        first = paragraph.add_r("(" * kind.endswith("Both") + number + (") " if "Paren" in kind else ". "))
        paragraph.xpath("a:r|a:fld|a:br")[0].addprevious(first)


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from described(select(shape._element, "string(*[1]/*[local-name()='cNvPr']/@descr)"))
            yield from _shapes(shape.shapes)
        elif getattr(shape, "has_table", False):
            yield markdown_table([[cell.text for cell in row.cells] for row in shape.table.rows])
        elif shape.has_text_frame and (text := shape.text_frame.text).strip():
            yield plain_lines(text)
        else:
            yield from _graphic(shape)
            yield from described(select(shape._element, "string(.//*[local-name()='cNvPr']/@descr)"))
        for link in select(shape._element, "*[1]/*[local-name()='cNvPr']/a:hlinkClick/@r:id"):
            if (leads_to := shape.part.rels.get(link)) is not None and leads_to.is_external:
                yield f"<{leads_to.target_ref}>"


def described(description: str) -> Iterator[str]:
    """Yield what is said of a picture, if there is anything."""
    if words := " ".join(description.split()):
        yield f"![{words}](<>)"


def _graphic(shape: Any) -> Iterator[str]:
    """Yield what a chart or a diagram shows, if the file has it."""
    from lxml.etree import XMLSyntaxError
    from pptx.exc import InvalidXmlError

    with contextlib.suppress(AttributeError, KeyError, ValueError, XMLSyntaxError, InvalidXmlError):
        if getattr(shape, "has_chart", False):
            yield from _chart(shape.chart._chartSpace)
        elif about := select(shape._element, "string(.//*[local-name()='relIds']/@r:dm)"):
            yield "\n".join(_diagram(shape.part.related_part(about).blob))


def _chart(tree: Any) -> Iterator[str]:
    """Yield the titles of a chart and its axes, labels of their own text, and what it shows as a table: a row
    for each place, a column for each series."""
    for written in select(tree, ".//*[local-name()='title' or local-name()='dLbl']"):
        if title := "".join(select(written, ".//a:r/a:t/text() | .//*[local-name()='v']/text()")).strip():
            yield title
    head, rows = [""], dict[str, dict[int, str]]()
    for series in select(tree, ".//*[local-name()='ser']"):
        head.append(select(series, "string(*[local-name()='tx']//*[local-name()='v'])"))
        for kinds, column in ((("cat", "xVal"), 0), (("val", "yVal"), len(head) - 1)):
            named = " or ".join(f"local-name()='{kind}'" for kind in kinds)
            said: dict[str, list[str]] = {}
            for point in select(series, f"*[{named}]//*[local-name()='pt']"):
                said.setdefault(point.get("idx", ""), []).append(_of_point(point))
            for place, texts in said.items():
                rows.setdefault(place, {})[column] = " ".join(reversed(texts))
    if rows:
        yield table_of([dict(enumerate(head)), *rows.values()])


def _of_point(point: Any) -> str:
    """Return what stands at a place of a chart, numbers as they are shown."""
    text, about = str(select(point, "string()")), point.getparent()[0]
    format = about.text if str(about.tag).endswith("formatCode") else ""
    if format := point.get("formatCode") or format:
        with contextlib.suppress(ValueError, OverflowError):
            return in_format(float(text), format, since_1904=bool(select(point, _SINCE_1904)))
    return text


_SINCE_1904 = "/*/*[local-name()='date1904'][@val='1' or @val='true']"


def _diagram(part: bytes) -> Iterator[str]:
    """Yield the texts of a diagram (SmartArt), each above those that it leads to."""
    from pptx.oxml import parse_xml

    tree = parse_xml(part)
    points = {point.get("modelId"): point for point in select(tree, "*[local-name()='ptLst']/*")}
    leads_to: dict[str, list[Any]] = {}
    for line in select(tree, "*[local-name()='cxnLst']/*[not(@type) or @type='parOf']"):
        leads_to.setdefault(line.get("srcId"), []).append(line)
    waiting = [id for id, point in points.items() if point.get("type") == "doc"]
    while waiting:
        point = points.pop(id := waiting.pop(), None)  # at once: it may lead to itself
        if point is None:
            continue
        yield from filter(
            str.strip, ("".join(select(line, ".//a:t/text()")) for line in select(point, ".//a:p"))
        )
        below = sorted(leads_to.get(id, ()), key=lambda line: -int(line.get("srcOrd", "0")))
        waiting += [line.get("destId") for line in below]


def plain_lines(text: str) -> str:
    return text.replace("\v", "\n").strip("\n").rstrip()


def table_of(rows: Sequence[Mapping[int, str]]) -> str:
    """Return rows, with their cells by column, as a table of Markdown without empty columns; plainly, where
    most of it would be empty."""
    columns = sorted({column for row in rows for column in row})
    if len(columns) * len(rows) > 100 * sum(map(len, rows)):
        return "\n\n".join(" | ".join(row.values()) for row in rows)
    return markdown_table([[row.get(column, "") for column in columns] for row in rows])


def markdown_table(rows: list[list[str]]) -> str:
    """Return cells as a table of Markdown; the first row is its head."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines[1:1] = [["---"] * len(row) for row in lines[:1]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
