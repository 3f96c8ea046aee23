"""Formats of files: which reader makes text of a file's bytes. What a file is, its content says; the suffix
says which kind of text.

A reader raises :class:`Unusable` when the file holds no text it can use.
"""

from __future__ import annotations

import io
import logging
import unicodedata
from collections.abc import Callable

from blendrag.errors import BlendragError, needs
from blendrag.index.text import Content, Unusable, decode

READER_VERSION = 3
"""The version of what the readers make of the same bytes: raise it with each change."""

HEAD_BYTES = 1024
"""The number of bytes of a file's beginning that :func:`find_reader` looks at."""

Reader = Callable[[bytes], Content]


def read_text(data: bytes) -> Content:
    """Read text, Markdown, data and code, as they are."""
    return Content(decode(data))


def read_pdf(data: bytes) -> Content:
    """Return the text layer of a PDF, pages apart by a blank line. A scan without one is refused."""
    with needs("blendrag[index]"):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports every repaired flaw of a file
    document = PdfReader(io.BytesIO(data))
    if document.is_encrypted and not document.decrypt(""):
        raise Unusable("encrypted PDF")
    pages = [page.extract_text().translate(_LIGATURES).strip() for page in document.pages]
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise Unusable("PDF without text (a scan has to go through OCR first)")
    return Content(text, {"pages": len(pages)})


_LIGATURES = {place: unicodedata.normalize("NFKC", chr(place)) for place in range(0xFB00, 0xFB07)}
"""Letters by the signs that typesetting has for several: nobody searches for a word with one of these."""


def read_html(data: bytes) -> Content:
    """Return a page as Markdown, under its title."""
    with needs("blendrag[index]"):
        from blendrag.index.html import read_html
    return read_html(data)


def read_archive(data: bytes) -> Content:
    """Read a document of Word, PowerPoint or Excel, or an EPUB."""
    with needs("blendrag[index]"):
        from blendrag.index.office import read_archive
    return read_archive(data)


def _refused(reason: str) -> Reader:
    def refuse(_: bytes) -> Content:
        raise Unusable(reason)

    return refuse


_TEXT = (
    "", ".txt", ".text", ".log", ".md", ".markdown", ".mdown", ".rst", ".adoc", ".org", ".tex", ".csv",
    ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".xml", ".sql", ".sh", ".py",
    ".pyi", ".js", ".ts", ".jsx", ".tsx", ".css", ".java", ".kt", ".go", ".rs", ".rb", ".php", ".c", ".h",
    ".cc", ".cpp", ".hpp", ".cs", ".swift", ".scala", ".lua", ".r", ".jl", ".pl", ".proto", ".cu",
)  # fmt: skip
READERS: dict[str, Reader] = {
    **dict.fromkeys(_TEXT, read_text),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    ".pdf": read_pdf,
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".epub"), read_archive),
}
"""Readers by suffix: in lower case with its dot, "" for files without one."""

_BEGINNINGS: tuple[tuple[bytes, Reader], ...] = (
    (b"%PDF-", read_pdf),
    (b"PK\x03\x04", read_archive),
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        _refused("encrypted, or of an Office before 2007: save it without a password in a newer format"),
    ),
    (b"{\\rtf", _refused("RTF: save it as .docx or as text")),
)
_PAGE = (b"<!doctype html", b"<html")


def find_reader(suffix: str, head: bytes, default: Reader | None = None) -> Reader | None:
    """Return the reader for a file with this suffix that begins like this; the default where neither says
    enough."""
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, reader in _BEGINNINGS:
        if bare.startswith(beginning):
            return reader
    if not suffix and bare.lower().startswith(_PAGE):
        return read_html
    return READERS.get(suffix.lower(), default)


def read(reader: Reader, data: bytes) -> Content:
    """Return what the reader makes of a file: whatever it fails with, the file is Unusable."""
    try:
        return reader(data)
    except (Unusable, BlendragError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]
        raise Unusable(f"broken {_CALLED.get(reader, 'file')} ({said})") from None


_LONGEST_REASON = 200
_CALLED: dict[Reader, str] = {read_pdf: "PDF", read_html: "HTML", read_archive: "document or ZIP archive"}
