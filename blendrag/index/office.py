"""Readers of documents that are ZIP archives: Word, PowerPoint, Excel (all three by libraries of the extra
``documents``) and EPUB."""

from __future__ import annotations

import io
import posixpath
import unicodedata
import zipfile
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from blendrag.index.html import markdown, markup
from blendrag.index.package import TYPES, known_name, unpacked
from blendrag.index.sheets import read_xlsx
from blendrag.index.slides import read_pptx
from blendrag.index.text import Content, Unusable, decode
from blendrag.index.word import read_docx

MAX_UNPACKED_BYTES = 100 << 20


def read_archive(data: bytes) -> Content:
    """Read a document of Word, PowerPoint or Excel, or an EPUB: which of them, its parts tell."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if (size := sum(member.file_size for member in members)) > MAX_UNPACKED_BYTES:
            raise Unusable(f"unpacks to more than the limit of {MAX_UNPACKED_BYTES:,} bytes ({size:,})")
        read = _reader({member.filename for member in members})
        if any(member.flag_bits & 1 for member in members):
            raise Unusable("encrypted ZIP archive")
        if damaged := archive.testzip():
            raise Unusable(f"broken ZIP archive (damaged in {damaged!r})")
        try:
            return read(archive)
        except ModuleNotFoundError as error:
            raise Unusable(f"needs blendrag[documents] ({error.name} is not installed)") from None


def _reader(names: set[str]) -> Callable[[zipfile.ZipFile], Content]:
    if _CONTAINER in names:
        return _read_epub
    known = set(map(known_name, names))
    if "xl/workbook.bin" in known:
        raise Unusable("binary workbook of Excel: save it as .xlsx")
    folders = {name.partition("/")[0] for name in known if TYPES in known}
    for folder, read in (("word", read_docx), ("ppt", read_pptx), ("xl", read_xlsx)):
        if folder in folders:
            return lambda archive: read(unpacked(archive))
    raise Unusable("ZIP archive that is neither Word, PowerPoint, Excel nor EPUB")


_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def _read_epub(archive: zipfile.ZipFile) -> Content:
    """Read chapters in the order in which they are read."""
    import turbohtml

    def parts(name: str, tag: str) -> list[Any]:
        source = decode(archive.read(name))
        try:
            page = turbohtml.parse_xml(source)
        except turbohtml.HTMLParseError:  # as of an & that is not escaped, which costs readers nothing
            page = turbohtml.parse(source)
        return [each for each in page.iter_elements() if each.tag.rpartition(":")[2] == tag]

    package = parts(_CONTAINER, "rootfile")[0].attr("full-path")
    folder, there = posixpath.dirname(package), {_known_as(name): name for name in archive.namelist()}
    hrefs = {item.attr("id"): item.attr("href", "") for item in parts(package, "item") if _is_page(item)}
    spine = (hrefs.get(item.attr("idref"), "").partition("#")[0] for item in parts(package, "itemref"))
    names = dict.fromkeys(_known_as(posixpath.join(folder, href)) for href in spine)
    locked = parts(_ENCRYPTION, "CipherReference") if _known_as(_ENCRYPTION) in there else ()
    if not names.keys().isdisjoint(_known_as(part.attr("URI", "")) for part in locked):  # or fonts only
        raise Unusable("encrypted EPUB")
    chapters = [markdown(markup(archive.read(there[name]))) for name in names if name in there]
    title = next((" ".join(each.text.split()) for each in parts(package, "title")), "")
    text = "\n\n".join(chapter.text for chapter in chapters if chapter.text.strip())
    return Content(text, {"title": title} if title else {})


def _known_as(name: str) -> str:
    """Return what a part's name has in common with how a book calls it, which readers do not hold it to."""
    plain = unicodedata.normalize("NFC", unquote(name)).casefold()
    return posixpath.normpath(plain).removeprefix("/")


def _is_page(item: Any) -> bool:
    return "ml" in item.attr("media-type", "html")
