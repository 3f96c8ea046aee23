"""PDFs as text, read by pypdf: its text layer, with what it would take for other text put right, what was
written on its pages, and filled into its form."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import hypot
from typing import Any, TypeVar

from pypdf import PageObject, PdfReader
from pypdf.generic import ContentStream, DictionaryObject, Field, NameObject, create_string_object

from blendrag.index.signs import RAISED
from blendrag.index.text import Content, Unusable
from blendrag.index.word import in_letters

T = TypeVar("T")

# Encodings of East Asia in which pypdf would read each two bytes as a letter of UTF-16.
_ENCODINGS = (
    ("KSC-EUC KSCms-UHC KSCms-UHC-HW KSCpc-EUC", "cp949"),
    ("83pv-RKSJ 90msp-RKSJ 90pv-RKSJ Add-RKSJ Ext-RKSJ", "cp932"),
    ("EUC", "euc_jp"),
    ("GBKp-EUC", "gbk"),
    ("B5pc", "cp950"),
    ("HKscs-B5", "big5hkscs"),
)
with contextlib.suppress(ImportError, AttributeError, TypeError):  # it is no part of what pypdf promises
    from pypdf._cmap import _predefined_cmap

    for _names, _codec in _ENCODINGS:
        for _name in _names.split():
            for _way in "HV":
                _predefined_cmap.setdefault(f"/{_name}-{_way}", _codec)


def read_pdf(data: bytes) -> Content:
    """Return the text layer of a PDF, pages apart by a blank line. A scan without one is refused."""
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports every repaired flaw of a file
    document = _opened(data)
    if document.is_encrypted and not document.decrypt(""):
        raise Unusable("encrypted PDF")
    in_time = _within(_SECONDS * (1 + len(data) / (1 << 20)))
    by_number = {getattr(page.indirect_reference, "idnum", -n): page for n, page in enumerate(document.pages)}
    pages = list(by_number.values())
    texts = [text_of(page) for page in in_time(pages)]
    if not any(map(_HYPHEN.search, texts)):
        texts = [_PARTED.sub("", text) for text in texts]
    made = document.metadata
    if made and _OF_TEX.search(f"{made.get('/Creator')} {made.get('/Producer')}"):
        texts = [_UNBROKEN.sub(_with_its_accents, _ACCENTED.sub(_with_accent, text)) for text in texts]
    texts = _rejoined([text.translate(_LETTERS).strip() for text in texts])
    fields = "\n".join(_fields(document, in_time(pages)))
    if not fields and "".join(texts).startswith("Please wait...") and document.xfa:
        raise Unusable("PDF whose form only Adobe's programs show (XFA): print it there as a PDF")
    if not fields and not any(texts):
        raise Unusable("PDF without text (a scan has to go through OCR first)")
    written = [
        "\n".join((text, *_beside(page, text, in_time))) for page, text in zip(pages, texts, strict=True)
    ]
    return Content("\n\n".join(filter(None, map(str.strip, [*written, fields]))), {"pages": len(pages)})


def _opened(data: bytes) -> PdfReader:
    """Open a PDF, also one whose last lines are missing: browsers show it, and it has all its pages."""
    last = data[max(data.rfind(b" obj"), 0) :]
    is_whole = b"trailer" in last or (b"/XRef" in last and b"endobj" in last)
    ended = b"%%EOF" in last or not is_whole
    return PdfReader(io.BytesIO(data if ended else data + b"\nstartxref\n0\n%%EOF\n"))


_SECONDS = 60  # for a file, and for each MiB of it: some hundred pages take as long


def _within(seconds: float) -> Callable[[Iterable[T]], Iterator[T]]:
    """Return what yields items as long as there is time, of which only this thread's work counts."""
    end = time.thread_time() + seconds

    def in_time(items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if time.thread_time() > end:
                raise Unusable(
                    f"PDF that takes more than {seconds:.0f} s, too many for its size: print it as a new PDF"
                )
            yield item

    return in_time


def _with_its_accents(found: re.Match[str]) -> str:
    return found[0] if _OF_CODE.search(found[0]) else _AMBIGUOUS.sub(_with_accent, found[0])


def _with_accent(found: re.Match[str]) -> str:
    letter = found[2].replace("\u0131", "i") + _COMBINING[_ACCENTS.index(found[1].strip())]
    return letter if len(letter := unicodedata.normalize("NFC", letter)) == 1 else found[0]


_OF_TEX = re.compile("TeX|tex2pdf|dvips")
# Before its letter, as TeX sets it; three of these signs stand for themselves, too, in code and addresses.
_ACCENTED = re.compile(r"([´¨¯¸ˇ˘˙˚˝] ?)([^\W\d_])")
_AMBIGUOUS = re.compile(r"(?<=[^\W\d_])([`ˆ](?=[aeiouı])|˜(?=[ano]))([^\W\d_])", re.I)
_UNBROKEN = re.compile(r"\S+")
_OF_CODE = re.compile(r"\w\(|\)\w|=")
_ACCENTS = "´¨¯¸ˇ˘˙˚˝`ˆ˜"
_COMBINING = "\u0301\u0308\u0304\u0327\u030c\u0306\u0307\u030a\u030b\u0300\u0302\u0303"


def _rejoined(texts: list[str]) -> list[str]:
    """Return texts with each word whole that a line's end parts, if it stands whole elsewhere in them, and
    nowhere with a hyphen."""
    every = "\n".join(texts).casefold()
    whole, hyphenated = set(_WORD.findall(every)), set(_HYPHENATED.findall(every))

    def rejoin(parts: re.Match[str]) -> str:
        word, parted = (sign.join(parts.groups()).casefold() for sign in ("", "-"))
        return "".join(parts.groups()) if word in whole and parted not in hyphenated else parts[0]

    return [_AT_AN_END.sub(rejoin, text) for text in texts]


_WORD = re.compile(r"[^\W\d_]+")
_HYPHENATED = re.compile(r"[^\W\d_]+-[^\W\d_]+")
_AT_AN_END = re.compile(r"(?<![^\W\d_])([^\W\d_]{2,})-\s*\n([^\W\d_]{2,})")  # typesetters leave two letters


def _beside(page: PageObject, text: str, in_time: Callable[[Iterable[Any]], Iterator[Any]]) -> Iterator[str]:
    """Yield what was written on a page, and where its links lead, unless its text has it."""
    known = " ".join(text.split())
    notes: list[Any] = []
    with contextlib.suppress(Exception):  # pypdf fails in its own ways at what it does not know
        notes.extend(page.annotations or ())
    found = dict[str, None]()
    for note in in_time(notes):
        with contextlib.suppress(Exception):
            about = note.get_object()
            said = None if about.get("/Subtype") in _NO_NOTES else about.get("/Contents")
            found |= dict.fromkeys(str(one).strip() for one in (said, about.get("/A", {}).get("/URI")) if one)
    yield from (one for one in in_time(found) if one and " ".join(one.split()) not in known)


_NO_NOTES = ("/Link", "/Popup", "/Widget")  # whose contents say what they are, or what another note says


def _fields(document: PdfReader, pages: Iterable[PageObject]) -> Iterator[str]:
    """Yield what was filled into a form: no page's text has it. Some forms do not list all their fields."""
    listed = set[str]()
    with contextlib.suppress(Exception):  # pypdf fails in its own ways at forms that it does not know
        for name, field in (document.get_fields() or {}).items():
            if line := _filled(field, name):
                listed.add(line)
                yield line
    for page in pages:
        with contextlib.suppress(Exception):
            for note in (note.get_object() for note in page.annotations or ()):
                widget = Field(note) if note.get("/Subtype") == "/Widget" and "/T" in note else {}
                if (line := _filled(widget)) and line not in listed:
                    yield line


def _filled(field: Any, name: str = "") -> str:
    """Return what was filled into a field, as it is shown, if anything was."""
    value, kind = field.get("/V"), field.get("/FT")
    if kind not in ("/Tx", "/Ch", "/Btn") or value in (None, "", "/Off"):
        return ""
    shown: dict[str, str] = {}
    for place, option in enumerate(field.get("/Opt") or ()):
        known = option.get_object()
        value_of, words = known if isinstance(known, list) else (place if kind == "/Btn" else known, known)
        shown[str(value_of)] = str(words)
    values = [str(one) for one in (value if isinstance(value, list) else [value])]
    if kind == "/Btn":
        values = [one.removeprefix("/") for one in values]
    said = "\n".join(", ".join(shown.get(one, one) for one in values).splitlines())
    return f"{field.get('/TU') or field.get('/T', name)}: {said}"


_PARTED = re.compile("\u00ad\\s*\n")  # a word
_HYPHEN = re.compile("\u00ad(?!\\s*\n)")  # as some fonts write it, at lines' ends, too
_LETTERS = {0: None, 0x7F: "\u2022", 0xAD: "-", 0x2010: "-"} | {
    place: unicodedata.normalize("NFKC", chr(place))
    for place in (*range(0x2E80, 0x2FD6), *range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFD))
}
"""Letters by the signs that typesetting has for several, for radicals and for Arabic in its place in a word,
which nobody searches for; nor for zeros, of fonts without names for their letters. WinAnsiEncoding shows 0x7F
as a bullet."""


