"""Documents of Office as their parts, under the names that readers know, and packed again for libraries."""

from __future__ import annotations

import codecs
import io
import re
import zipfile
from collections.abc import Mapping

Parts = dict[str, bytes]
"""The parts of a document, by their names."""

TYPES = "[Content_Types].xml"
"""The name of the part that every document has."""

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


def unpacked(archive: zipfile.ZipFile) -> Parts:
    """Return a document's parts under the names that its readers know, without its media."""
    names = {name: known_name(name) for name in archive.namelist()}
    parts = {known: _in_utf_8(archive.read(name)) for name, known in names.items() if known.endswith(_MARKUP)}
    told = [parts[name] for name in (TYPES, "_rels/.rels") if name in parts]
    kinds = [kind for kind in _PLAIN if any(map(kind[0].search, told))]
    for name in [name for name in parts if name.endswith((".xml", ".rels"))]:
        if name.endswith(".rels"):
            parts[name] = _RELATED.sub(_named, parts[name])
        for kind, known in kinds:
            parts[name] = kind.sub(known, parts[name])
    return parts


def packed(parts: Mapping[str, bytes | str]) -> io.BytesIO:
    """Return a document of these parts, as libraries open it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, part in parts.items():
            written.writestr(name, part)
    return file


def _in_utf_8(part: bytes) -> bytes:
    """Return XML in the encoding in which its tags are looked for."""
    if not part.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return part
    return _DECLARATION.sub("", part.decode("utf-16"), count=1).encode()


def known_name(name: str) -> str:
    """Return a part's name in lower case, with `/`, since names of parts differ in neither."""
    lower = name.replace("\\", "/").encode().lower().decode()
    return TYPES if lower == TYPES.lower() else lower


def _named(related: re.Match[bytes]) -> bytes:
    """Return what relates to a part, with the name that the part has."""
    if _OUTSIDE.search(related[0]):
        return related[0]
    return _TARGET.sub(lambda target: known_name(target[0].decode("utf-8", "replace")).encode(), related[0])
