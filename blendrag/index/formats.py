"""Formats of files: which reader makes text of a file's bytes. What a file is, its content says; the suffix
says which kind of text.

A reader raises :class:`Unusable` when the file holds no text it can use.
"""

from __future__ import annotations

import contextlib
import re
from binascii import a2b_qp
from collections.abc import Callable
from html import unescape

import yaml  # type: ignore[import-untyped]  # comes with pydantic-settings[yaml]

from blendrag.errors import BlendragError, needs
from blendrag.index.text import CONTROL, Content, Unusable, decode

READER_VERSION = 14
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
    r"""(\]\(\s?<?|\]:\s*<?|["'])"""
    r"data:(?:image/|application/octet-stream)[\w.+;=-]*,(?:[\w+/=%.-]|\n(?=[A-Za-z\d+/]{60})){100,}",
    re.I,
)


def read_escaped(data: bytes) -> Content:
    """Read data with the signs in place of what JSON may write for them, which mean the same, and without
    pictures in letters."""
    return Content(_PICTURE.sub(r"\1", _ESCAPED.sub(_sign, decode(data))))


_ESCAPED = re.compile(r"\\[\\/]|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[0-9A-Fa-f]{4}|\\u[0-9A-Fa-f]{4}")
_MEANS_MORE = re.compile('[\0-\x1f"\\\\\x7f-\x9f\u2028\u2029\ufeff\ufffd]')  # the last is half of a letter


def _sign(found: re.Match[str]) -> str:
    numbers = [int(number, 16) for number in _NUMBER.findall(found[0])]
    text = "".join(map(chr, numbers)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return "/" if found[0] == "\\/" else found[0] if _MEANS_MORE.search(text or "\\") else text


_NUMBER = re.compile("[0-9A-Fa-f]{2,}")


def read_yaml(data: bytes) -> Content:
    """Read YAML with the letters in place of what double quotes may have for them, where lines may part a
    word; what is no YAML stays as it is."""
    text, pieces, at = decode(data), list[str](), 0
    with contextlib.suppress(yaml.YAMLError):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for token in yaml.scan(text, Loader=loader) if "\\" in text else ():
            if isinstance(token, yaml.ScalarToken) and token.style == '"':
                begin, end = token.start_mark.index, token.end_mark.index
                pieces += text[at:begin], _OF_YAML.sub(_unfolded, text[begin:end])
                at = end
    return Content("".join((*pieces, text[at:])))


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
    fold = b" " if b"\nVERSION:1.0" in data else b""  # vCalendar's lines are parted at blanks
    text = _QUOTED.sub(_unquoted, decode(_FOLD.sub(fold, data)))
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
    """Return the text layer of a PDF, what was written on its pages and filled into its form."""
    with needs("blendrag[index]"):
        from blendrag.index.pdf import read_pdf
    return read_pdf(data)


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
    ".typ", ".tex", ".bib", ".srt", ".vtt", ".csv", ".tsv", ".tab", ".json5", ".toml", ".ini", ".cfg",
    ".conf", ".xsd", ".po", ".sql", ".graphql", ".gql", ".sh", ".bash", ".zsh", ".fish", ".ps1", ".psm1",
    ".bat", ".py", ".pyi", ".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx", ".vue", ".svelte",
    ".astro", ".css", ".scss", ".sass", ".less", ".java", ".kt", ".kts", ".groovy", ".gradle", ".go", ".rs",
    ".rb", ".php", ".c", ".h", ".cc", ".hh", ".cpp", ".cxx", ".hpp", ".cs", ".fs", ".vb", ".swift", ".dart",
    ".scala", ".clj", ".hs", ".ml", ".ex", ".exs", ".erl", ".lua", ".r", ".jl", ".pl", ".m", ".zig", ".nim",
    ".f90", ".tf", ".hcl", ".bicep", ".nix", ".cmake", ".mk", ".prisma", ".sol", ".proto", ".cu", ".diff",
    ".patch", ".doc", ".xls", ".psv", ".prn", ".lst", ".err", ".man", ".roff", ".texi", ".sty", ".cls",
    ".bst", ".rnw", ".rd", ".pod", ".rdoc", ".puml", ".mmd", ".dot", ".ris", ".nbib", ".enw", ".ass", ".ssa",
    ".sbv", ".lrc", ".ttml", ".pot", ".strings", ".resx", ".xlf", ".xliff", ".tmx", ".plist", ".tei", ".dbk",
    ".docbook", ".nxml", ".kml", ".gpx", ".wsdl", ".xsl", ".xslt", ".dtd", ".rdf", ".ttl", ".ldif", ".ledger",
    ".journal", ".beancount", ".cnf", ".reg", ".cmd", ".awk", ".sed", ".tcl", ".ksh", ".csh", ".psd1",
    ".vbs", ".bas", ".asm", ".f", ".for", ".f77", ".f95", ".f03", ".cob", ".cbl", ".pas", ".adb", ".ads",
    ".v", ".sv", ".vhd", ".vhdl", ".lisp", ".el", ".scm", ".rkt", ".cljs", ".cljc", ".edn", ".fsx", ".fsi",
    ".mli", ".elm", ".purs", ".coffee", ".pug", ".hbs", ".ejs", ".twig", ".jinja", ".j2", ".erb", ".tmpl",
    ".tpl", ".jsp", ".cshtml", ".csproj", ".sln", ".props", ".mm", ".hxx", ".inl", ".cuh", ".ino", ".glsl",
    ".hlsl", ".wgsl", ".gd", ".pyx", ".pxd", ".pyw", ".thrift", ".fbs", ".idl", ".yang", ".ddl", ".pls",
    ".pkb", ".pks", ".hql", ".cql", ".cypher", ".rego", ".jsonnet", ".tfvars", ".bzl", ".sbt", ".rake",
    ".gemspec", ".dockerfile", ".robot", ".http", ".ado", ".sas", ".sps", ".lean", ".agda", ".thy",
)  # fmt: skip
_JSON = (
    ".json", ".jsonl", ".ndjson", ".jsonc", ".jsonld", ".geojson", ".har", ".webmanifest", ".properties"
)  # fmt: skip
READERS: dict[str, Reader] = {
    **dict.fromkeys(_TEXT, read_text),
    **dict.fromkeys(
        (".md", ".markdown", ".mdown", ".mdx", ".mkd", ".qmd", ".rmd", ".rmarkdown"), read_markdown
    ),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys(_JSON, read_escaped),
    **dict.fromkeys((".yaml", ".yml"), read_yaml),
    **dict.fromkeys((".ics", ".vcs", ".vcf"), read_folded),
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
# Programs save tables and pages so, and templates may be whole pages.
_SAYING_NOTHING = {
    "", ".doc", ".xls", ".jsp", ".cshtml", ".tpl", ".tmpl", ".erb", ".twig", ".hbs", ".ejs", ".jinja", ".j2",
    ".http", ".dot", ".err", ".man",
}  # fmt: skip
_SUFFIX = re.compile(r"\.(?:[A-Za-z]|\d[a-z])\S*")  # not in "Notes of 1. May" or "app.log.1"


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
