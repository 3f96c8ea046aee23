"""What an exported index consists of: names that are allowed, and what an archive says of itself."""

from __future__ import annotations

import json
import pickletools
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.errors import ArchiveError
from blendrag.store.identity import KVIdentity

HEADER = "blendrag.json"  # first
MANIFEST = "manifest.txt"  # last: a line per file, "checksum size name"
DATABASES = ("catalogue.sqlite", "ledger.sqlite", "chroma/chroma.sqlite3")

_FORMAT = 1
MOST_HEADER = 1 << 16
_VECTORS = re.compile(r"chroma/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[a-z_0-9]+\.(bin|pickle)")
_KV = re.compile(r"kv/([0-9a-f]{2})/\1[0-9a-f]{30}\.safetensors")
# What numbers, texts, lists and dictionaries are written with; nothing that names or calls anything.
_DATA_ONLY = re.compile(
    r"PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_)?BIN(PUT|GET)|NONE|NEW(TRUE|FALSE)|BININT[12]?|LONG[14]|BINFLOAT"
    r"|(SHORT_)?BINUNICODE8?|(SHORT_)?BINBYTES8?|EMPTY_(DICT|LIST|TUPLE|SET)|SETITEMS?|APPENDS?|ADDITEMS"
    r"|TUPLE[123]?|DICT|LIST"
)


@dataclass(frozen=True, slots=True)
class Header:
    """What an archive says of itself before it is read.

    files, nbytes: of all between header and manifest. kv: whether KV is among it.
    """

    blendrag: str
    identity: KVIdentity
    dtype: str | None
    kv: bool
    files: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def encode(self) -> bytes:
        return json.dumps({"format": _FORMAT} | self.to_dict(), indent=1).encode()

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """Raises ArchiveError for what is no header, or one of a later format."""
        try:
            values = json.loads(text)
            made_as = values.pop("format")
            if made_as != _FORMAT:
                raise ArchiveError(f"the archive has format {made_as!r}: this version reads {_FORMAT}")
            header = cls(**values | {"identity": KVIdentity(**values["identity"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArchiveError(f"no export of an index ({type(error).__name__} in its header)") from error
        if not all(type(count) is int and count >= 0 for count in (header.files, header.nbytes)):
            raise ArchiveError("no export of an index (its header has no sizes)")
        return header


def line(checksum: str, size: int, name: str) -> bytes:
    """A file's line in the manifest. checksum: xxh3, 128 bits."""
    return f"{checksum} {size} {name}\n".encode()


def belongs(name: str) -> bool:
    """Whether an index has a file of this name. Anything else is not even looked at."""
    return name in DATABASES or bool(_KV.fullmatch(name) or _VECTORS.fullmatch(name))


def refuse_code(path: Path) -> None:
    """Raises ArchiveError if a pickle, in which Chroma keeps its vectors' names, is more than plain data."""
    try:
        with path.open("rb") as file:
            for opcode, _, _ in pickletools.genops(file):
                if not _DATA_ONLY.fullmatch(opcode.name):
                    raise ArchiveError(f"{path.name} in the archive would run code ({opcode.name})")
    except ValueError as error:
        raise ArchiveError(f"{path.name} in the archive is damaged: {error}") from error
