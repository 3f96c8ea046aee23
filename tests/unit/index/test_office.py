"""Documents that are ZIP archives: all their text in order, and no harm from what is inside."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from contextlib import suppress

import pytest

from blendrag.index import office
from blendrag.index.formats import read
from blendrag.index.office import read_archive
from blendrag.index.text import Unusable
from office_files import W, archive, docx, epub, paragraph, png, pptx, xlsx


def test_word_document_keeps_its_structure() -> None:
    text = read_archive(docx()).text
    assert text.startswith(
        "# Handbook\n\n# Cranes\n\n1. close\n2. drain\n\n| Part | Load |\n| --- | --- |\n| crane | 40 t |"
    )
    for part in ("[form](forms/b7.pdf)", "![crane, 40 t](", "noted", "below", "asked"):
        assert part in text  # fmt: skip


def test_presentation_keeps_slides_tables_pictures_groups_and_notes() -> None:
    content = read_archive(pptx())
    assert content.text == (
        "# Cranes\n\nclose\ndrain\n\n| Part | Load |\n| --- | --- |\n| a\\|b | 40 t |\n\n"
        "![crane, 40 t](<>)\n\ngrouped\n\nspoken\n\nlast"
    )
    assert content.metadata == {"slides": 2}


def test_workbook_keeps_sheets_dates_and_numbers_without_empty_rows_and_columns() -> None:
    assert read_archive(xlsx()).text.strip() == (
        "# Loads\n\n| Part | Since | Load | Ready |\n| --- | --- | --- | --- |\n"
        "| a\\|b c | 2026-01-02 | 1.5 | TRUE |\n| crane | 2026-01-02 | 40 | 03:04:00 |\n\n# Empty"
    )


def test_cell_at_the_end_of_a_sheet_costs_neither_memory_nor_text() -> None:
    text = read_archive(xlsx(far="XFD1048576")).text
    assert text.endswith("# Far\n\n| far |\n| --- |") and len(text) < 500


def test_sheet_whose_cells_lie_on_a_diagonal_stays_small() -> None:
    from openpyxl import Workbook

    book = Workbook()
    for place in range(1, 1_001):
        book.active.cell(place, place, f"v{place}.")  # type: ignore[union-attr]
    file = io.BytesIO()
    book.save(file)
    text = read_archive(file.getvalue()).text
    assert all(f"v{place}." in text for place in range(1, 1_001)) and len(text) < 20_000


def test_chapters_of_an_epub_are_in_reading_order() -> None:
    content = read_archive(epub())
    assert content.text == "# One\n\nfirst\n\n# Two\n\nsecond"
    assert content.metadata == {"title": "Cranes"}


def test_epub_whose_spine_names_pictures_missing_parts_and_chapters_twice_is_read() -> None:
    with zipfile.ZipFile(io.BytesIO(epub())) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
        package = old.read("book/b.opf").decode()
    more = "".join(f'<itemref idref="{name}"/>' for name in ("c0", "nowhere", "cover", "lost")) + "</spine>"
    items = (
        '<item id="cover" href="b.png" media-type="image/png"/><item id="lost" href="lost.html"/></manifest>'
    )
    parts["book/b.opf"] = package.replace("</spine>", more).replace("</manifest>", items)
    parts["book/b.png"] = png()
    assert read_archive(archive(parts)).text == read_archive(epub()).text


@pytest.mark.parametrize("package", ["mammoth", "pptx", "openpyxl"])
def test_without_the_extra_the_reason_names_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"mammoth": docx, "pptx": pptx, "openpyxl": xlsx}[package]()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unusable, match=r"blendrag\[documents\]"):
        read_archive(file)


def test_archive_of_anything_else_is_refused() -> None:
    with pytest.raises(Unusable, match="ZIP archive that is neither"):
        read_archive(archive({"a.txt": "text", "word/b.txt": "text"}))


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
    monkeypatch.setattr(office, "_MAX_CELLS", 16_000)
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
    with zipfile.ZipFile(io.BytesIO(epub("<p>x</p>"))) as old:
        parts: dict[str, str | bytes] = {name: old.read(name) for name in old.namelist()}
        package = old.read("book/b.opf").decode().replace("Cranes", "&e;")
    parts["book/b.opf"] = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>{package}'
    with suppress(Unusable):
        assert "root:" not in str(read(read_archive, archive(parts)))
