"""Numbers of Word's paragraphs, as Word counts them, and what is code: their lists and styles tell both."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from blendrag.index.fields import VAL, W
from blendrag.index.numbers import formatted

NUMBER = "\ufdd1"
"""No character of any text. It stands around the number of an item in a list, and in empty lines of code."""
CODE = "code-of-any-style"
"""The style that paragraphs of code get."""
_COUNTED = re.compile(r"([0-9]{1,9})[.)]?")
_HEADING = re.compile(r"heading [1-6]|title", re.IGNORECASE)
_TICKS = frozenset("☐☑☒✓✔✗✘✅❌")  # bullets that say something of their item
_CODE_STYLE = re.compile(
    r"(source |html )?code( ?block| snippet)?|(html )?preformatted( text)?|macro( text)?", re.I
)
# Not Courier, in which letters and pleadings are typed, too.
_CODE_FONT = re.compile(
    r"^(consolas|menlo|monaco|lucida console|(source|fira|cascadia) code\b.*)$|\bmono\b", re.I
)
_NOT_IN_CODE = tuple(
    f"{W}{name}" for name in ("hyperlink", "strike", "footnoteReference", "endnoteReference")
)


class _Level(NamedTuple):
    start: int
    format: str
    text: str
    style: str
    legal: bool
    begins_behind: int  # the number of levels whose items let it begin anew


class Numbers:
    """The numbers of a document's paragraphs, counted in their order."""

    def __init__(self, trees: Iterable[Element]) -> None:
        self._levels: dict[str, dict[int, _Level]] = {}
        self._kinds: dict[str, str] = {}  # of numbered lists: which counts and forms they have
        self._overrides: dict[str, dict[int, _Level]] = {}
        self._starts: dict[str, dict[int, int]] = {}
        self._styles: dict[str, Element] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._in_code = False
        links: dict[str, str] = {}
        for root in trees:
            for style in root.iter(f"{W}style"):
                self._styles[style.get(f"{W}styleId", "")] = style
            for kind in root.iter(f"{W}abstractNum"):
                id = kind.get(f"{W}abstractNumId", "")
                self._levels[id] = dict(_level(one) for one in kind.iter(f"{W}lvl"))
                links[id] = value(kind, "numStyleLink")
            for num in root.iter(f"{W}num"):
                id = num.get(f"{W}numId", "")
                self._kinds[id] = value(num, "abstractNumId")
                self._overrides[id] = dict(_level(one) for one in num.iter(f"{W}lvl"))
                starts = (
                    (int_of(one.get(f"{W}ilvl")), value(one, "startOverride"))
                    for one in num.iter(f"{W}lvlOverride")
                )
                self._starts[id] = {place: int_of(start) for place, start in starts if start}
        for id, kind_id in list(self._kinds.items()):
            linked = self._styles.get(links.get(kind_id, ""))
            if linked is not None:
                self._kinds[id] = self._kinds.get(value(linked, "pPr/numPr/numId"), kind_id)

    def write(self, paragraph: Element) -> None:
        """Write a paragraph's number before its text, if it has one."""
        properties, style = paragraph.find(f"{W}pPr"), value(paragraph, "pPr/pStyle")
        num, place = self._of(paragraph, style)
        levels = self._of_list(num)
        if properties is None or place not in levels:
            return
        label = self._label(num, place, levels)
        begin = list(paragraph).index(properties) + 1
        if levels[place].format == "bullet" and label:  # one without a sign goes on with the item before
            if label in _TICKS:
                paragraph.insert(begin, run_of(f"{label} "))
            return
        heading = self._heading(style)
        counted = _COUNTED.fullmatch(label)
        if not counted:  # no list of Markdown has such numbers
            for given in properties.findall(f"{W}numPr"):
                properties.remove(given)
            none = ElementTree.SubElement(properties, f"{W}numPr")
            for name in ("ilvl", "numId"):
                ElementTree.SubElement(none, f"{W}{name}").set(VAL, "0")
        if label:
            written = f"{NUMBER}{counted[1]}{NUMBER}" if counted and not heading else f"{label} "
            paragraph.insert(begin, run_of(written))

    def write_heading(self, paragraph: Element) -> None:
        """Write into a heading the style of headings that its own one is based on."""
        for given in paragraph.findall(f"{W}pPr/{W}pStyle"):
            given.set(VAL, self._heading(given.get(VAL, "")) or given.get(VAL, ""))

    def _heading(self, style: str) -> str:
        above = (id for id, named in self._above(style) if _HEADING.fullmatch(value(named, "name")))
        return next(above, "")

    def write_code(self, paragraph: Element, apart: bool) -> None:
        """Write into a paragraph of code that it is one, if it stands apart from other cells of a table."""
        empty = not any(part.text for part in paragraph.iter(f"{W}t"))
        self._in_code = self._is_code(paragraph) and (self._in_code or not empty)
        if not self._in_code:
            return
        if (properties := paragraph.find(f"{W}pPr")) is None:
            paragraph.insert(0, properties := Element(f"{W}pPr"))
        for given in properties.findall(f"{W}pStyle"):
            properties.remove(given)
        if apart:
            ElementTree.SubElement(properties, f"{W}pStyle").set(VAL, CODE)
            if empty:
                paragraph.append(run_of(NUMBER))  # a line, which mammoth would pass over

    def _is_code(self, paragraph: Element) -> bool:
        """Return whether a style says so, or the font of a whole paragraph: of no heading or item, nor of one
        with what code would lose."""
        style = value(paragraph, "pPr/pStyle")
        name = next((value(named, "name") for _, named in self._above(style)), "")
        num, place = self._of(paragraph, style)
        levels = self._of_list(num)
        if _CODE_STYLE.fullmatch(name):
            return place not in levels or levels[place].format != "bullet"
        runs = [run for run in paragraph.iter(f"{W}r") if any(part.text for part in run.iter(f"{W}t"))]
        fonts = [fonts_of(run)[0] for run in runs or paragraph.findall(f"{W}pPr")]
        plain = not levels and not self._heading(style)
        lost = (part.get(VAL) not in ("0", "false") for tag in _NOT_IN_CODE for part in paragraph.iter(tag))
        return bool(fonts) and all(map(_CODE_FONT.search, fonts)) and plain and not any(lost)

    def write_style(self, run: Element) -> None:
        """Write into a run the font and the height that its style gives it, which mammoth does not ask."""
        if (properties := run.find(f"{W}rPr")) is None:
            return
        for _, named in self._above(value(run, "rPr/rStyle")):
            for name in ("rFonts", "vertAlign"):
                given = named.find(f"{W}rPr/{W}{name}")
                if given is not None and properties.find(f"{W}{name}") is None:
                    properties.append(given)

    def _above(self, style: str) -> Iterator[tuple[str, Element]]:
        """Yield a style and those that it is based on."""
        seen: set[str] = set()
        while style not in seen and (named := self._styles.get(style)) is not None:
            seen.add(style)
            yield style, named
            style = value(named, "basedOn")

    def _of(self, paragraph: Element, style: str) -> tuple[str, int]:
        """Return the numbered list of a paragraph, its own or its style's, and the level there."""
        num, given = value(paragraph, "pPr/numPr/numId"), value(paragraph, "pPr/numPr/ilvl")
        for id, named in self._above(style) if not num else ():
            num = value(named, "pPr/numPr/numId")
            of_style = [str(place) for place, level in self._of_list(num).items() if level.style == id]
            given = given or next(iter(of_style), "") or value(named, "pPr/numPr/ilvl")
            if num:
                break
        return num, int_of(given)

    def _of_list(self, num: str) -> dict[int, _Level]:
        return self._levels.get(self._kinds.get(num, ""), {}) | self._overrides.get(num, {})

    def _label(self, num: str, place: int, levels: Mapping[int, _Level]) -> str:
        counts, starts = self._counts[self._kinds[num]], self._starts.pop(num, None) or {}
        for start in sorted(starts):  # a list that begins anew does so once
            counts.pop(start, None)
        first = {one: starts.get(one, level.start) for one, level in levels.items()}
        for above in range(place):
            counts.setdefault(above, first.get(above, 1))
        counts[place] = counts[place] + 1 if place in counts else first[place]
        for below in [one for one in counts if one > place]:
            if below not in levels or place < levels[below].begins_behind:
                del counts[below]
        level = levels[place]

        def count(found: re.Match[str]) -> str:
            one = int(found[1]) - 1
            return formatted(counts.get(one, 1), "decimal" if level.legal else levels.get(one, level).format)

        return re.sub(r"%(\d)", count, level.text).strip()


