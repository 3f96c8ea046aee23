"""The keys of a server's clients: in whose name each asks, and what it may do."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError
from blendrag.names import closest

ASK, INGEST, ADMIN = "ask", "ingest", "admin"
RIGHTS = frozenset({ASK, INGEST, ADMIN})

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAMESPACE = re.compile(r"[\w-][\w.-]{0,63}")  # the name of a folder, too


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key. namespace: the tenant, whose documents it reaches and no others."""

    namespace: str
    rights: frozenset[str]

    @property
    def names(self) -> bool:
        """Return whether it may know what the documents of its namespace are called."""
        return INGEST in self.rights

    def shown(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what its holder sees of rows about documents, whose name is their ``source``."""
        return [row if self.names else {**row, "source": None} for row in rows]


class Keys:
    """The keys of one server's clients, known by their SHA-256: who reads the file can ask nothing."""

    def __init__(self, by_digest: Mapping[bytes, Key]) -> None:
        self._by_digest = by_digest

    @property
    def namespaces(self) -> list[str]:
        return sorted({key.namespace for key in self._by_digest.values()})

    def find(self, secret: bytes) -> Key | None:
        """Find the key of a secret. Takes as long for a wrong one as for a right one."""
        digest, found = hashlib.sha256(secret).digest(), None
        for known, key in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found


def read_keys(file: Path) -> Keys:
    """Read keys, one per line: its SHA-256, namespace and rights, ``HASH customer-42 ask,ingest``; ``#``
    begins a comment. Raises ConfigError, which shows no first word: it may be a key itself."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the keys in {str(file)!r}: {reason}") from None
    found: dict[bytes, Key] = {}
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            try:
                digest, key = _read(words)
                if digest in found:
                    raise ConfigError("this key is in an earlier line, too")
            except ConfigError as error:
                raise ConfigError(f"{str(file)!r}, line {number}: {error}") from None
            found[digest] = key
    if not found:
        raise ConfigError(f"{str(file)!r} has no key: nobody could ask")
    return Keys(found)


def _read(words: list[str]) -> tuple[bytes, Key]:
    if len(words) != 3:
        raise ConfigError(f"needs the SHA-256 of a key, a namespace and rights, and has {len(words)} words")
    digest, namespace, given = words
    if not _DIGEST.fullmatch(digest):
        raise ConfigError("the first word is no SHA-256: 64 hex digits, as sha256sum prints them")
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"{namespace!r} is no namespace: 64 letters, digits, '.', '-' and '_' at most, and no '.' first"
        )
    rights = given.split(",")
    for right in rights:
        if right not in RIGHTS:
            raise ConfigError(f"unknown right {right!r}{closest(right, RIGHTS)}")
    return bytes.fromhex(digest), Key(namespace, frozenset(rights))
