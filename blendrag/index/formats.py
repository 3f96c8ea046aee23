"""Formats of files: which reader makes text of a file's bytes. What a file is, its content says; the suffix
says which kind of text.

A reader raises :class:`Unusable` when the file holds no text it can use.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
import unicodedata
from binascii import a2b_qp
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from typing import TYPE_CHECKING, Any, TypeVar

from blendrag.errors import BlendragError, needs
from blendrag.index.text import CONTROL, Content, Unusable, decode

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

T = TypeVar("T")

READER_VERSION = 12
"""The version of what the readers make of the same bytes: raise it with each change."""

HEAD_BYTES = 8192
"""The number of bytes of a file's beginning that :func:`find_reader` looks at."""

Reader = Callable[[bytes], Content]


def read_text(data: bytes) -> Content:
    """Read text, data and code, as they are."""
    return Content(decode(data))


def read_markdown(data: bytes) -> Content:
    """Read Markdown as it is, without pictures in letters, as Google Docs writes them."""
    return Content(_PICTURE.sub(r"\1", decode(data)))


_PICTURE = re.compile(
    r"""(\]\(\s?<?|\]:\s*<?|\bsrc(?:set)?=["'])"""
    r"data:(?:image/|application/octet-stream)[\w.+;=-]*,(?:[\w+/=%.-]|\n(?=[A-Za-z\d+/]{60})){100,}",
    re.I,
)


def read_escaped(data: bytes) -> Content:
    """Read data with the signs in place of what JSON may write for them; it means the same."""
    return Content(_ESCAPED.sub(_sign, decode(data)))


_ESCAPED = re.compile(r"\\[\\/]|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[0-9A-Fa-f]{4}|\\u[0-9A-Fa-f]{4}")
_MEANS_MORE = re.compile('[\0-\x1f"\\\\\x7f-\x9f\u2028\u2029\ufeff\ufffd]')  # the last is half of a letter


def _sign(found: re.Match[str]) -> str:
    numbers = [int(number, 16) for number in _NUMBER.findall(found[0])]
    text = "".join(map(chr, numbers)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return "/" if found[0] == "\\/" else found[0] if _MEANS_MORE.search(text or "\\") else text


_NUMBER = re.compile("[0-9A-Fa-f]{2,}")


def read_yaml(data: bytes) -> Content:
    """Read YAML with the letters in place of what quotes may have for them, where lines may part a word."""
    return Content(_IN_QUOTES.sub(lambda quoted: _OF_YAML.sub(_unfolded, quoted[0]), decode(data)))


_IN_QUOTES = re.compile(r'(?<=[\s\[{,])"[^"\\]*(?:\\[\s\S][^"\\]*)+"')
_OF_YAML = re.compile(
    rf"\\\n[ \t]*|\\[ _]|\\x[0-9A-Fa-f]{{2}}|\\U00(?:0[0-9A-Fa-f]|10)[0-9A-Fa-f]{{4}}|{_ESCAPED.pattern}"
)


def _unfolded(found: re.Match[str]) -> str:
    return {"\n": "", " ": " ", "_": "\xa0"}.get(found[0][1], _sign(found))


def read_xml(data: bytes) -> Content:
    """Read XML with the letters in place of the numbers that they may be written with."""
    return Content(_REFERENCE.sub(_letter, decode(data)))


_REFERENCE = re.compile(r"&#(?:\d{1,7}|x[0-9A-Fa-f]{1,6});")


def _letter(found: re.Match[str]) -> str:
    letter = unescape(found[0])
    return letter if letter >= "\xa0" and letter != "\ufffd" else found[0]  # others may mean more in XML


def read_folded(data: bytes) -> Content:
    """Read calendars and contacts with their lines whole, which are folded anywhere in a word or letter, and
    without pictures in letters."""
    text = _QUOTED.sub(_unquoted, decode(_FOLD.sub(b"", data)))
    return Content(_ATTACHED.sub(r"\1", text))


_FOLD = re.compile(rb"(?<!=)(?:\r\n|(?<!\r)\n)[ \t]")
# A value with the lines that it goes on in, or a fold behind "=" that is part of no such value.
_QUOTED = re.compile(
    r"^([^:\n]{0,200};(?:ENCODING=)?QUOTED-PRINTABLE\b[^:\n]{0,200}:)((?:=\n|.)*)|\n[ \t]", re.I | re.M
)
_CHARSET = re.compile(r";CHARSET=\"?([\w.:-]+)", re.I)
_ATTACHED = re.compile(
    r"(;(?:ENCODING=B|(?:ENCODING=)?BASE64)\b[^:\n]{0,200}:|;base64\\?,)[\w+/=]{100,}", re.I | re.ASCII
)


def _unquoted(found: re.Match[str]) -> str:
    if not (head := found[1]):
        return ""
    charset = _CHARSET.search(head)
    value = a2b_qp(found[2].encode()).translate(None, CONTROL)
    return head + decode(value, charset[1] if charset else "")


def read_pdf(data: bytes) -> Content:
    """Return the text layer of a PDF, pages apart by a blank line. A scan without one is refused."""
    with needs("blendrag[index]"):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports every repaired flaw of a file
    document = PdfReader(io.BytesIO(data))
    if document.is_encrypted and not document.decrypt(""):
        raise Unusable("encrypted PDF")
    in_time = _within(_SECONDS * (1 + len(data) / (1 << 20)))
    by_number = {getattr(page.indirect_reference, "idnum", -n): page for n, page in enumerate(document.pages)}
    pages = list(by_number.values())
    texts = [page.extract_text() for page in in_time(pages)]
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
    from pypdf.generic import Field

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
_LETTERS = {0: None, 0x7F: "\u2022", 0xAD: "-"} | {
    place: unicodedata.normalize("NFKC", chr(place))
    for place in (*range(0x2E80, 0x2FD6), *range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFD))
}
"""Letters by the signs that typesetting has for several, for radicals and for Arabic in its place in a word,
which nobody searches for; nor for zeros, of fonts without names for their letters. WinAnsiEncoding shows 0x7F
as a bullet."""


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