def value(element: Element, path: str) -> str:
    found = element.find("/".join(f"{W}{name}" for name in path.split("/")))
    return "" if found is None else found.get(VAL, "")


def int_of(written: str | None) -> int:
    return int(written) if written and re.fullmatch(r"\d{1,9}", written) else 0


def _level(element: Element) -> tuple[int, _Level]:
    place = int_of(element.get(f"{W}ilvl"))
    legal = element.find(f"{W}isLgl") is not None
    text = element.find(f"{W}lvlText")
    return place, _Level(
        int_of(value(element, "start") or "1"),
        value(element, "numFmt") or "decimal",
        f"%{place + 1}." if text is None else text.get(VAL, ""),
        value(element, "pStyle"),
        legal,
        int_of(value(element, "lvlRestart") or str(place)),
    )


def fonts_of(element: Element) -> tuple[str, str]:
    """Return the fonts of a run, or of the mark at the end of a paragraph with these properties: for ASCII,
    and for other signs."""
    if (fonts := element.find(f"{W}rPr/{W}rFonts")) is None:
        return "", ""
    ascii = fonts.get(f"{W}ascii", "")
    return ascii, fonts.get(f"{W}hAnsi", ascii)


def run_of(text: str) -> Element:
    run = Element(f"{W}r")
    run.append(text_of(text))
    return run


def text_of(text: str) -> Element:
    element = Element(f"{W}t")
    element.text = text
    return element
