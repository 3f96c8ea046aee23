"""Readers of documents that are ZIP archives: Word, PowerPoint, Excel (all three by libraries of the extra
``documents``) and EPUB."""

from __future__ import annotations

import codecs
import io
import posixpath
import re
import unicodedata
import zipfile
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from blendrag.index.html import markdown, markup
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
            return read(archive if read is _read_epub else _plain(archive, whole=read is read_pptx))
        except ModuleNotFoundError as error:
            raise Unusable(f"needs blendrag[documents] ({error.name} is not installed)") from None


def _reader(names: set[str]) -> Callable[[zipfile.ZipFile], Content]:
    if _CONTAINER in names:
        return _read_epub
    known = set(map(_plain_name, names))
    if "xl/workbook.bin" in known:
        raise Unusable("binary workbook of Excel: save it as .xlsx")
    folders = {name.partition("/")[0] for name in known if _TYPES in known}
    for folder, read in (("word", read_docx), ("ppt", read_pptx), ("xl", read_xlsx)):
        if folder in folders:
            return read
    raise Unusable("ZIP archive that is neither Word, PowerPoint, Excel nor EPUB")


_TYPES = "[Content_Types].xml"
# The strict form of Office's formats, and shows, differ from what is read in names only.
_PLAIN = (
    (re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/"), rb"http://schemas.openxmlformats.org/\1/2006/"),
    (re.compile(rb"(presentationml|powerpoint)\.(slideshow|template)\."), rb"\1.presentation."),
)
_MARKUP = (".xml", ".rels", ".vml")
_DECLARATION = re.compile(r"<\?xml\b[^<>]*>")
_RELATED = re.compile(rb"<(?:\w+:)?Relationship\s[^<>]*>")
_OUTSIDE = re.compile(rb"""External["']|/hyperlink["']""")
_TARGET = re.compile(rb"""(?<=\sTarget=["'])[^"']*""")


def _plain(archive: zipfile.ZipFile, whole: bool) -> zipfile.ZipFile:
    """Return a document of Office's under the names that its readers know, without its media unless whole."""
    names = {name: _plain_name(name) for name in archive.namelist()}
    parts = {
        known: _in_utf_8(archive.read(name)) if known.endswith(_MARKUP) else archive.read(name)
        for name, known in names.items()
        if whole or known.endswith(_MARKUP)
    }
    told = [parts[name] for name in (_TYPES, "_rels/.rels") if name in parts]
    kinds = [kind for kind in _PLAIN if any(map(kind[0].search, told))]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, part in parts.items():
            if name.endswith(".rels"):
                part = _RELATED.sub(_named, part)
            for kind, known in kinds if name.endswith((".xml", ".rels")) else ():
                part = kind.sub(known, part)
            written.writestr(name, part)
    return zipfile.ZipFile(file)


def _in_utf_8(part: bytes) -> bytes:
    """Return XML in the encoding in which its tags are looked for."""
    if not part.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return part
    return _DECLARATION.sub("", part.decode("utf-16"), count=1).encode()


def _plain_name(name: str) -> str:
    """Return a part's name in lower case, with `/`, since names of parts differ in neither."""
    lower = name.replace("\\", "/").encode().lower().decode()
    return _TYPES if lower == _TYPES.lower() else lower


def _named(related: re.Match[bytes]) -> bytes:
    """Return what relates to a part, with the name that the part has."""
    if _OUTSIDE.search(related[0]):
        return related[0]
    return _TARGET.sub(lambda target: _plain_name(target[0].decode("utf-8", "replace")).encode(), related[0])


_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def _read_epub(archive: zipfile.ZipFile) -> Content:
    """Read chapters in the order in which they are read."""
    import turbohtml

    def parts(name: str, tag: str) -> list[Any]:
        page = turbohtml.parse_xml(decode(archive.read(name)))
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