_refuse_mail = _refused("mail or web archive: save its text alone as .txt, its page as .html")
_TEXT = (
    "", ".txt", ".text", ".log", ".rst", ".adoc", ".asciidoc", ".org", ".wiki", ".mediawiki", ".textile",
    ".typ", ".tex", ".bib", ".srt", ".vtt", ".csv", ".tsv", ".tab", ".json", ".jsonl", ".ndjson", ".jsonc",
    ".json5", ".geojson", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".properties", ".xml", ".rss",
    ".atom", ".opml", ".dita", ".xsd", ".ics", ".vcf", ".po", ".sql", ".graphql", ".gql", ".sh", ".bash",
    ".zsh", ".fish", ".ps1", ".psm1", ".bat", ".py", ".pyi", ".js", ".mjs", ".cjs", ".ts", ".mts", ".cts",
    ".jsx", ".tsx", ".vue", ".svelte", ".astro", ".css", ".scss", ".sass", ".less", ".java", ".kt", ".kts",
    ".groovy", ".gradle", ".go", ".rs", ".rb", ".php", ".c", ".h", ".cc", ".hh", ".cpp", ".cxx", ".hpp",
    ".cs", ".fs", ".vb", ".swift", ".dart", ".scala", ".clj", ".hs", ".ml", ".ex", ".exs", ".erl", ".lua",
    ".r", ".jl", ".pl", ".m", ".zig", ".nim", ".f90", ".tf", ".hcl", ".bicep", ".nix", ".cmake", ".mk",
    ".prisma", ".sol", ".proto", ".cu", ".diff", ".patch", ".doc", ".xls", ".psv", ".prn", ".lst", ".err",
    ".man", ".roff", ".texi", ".sty", ".cls", ".bst", ".rmarkdown", ".rnw", ".rd", ".pod", ".rdoc", ".puml",
    ".mmd", ".dot", ".ris", ".nbib", ".enw", ".ass", ".ssa", ".sbv", ".lrc", ".ttml", ".pot", ".strings",
    ".resx", ".xlf", ".xliff", ".tmx", ".plist", ".tei", ".dbk", ".docbook", ".nxml", ".kml", ".gpx",
    ".wsdl", ".xsl", ".xslt", ".dtd", ".rdf", ".ttl", ".ldif", ".ledger", ".journal", ".beancount", ".vcs",
    ".cnf", ".reg", ".cmd", ".awk", ".sed", ".tcl", ".ksh", ".csh", ".psd1", ".vbs", ".bas", ".asm", ".f",
    ".for", ".f77", ".f95", ".f03", ".cob", ".cbl", ".pas", ".adb", ".ads", ".v", ".sv", ".vhd", ".vhdl",
    ".lisp", ".el", ".scm", ".rkt", ".cljs", ".cljc", ".edn", ".fsx", ".fsi", ".mli", ".elm", ".purs",
    ".coffee", ".pug", ".hbs", ".ejs", ".twig", ".jinja", ".j2", ".erb", ".tmpl", ".tpl", ".jsp", ".cshtml",
    ".csproj", ".sln", ".props", ".mm", ".hxx", ".inl", ".cuh", ".ino", ".glsl", ".hlsl", ".wgsl", ".gd",
    ".pyx", ".pxd", ".pyw", ".thrift", ".fbs", ".idl", ".yang", ".ddl", ".pls", ".pkb", ".pks", ".hql",
    ".cql", ".cypher", ".rego", ".jsonnet", ".tfvars", ".bzl", ".sbt", ".rake", ".gemspec", ".dockerfile",
    ".robot", ".http", ".ado", ".sas", ".sps", ".lean", ".agda", ".thy",
)  # fmt: skip
_JSON = (
    ".json", ".jsonl", ".ndjson", ".jsonc", ".jsonld", ".geojson", ".har", ".webmanifest", ".properties"
)  # fmt: skip
READERS: dict[str, Reader] = {
    **dict.fromkeys(_TEXT, read_text),
    **dict.fromkeys((".md", ".markdown", ".mdown", ".mdx", ".mkd", ".qmd", ".rmd"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys(_JSON, read_escaped),
    **dict.fromkeys((".yaml", ".yml"), read_yaml),
    **dict.fromkeys((".ics", ".vcf"), read_folded),
    **dict.fromkeys((".xml", ".rss", ".atom", ".opml", ".dita"), read_xml),
    ".pdf": read_pdf,
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".epub"), read_archive),
    **dict.fromkeys((".eml", ".mbox", ".mht", ".mhtml"), _refuse_mail),
    ".ipynb": _refused("notebook: save it as .md (jupyter nbconvert --to markdown)"),
}
"""Readers by suffix: in lower case with its dot, "" for files without one."""

