"""Documents of Word as text, read by mammoth: what it would pass over is put where it reads, and paragraphs
get their numbers, which it counts anew behind each interruption, or leaves out."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from blendrag.index.fields import VAL, W, field_of, leave_codes, shown
from blendrag.index.formulas import MATH, formula, local
from blendrag.index.html import markdown
from blendrag.index.numbering import CODE, NUMBER, Numbers, fonts_of, int_of, run_of, text_of, value
from blendrag.index.package import Parts, packed
from blendrag.index.text import Content, Unusable

_LEADING = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_ID = f"{W}id"

# Elements around text, or notes, that mammoth reads, or passes over as deleted.
_READ = frozenset(
    {
        "body", "Choice", "comment", "commentReference", "comments", "customXml", "del", "document",
        "drawing", "endnote", "endnoteReference", "endnotes", "Fallback", "footnote", "footnoteReference",
        "footnotes", "group", "hyperlink", "ins", "moveFrom", "moveTo", "object", "p", "pict", "r", "rect",
        "roundrect", "sdt", "sdtContent", "shape", "smartTag", "t", "tbl", "tc", "textbox", "tr",
        "txbxContent",
    }
)  # fmt: skip
_SHOWN = tuple(f"{W}{name}" for name in ("t", "footnoteReference", "endnoteReference", "commentReference"))
_BREAK, _READING = f"{W}br", f"{W}rt"
_SAME = {f"{W}cr": _BREAK, f"{W}dstrike": f"{W}strike", f"{W}ptab": f"{W}tab"}

_ITEM = re.compile(rf"<li>((?:<(?!/?li\b)[^<>]*>)*){NUMBER}(\d+){NUMBER}")
_MOST_SKIPPED = 63  # columns: so many a table of Word has
_MAX_TAGS = 1_000_000  # of a document: each costs up to a kilobyte and a tenth of a millisecond


def read_docx(parts: Parts) -> Content:
    """Read headings, lists, tables, links, boxes, formulas, notes, comments and pictures' descriptions."""
    import mammoth

    if sum(part.count(b"<") for name, part in parts.items() if name.endswith(".xml")) > _MAX_TAGS:
        raise Unusable(f"Word document of more than {_MAX_TAGS:,} tags")
    styles = "\n".join(
        ("p[style-name='Title'] => h1:fresh", "comment-reference => sup", f"p.{CODE} => pre:separator('\\n')")
    )
    pictures = mammoth.images.img_element(lambda picture: {"src": ""})
    page = mammoth.convert_to_html(
        packed(_for_mammoth(parts)),
        style_map=styles,
        include_embedded_style_map=False,
        convert_image=pictures,
    )
    return markdown(_numbered(page.value))


def _for_mammoth(parts: Parts) -> Parts:
    """Return the document as mammoth reads it whole."""
    parts, trees = dict(parts), dict[str, Element]()
    for name in filter(re.compile(r"word/[^/]+\.xml").fullmatch, parts):
        with contextlib.suppress(ElementTree.ParseError):  # mammoth says so, if it needs this part
            trees[name] = ElementTree.fromstring(parts[name])
    numbers = Numbers(trees.values())
    notes = {(local(note), note.get(_ID)) for root in trees.values() for note in root if note.get(_ID)}
    for name, root in trees.items():
        if local(root) == "styles":
            for style in root.iter(f"{W}style"):
                for needed, default in (("type", "paragraph"), ("styleId", "")):  # by mammoth
                    style.attrib.setdefault(f"{W}{needed}", default)
            parts[name] = ElementTree.tostring(root, "utf-8")
        if local(root) in _READ:
            leave_codes(root)
            for run in root.iter(f"{W}r"):
                numbers.write_style(run)
            _write_letters(root)
            _join_paragraphs(root)
            _read_whole(root)
            _join_capitals(root)
            _fill_rows(root)
            _cut(root, parts.get(f"word/_rels/{name.removeprefix('word/')}.rels", b""), notes)
            in_table = _in_tables(root)
            for paragraph in root.iter(f"{W}p") if local(root) == "document" else ():
                numbers.write(paragraph)
                numbers.write_heading(paragraph)
                numbers.write_code(paragraph, apart=paragraph not in in_table)
            parts[name] = ElementTree.tostring(root, "utf-8")
    return parts


