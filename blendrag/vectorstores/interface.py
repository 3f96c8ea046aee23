"""The interface of a kind of vector store, which tells its rows page by page, and the address of one."""

from __future__ import annotations

import contextlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from blendrag.errors import BlendragError, ConfigError, MissingDependencyError, SourceError
from blendrag.names import Registry, closest

PAGE = 256
"""Rows of a page."""
TIMEOUT_S = 60
"""Seconds that a store may take for a page."""
TEXT_FIELDS = (
    "page_content", "text", "content", "document", "content_with_weight", "pageContent", "chunk", "body",
    "doc_content", "text_segment",
)  # fmt: skip
"""Fields in which frameworks keep a text, those of LangChain and LlamaIndex first."""
_NODE = "_node_content"  # where LlamaIndex keeps a node, as JSON
_TLS = "+https"
_LONGEST = 300  # characters of what a client says

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """A collection of a store, as a URL names it: ``kind[+https]://[user:password@]host[:port]/[folders/]
    collection[?options]``. A key without a user stands where the password does."""

    kind: str
    tls: bool
    host: str
    port: int | None
    folders: tuple[str, ...]
    collection: str
    options: Mapping[str, str] = field(default_factory=dict)
    user: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, url: str, key: str | None = None) -> Address:
        """Read a URL. key: for one without. Raises ConfigError, which never shows a key."""
        try:
            parts = urlsplit(url)
            port = parts.port
            options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            scheme = parts.scheme.lower()
            kind = scheme.removesuffix(_TLS)
            if "://" not in url or not kind:
                raise ValueError
        except ValueError:
            raise ConfigError("this is no URL of a vector store, as in qdrant://localhost/handbook") from None
        if kind not in STORES:
            raise ConfigError(STORES.unknown(kind))
        kind_of = STORES[kind]
        for name in sorted(options.keys() - set(kind_of.options)):
            raise ConfigError(f"{kind} URLs have no option {name!r}{closest(name, kind_of.options)}")
        *folders, collection = [unquote(part) for part in parts.path.split("/") if part] or [""]
        if not collection:
            raise ConfigError(f"the {kind} URL names no collection: put it behind the host, as in /handbook")
        if kind_of.most_folders is not None and len(folders) > kind_of.most_folders:
            most = kind_of.most_folders or "no"
            raise ConfigError(
                f"{kind} URLs have {most} folder before the collection, not {'/'.join(folders)}"
            )
        return cls(
            kind,
            scheme.endswith(_TLS),
            parts.hostname or ("localhost" if kind_of.port else ""),
            port or kind_of.port,
            tuple(folders),
            collection,
            options,
            unquote(parts.username) if parts.username else None,
            (unquote(parts.password) if parts.password else None) or (key or "").strip() or None,
        )

    @property
    def url(self) -> str:
        """The URL of the host, for clients that take one."""
        return f"{'https' if self.tls else 'http'}://{_bracketed(self.host)}:{self.port}"

    @property
    def prefix(self) -> str:
        """The path below which a proxy has the store; "" for none."""
        return "".join(f"/{quote(folder)}" for folder in self.folders)

    def __str__(self) -> str:
        """Return the URL as it may be shown, which names the place and nothing else."""
        port = f":{self.port}" if self.port else ""
        place = "/".join([f"{_bracketed(self.host)}{port}", *self.folders, self.collection])
        options = "&".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        return f"{self.kind}://{place}{options and '?'}{options}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class VectorStore(ABC):
    """A collection of a vector store, by a client of that store."""

    package: ClassVar[str]
    """The name by which pip installs the client."""
    port: ClassVar[int | None] = None
    options: ClassVar[tuple[str, ...]] = ()
    """Names that a URL may have behind its question mark."""
    most_folders: ClassVar[int | None] = None
    """Folders that a URL may have before the collection."""

    def __init__(self, client: Any, collection: str) -> None:
        """Scroll by a client that is the caller's."""
        self.client, self.collection = client, collection

    @classmethod
    @abstractmethod
    def connect(cls, at: Address) -> VectorStore:
        """Connect by the store's own client, imported here."""

    @abstractmethod
    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        """Yield all rows, each an id and its fields. What others add or delete meanwhile may be among them or
        not; a row that stays is."""

    @abstractmethod
    def count(self) -> int:
        """Return about how many rows there are."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of all collections."""

    def close(self) -> None:
        """End the connection."""
        self.client.close()

    def __str__(self) -> str:
        return f"collection {self.collection!r}"


STORES: Registry[VectorStore] = Registry("kind of vector store")


def text_of(fields: Fields, named: str | None = None) -> str | None:
    """Return the text of a row; None if it has none. named: the field that holds it, within others by dots;
    by default the first of :data:`TEXT_FIELDS` that there is, LlamaIndex's node, or the text of metadata."""
    if named is not None:
        found: Any = fields
        if named in fields:
            return _text(fields[named])
        for part in named.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _text(found)
    for name in TEXT_FIELDS:
        if (text := _text(fields.get(name))) is not None:
            return text
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
        node = json.loads(fields[_NODE])
        return _text(node.get("text")) or _text(node["text_resource"]["text"])
    metadata = fields.get("metadata")
    return _text(metadata.get("text")) if isinstance(metadata, Mapping) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def client_of(module: str, package: str) -> Any:
    """Import a store's client. Raises MissingDependencyError, naming the package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} cannot be imported ({error}): pip install {package}"
        ) from None


@contextlib.contextmanager
def failures(where: Address | VectorStore) -> Iterator[None]:
    """Raise SourceError for whatever a client raises inside, in one line without the key."""
    try:
        yield
    except BlendragError:
        raise
    except Exception as error:  # each client has errors of its own
        message = str(error)
        if isinstance(where, Address) and where.key:
            for key in (where.key, quote(where.key), quote(where.key, safe="")):
                message = message.replace(key, "***")
        message = " ".join(message.split()) or type(error).__name__
        raise SourceError(f"{where} cannot be read: {message[:_LONGEST]}") from None


@contextlib.contextmanager
def open_store(at: Address) -> Iterator[VectorStore]:
    """Open a store by its client, and end the connection behind the block. Raises MissingDependencyError
    without the client, SourceError where no store answers."""
    with failures(at):
        store = STORES[at.kind].connect(at)
    try:
        yield store
    finally:
        with contextlib.suppress(Exception):  # what was read is read; and not all clients can be closed
            store.close()
