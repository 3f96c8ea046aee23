"""Documents, loaded from what a user hands to ``ingest``: paths, folders, texts, our documents or a
framework's.

A mistake in what was named directly is a SourceError before anything is read; a file inside a folder that
cannot be used is reported as Skipped, and the walk goes on.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blendrag.errors import SourceError
from blendrag.files.paths import absolute
from blendrag.index.formats import HEAD_BYTES, READERS, Reader, find_reader, read, read_text
from blendrag.index.text import Unusable
from blendrag.text import encodable, hash_of

MAX_FILE_BYTES = 50 << 20

_KINDS = ".md .txt .html .pdf .docx .pptx .xlsx .epub, data and code"
_JUNK_NAMES = frozenset({"__pycache__", "node_modules", "Thumbs.db", "desktop.ini"})


@dataclass(frozen=True, slots=True)
class Document:
    """A text to ingest. ``source`` names it in answers and identifies it when it is ingested again.

    Without a source the text is its own identity: ``text-`` and a hash. metadata: what sources of an answer
    show beside the text, as JSON can hold it. part_of: the source that it is a part of, by default its own.
    """

    text: str
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part_of: str = ""

    @property
    def content_hash(self) -> str:
        """The hash by which a changed text, or metadata, is told from the one before."""
        told = json.dumps(_plain(self.metadata), sort_keys=True) if self.metadata else ""
        return hash_of(self.text + told)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A source that could not be used, and why. ``transient``: it may be another time."""

    source: str
    reason: str
    transient: bool = False


Loaded = Document | Skipped
Item = Any  # str | Path | Document | anything with page_content and metadata (a LangChain document)


def resolved(items: Item | Iterable[Item]) -> list[Path | Document]:
    """Return the absolute path or the document that each of ``items`` stands for.

    A string is a path when it exists, and a text when it has several lines or reads like a sentence;
    ``Document(text=...)`` leaves no doubt. Raises SourceError for a path that does not exist.
    """
    return [_resolve(item) for item in ([items] if is_single(items) else items)]


def load_sources(items: Item | Iterable[Item], *, exclude: Iterable[Path] = ()) -> Iterator[Loaded]:
    """Yield a Document or Skipped for everything in ``items``: :func:`load` of what they are resolved to."""
    return load(resolved(items), exclude=exclude)


def is_single(items: Item | Iterable[Item]) -> bool:
    """Return whether this is an item itself, not several."""
    if isinstance(items, str | Path | Document | bytes | Mapping) or hasattr(items, "page_content"):
        return True
    return not isinstance(items, Iterable)


# -- what an item is -------------------------------------------------------------------------------


def _resolve(item: Item) -> Path | Document:
    """Return the absolute path or the document that an item stands for. A link stays one: it names the same
    documents when it is switched to another release."""
    if isinstance(item, Document):
        if not isinstance(item.text, str):
            raise SourceError(f"a document's text is a string, not a {type(item.text).__name__}")
        document = replace(item, text=encodable(item.text), metadata=_plain(item.metadata))
        names = ("" if name is None else str(name) for name in (item.source, item.part_of))  # Path, UUID
        given, whole = map(encodable, names)
        source = given or f"text-{hash_of(document.text)[:16]}"
        return replace(document, source=source, part_of=whole or source)
    if hasattr(item, "page_content"):
        return _from_framework(item)
    if not isinstance(item, str | Path):
        kinds = "paths, texts, or documents of blendrag's or LangChain's"
        raise SourceError(f"cannot ingest a {type(item).__name__}: give {kinds}")
    path = os.path.expanduser(item)
    if os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # "." in a working folder that was deleted
            named, real = absolute(path), os.path.realpath(path)
            same = os.path.realpath(named) == real  # ".." behind a link leads elsewhere
            return Path(named if same else real)
    if isinstance(item, str) and _is_prose(item):
        return _resolve(Document(item))
    if _ADDRESS.match(path):
        raise SourceError(f"{str(item)!r} is an address, which is not fetched: save what is there as a file")
    hint = _near(Path(path)) or ("; a text is given as Document(text=...)" if isinstance(item, str) else "")
    raise SourceError(f"no such file or folder: {str(item)!r}{hint}")


_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")  # also with one slash, as a Path has it