_BEGINNINGS: tuple[tuple[bytes, Reader], ...] = (
    (b"%PDF-", read_pdf),
    (b"PK\x03\x04", read_archive),
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        _refused(
            "encrypted, of an Office before 2007, or a mail of Outlook: "
            "save it without a password in a newer format, a mail as .txt"
        ),
    ),
    (b"{\\rtf", _refused("RTF: save it as .docx or as text")),
)
_PAGE = re.compile(
    rb"(?:\s|<\?xml[^>]*>|<!--(?:(?!-->).)*-->)*<(?:!doctype\s+html|html|(table))\b", re.I | re.S
)  # a table alone may begin Markdown, too

# Mail that is no text as it is: in parts, or encoded. Patches of Git have such heads around their text.
_HEADERS = re.compile(rb"(?!From [\da-f]{40,64} )(?:From [^\n]*\n)?(?:[\w-]+:[^\n]*\n(?:[ \t][^\n]*\n)*)+")
_MIME = re.compile(rb"^MIME-Version:", re.I | re.M)
_ENCODED = re.compile(
    rb"^Content-(?:Type:\s*multipart/|Transfer-Encoding:\s*(?:base64|quoted-printable)\b)", re.I | re.M
)
_PATCHES = (".patch", ".diff")
_SAYING_NOTHING = {"", ".doc", ".xls"}  # programs save tables and pages so
_SUFFIX = re.compile(r"\.[A-Za-z]\S*")  # not in "Notes of 1. May" or "app.log.1"


def find_reader(suffix: str, head: bytes, default: Reader | None = None) -> Reader | None:
    """Return the reader for a file with this suffix that begins like this; the default where neither says
    enough."""
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, reader in _BEGINNINGS:
        if bare.startswith(beginning):
            return reader
    suffix = suffix.lower() if _SUFFIX.fullmatch(suffix) else ""
    headers = _HEADERS.match(bare) if suffix not in _PATCHES else None
    if headers and _MIME.search(headers[0]) and _ENCODED.search(headers[0]):
        return _refuse_mail
    page = _PAGE.match(bare) if suffix not in READERS.keys() - _SAYING_NOTHING else None
    if page and (suffix or not page[1]):
        return read_html
    if bare.startswith(b"<?xml") and suffix != ".svg" and READERS.get(suffix, read_text) is read_text:
        return read_xml
    return READERS.get(suffix, default)


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
