"""Documents that are ZIP archives: all their text in order, and no harm from what is inside."""

from __future__ import annotations

import struct
import sys
import zipfile
from contextlib import nullcontext, suppress

import pytest

from blendrag.index import office, sheets
from blendrag.index.formats import read
from blendrag.index.office import read_archive
from blendrag.index.text import Unusable
from office_files import W, archive, docx, epub, paragraph, parts_of, png, pptx, renamed, xlsx

of_each_kind = pytest.mark.parametrize("file", [docx(), pptx(), xlsx()], ids=["docx", "pptx", "xlsx"])


def test_chapters_of_an_epub_are_in_reading_order() -> None:
    content = read_archive(epub())
    assert content.text == "# One\n\nfirst\n\n# Two\n\nsecond"
    assert content.metadata == {"title": "Cranes"}


def test_epub_whose_spine_names_pictures_missing_parts_and_chapters_twice_is_read() -> None:
    parts = parts_of(epub())
    package = parts["book/b.opf"].decode()
    more = "".join(f'<itemref idref="{name}"/>' for name in ("c0", "nowhere", "cover", "lost")) + "</spine>"
    items = (
        '<item id="cover" href="b.png" media-type="image/png"/><item id="lost" href="lost.html"/></manifest>'
    )
    parts["book/b.opf"] = package.replace("</spine>", more).replace("</manifest>", items)
    parts["book/b.png"] = png()
    assert read_archive(archive(parts)).text == read_archive(epub()).text


@pytest.mark.parametrize(
    ("href", "name", "kind"),
    [
        ("/book/a.xhtml#top", "book/a.xhtml", "application/xhtml+xml"),
        ("../Text/A.xhtml", "text/a.XHTML", "application/xhtml+xml"),
        ("a%201.xhtml", "book/a%201.xhtml", "application/xhtml+xml"),
        ("caf\u00e9.xhtml", "book/cafe\u0301.xhtml", "application/xhtml+xml"),
        ("a.xml", "book/a.xml", "application/xml"),
    ],
)
def test_chapter_is_found_that_an_epub_has_under_a_name_written_otherwise(
    href: str, name: str, kind: str
) -> None:
    parts = parts_of(epub("<p>close</p>"))
    parts[name] = parts.pop("book/text/c 0.xhtml")
    package = parts["book/b.opf"].decode()
    package = package.replace("text/c%200.xhtml", href).replace("application/xhtml+xml", kind)
    parts["book/b.opf"] = f'<?xml version="1.0" encoding="iso-8859-1"?>{package}'.encode("iso-8859-1")
    assert read_archive(archive(parts)).text == "close"


@pytest.mark.parametrize("chapter", [True, False])
def test_epub_whose_chapters_are_encrypted_is_refused_other_than_one_whose_fonts_are(chapter: bool) -> None:
    parts = parts_of(epub())
    locked = "book/text/c%200.xhtml" if chapter else "book/a.ttf"
    parts["META-INF/encryption.xml"] = (
        '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><e:EncryptedData '
        'xmlns:e="http://www.w3.org/2001/04/xmlenc#"><e:CipherData><e:CipherReference '
        f'URI="{locked}"/></e:CipherData></e:EncryptedData></encryption>'
    )
    with pytest.raises(Unusable, match="encrypted EPUB") if chapter else nullcontext():
        assert read_archive(archive(parts)).text == read_archive(epub()).text


def test_epub_whose_package_is_not_quite_xml_is_read() -> None:
    parts = parts_of(epub())
    parts["book/b.opf"] = parts["book/b.opf"].replace(b"Cranes", b"Cranes & more")
    content = read_archive(archive(parts))
    assert content.text == read_archive(epub()).text
    assert content.metadata == {"title": "Cranes & more"}


@pytest.mark.parametrize("package", ["mammoth", "pptx", "openpyxl"])
def test_without_the_extra_the_reason_names_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"mammoth": docx, "pptx": pptx, "openpyxl": xlsx}[package]()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unusable, match=r"blendrag\[documents\]"):
        read_archive(file)


def test_archive_of_anything_else_is_refused() -> None:
    with pytest.raises(Unusable, match="ZIP archive that is neither"):
        read_archive(archive({"a.txt": "text", "word/b.txt": "text"}))
    with pytest.raises(Unusable, match=r"binary workbook .*save it as \.xlsx"):
        read_archive(archive({"[Content_Types].xml": "", "xl/workbook.bin": ""}))


