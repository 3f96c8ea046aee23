"""Signs in place of what only the height of letters tells apart: exponents, indices, formulas, readings."""

from __future__ import annotations

import re
from itertools import islice

from turbohtml import Document, Element, Node, Text

RAISED = re.compile(r"[\d+\u2012-\u2014\u2212-]|[^\W_adeor]\b|\([^()]*[\d+\u2012-\u2014\u2212-]")
"""The beginning of an exponent or a note's number, not of the letters of "1st", "1er" or "XIXe"."""
# Of formulas: before the second part, the third.
# No links: in Markdown, [^1](#fn) is not one.
_WRAPPERS = ("b", "em", "font", "i", "s", "span", "strong", "u")
_ALIGNED = re.compile(r"(?<![\w-])vertical-align\s*:\s*(sup|sub)", re.I)
_PARTS = {"msub": "_", "munder": "_", "msup": "^", "msubsup": "_^", "munderover": "_^", "mfrac": "/"}


def write_signs(page: Document) -> None:
    """Write signs where only the height of letters tells apart: 10 to the power of 2 is not 102."""
    signed = {sign.parent for sign in page.select("rp")}
    for reading in page.select("rt"):
        if reading.parent not in signed:
            _enclose(reading)
    for sign in page.select("rp"):
        sign.tag = "span"  # the writer leaves the others out
    for styled in page.select("span[style*='vertical-align' i]"):
        if aligned := _ALIGNED.search(styled.attr("style") or ""):
            styled.tag = aligned[1].lower()
    for raised in reversed(page.select("sup")):  # one around another is marked, not both
        before, texts = _beside(raised, "previous_sibling"), _first_texts(raised)
        apart = before is None or (isinstance(before, Text) and before.data[-1:].isspace())
        said = texts[0].data.lstrip(" \t\n\xa0\u2060") if texts and not apart else ""
        if RAISED.match(said):
            texts[0].data = said
            mixed = _is_over(raised) and "".join(text.data for text in _first_texts(before))[-1:].isdigit()
            _mark(raised, " " if mixed else "^")
    for lowered in page.select("sub"):
        both = (_beside(lowered, "previous_sibling"), lowered)
        ahead, said = ("".join(text.data for text in _first_texts(part)) for part in both)
        if said[:1].isdigit() and (ahead[-1:].isdigit() or _digit_behind(lowered)):
            _mark(lowered, "_")
    for root in page.select("msqrt, mroot"):
        parts = [part for part in root.children if isinstance(part, Element)]
        _enclose(root)
        for degree in parts[1:2] if root.tag == "mroot" else ():
            for part in (Text("]"), degree.extract(), Text("[")):
                root.insert(0, part)
        root.insert(0, Text("√"))
    for fenced in page.select("mfenced"):
        _enclose(fenced, fenced.attr("open"), fenced.attr("close"))
    for name, signs in _PARTS.items():
        for formula in page.select(name):
            parts = [part for part in formula.children if isinstance(part, Element)]
            for part in parts if name == "mfrac" else parts[1:]:
                if len("".join(part.strings).strip()) > 1:
                    _enclose(part)
            for part, written in zip(parts[1:], signs, strict=False):
                part.insert_before(Text(written))


def _first_texts(node: Node | None) -> list[Text]:
    """Return a text itself, or those with which an element begins: enough of them."""
    nodes = islice(node.descendants, 20) if isinstance(node, Element) else [node]
    return [each for each in nodes if isinstance(each, Text)]


def _enclose(part: Element, opened: str | None = None, closed: str | None = None) -> None:
    part.insert(0, Text("(" if opened is None else opened))
    part.append(Text(")" if closed is None else closed))


def _mark(part: Element, sign: str) -> None:
    """Write a sign before a part, and parentheses around it if the next digit would become one of it."""
    if _digit_behind(part):
        _enclose(part)
    part.insert(0, Text(sign))


def _is_over(part: Element) -> bool:
    """Return whether this is the upper number of a fraction."""
    slash = part.next_sibling
    below = slash.next_sibling if isinstance(slash, Text) and slash.data.strip() in ("/", "\u2044") else None
    return isinstance(below, Element) and below.tag == "sub"


def _digit_behind(part: Element) -> bool:
    behind = _beside(part, "next_sibling")
    texts = [] if isinstance(behind, Element) and behind.tag not in _WRAPPERS else _first_texts(behind)
    return "".join(text.data for text in texts)[:1].isdigit()


def _beside(part: Element, side: str) -> Node | None:
    """Return what stands on this side of a part, also outside of elements that only mark it up."""
    beside: Node | None = getattr(part, side)
    while beside is None and isinstance(around := part.parent, Element) and around.tag in _WRAPPERS:
        part, beside = around, getattr(around, side)
    return beside
