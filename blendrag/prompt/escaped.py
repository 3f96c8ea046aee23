"""Known texts that a prompt holds in escaped form: as JSON, Python or CSV writes a string, for HTML, indented
or quoted, with other line ends or blanks.

Tools answer in JSON, and chat templates write their answers as JSON once more; a list of documents becomes
a string, ``\\n`` for each new line; a template language made for web pages writes ``&amp;`` for ``&``. The
model reads such a prompt well enough, but the text that was ingested is not in it: what is there is another
form of it, whose KV can be kept as well.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import unescape

from blendrag.prompt.plan import Form
from blendrag.prompt.recognise import SHORT_ANCHOR, Match, Recogniser, gaps

# Every escape of Python's ``repr`` and of JSON, which writes characters above U+FFFF as two. No code point
# above the last.
_STRING = re.compile(
    r"\\(?:([\\'\"/nrtbf])|x(H{2})|u([dD][89abAB]H{2})\\u([dD][c-fC-F]H{2})|u(H{4})|U(000H{5}|0010H{4}))"
    "".replace("H", "[0-9a-fA-F]")
)
_STRING_SIGNS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
# The escapes of html.escape, markupsafe, mustache, Handlebars and XML; of numbers, no more than letters have:
# html.unescape raises on &#999...9; of any length.
_HTML = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")


@dataclass(frozen=True, slots=True)
class _Escape:
    """A way of escaping: the mark of texts that may have it, its escapes, the character that each is for.
    shown: what stands in each text that does, where the mark says too little."""

    mark: str
    pattern: re.Pattern[str]
    sign: Callable[[re.Match[str]], str]
    shown: str = ""

    def may_be_in(self, text: str) -> bool:
        return self.mark in text and re.search(self.shown, text) is not None


class _Unescaped:
    """A text without its escapes of one kind, each of which stood for one character. outer: what the text was
    itself unescaped from, if from anything."""

    def __init__(self, text: str, escape: _Escape, outer: _Unescaped | None = None) -> None:
        self._outer, self._longer, self._signs = outer, [0], list[int]()
        pieces, at, longer = list[str](), 0, 0
        for match in escape.pattern.finditer(text) if escape.may_be_in(text) else ():
            begin, end = match.span()
            pieces += text[at:begin], escape.sign(match)
            self._signs.append(begin - longer)
            at, longer = end, longer + end - begin - 1
            self._longer.append(longer)
        self.text = "".join((*pieces, text[at:]))

    def __bool__(self) -> bool:
        return bool(self._signs)

    def before(self, position: int) -> int:
        """Return where what stands at ``position`` begins in the text with all its escapes."""
        position += self._longer[bisect_left(self._signs, position)]
        return self._outer.before(position) if self._outer else position


def find_escaped(text: str, recogniser: Recogniser, reused: Iterable[Match]) -> list[Form]:
    """Return the forms of known texts in ``text`` that are not those that were ingested, each once.

    reused: the matches in ``text`` itself. What lies in one of them, whole, is not looked for.
    A text without escapes is only searched for their marks, which takes microseconds.
    """
    found: dict[tuple[str, str], Form] = {}
    for begin, end in gaps((match for match in reused if match.whole), len(text)):
        part = text[begin:end]
        for unescaped in _unescaped(part) if len(part) >= SHORT_ANCHOR else ():
            for match in recogniser.find(unescaped.text, whole=True):
                form = part[unescaped.before(match.start) : unescaped.before(match.end)]
                if form != match.known.text:
                    one = Form(match.key, form, match.known.source, match.tokens)
                    found.setdefault((match.key, form), one)
    return list(found.values())


def _unescaped(text: str) -> Iterator[_Unescaped]:
    """Yield ``text`` unescaped in each of the ways of which it bears marks, and strings in such texts once
    more: a tool's JSON, which a template writes as JSON."""
    for escape in _ESCAPES:
        if outer := _Unescaped(text, escape):
            yield outer
            if inner := _Unescaped(outer.text, _IN_STRING, outer):
                yield inner


def _string_sign(escape: re.Match[str]) -> str:
    sign = escape[1]
    if sign:
        return _STRING_SIGNS.get(sign, sign)
    if escape[3]:
        return chr(0x10000 + ((int(escape[3], 16) & 0x3FF) << 10) + (int(escape[4], 16) & 0x3FF))
    return chr(int(escape[escape.lastindex or 0], 16))


_IN_STRING = _Escape("\\", _STRING, _string_sign)


def _line_end(mark: str, shown: str = "") -> _Escape:
    return _Escape(mark, re.compile(mark), lambda _: "\n", shown)


_ESCAPES = (
    _IN_STRING,
    _Escape("&", _HTML, lambda escape: unescape(escape[0])[:1] or "\ufffd"),  # of no letter
    *map(_line_end, ("\n  ", "\n    ", "\n\t", "\r\n")),  # JSON's, YAML's and Markdown's indentation
    # Of lists, and nested: some line has no more, or code would be searched for all of them.
    *(_line_end("\n" + " " * width, f"\n {{{width}}}(?! )") for width in (3, 6, 8)),
    _Escape("\n>", re.compile("\n> ?"), lambda _: "\n"),
    _Escape("\u00a0", re.compile("\u00a0"), lambda _: " "),
    # Of CSV: beside a word, else it is an empty cell, or the third quote of a docstring is behind it.
    _Escape('""', re.compile('""'), lambda _: '"', r'""(?:(?<!""")(?=\w)|(?<=[^\s,;"]"")(?!"))'),
)