@of_each_kind
def test_document_in_the_strict_form_of_its_format_has_the_same_text(file: bytes) -> None:
    kinds = b"drawingml officeDocument presentationml spreadsheetml wordprocessingml".split()
    plain, strict = b"http://schemas.openxmlformats.org/%s/2006/", b"http://purl.oclc.org/ooxml/%s/"
    other = renamed(file, *((plain % kind, strict % kind) for kind in kinds))
    assert other != file
    assert read_archive(other) == read_archive(file)


@of_each_kind
def test_names_of_parts_are_the_same_in_any_case_and_with_any_separator(file: bytes) -> None:
    parts = {name.swapcase().replace("/", "\\"): part for name, part in parts_of(file).items()}
    assert read_archive(archive(parts)) == read_archive(file)


@of_each_kind
def test_media_of_documents_are_not_copied(file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    part_of = zipfile.ZipFile.read
    monkeypatch.setattr(
        zipfile.ZipFile, "read", lambda self, name, *rest: read.append(str(name)) or part_of(self, name)
    )
    with_media = archive(parts_of(file) | {"media/film.mp4": bytes(100)})
    read.clear()
    assert read_archive(with_media) == read_archive(file)
    assert not any("film" in name for name in read)


@of_each_kind
def test_broken_part_that_is_needed_is_a_reason(file: bytes) -> None:
    parts = parts_of(file)
    (name,) = parts.keys() & {"word/document.xml", "ppt/presentation.xml", "xl/workbook.xml"}
    with pytest.raises(Unusable, match="broken"):
        read(read_archive, archive(parts | {name: b"<broken"}))


def test_link_that_leads_to_nothing_costs_no_text() -> None:
    broken = renamed(docx(), (b'Id="rId2"', b'Id="rId99"'))
    assert read_archive(broken).text == read_archive(docx()).text.replace("[form](forms/b7.pdf)", "form")


# -- hostile archives --------------------------------------------------------------------------------------


def test_bomb_is_refused_unread() -> None:
    bomb = docx(**{"word/media/zeros": "\0" * 10_000})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(office, "MAX_UNPACKED_BYTES", 5_000)
        patch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("read"))
        with pytest.raises(Unusable, match=r"more than the limit of 5,000 bytes"):
            read_archive(bomb)


def test_small_file_that_would_take_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match="1,000,000 tags"):
        read_archive(docx("<w:p/>" * 1_000_000))
    monkeypatch.setattr(sheets, "_MAX_CELLS", 16_000)
    with pytest.raises(Unusable, match="reaches over more than 16,000 cells"):
        read_archive(xlsx(far="XFD1"))


def test_archive_that_lies_about_its_sizes_is_refused() -> None:
    data = bytearray(docx(**{"word/media/zeros": "\0" * 1_000_000}))
    entry = data.rindex(b"word/media/zeros") - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    data[entry + 24 : entry + 28] = struct.pack("<I", 10)
    with pytest.raises((Unusable, zipfile.BadZipFile)):
        read_archive(bytes(data))


def test_encrypted_part_is_refused() -> None:
    data = bytearray(epub())
    entry = data.rindex(b"PK\1\2")
    data[entry + 8] |= 1
    with pytest.raises(Unusable, match="encrypted"):
        read_archive(bytes(data))


def test_entities_do_not_unfold_into_a_bomb() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    body = f"<w:document {W}><w:body>{paragraph('&e9;')}</w:body></w:document>"
    with pytest.raises(Exception, match=r"entit|amplification"):
        read_archive(docx(**{"word/document.xml": f'<!DOCTYPE x [<!ENTITY e0 "lol">{entities}]>{body}'}))


@pytest.mark.parametrize("tag", ["w:tbl><w:tr><w:tc", "w:ins", "w:sdt><w:sdtContent"])
def test_document_nested_100000_deep_is_read_or_refused(tag: str) -> None:
    names = tag.split("><")
    begin = "".join(f"<{name}>" for name in names) * 100_000
    end = "".join(f"</{name}>" for name in reversed(names)) * 100_000
    with suppress(Unusable):
        read(read_archive, docx(f"{paragraph('before')}{begin}{paragraph('deep')}{end}"))


def test_external_entity_is_not_read() -> None:
    parts = parts_of(epub("<p>x</p>"))
    package = parts["book/b.opf"].decode().replace("Cranes", "&e;")
    parts["book/b.opf"] = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>{package}'
    with suppress(Unusable):
        assert "root:" not in str(read(read_archive, archive(parts)))
