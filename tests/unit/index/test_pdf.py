"""PDFs: what their pages show, what was written on them, and filled into their forms."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from pypdfium2 import PdfiumError

from blendrag.index import pdf as pdfs
from blendrag.index.pdf import read_pdf
from blendrag.index.text import Unusable
from office_files import pdf


def rewritten(file: bytes, change: Callable[[Any], object]) -> str:
    """The text of a PDF behind this change, which gets its writer."""
    from pypdf import PdfReader, PdfWriter

    writer, changed = PdfWriter(clone_from=PdfReader(io.BytesIO(file))), io.BytesIO()
    change(writer)
    writer.write(changed)
    return read_pdf(changed.getvalue()).text


def test_word_or_sign_of_a_pdf_is_found_that_was_set_otherwise() -> None:
    assert read_pdf(pdf("Of\xaece")).text == "Office"
    assert read_pdf(pdf("\\177 close", encoding="WinAnsiEncoding")).text == "\u2022 close"


def test_letters_of_a_pdf_in_forms_for_their_place_are_found() -> None:
    from pypdf.generic import DecodedStreamObject, NameObject

    def name(writer: Any) -> None:
        names = DecodedStreamObject()
        names.set_data(b"2 beginbfchar <61> <2f47> <62> <fe8e> endbfchar")
        (font,) = writer.pages[0]["/Resources"]["/Font"].values()
        font.get_object()[NameObject("/ToUnicode")] = writer._add_object(names)

    assert rewritten(pdf("a"), name) == "\u65e5" and rewritten(pdf("b"), name) == "\u0627"


def test_pdf_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdfs, "_SECONDS", -1)
    with pytest.raises(Unusable, match="more than"):
        read_pdf(pdf("It lifts."))


def of_pdf(**values: Any) -> Any:
    from pypdf.generic import DictionaryObject, NameObject

    return DictionaryObject({NameObject(f"/{name}"): value for name, value in values.items()})


def field(writer: Any, kind: str, name: str, value: Any, **more: Any) -> Any:
    """A field on a page, shown there if it is checked."""
    from pypdf.generic import ArrayObject, NameObject, NumberObject, TextStringObject

    place = ArrayObject(map(NumberObject, (1, 1, 9, 9)))
    shown = of_pdf(N=of_pdf(**{str(value)[1:] or "x": writer._add_object(content_of(""))}))
    if kind == "Btn":
        more |= {"AS": value, "AP": shown}
    said = {"Subtype": NameObject("/Widget"), "FT": NameObject(f"/{kind}"), "T": TextStringObject(name)}
    return writer._add_object(of_pdf(**said, V=value, Rect=place, **more))


def test_form_that_only_the_programs_of_adobe_show_is_refused_unless_its_fields_are_filled() -> None:
    from pypdf.generic import ArrayObject, NameObject, TextStringObject

    def hide(writer: Any, *fields: Any) -> None:
        parts = ArrayObject([TextStringObject("template"), writer._add_object(content_of(""))])
        writer.root_object[NameObject("/AcroForm")] = of_pdf(XFA=parts, Fields=ArrayObject(fields))
        writer.pages[0][NameObject("/Annots")] = ArrayObject(fields)

    notice = pdf("Please wait... If this message is not replaced")
    with pytest.raises(Unusable, match="XFA"):
        rewritten(notice, hide)
    assert read_pdf(notice).text.startswith("Please wait")
    text = rewritten(
        notice, lambda writer: hide(writer, field(writer, "Tx", "Name", TextStringObject("Ada")))
    )
    assert text.endswith("Name: Ada")


def test_what_was_filled_into_a_form_is_kept_as_it_is_shown() -> None:
    from pypdf.generic import ArrayObject, NameObject, NumberObject, TextStringObject

    def texts(*texts: str) -> ArrayObject:
        return ArrayObject(map(TextStringObject, texts))

    def fill(writer: Any) -> None:
        agrees, several = TextStringObject("agrees"), NumberObject(1 << 21)
        germany = ArrayObject([texts("DE", "Germany"), texts("FR", "France")])
        listed = [
            field(writer, "Tx", "name", TextStringObject("Anna\rBerg")),
            field(writer, "Btn", "c1", NameObject("/Yes"), TU=agrees),
            field(writer, "Btn", "c2", NameObject("/Off"), TU=agrees),
            field(writer, "Ch", "in", TextStringObject("DE"), Opt=germany, Ff=NumberObject(1 << 17)),
            field(writer, "Ch", "of", texts("a", "b"), Opt=texts("a", "b", "c"), Ff=several),
            field(writer, "Ch", "for", TextStringObject("other"), Opt=texts("a"), Ff=NumberObject(3 << 17)),
        ]
        unlisted = field(writer, "Tx", "load", TextStringObject("40 t"))
        writer.root_object[NameObject("/AcroForm")] = of_pdf(Fields=ArrayObject(listed))
        writer.pages[0][NameObject("/Annots")] = ArrayObject([*listed, unlisted])

    filled = "name: Anna\nBerg\nagrees: Yes\nin: Germany\nof: a, b\nfor: other\nload: 40 t"
    assert rewritten(pdf("Name:"), fill) == f"Name:\n\n{filled}"


def test_scan_without_text_is_refused_though_there_is_a_link_on_it() -> None:
    from pypdf.annotations import Link

    link = Link(rect=(1, 1, 9, 9), url="https://a.test")
    for change in (lambda writer: None, lambda writer: writer.add_annotation(0, link)):
        with pytest.raises(Unusable, match=r"without text .*OCR"):
            rewritten(pdf(), change)


def test_what_was_written_on_a_page_and_where_its_links_lead_is_kept() -> None:
    from pypdf.annotations import FreeText, Highlight, Link, Text
    from pypdf.generic import ArrayObject, FloatObject, NameObject, TextStringObject

    def marked(text: str) -> Highlight:
        mark = Highlight(rect=place, quad_points=ArrayObject([FloatObject(1)] * 8))
        mark[NameObject("/Contents")] = TextStringObject(text)
        return mark

    place = (1, 1, 9, 9)
    notes = (
        FreeText(text="Anna Berg", rect=place),
        Text(text="checked", rect=place),
        marked("which one?"),
        marked("Name:\nsee"),  # some programs put there what is marked
        Link(rect=place, url="https://a.test"),
        Link(rect=place, url="https://b.test/b7.pdf"),
    )
    page = pdf("Name: see https://a.test")
    text = rewritten(page, lambda writer: [writer.add_annotation(0, note) for note in notes])
    assert text == "Name: see https://a.test\nAnna Berg\nchecked\nwhich one?\nhttps://b.test/b7.pdf"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("the docu\\255", "ment, inter-", "national"), "the docu-\nment, inter-\nnational"),
        (("International: inter-", "national"), "International: international"),
        (("well\\255known, docu\\255", "ment, docu"), "well-known, docu-\nment, docu"),  # a font's hyphen
        (("well\\255known, docu\\255", "ment, document"), "well-known, document, document"),
        (("co-", "op, a coop, the co-op"), "co-\nop, a coop, the co-op"),
        (("an E-", "Mail, or Email"), "an E-\nMail, or Email"),
    ],
    ids=lambda lines: lines[0] if isinstance(lines, tuple) else "",
)
def test_word_of_a_pdf_that_a_line_parts_is_whole_again_if_that_is_sure(
    lines: tuple[str, ...], text: str
) -> None:
    made = pdf(") Tj 0 -14 Td (".join(lines), encoding="WinAnsiEncoding")
    assert read_pdf(made).text == text


@pytest.mark.parametrize("end", [b"%%EOF", b"startxref"])
def test_pdf_is_read_without_its_last_lines_other_than_one_that_is_cut_off(end: bytes) -> None:
    made = pdf("It lifts.")
    assert read_pdf(made[: made.index(end)]).text == "It lifts."
    with pytest.raises(Unusable, match="cut off"):
        read_pdf(made[: made.index(b"trailer")])
    with pytest.raises(PdfiumError):
        read_pdf(made[: made.index(b"1 0 obj")] + b"%%EOF")


def test_pdf_is_read_that_counts_more_pages_than_it_has() -> None:
    from pypdf.generic import NameObject, NumberObject

    def count(writer: Any) -> None:
        writer.root_object["/Pages"][NameObject("/Count")] = NumberObject(3)

    assert rewritten(pdf("It lifts."), count) == "It lifts."


def test_pdf_that_is_encrypted_without_a_password_is_read() -> None:
    text = rewritten(pdf("It lifts."), lambda writer: writer.encrypt("", "owner", algorithm="AES-256"))
    assert text == "It lifts."


def drawn(*operations: str, font: str = "Helvetica") -> str:
    """The text of a page that these operations draw, in a font that may be one of signs."""
    made = pdf(") Tj ET " + " ".join(operations) + " BT (", encoding="WinAnsiEncoding")
    return rewritten(made.replace(b"/Helvetica", f"/{font}".encode()), lambda writer: None)


def test_accent_that_is_drawn_over_a_letter_is_a_part_of_it_and_one_in_code_is_none() -> None:
    over = "M\\250) 420 (uller caf\\264) 420 (e S\\230) 420 (ao, x\\210) 420 (x"
    assert drawn(f"BT /F1 12 Tf 9 9 Td [({over})] TJ ET") == "M\u00fcller caf\u00e9 S\u00e3o, x\u02c6x"
    beside = "it\\264s, \\230anna, \\(mpg\\230am\\), x\\210n, a`b, ``c"
    shown = "it\u00b4s, \u02dcanna, (mpg\u02dcam), x\u02c6n, a`b, ``c"
    assert read_pdf(pdf(beside, encoding="WinAnsiEncoding")).text == shown


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        ("BT 1 0 0 1 9 9 Tm (Gda) Tj ET BT 1 0 0 1 9 9 Tm 22 0 Td (nsk) Tj ET", "Gdansk"),
        ("BT 14 TL 9 9 Td (so) Tj 60 0 Td (on) Tj T* (off) Tj ET", "so on\noff"),
        ("BT 9 9 Td (Fees) Tj ET BT 9.3 9 Td (Fees) Tj ET BT 9 9.3 Td (Fees) Tj ET", "Fees"),
        ("BT 9 9 Td (F) Tj .2 0 Td (F) Tj 7.1 0 Td (e) Tj .2 0 Td (e) Tj 6.5 0 Td (e) Tj ET", "Fee"),
        ("BT 9 9 Td (i) Tj 2.7 0 Td (i) Tj (i) Tj ET", "iii"),
        ("BT 40 Tz 9 9 Td (w) Tj 3.4 0 Td (i) Tj 1.06 0 Td (l) Tj 1.06 0 Td (l) Tj ET", "will"),
        ("BT 9 9 Td (a) Tj ( b) Tj ET BT /F1 12 Tf 9.2 9 Td (a) Tj ( b) Tj ET", "a b"),
        ("BT 9 9 Td (do) Tj /Span <</ActualText <FEFF00AD>>> BDC (-) Tj EMC 0 -14 Td (or) Tj ET", "door"),
        ("BT 9 9 Td /Span <</ActualText (fi)>> BDC (a) Tj EMC (ne) Tj ET", "fine"),
        ("BT 9 9 Td /Span <</ActualText (fi)>> BDC (a) Tj EMC ( ne) Tj ET", "fi ne"),
        ("BT 9 9 Td (10) Tj /F1 7 Tf 13.4 5 Td (-) Tj 2.4 0 Td (6) Tj /F1 12 Tf 4 -5 Td (m) Tj ET", "10^-6m"),
        ("BT 9 9 Td (2) Tj /F1 7 Tf 6.7 5 Td (5) Tj /F1 12 Tf 4 -5 Td (3) Tj ET", "2^(5)3"),
        ("BT 9 9 Td (1) Tj /F1 7 Tf 6.7 5 Td (st) Tj ET", "1st"),
        ("BT 9 9 Td (11) Tj /F1 7 Tf 13.4 -3 Td (2) Tj ET", "11_2"),
        ("BT 9 9 Td (H) Tj /F1 7 Tf 8.7 -3 Td (2) Tj /F1 12 Tf 4 3 Td (O) Tj ET", "H2O"),
        ("BT 9 9 Td (10) Tj /F1 7 Tf 5 Ts (6) Tj /F1 12 Tf 0 Ts ( m) Tj 28 0 Td (m) Tj ET", "10^6 mm"),
        ("BT 9 9 Td (T) Tj /F1 7 Tf 5 Ts 7.4 0 Td (2) Tj -3 Ts 0 0 Td (2) Tj ET", "T^(2)_2"),
        ("BT 9 9 Td (11) Tj -3 Ts /F1 7 Tf (2) Tj 0 Ts /F1 12 Tf ( m) Tj ET", "11_2 m"),
        ("BT 0 1 -1 0 99 9 Tm (10) Tj /F1 7 Tf 0 1 -1 0 94 22.4 Tm (3) Tj ET", "10^3"),
        ("BT -1 0 0 -1 99 9 Tm (10) Tj /F1 7 Tf -1 0 0 -1 85.6 4 Tm (3) Tj ET", "10^3"),
        ("BT 1 0 .2 1 9 9 Tm (10) Tj /F1 7 Tf 1 0 .2 1 22.4 9 Tm (3) Tj ET", "103"),
        ("BT 9 60 Td (1) Tj .1 -50 Td (2) Tj ET", "1\n2"),
        ("BT 9 9 Td (12) Tj ET BT /F1 12 Tf 0 1 -1 0 23 20 Tm (34) Tj ET", "12\n34"),
        (
            "BT 9 9 Td (Krsti) Tj 22.7 .1 Td (\\264) Tj -.6 -.1 Td (c, R. Leslie, and M. R. Tuttle) Tj ET",
            "Krsti\u0107, R. Leslie, and M. R. Tuttle",
        ),
    ],
)  # fmt: skip
def test_text_of_a_page_is_what_is_seen_of_it(operations: str, text: str) -> None:
    begun = operations.replace("BT", "BT /F1 12 Tf", 1)
    assert drawn(begun) == text


def test_word_from_right_to_left_is_read_so_that_is_drawn_letter_by_letter() -> None:
    said = ("0628", "06440627", "0633")
    letters = (f"/Span <</ActualText <FEFF{one}>>> BDC (a) Tj EMC 7 0 Td" for one in said)
    assert drawn(f"BT /F1 12 Tf 9 9 Td {' '.join(letters)} ET") == "\u0633\u0644\u0627\u0628"


def test_what_pages_of_a_pdf_share_is_read_as_they_are() -> None:
    from pypdf.generic import ArrayObject, DictionaryObject, NameObject

    def share(writer: Any) -> None:
        page = writer.pages[0]
        form, fonts = page["/Contents"].get_object(), DictionaryObject(page["/Resources"])
        form.update({NameObject("/Subtype"): NameObject("/Form"), NameObject("/Resources"): fonts})
        drawn = writer.add_blank_page(9, 9)
        for each, name in ((page, "/X"), (drawn, "/Y")):
            shared = DictionaryObject({NameObject(name): page.raw_get("/Contents")})
            each[NameObject("/Resources")] = DictionaryObject({NameObject("/XObject"): shared})
        for each, name in ((page, "/X"), (drawn, "/Y")):
            each[NameObject("/Contents")] = ArrayObject([writer._add_object(content_of(f"{name} Do"))])

    twice = "It) Tj ET BT /F1 12 Tf 10.1 50 Td (It) Tj 20 0 Td (lifts."
    assert rewritten(pdf(twice), share) == "It lifts.\n\nIt lifts."


def content_of(operations: str) -> Any:
    from pypdf.generic import DecodedStreamObject

    content = DecodedStreamObject()
    content.set_data(operations.encode())
    return content


def test_signs_of_a_pdf_are_those_of_their_font() -> None:
    assert drawn("BT /F1 12 Tf 9 9 Td (\247) Tj ET", font="ABCDEF+Wingdings-Regular") == "\u25aa"
    assert drawn("BT /F1 12 Tf 9 9 Td (m) Tj ET", font="SymbolMT") == "\u00b5"


def test_signs_that_a_pdf_itself_or_its_reader_names_stay_as_they_are() -> None:
    from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NumberObject

    def text(name: str, encoding: Any = None, to: str = "") -> str:
        def change(writer: Any) -> None:
            font = next(iter(writer.pages[0]["/Resources"]["/Font"].values())).get_object()
            del font["/Encoding"]
            font[NameObject("/BaseFont")] = NameObject(name)
            if encoding:
                font[NameObject("/Encoding")] = encoding
            if to:
                names = content_of(f"1 beginbfchar <b4> <{to}> endbfchar")
                font[NameObject("/ToUnicode")] = writer._add_object(names)

        return rewritten(pdf("3 \\264 4"), change)

    named = DictionaryObject({NameObject("/BaseEncoding"): NameObject("/WinAnsiEncoding")})
    named[NameObject("/Differences")] = ArrayObject([NumberObject(0xB4), NameObject("/multiply")])
    assert text("/Symbol") == text("/ABCDEF+SymbolMT", to="00d7") == text("/Symbol", named) == "3 \u00d7 4"
    assert text("/ABCDEF+SymbolMT", to="f0b4") == "3 \u00d7 4", "no sign of Unicode, but a place in the font"


@pytest.mark.parametrize(
    ("encoding", "ordering", "codec", "text"),
    [
        ("KSCms-UHC-H", "Korea1", "cp949", "\uac00\uaca9 40 t"),
        ("90msp-RKSJ-H", "Japan1", "cp932", "\u4fa1\u683c"),
        ("EUC-H", "Japan1", "euc_jp", "\u4fa1\u683c"),
        ("GBKp-EUC-H", "GB1", "gbk", "\u4ef7\u683c"),
        ("HKscs-B5-H", "CNS1", "big5hkscs", "\u50f9\u683c"),
        ("UniJIS-UTF16-H", "Japan1", "utf-16-be", "\u4fa1\u683c"),
    ],
)
def test_encoding_of_east_asia_in_a_pdf_is_known(encoding: str, ordering: str, codec: str, text: str) -> None:
    from pypdf.generic import ArrayObject, NameObject, NumberObject, TextStringObject

    def name(writer: Any) -> None:
        (font,) = (font.get_object() for font in writer.pages[0]["/Resources"]["/Font"].values())
        known = {"Registry": "Adobe", "Ordering": ordering}
        system = of_pdf(
            **{key: TextStringObject(value) for key, value in known.items()}, Supplement=NumberObject(2)
        )
        kind, base = NameObject("/CIDFontType0"), NameObject("/Ryumin")
        cid = of_pdf(Type=NameObject("/Font"), Subtype=kind, BaseFont=base, CIDSystemInfo=system)
        font |= of_pdf(Subtype=NameObject("/Type0"), DescendantFonts=ArrayObject([cid]))

    written = "".join(f"\\{byte:03o}" for byte in text.encode(codec))
    assert rewritten(pdf(written, encoding=encoding), name) == text


def test_number_in_a_line_from_right_to_left_keeps_its_digits_in_order() -> None:
    from pypdf.generic import DecodedStreamObject, NameObject

    def name(writer: Any) -> None:
        names = DecodedStreamObject()
        names.set_data(b"1 beginbfrange <30> <39> <0660> endbfrange 1 beginbfchar <61> <0627> endbfchar")
        (font,) = writer.pages[0]["/Resources"]["/Font"].values()
        font.get_object()[NameObject("/ToUnicode")] = writer._add_object(names)

    number, letter = "\u0662\u0660\u0662\u0664/\u0660\u0661/\u0660\u0665", "\u0627"
    text = rewritten(pdf("2024/01/05 a 2024/01/05"), name)
    assert text == f"{number} {letter} {number}"


def test_pdf_with_a_password_is_refused() -> None:
    with pytest.raises(Unusable, match="encrypted PDF"):
        read_pdf(pdf("secret", password="p"))