def _numbered(page: str) -> str:
    """Return mammoth's HTML with the numbers of a list's items where HTML has them."""
    page = _ITEM.sub(r'<li value="\2">\1', page)
    return re.sub(rf"{NUMBER}(\d+){NUMBER}", r"\1. ", page).replace(NUMBER, "")


def _cut(root: Element, targets: bytes, notes: Collection[tuple[str, str | None]]) -> None:
    """Cut what leads to nothing that the document has: links and pictures without a target, signs of notes
    and comments."""
    there = set(re.findall(r"""\bId=["']([^"']*)""", targets.decode("utf-8", "replace")))
    for element in root.iter():
        for name in [name for name in element.attrib if name.startswith(_LEADING)]:
            if element.attrib[name] not in there:
                del element.attrib[name]
        of, reference, _ = local(element).partition("Reference")
        if reference and (of, element.get(_ID)) not in notes:
            element.tag = f"{W}none"


# -- what mammoth would pass over --------------------------------------------------------------------------


def _read_whole(element: Element) -> bool:
    """Put what the element shows where mammoth reads it. Returns whether there is any text, or a note."""
    has_text = element.tag in _SHOWN
    children: list[Element] = []
    for child in sorted(element, key=lambda part: part.tag == _READING):  # which stands before its letters
        if MATH in child.tag:
            has_text = True
            children.append(run_of(formula(child)))
            continue
        if described := _description(child):
            children.append(text_of(described))
        if _read_whole(child):
            has_text = True
            children += _in_place_of(child, local(element))
        elif described:
            has_text = True
        else:
            if said := _said(child):
                children.append(text_of(said))
            child.tag = _SAME.get(child.tag, child.tag)
            if child.tag == _BREAK:
                child.attrib.clear()  # of a page or a column: it parts words all the same
            children.append(child)
    element[:] = children
    return has_text


def _in_place_of(element: Element, around: str) -> list[Element]:
    """Return what stands in place of an element with text."""
    name = local(element)
    if name == "AlternateContent":  # several forms of the same
        return list(next(form for form in element if _has_text(form)))
    if name == "txbxContent" and around != "textbox":
        box = Element(f"{W}pict")
        box.append(element)
        return [box]
    parts = [part for part in element if _has_text(part)]
    if element.tag == _READING:
        return [run_of("("), *parts, run_of(")")]
    if name == "fldSimple":  # a link, perhaps
        return field_of(element.get(f"{W}instr", ""), parts)
    return [element] if name in _READ else parts


def _description(element: Element) -> str:
    """Return what is said of pictures, charts and diagrams; mammoth reads it of pictures that are links."""
    name, said = local(element), list[str]()
    if name == "group" or (name == "shape" and element.find("{*}imagedata") is not None):
        said = [element.get("alt", "")]
    elif name == "drawing" and element.find("*/{*}docPr/{*}hlinkClick") is None:
        said = list(_described(element))
    lines = dict.fromkeys(" ".join(one.split()) for one in said)
    return " ".join(f"![{_BRACKET.sub(_ESCAPED, line)}](<>)" for line in lines if line)


_BRACKET, _ESCAPED = re.compile(r"[\[\]]"), r"\\\g<0>"


def _described(element: Element) -> Iterator[str]:
    """Yield what is said of a drawing and its parts, other than those that its boxes hold."""
    for part in element:
        name = local(part)
        if name in ("docPr", "cNvPr"):
            yield part.get("descr", "").strip() or part.get("title", "")
        elif name != "txbxContent" and (name != "graphicData" or part.find("{*}pic") is None):
            yield from _described(part)


def _said(element: Element) -> str:
    """Return what a drawn title says, what is chosen of a list, or what a field without a result shows."""
    if local(element) == "textpath":
        return element.get("string", "")
    if local(element) == "fldSimple":
        return shown(element.get(f"{W}instr", ""))
    for choice in element.iter(f"{W}ddList") if local(element) == "fldChar" else ():
        offered = [entry.get(VAL, "") for entry in choice.iter(f"{W}listEntry")]
        chosen = int_of(value(choice, "result") or value(choice, "default"))
        return "".join(offered[chosen : chosen + 1])
    return ""