# -- pages ------------------------------------------------------------------------------------------------

_FONT_OF_SIGNS = re.compile(r"/(?:[A-Z]{6}\+)?(Symbol|Webdings|Wingdings)(?:MT)?[ -]?([23]?)(?:-?Regular)?")
# These stand from left to right all the same; to pypdf they have no direction, nor have other signs here.
_NUMBER = re.compile("[\u0660-\u0669\u06f0-\u06f9](?:[/:.,\u066b\u066c]?[\u0660-\u0669\u06f0-\u06f9])+")
_STRONG = re.compile("[^\0-/:-@\u0660-\u066d\u06f0-\u06f9\u2000-\u206f\u20a0-\u21ff]")
_MAY_PART = "\ufdd2"  # no character of any text: where a word may be parted
_PARTS_AT = re.compile(f"{_MAY_PART}(?:\\s*\n)?")
_SAID = "\0"
_FROM_RIGHT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")  # to left
_LATELY = 4  # that many times a text is drawn over itself, to look bold or have a shadow
_NEAR = 0.1  # of its height: so far apart they are
_SHOWN = re.compile(rb"T[jJ]|Do|['\"]")  # else there is no text
_SHOWS = (b"Tj", b"TJ", b"'", b'"')
_MOVES = (b"Td", b"TD", b"Tm", b"T*", b"'", b'"', b"BT", b"ET")


