"""PDFs as text, read by PDFium: their text layer, with signs for what only the height of letters tells apart,
what was written on their pages, and filled into their forms."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from math import cos, hypot
from typing import Any

import pypdfium2 as pdfium
from pypdfium2 import raw

from blendrag.index.signs import RAISED
from blendrag.index.text import Content, Unusable
from blendrag.index.word import in_letters

_ONE_AT_A_TIME = threading.Lock()  # PDFium has no other
_SECONDS = 60  # for a file, and for each MiB of it: some thousand pages take as long


def read_pdf(data: bytes) -> Content:
    """Return the text layer of a PDF, pages apart by a blank line. A scan without one is refused."""
    if b"%PDF-" in data[:1024] and _is_cut_off(data):
        raise Unusable("broken PDF (it is cut off)")
    logging.getLogger("pypdfium2").setLevel(logging.ERROR)  # it warns of forms that it only reads
    with _ONE_AT_A_TIME, contextlib.closing(_opened(data)) as document:
        document.init_forms()
        pages = list(_in_time(document, _SECONDS * (1 + len(data) / (1 << 20))))
        is_only_for_adobe = document.get_formtype() in (raw.FORMTYPE_XFA_FULL, raw.FORMTYPE_XFA_FOREGROUND)
    texts = [text for text, _, _ in pages]
    texts = _rejoined([text.translate(_LETTERS).strip() for text in texts])
    fields = "\n".join(dict.fromkeys(field for *_, fields in pages for field in fields))
    if not fields and "".join(texts).startswith("Please wait...") and is_only_for_adobe:
        raise Unusable("PDF whose form only Adobe's programs show (XFA): print it there as a PDF")
    if not fields and not any(texts):
        raise Unusable("PDF without text (a scan has to go through OCR first)")
    written = ["\n".join((text, *_unless_in(text, page[1]))) for text, page in zip(texts, pages, strict=True)]
    return Content("\n\n".join(filter(None, map(str.strip, [*written, fields]))), {"pages": len(pages)})


def _is_cut_off(data: bytes) -> bool:
    """Return whether the last lines of a file are missing, and more with them: PDFium would show the rest."""
    last = data[max(data.rfind(b" obj"), 0) :]
    return not (b"%%EOF" in last or b"trailer" in last or (b"/XRef" in last and b"endobj" in last))


def _opened(data: bytes) -> pdfium.PdfDocument:
    try:
        return pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            raise Unusable("encrypted PDF") from None
        raise


def _in_time(document: pdfium.PdfDocument, seconds: float) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what each page holds as long as there is time, of which only this thread's work counts: its text
    layer, what was written on it, and filled into its part of a form."""
    end = time.thread_time() + seconds
    for number in range(len(document)):
        if time.thread_time() > end:
            raise Unusable(
                f"PDF that takes more than {seconds:.0f} s, too many for its size: print it as a new PDF"
            )
        try:
            page = document[number]
        except pdfium.PdfiumError:  # there is none, though the file counts it
            continue
        with contextlib.closing(page):
            yield text_of(page), *_beside(page)


# -- what typesetters write ---------------------------------------------------------------------------------


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
_LETTERS = {0: None, 0x7F: "\u2022", 0xAD: "-", 0x2010: "-"} | {
    place: unicodedata.normalize("NFKC", chr(place))
    for place in (*range(0x2E80, 0x2FD6), *range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFD))
}
"""Letters by the signs that typesetting has for several, for radicals and for Arabic in its place in a word,
which nobody searches for; nor for zeros, of fonts without names for their letters."""


# -- notes and forms --------------------------------------------------------------------------------------