def _plain(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as JSON can hold it."""
    named = {str(name): value for name, value in (metadata or {}).items()}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(named, default=str, skipkeys=True))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"a document's metadata cannot be written as JSON: {error}") from error
    return plain


def _from_framework(item: Any) -> Path | Document:
    """Make a document of LangChain's, named by its page, too: pages of a file have one source."""
    metadata = dict(item.metadata or {})
    source = whole = str(getattr(item, "id", None) or metadata.get("source") or "")
    if source == str(metadata.get("source")) and "page" in metadata:
        source = f"{source}#page={metadata['page']}"
    return _resolve(Document(item.page_content, source, metadata, whole))


def _is_prose(text: str) -> bool:
    if "\n" in text:
        return True
    suffix = Path(text).suffix.lower()
    looks_like_path = text.startswith(("/", "./", "../", "~")) or (suffix != "" and suffix in READERS)
    return not looks_like_path and (len(text.split()) >= 4 or text.endswith(("。", "！", "？")))


def _near(path: Path) -> str:
    """Return the hint at what has a name like that of a path that does not exist."""
    try:
        missing, parent = "", Path(os.path.abspath(path))
        while not os.path.isdir(parent):
            missing, parent = parent.name, parent.parent
        names = {name.casefold(): name for name in os.listdir(parent)}
    except OSError:  # also of a working folder that was deleted
        return ""
    match = difflib.get_close_matches(missing.casefold(), names, n=1)
    return f"; did you mean {str(parent / names[match[0]])!r}?" if match else ""


# -- reading ---------------------------------------------------------------------------------------


def load(targets: Iterable[Path | Document], *, exclude: Iterable[Path] = ()) -> Iterator[Loaded]:
    """Yield a Document or Skipped for everything in ``targets``, in a stable order, each file once, read as
    the iterator advances. A source that another text has already gets a number behind it.

    exclude: folders and files left out of walks (the index itself). Raises SourceError for a file named
    directly that cannot be used, and for a folder without a single document.
    """
    names: dict[str, str] = {}
    for loaded in _read(targets, {os.path.realpath(path) for path in exclude}):
        if isinstance(loaded, Skipped):
            yield loaded
            continue
        source, number, text_hash = loaded.source, 1, hash_of(loaded.text)
        while names.get(source, text_hash) != text_hash:
            number += 1
            source = f"{loaded.source}#{number}"
        if not loaded.text.strip():
            yield Skipped(source, "empty text")
        elif source not in names:
            names[source] = text_hash
            yield replace(loaded, source=source)


def _read(targets: Iterable[Path | Document], excluded: set[str]) -> Iterator[Loaded]:
    seen: set[str] = set()
    for target in targets:
        if isinstance(target, Document):
            yield target
        elif target.is_dir():
            yield from _load_folder(target, seen, excluded)
        elif (real := os.path.realpath(target)) not in seen:
            seen.add(real)
            loaded = _load_file(target, read_text)
            if isinstance(loaded, Skipped):
                raise SourceError(f"cannot use {loaded.source!r}: {loaded.reason}")
            yield loaded


def _load_folder(folder: Path, seen: set[str], excluded: set[str]) -> Iterator[Loaded]:
    found = False
    problem = ""
    for path in _walk(folder, excluded):
        real = os.path.realpath(path)
        if real in seen:
            found = True
            continue
        seen.add(real)
        loaded = _load_file(path)
        if isinstance(loaded, Document):
            found = True
        else:
            problem = problem or f"; {loaded.source!r} was skipped: {loaded.reason}"
        yield loaded
    if not found:
        raise SourceError(f"no documents in folder {source_of(folder)!r}; looked for {_KINDS}{problem}")


def _walk(folder: Path, excluded: set[str]) -> Iterator[Path]:
    """Yield the files under a folder, sorted, behind links, too; an unreadable folder as itself."""
    visited = set(excluded)
    stack = [folder]
    while stack:
        path = stack.pop()
        real = os.path.realpath(path)
        if real in visited:
            continue
        visited.add(real)
        try:
            names = sorted(os.listdir(path))
        except OSError:
            yield path
        else:
            stack += [path / name for name in reversed(names) if not _is_junk(name)]


def _is_junk(name: str) -> bool:  # "~$": Office marks the files that are open in it so
    return name.startswith((".", "~$")) or name.endswith("~") or name in _JUNK_NAMES


def _load_file(path: Path, default: Reader | None = None) -> Loaded:
    source = source_of(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):  # the walk only hands on a folder that it could not list
            return Skipped(source, "folder cannot be listed", transient=True)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            return Skipped(source, "not a regular file")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            reader = find_reader(path.suffix, head, default)
            if reader is None:
                return Skipped(source, f"no reader for {path.suffix} files")
            if (size := status.st_size) > MAX_FILE_BYTES:
                return Skipped(source, f"larger than the limit of {MAX_FILE_BYTES:,} bytes ({size:,})")
            data = head + file.read(MAX_FILE_BYTES)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        return Skipped(source, f"unreadable ({error.strerror})", transient=not gone)
    if not data:
        return Skipped(source, "empty file")
    try:
        content = read(reader, data)
    except Unusable as problem:
        return Skipped(source, str(problem))
    if not content.text.strip():
        return Skipped(source, "no text in it")
    return Document(encodable(content.text), source, content.metadata, source)


def source_of(path: Path) -> str:
    """Return a path as a source. File names need not be valid text; what is kept in SQLite has to be."""
    return os.fsencode(path).decode("utf-8", errors="replace")