def text_of(page: PageObject) -> str:
    """Return the text layer of a page."""
    kept: list[tuple[Any, NameObject, Any]] = []  # and put back, since what stands in its place fills memory
    _write_plainly(page, "/Contents", page, kept)
    heard = _Heard()
    page.extract_text(visitor_operand_before=heard.operation, visitor_text=heard.text)
    for around, name, given in kept:
        around[name] = given
    return _PARTS_AT.sub("", "".join(heard.texts))


def _write_plainly(around: Any, name: str, page: PageObject, kept: list[tuple[Any, NameObject, Any]]) -> None:
    """Write what is drawn as pypdf reads it, and the forms in it, which others may draw, too."""
    with contextlib.suppress(Exception):  # pypdf fails in its own ways, and again when it reads
        given, key = around.raw_get(name), NameObject(name)
        drawn = given.get_object()
        if isinstance(drawn, ContentStream) or (around is not page and drawn.get("/Subtype") != "/Form"):
            return
        plain = ContentStream(given, page.pdf, "bytes")
        shows = _SHOWN.search(plain.get_data())  # else it is a figure, which may be long
        plain.operations = list(_Drawn(plain.operations).operations()) if shows else []
        if isinstance(drawn, DictionaryObject):
            plain.update(drawn)
        around[key] = plain
        kept.append((around, key, given))
        source: Any = page if around is page else plain
        for form in {operands[0] for operands, operator in plain.operations if operator == b"Do"}:
            _write_plainly(source["/Resources"]["/XObject"], form, page, kept)


_Operation = tuple[Any, bytes]
_AT_ZERO: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


