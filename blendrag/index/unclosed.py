"""HTML parsed so that what is never closed takes no text.

A parser does as browsers do: a comment, script or title that is never closed takes the rest of the page.
Here its opening counts as text, for no text may be lost. Every step is linear in the page.
"""

from __future__ import annotations

import re
from html import escape

import turbohtml
from turbohtml import Document

_READ = r"script|style|title|textarea|iframe|xmp"  # a parser reads them as text, up to their end
_DROPPED = r"nav|template"
_EMPTY = re.compile(rf"<({_READ})\b([^<>]*)/>", re.I)
# XHTML, Confluence's too: there is what is closed at once, which a parser of HTML would leave open.
_XHTML = re.compile(
    r"""\A\s*<\?xml\b|<html\b[^<>]*\sxmlns\s*=\s*["']http://www\.w3\.org/1999/xhtml|<(?:ac|ri):\w"""
)
_VOID = r"(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)"
# Or text that a parser reads as it is, up to its end.
_CLOSED = re.compile(
    rf"""<({_READ})(?=[\s>])[^<>]*(?<!/)>[^<]*(?:<(?!/?(?:{_READ})\b)[^<]*)*(?=</\1\b)"""
    rf"""|<((?!{_VOID}[\s/])[\w:-]+)(\s[^<>]*["'\s]|)/>""",
    re.I,
)
_OPENING = re.compile(rf"<(?:(!--)|(!\[CDATA\[)|({_READ}|{_DROPPED})(?=[\s/>]))", re.I)
_CLOSING = re.compile(rf"(--!?>)|(\]\]>)|</({_READ}|{_DROPPED})(?=[\s/>])", re.I)
# Elements that a browser with scripts and frames does not show, but that have text of the page.
_UNSEEN = re.compile(
    r"<(/?)(?:frameset|noframes|noembed|plaintext|datalist|template(?=[^<>]*\sshadowroot))(?=[\s/>])", re.I
)
_PREFIXED = re.compile(
    r"<(/?)\w+:(math|m[a-z]+|semantics|annotation(?:-xml)?)(?=[\s/>])"
)  # formulas of XHTML
_ROUNDS = 4


def parse(markup: str) -> Document:
    """Parse a page; a tag that an open quote carries to the page's end is text, too."""
    markup = _closed(markup)
    for last in (False,) * _ROUNDS + (True,):
        page = turbohtml.parse(markup, source_locations=True)
        if not any(error.code == "eof-in-tag" for error in page.errors):
            break
        tokens = turbohtml.tokenize(markup, resolve_references=False, capture_source=True)
        begin = sum(len(token.source or token.data or "") for token in tokens)
        begin = markup.find("<", begin)
        if begin < 0:
            break
        tail = markup[begin + 1 :]
        markup = f"{markup[:begin]}&lt;{tail.replace('<', '&lt;') if last else tail}"
    return page


def _closed(markup: str) -> str:
    """Return the page with what is never closed made harmless: none of it takes the rest of the page."""
    head, end, tail = _PREFIXED.sub(r"<\1\2", _text_of_cdata(markup)).rpartition(">")
    markup = head + end + tail.replace("<", "&lt;")  # no tag is complete behind the last bracket
    if _XHTML.search(markup):
        markup = _CLOSED.sub(lambda at: at[0] if at[1] else f"<{at[2]}{at[3]}></{at[2]}>", markup)
    markup = _UNSEEN.sub(r"<\1div", _EMPTY.sub(r"<\1\2></\1>", markup))
    last = {_kind(closing): closing.start() for closing in _CLOSING.finditer(markup)}

    def checked(opening: re.Match[str]) -> str:
        closed = opening.start() < last.get(_kind(opening), -1)
        return opening[0] if closed else f"&lt;{opening[0][1:]}"

    return _OPENING.sub(checked, markup)


def _kind(found: re.Match[str]) -> str:
    return found[3].lower() if found[3] else str(found.lastindex)


def _text_of_cdata(markup: str) -> str:
    *closed, rest = markup.split("]]>")
    return "".join(_escaped_cdata(part) for part in closed) + rest


def _escaped_cdata(part: str) -> str:
    head, opening, text = part.partition("<![CDATA[")
    return head + escape(text, quote=False) if opening else f"{part}]]>"