def _beside(page: pdfium.PdfPage) -> tuple[list[str], list[str]]:
    """Return what was written on a page and where its links lead, and what was filled into its fields."""
    notes, fields = dict[str, None](), list[str]()
    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        if not (note := raw.FPDFPage_GetAnnot(page, number)):
            continue
        kind = raw.FPDFAnnot_GetSubtype(note)
        if kind == raw.FPDF_ANNOT_WIDGET:
            fields += _filled(page.formenv, note)
        elif kind == raw.FPDF_ANNOT_LINK:
            action = raw.FPDFLink_GetAction(raw.FPDFAnnot_GetLink(note))
            notes[_written(raw.FPDFAction_GetURIPath, page.pdf, action, encoding="utf-8")] = None
        elif kind != raw.FPDF_ANNOT_POPUP:  # which shows what another says
            notes[_written(raw.FPDFAnnot_GetStringValue, note, b"Contents").strip()] = None
        raw.FPDFPage_CloseAnnot(note)
    return [note for note in notes if note], fields


def _filled(form: Any, field: Any) -> Iterator[str]:
    """Yield what was filled into a field, as it is shown, if anything was."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, field)
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        checked = raw.FPDFAnnot_IsChecked(form, field)
        value = _written(raw.FPDFAnnot_GetFormFieldExportValue, form, field) if checked else ""
    elif kind in (raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX):
        chosen = [
            _written(raw.FPDFAnnot_GetOptionLabel, form, field, number)
            for number in range(raw.FPDFAnnot_GetOptionCount(form, field))
            if raw.FPDFAnnot_IsOptionSelected(form, field, number)
        ]
        value = ", ".join(chosen) or _written(raw.FPDFAnnot_GetFormFieldValue, form, field)
    elif kind == raw.FPDF_FORMFIELD_TEXTFIELD:
        value = _written(raw.FPDFAnnot_GetFormFieldValue, form, field)
    elif kind < 0:  # the form does not list it
        value = _written(raw.FPDFAnnot_GetStringValue, field, b"V").removeprefix("Off")
    else:
        return
    if value:
        names = (_written(raw.FPDFAnnot_GetStringValue, field, name) for name in (b"TU", b"T"))
        name = _written(raw.FPDFAnnot_GetFormFieldAlternateName, form, field)
        name = name or _written(raw.FPDFAnnot_GetFormFieldName, form, field) or next(filter(None, names), "")
        yield f"{name}: " + "\n".join(value.splitlines())


def _written(get: Callable[..., int], *of: Any, encoding: str = "utf-16-le") -> str:
    """Return a text that PDFium writes into a buffer, whose size it says."""
    buffer = ctypes.create_string_buffer(get(*of, None, 0))
    end = get(*of, ctypes.cast(buffer, get.argtypes[-2]), len(buffer))  # type: ignore[attr-defined]
    return buffer.raw[:end].decode(encoding, "replace").rstrip("\0")


def _unless_in(text: str, notes: Iterable[str]) -> Iterator[str]:
    known = " ".join(text.split())
    return (note for note in notes if " ".join(note.split()) not in known)


# -- the text layer ---------------------------------------------------------------------------------------

_FONT_OF_SIGNS = re.compile(r"(?:[A-Z]{6}\+)?(Symbol|Webdings|Wingdings)(?:MT)?[ -]?([23]?)(?:-?Regular)?")


@dataclass(slots=True)
class _Piece:
    """A text that was drawn at once. gap: the blank or line's end that PDFium sees before it. way: the
    direction that it runs. begin, end: where along its way; across: how high it stands; height: of its
    letters. is_for_others: it is what the letters stand for that are drawn there (ActualText)."""

    gap: str
    text: str
    way: tuple[float, float]
    height: float
    begin: float
    end: float
    across: float
    is_for_others: bool = False


def text_of(page: pdfium.PdfPage) -> str:
    """Return the text layer of a page, with signs before exponents, and before indices of numbers."""
    texts: list[str] = []
    sign, begin = "", 0  # of what is raised or lowered just now
    last = line = _Piece("", "", (0.0, 0.0), 1.0, 0.0, 0.0, 0.0)  # line: the last one that is neither
    with contextlib.closing(page.get_textpage()) as layer:
        for piece in list(_pieces(layer)):
            if piece.text == _HYPHEN and piece.gap:  # it stands for a soft one
                continue
            before = texts[-1][-1:] if texts else ""
            gap, above, is_smaller = _gap(piece, last, line, before.isdigit())
            if not sign or gap or above * (1 if sign == "^" else -1) < 0.05:
                if sign and not gap and piece.text[:1].isdigit():  # which would become a part of it
                    texts[begin:] = [f"{sign}({''.join(texts[begin:])[1:]})"]
                begin, sign = len(texts), ""
                if is_smaller and above > 0.15 and not before.isspace() and RAISED.match(piece.text):
                    sign = "^"
                elif is_smaller and above < -0.05 and before.isdigit() and piece.text[:1].isdigit():
                    sign = "_"
                elif not is_smaller or abs(above) < 0.05:
                    line = piece
                gap += sign
            texts.append(gap + piece.text)
            last = piece
    return "".join(texts).replace("\r\n", "\n").replace(_HYPHEN, "-\n")


_HYPHEN = "\x02"  # as PDFium says, at a line's end


def _gap(piece: _Piece, last: _Piece, line: _Piece, behind_digit: bool) -> tuple[str, float, bool]:
    """Return what parts a piece from the last one; how far above its line it stands, in parts of the line's
    height; and whether it joins the last one in smaller letters."""
    of_numbers = behind_digit and not piece.text[:1].isalpha()
    if piece.way != line.way:
        return piece.gap or "\n" * of_numbers, 0.0, False
    above, apart = (piece.across - line.across) / line.height, (piece.begin - last.end) / line.height
    joins, is_smaller, gap = -0.6 < apart < 0.4, piece.height < 0.85 * line.height, piece.gap
    if "\n" in gap and joins and (abs(above) < 0.05 or (is_smaller and abs(above) < 0.9)):
        gap = " " if apart > 0.12 else ""  # PDFium takes what is raised for a line of its own
    elif gap == " " and last.is_for_others and apart < 0.15:
        gap = ""  # PDFium does not see how wide these others are
    if not gap and abs(above) < 0.5 and apart > (0.15 if of_numbers else 1):
        gap = " "  # PDFium sees none where it saw one in a line before, and would join columns
    elif of_numbers and not gap and abs(above) > 1:
        gap = "\n"  # nor between cells one below another
    return gap, above, is_smaller and joins and not gap


def _pieces(layer: pdfium.PdfTextPage) -> Iterator[_Piece]:
    """Yield the texts of a layer, with accents that are drawn over letters (by TeX) as parts of these."""
    gap, last, accent, its_places = "", None, None, list[int]()
    units = "".join(chr(raw.FPDFText_GetUnicode(layer, place)) for place in range(layer.count_chars()))
    for (drawn, _), group in groupby(
        _in_order(layer, units), lambda place: (_drawing(layer, place), units[place] in _ACCENTS)
    ):
        places = list(group)
        text = "".join(units[place] for place in places)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if drawn is None:  # a blank or line's end of PDFium's own
            gap += text
            continue
        piece = _piece(layer, places, gap, text)
        gap = ""
        if last and text in _ACCENTS and _is_over(piece, last):  # PDFium has letters first
            middle = (piece.begin + piece.end) / 2
            begins = (_along(_origin(layer, place), last.way) for place in its_places)
            if _with_accent(last, sum(begin < middle for begin in begins) - 1, text):
                continue
        if accent and _is_over(accent, piece) and _with_accent(piece, 0, accent.text):
            accent.text = piece.gap = ""
        yield piece
        accent = piece if text in _ACCENTS else None
        if not accent:
            last, its_places = piece, places


# By what stands alone, what follows its letter.
_ACCENTS = dict(
    zip("´¨¯¸ˇ˘˙˚˝`ˆ˜", map(chr, (769, 776, 772, 807, 780, 774, 775, 778, 779, 768, 770, 771)), strict=True)
)


def _is_over(accent: _Piece, other: _Piece) -> bool:
    later = accent if accent.begin > other.begin else other
    return other.begin < (accent.begin + accent.end) / 2 < other.end and "\n" not in later.gap


def _with_accent(piece: _Piece, place: int, accent: str) -> bool:
    """Put an accent on a letter of a piece, if there is such a letter; return whether there is."""
    letter = piece.text[place : place + 1].replace("\u0131", "i")
    accented = unicodedata.normalize("NFC", letter + _ACCENTS[accent])
    if is_known := letter.isalpha() and len(accented) == 1:
        piece.text = piece.text[:place] + accented + piece.text[place + 1 :]
    return is_known


def _in_order(layer: pdfium.PdfTextPage, units: str) -> list[int]:
    """Return the places of a layer as they are read: PDFium takes what letters stand for (ActualText) as it
    is drawn, also in words from right to left."""
    places = list(range(len(units)))
    for word in _FROM_RIGHT.finditer(units):
        way = round(cos(raw.FPDFText_GetCharAngle(layer, word.start())))
        right = {place: way * _origin(layer, place)[0] for place in range(*word.span())}
        letters = [right[place] for place in right if units[place].isalpha()]
        if letters != sorted(letters, reverse=True):
            places[slice(*word.span())] = sorted(right, key=right.__getitem__, reverse=True)
    return places


# Without numbers, which stand from left to right.
_FROM_RIGHT = re.compile("[\u0590-\u065f\u066e-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]{2,}")


def _piece(layer: pdfium.PdfTextPage, places: list[int], gap: str, text: str) -> _Piece:
    matrix, box, drawn = raw.FS_MATRIX(), raw.FS_RECTF(), raw.FPDFText_GetTextObject(layer, places[0])
    raw.FPDFText_GetMatrix(layer, places[0], matrix)
    length = hypot(matrix.a, matrix.b) or 1.0
    way = round(matrix.a / length, 1), round(matrix.b / length, 1)
    height = raw.FPDFText_GetFontSize(layer, places[0]) * (matrix.a * matrix.d - matrix.b * matrix.c) / length
    x, y = _origin(layer, places[0])
    is_for_others = len(places) > 1 and (x, y) == _origin(layer, places[-1])
    if is_for_others:
        sides = [ctypes.c_float() for _ in range(4)]
        raw.FPDFPageObj_GetBounds(drawn, *sides)
        box.left, box.bottom, box.right, box.top = (side.value for side in sides)
    else:
        raw.FPDFText_GetLooseCharBox(layer, places[-1], box)
    return _Piece(
        gap,
        _in_letters(text, raw.FPDFTextObj_GetFont(drawn)),
        way,
        abs(height) or 1.0,
        _along((x, y), way),
        max(_along(corner, way) for corner in product((box.left, box.right), (box.bottom, box.top))),
        _along((y, -x), way),
        is_for_others,
    )


def _drawing(layer: pdfium.PdfTextPage, place: int) -> int | None:
    """Return what tells apart by what letters are drawn, and None for those that are not."""
    return ctypes.cast(raw.FPDFText_GetTextObject(layer, place), ctypes.c_void_p).value


def _origin(layer: pdfium.PdfTextPage, place: int) -> tuple[float, float]:
    x, y = ctypes.c_double(), ctypes.c_double()
    raw.FPDFText_GetCharOrigin(layer, place, x, y)
    return x.value, y.value


def _along(point: tuple[float, float], way: tuple[float, float]) -> float:
    return point[0] * way[0] + point[1] * way[1]


def _in_letters(text: str, font: Any) -> str:
    """Return a text with the signs that its font shows for letters."""
    known = _FONT_OF_SIGNS.fullmatch(_written(raw.FPDFFont_GetBaseFontName, font, encoding="utf-8"))
    if known:
        name = " ".join(filter(None, known.groups()))
        letters = "" if name == "Symbol" else name  # PDFium knows the letters of this one
        with contextlib.suppress(ModuleNotFoundError):  # of blendrag[documents]
            return in_letters(text, letters, letters, name)
    return text