class _Drawn:
    """The operations of a page, written so that pypdf reads each text at its place, once."""

    def __init__(self, operations: list[_Operation]) -> None:
        self._operations = operations
        self._cm = self._tm = _AT_ZERO
        self._leading = self._rise = 0.0
        self._scale = 100.0  # across, of a hundred
        self._font: list[Any] = []
        self._saved: list[tuple[Any, ...]] = []
        self._meant: list[str] = []  # what marked content stands for, outermost first
        self._has_moved = False
        self._lately: deque[tuple[str, float, float]] = deque(maxlen=_LATELY)

    def operations(self) -> Iterator[_Operation]:
        """Yield these operations with one move before a text, where pypdf would take the first of two for a
        gap between words (Chromium draws so where a word goes on in another font); without what is drawn over
        itself; and what marked content stands for in its place."""
        begun = sum(operator in (b"BDC", b"BMC") for _, operator in self._operations)
        all_end = begun == sum(operator == b"EMC" for _, operator in self._operations)
        for place, (operands, operator) in enumerate(self._operations):
            match operator:
                case b"q":
                    self._saved.append((self._cm, self._font, self._leading, self._scale, self._rise))
                case b"Q" if self._saved:
                    self._cm, self._font, self._leading, self._scale, self._rise = self._saved.pop()
                case b"cm":
                    self._cm = _product(_numbers(operands, *_AT_ZERO), self._cm)
                case b"Tf":
                    self._font = operands[:2]
                case b"TL":
                    (self._leading,) = _numbers(operands, 0.0)
                case b"Ts":
                    (self._rise,) = _numbers(operands, 0.0)
                case b"Tz":
                    (self._scale,) = _numbers(operands, 100.0)
                case b"BT":
                    self._tm, self._has_moved = _AT_ZERO, False
                case b"BDC" | b"BMC":
                    self._meant.append(_meant(operands) if all_end else "")
                case b"EMC" if self._meant:
                    self._meant.pop()
                case b"Tm":
                    self._move(*_numbers(operands, *_AT_ZERO), of=_AT_ZERO)
                    continue
                case b"Td" | b"TD":
                    right, up = _numbers(operands, 0.0, 0.0)
                    self._leading = -up if operator == b"TD" else self._leading
                    self._move(1, 0, 0, 1, right, up, of=self._tm)
                    continue
                case b"T*" | b"'" | b'"':
                    self._move(1, 0, 0, 1, 0, -self._leading, of=self._tm)
                    if operator == b"T*":
                        continue
                    if operator == b'"':
                        yield operands[-3:-2], b"Tw"
                        yield operands[-2:-1], b"Tc"
                    operands, operator = operands[-1:], b"Tj"
            if operator in (b"Tj", b"TJ"):
                if meant := next(filter(None, self._meant), ""):
                    if meant == _SAID:
                        continue
                    operands, operator = [meant], b"Tj"
                    self._meant = [_SAID if one else "" for one in self._meant]
                elif self._has_moved and self._is_alone(place) and self._is_drawn_again(operands):
                    continue
                if self._has_moved:
                    yield list(self._tm), b"Tm"
                    self._has_moved = False
            yield operands, operator

    def _move(self, *by: float, of: tuple[float, ...]) -> None:
        self._tm, self._has_moved = _product(by, of), True

    def _is_alone(self, place: int) -> bool:
        """Return whether no text goes on behind the one at this place: of such, all or nothing is dropped."""
        behind = (self._operations[n][1] for n in range(place + 1, len(self._operations)))
        return next((one in _MOVES for one in behind if one in _MOVES or one in _SHOWS), True)

    def _is_drawn_again(self, operands: list[Any]) -> bool:
        *across, _, _, left, below = _product(self._tm, self._cm)
        name, size = f"{self._font}{self._rise} {operands}", _numbers(self._font[1:], 0.0)[0]
        near = _NEAR * abs(size) * hypot(*across) * min(abs(self._scale) / 100, 1)
        again = any(
            name == other and abs(left - x) < near and abs(below - y) < near for other, x, y in self._lately
        )
        self._lately.append((name, left, below))
        return again


