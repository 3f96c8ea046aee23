"""From the bytes of one file to plain text: one reader per file type, behind a registry by suffix.

Structure that helps a reader of the text (headings, list items, code) is kept in Markdown's own notation,
whichever format it came from. A reader raises :class:`Unusable` when the file holds no text it can use.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup


class Unusable(Exception):
    """Why a file cannot be used. Never leaves the package: it becomes ``Skipped`` or ``SourceError``."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a reader found: the plain text, and what it knows about the file (JSON-able)."""

    text: str
    metadata: dict[str, str | int] = field(default_factory=dict)


Reader = Callable[[bytes], Content]
READERS: dict[str, Reader] = {}


def reader(*suffixes: str) -> Callable[[Reader], Reader]:
    """Register a reader for these suffixes (lower case, with the dot; "" for files without one)."""

    def register(function: Reader) -> Reader:
        for suffix in suffixes:
            if suffix and (not suffix.startswith(".") or suffix != suffix.lower()):
                raise ConfigError(f"a suffix is given in lower case with its dot, not as {suffix!r}")
            READERS[suffix] = function
        return function

    return register


# -- plain text ------------------------------------------------------------------------------------

# The UTF-32 marks come first: the UTF-16 mark is a prefix of the little-endian one.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 1 << 16
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b")) + b"\x7f"


def decode(data: bytes) -> str:
    """Decode by byte-order mark, else as UTF-8, else by detection on a sample.

    Line ends become ``\\n``. Raises Unusable for what is not text.
    """
    return re.sub(r"\r\n?", "\n", _decode(data))


def _decode(data: bytes) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    sample = data[:_SAMPLE]
    if b"\0" in sample or len(sample.translate(None, _CONTROL)) < 0.95 * len(sample):
        raise Unusable("binary file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        from charset_normalizer import from_bytes

        # Without a mark, 16-bit text was refused above. Among equal guesses the most common one is taken:
        # in a short Western text nothing tells its accents from Polish ones.
        guesses = from_bytes(sample, cp_exclusion=["utf_16", "utf_16_be", "utf_16_le"])
        best = guesses.best()
        equal = {
            guess.encoding
            for guess in guesses
            if best and guess.chaos <= best.chaos and guess.coherence >= best.coherence
        }
        encoding = "cp1252" if best is None or "cp1252" in equal else best.encoding
        return data.decode(encoding, errors="replace")


@reader(
    "", ".txt", ".text", ".log", ".rst", ".adoc", ".org", ".tex", ".csv", ".tsv", ".json", ".jsonl", ".yaml",
    ".yml", ".toml", ".ini", ".cfg", ".xml", ".sql", ".sh", ".py", ".pyi", ".js", ".ts", ".jsx", ".tsx",
    ".css", ".java", ".kt", ".go", ".rs", ".rb", ".php", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".swift",
    ".scala", ".lua", ".r", ".jl", ".pl", ".proto", ".cu",
)  # fmt: skip
def read_text(data: bytes) -> Content:
    """Text and code, as they are."""
    return Content(decode(data))


# -- Markdown and HTML -----------------------------------------------------------------------------

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_DROPPED = ("script", "style", "nav", "template", "noscript", "svg", "iframe")
_BLOCKS = (
    "address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption",
    "figure", "footer", "form", "header", "hr", "main", "ol", "p", "pre", "section", "summary", "table", "ul",
)  # fmt: skip
# What stands before and after the text of a tag.
_AROUND = {
    **{name: ("\n\n", "\n\n") for name in _BLOCKS},
    **{f"h{level}": ("\n\n" + "#" * level + " ", "\n\n") for level in range(1, 7)},
    "li": ("\n- ", ""),
    "br": ("\n", ""),
    "tr": ("", "\n"),
    "td": ("", " | "),
    "th": ("", " | "),
}


@reader(".md", ".markdown", ".mdown")
def read_markdown(data: bytes) -> Content:
    """Markdown without its markup. Front matter would parse as a heading, so it is kept apart, as lines."""
    from markdown_it import MarkdownIt

    source = decode(data)
    front = _FRONT_MATTER.match(source)
    body = MarkdownIt("commonmark").enable("table").render(source[front.end() :] if front else source)
    text = _plain_text(_parse(body))
    return Content(f"{front[1]}\n{text}" if front else text)


@reader(".html", ".htm", ".xhtml")
def read_html(data: bytes) -> Content:
    """A page's title and text; scripts, styles and navigation are dropped."""
    if not data.startswith(tuple(mark for mark, _ in _BYTE_ORDER_MARKS)):
        decode(data)  # refuses binary files; what encoding a page declares is for the parser to find
    page = _parse(data)
    title = ""
    if page.title:
        title = " ".join(page.title.extract().get_text().split())
    text = _plain_text(page)
    if title and title not in text[: 2 * len(title) + 100]:
        text = f"# {title}\n\n{text}"
    return Content(text, {"title": title} if title else {})


def _parse(markup: str | bytes) -> BeautifulSoup:
    from bs4 import BeautifulSoup
    from bs4.exceptions import ParserRejectedMarkup

    logging.getLogger("bs4.dammit").setLevel(logging.ERROR)  # it reports every character it replaces
    try:
        return BeautifulSoup(markup, "html.parser")
    except (ParserRejectedMarkup, AssertionError, ValueError, RecursionError) as error:
        raise Unusable(f"broken HTML ({error})") from None


def _plain_text(page: BeautifulSoup) -> str:
    """Text of a parsed page, one block per line or paragraph.

    The tree is walked with a stack: pages exist that never close a paragraph, nested thousands deep.
    """
    from bs4.element import PreformattedString, Tag

    parts: list[str] = []
    stack: list[tuple[object, bool]] = [(page, False)]
    while stack:
        node, preformatted = stack.pop()
        if isinstance(node, Tag) and node.name not in _DROPPED:
            before, after = _AROUND.get(node.name, ("", ""))
            preformatted = preformatted or node.name == "pre"
            parts.append(before)
            stack.append((after, True))
            stack += [(child, preformatted) for child in reversed(node.contents)]
        elif isinstance(node, str) and not isinstance(node, PreformattedString):  # comments and such
            # Outside <pre> white space means nothing, so that a line end is one that we put there.
            parts.append(node if preformatted else re.sub(r"\s+", " ", node))
    text = re.sub(r"(?<![ |])[ |]*\n", "\n", "".join(parts))  # white space and empty cells at a line's end
    text = re.sub(r"\n (?! )", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(\n- )\s+", r"\1", text)).strip()


# -- PDF -------------------------------------------------------------------------------------------


@reader(".pdf")
def read_pdf(data: bytes) -> Content:
    """The text layer of a PDF, pages apart by a blank line. A scan without one is refused."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports every repaired flaw of a file
    try:
        document = PdfReader(io.BytesIO(data))
        if document.is_encrypted and not document.decrypt(""):
            raise Unusable("encrypted PDF")
        pages = [page.extract_text().strip() for page in document.pages]
    except Unusable:
        raise
    except Exception as error:  # a damaged file fails anywhere in the parser, with any error
        raise Unusable(f"broken PDF ({type(error).__name__}: {error})") from None
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise Unusable("PDF without text (a scan has to go through OCR first)")
    return Content(text, {"pages": len(pages)})