def _write_letters(root: Element) -> None:
    """Write letters and signs where Word names them by their places in a font."""
    for run in root.iter(f"{W}r"):
        ascii, other = fonts_of(run)
        for part in run:
            if part.tag == f"{W}t":
                part.text = in_letters(part.text or "", ascii, other)
            elif part.tag == f"{W}sym":
                place = part.get(f"{W}char", "")
                known, font = re.fullmatch("[0-9A-Fa-f]{1,4}", place), part.get(f"{W}font", "")
                text = in_letters(chr(int(place, 16)), font, font) if known else ""
                if text.isprintable():  # else only that font has the sign
                    part.tag, part.text = f"{W}t", text


def in_letters(text: str, ascii: str, latin: str, own: str | None = None) -> str:
    """Return a run's text with the letters and signs that its fonts show: one in the places of ASCII, one in
    those of Latin-1 above it, and one, else the same, in those that fonts of signs have for themselves."""
    return text.translate(_letters(ascii, latin, latin if own is None else own))


@functools.lru_cache
def _letters(ascii: str, latin: str, own: str) -> dict[int, int]:
    from mammoth.docx.dingbats import dingbats

    ranges = (ascii, range(0x21, 0x80)), (latin, range(0x80, 0x100)), (own, range(0xF020, 0xF100))
    places = ((place, (font, place & 0xFF)) for font, places in ranges for place in places)
    return {place: dingbats[sign] for place, sign in places if sign in dingbats}


def _join_paragraphs(root: Element) -> None:
    """Make one paragraph of those whose ends are deleted, or moved away, and the next."""
    for around in [above for above in root.iter() if above.find(f"{W}p") is not None]:
        kept: list[Element] = []
        joined: list[Element] = []
        for part in around:
            ends = not _goes_on(part) if part.tag == f"{W}p" else len(part) > 0  # or it is a mark
            if part.tag == f"{W}p":
                joined.append(part)
            if joined and ends:
                kept.append(_joined(joined))
                joined = []
            if part.tag != f"{W}p":
                kept.append(part)
        around[:] = [*kept, _joined(joined)] if joined else kept


def _goes_on(paragraph: Element) -> bool:
    ends = (paragraph.find(f"{W}pPr/{W}rPr/{W}{of}") for of in ("del", "moveFrom"))
    return any(end is not None for end in ends)


def _joined(paragraphs: list[Element]) -> Element:
    """Return the last of these paragraphs with what is left of the others."""
    last = paragraphs[-1]
    begin = len(last.findall(f"{W}pPr"))
    last[begin:begin] = [part for one in paragraphs[:-1] for part in one if part.tag != f"{W}pPr"]
    if _goes_on(last):  # and no paragraph is there
        for properties in last.findall(f"{W}pPr/{W}rPr"):
            properties.clear()
        if not any(len(part) for part in last if local(part) not in ("pPr", "del", "moveFrom")):
            last.clear()
    return last


def _join_capitals(root: Element) -> None:
    """Put capitals that are let into paragraphs where these go on: each is a paragraph of its own."""
    for around in root.iter():
        moved = set[Element]()
        for above, paragraph in pairwise(around):
            if _is_let_in(above) and paragraph.tag == above.tag and not _is_let_in(paragraph):
                begin = len(paragraph.findall(f"{W}pPr"))
                paragraph[begin:begin] = [part for part in above if part.tag != f"{W}pPr"]
                moved.add(above)
        if moved:
            around[:] = [part for part in around if part not in moved]


def _is_let_in(paragraph: Element) -> bool:
    framed = paragraph.find(f"{W}pPr/{W}framePr") if paragraph.tag == f"{W}p" else None
    return framed is not None and framed.get(f"{W}dropCap") in ("drop", "margin")


def _fill_rows(root: Element) -> None:
    """Put empty cells where a row of a table begins behind its first columns."""
    for row in root.iter(f"{W}tr"):
        skipped = min(int_of(value(row, "trPr/gridBefore")), _MOST_SKIPPED)
        begin = next((place for place, part in enumerate(row) if local(part) in ("tc", "sdt")), 0)
        row[begin:begin] = [Element(f"{W}tc") for _ in range(skipped)]


def _in_tables(root: Element) -> set[Element]:
    """Return the paragraphs in tables of several cells: such a table has no place for lines of code."""
    found = set[Element]()
    for table in root.iter(f"{W}tbl"):
        if table not in found and len(list(table.iter(f"{W}tc"))) > 1:
            found.update(table.iter(f"{W}tbl"), table.iter(f"{W}p"))
    return found


def _has_text(element: Element) -> bool:
    return any(next(element.iter(tag), None) is not None for tag in _SHOWN)