def _meant(marked: list[Any]) -> str:
    """Return the text that marked content stands for, if it says so and pypdf need not turn it around."""
    is_span = marked[:1] == ["/Span"] and isinstance(marked[-1], dict)
    said = marked[-1].get("/ActualText", "") if is_span else ""
    text = str(said if isinstance(said, str) else create_string_object(said))
    return "" if _FROM_RIGHT.search(text) else text.replace("\u00ad", _MAY_PART)


def _numbers(operands: list[Any], *default: float) -> tuple[float, ...]:
    """Return an operation's numbers, if it has as many as it has to, else the default."""
    there = tuple(float(one) for one in operands if isinstance(one, int | float))
    return there if len(there) == len(default) else default


def _product(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    a, b, c, d, e, f = one
    p, q, r, s, t, u = other
    return a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s, e * p + f * r + t, e * q + f * s + u


def _has_its_signs(font: Any) -> bool:
    """Return whether pypdf knows a font's signs, and not only their places."""
    encoding = font.get("/Encoding")
    if encoding is None:
        return "/ToUnicode" in font or font["/BaseFont"] == "/Symbol" or font.get("/Subtype") != "/TrueType"
    return "/ToUnicode" in font or isinstance(encoding.get_object(), DictionaryObject)


class _Heard:
    """The texts of a page, as pypdf hears them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._line: tuple[float, float] | None = None  # its letters' height, and where they stand
        self._way: tuple[float, float] | None = None  # that it runs
        self._rise = 0.0
        self._risen: float | None = None  # how far the next piece is, once its first text is drawn
        self._sign = ""  # of what is raised or lowered just now
        self._begin = 0
        self._from_right = False  # pypdf turns the text around

    def operation(self, operator: bytes, operands: list[Any], *_: Any) -> None:
        """Take how far a text is raised in its line, which is no move to pypdf."""
        if operator == b"Ts":
            (self._rise,) = _numbers(operands, 0.0)
        elif operator in _SHOWS and self._risen is None:
            self._risen = self._rise

    def text(self, text: str, cm: list[float], tm: list[float], font: Any, size: float) -> None:
        """Take a piece of text, with the signs that its font, its height or its direction stands for."""
        if not text:
            return
        if known := _FONT_OF_SIGNS.fullmatch(str(font.get("/BaseFont")) if font else ""):
            name = " ".join(filter(None, known.groups()))
            letters = "" if _has_its_signs(font) else name
            with contextlib.suppress(ModuleNotFoundError):  # of blendrag[documents]
                text = in_letters(text, letters, letters, name)
        if strong := _STRONG.search(text):
            self._from_right = bool(_FROM_RIGHT.match(strong[0]))
        if self._from_right:
            text = _NUMBER.sub(lambda number: number[0][::-1], text)
        if text.strip():
            a, b, c, d, e, f = _product((1, 0, 0, 1, 0, self._risen or 0.0), _product(tm, cm))
            along = hypot(a, b) or 1.0
            way = round(a / along, 1), round(b / along, 1)
            self._line, self._way = self._line if way == self._way else None, way
            text = self._with_sign(text, abs(size * (a * d - b * c)) / along, (a * f - b * e) / along)
        self._risen = None
        self.texts.append(text)
        if text.endswith("\n"):
            self._line, self._sign = None, ""

    def _with_sign(self, text: str, height: float, place: float) -> str:
        """Return an exponent or index behind its sign, or what is none."""
        before = self.texts[-1][-1:] if self.texts else ""
        smaller = self._line is not None and height < 0.85 * self._line[0]
        above = (place - self._line[1]) / self._line[0] if smaller and self._line and self._line[0] else 0.0
        if self._sign and above * (1 if self._sign == "^" else -1) > 0.05:
            return text
        if self._sign and text[0].isdigit():  # which would become a part of it
            self.texts[self._begin :] = [f"{self._sign}({''.join(self.texts[self._begin :])[1:]})"]
        self._sign = ""
        if above > 0.15 and before and not before.isspace() and RAISED.match(text):
            self._sign = "^"
        elif above < -0.05 and before.isdigit() and text[0].isdigit():
            self._sign = "_"
        elif not smaller or abs(above) <= 0.05:
            self._line = height, place
        self._begin = len(self.texts)
        return self._sign + text
