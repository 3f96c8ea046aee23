"""The record of a chunk: the same bytes in every tier, laid out so that a layer is one sequential read.

It is a safetensors file: header (padded, so that what follows is aligned), ``token_ids`` (int32 [tokens]),
``layers`` (uint8 [shards * layers, row]; a row is what the codec makes of one layer's K and V of a shard's
heads). The header carries a checksum per row, so a layer can be used before the next one has arrived.

An engine of several ranks cuts its records into as many shards of heads, all layers of the first before those
of the second, so that each rank reads one range. Any engine reads any record.

Behind the model's own layers there may be those of a model that drafts, which the header names. A chunk's key
does not depend on it, since no text does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from blendrag.store.codec import Codec, make_codec
from blendrag.store.identity import NO_CONTEXT, KVIdentity

TokenIds = npt.NDArray[np.int32]
Reason = Literal["missing", "damaged", "mismatch", "unavailable"]

HEAD_READ = 16 << 10  # one read of this size has the head of a chunk of up to 2,000 tokens
_ALIGN = 1024
_MAX_HEADER = 1 << 16  # bytes: 16 hex digits per layer, and some names
_MAX_TOKENS = 1 << 22


class DamagedError(Exception):
    """A record exists and cannot be trusted. Never leaves the store: it becomes ``Miss("damaged")``.

    The message is "key: what is wrong".
    """

    @property
    def key(self) -> str:
        return str(self).partition(":")[0]


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why a chunk's KV could not be had: never stored or evicted; damaged; made of other tokens;
    on a tier that cannot be reached now."""

    reason: Reason


class DraftLayers(NamedTuple):
    """The layers of a model that drafts: which model it is, and how many of its layers there are."""

    name: str = ""
    layers: int = 0


NO_DRAFTS = DraftLayers()


class Layout:
    """The format of one identity's records.

    ``dtype``: what the engine computes in, "bfloat16" for example: an identity may leave it open.
    ``digest`` names all records of this layout, whatever their chunk: shared servers keep them under it.
    ``own``: the KV heads that this process has of every layer; None: all. ``shards``: how many the records
    have that are made here.
    """

    def __init__(self, identity: KVIdentity, dtype: str, own: range | None = None, shards: int = 1) -> None:
        self.identity, self.num_layers = identity, identity.num_layers
        self.heads, self.size = identity.num_kv_heads, identity.head_size
        self.own, self.shards = range(self.heads) if own is None else own, shards
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._codecs: dict[int, Codec] = {}
        self.codec = self.codec_of(1)
        self.digest = xxhash.xxh3_128_hexdigest(f"{identity.digest()} {dtype}".encode())

    def codec_of(self, shards: int) -> Codec:
        """Return the codec for the rows of a record with so many shards."""
        if shards not in self._codecs:
            heads = self.heads // shards
            self._codecs[shards] = make_codec(self.identity.codec, heads, self.size, self.dtype)
        return self._codecs[shards]

    def row_bytes(self, tokens: int, shards: int = 1, context: str = NO_CONTEXT) -> int:
        """Return the bytes of a row of a chunk with so many shards."""
        return self.codec_of(shards).row_bytes(tokens)

    def encode(
        self,
        key: str,
        token_ids: Sequence[int],
        kv: torch.Tensor,
        context: str = NO_CONTEXT,
        drafts: DraftLayers = NO_DRAFTS,
    ) -> Record:
        """Make a record of [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size], of which ``drafts``
        are the last ones."""
        ids = np.ascontiguousarray(token_ids, dtype="<i4")
        codec = self.codec_of(self.shards)
        parts = [codec.encode(part).cpu() for part in kv.chunk(self.shards, dim=3)]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        head = Head(self, key, ids, tuple(checksum(row) for row in rows), context, drafts)
        return Record(head, rows)

    def header(
        self,
        key: str,
        ids: TokenIds,
        checksums: Sequence[str],
        context: str = NO_CONTEXT,
        drafts: DraftLayers = NO_DRAFTS,
    ) -> bytes:
        """Return a record's first bytes, which follow from what it holds: others mean damage."""
        tokens, count = len(ids), len(checksums)
        row = self.row_bytes(tokens, max(1, self._shards(count, drafts)), context)
        fields = {
            "__metadata__": {
                "key": key,
                "identity": self.digest,
                "codec": self.identity.codec,
                "ids": xxhash.xxh3_64_hexdigest(ids.tobytes()),
                "rows": "".join(checksums),
                **({"context": context} if context else {}),
                **({"drafts": f"{drafts.layers} {drafts.name}"} if drafts.layers else {}),
            },
            "token_ids": {"dtype": "I32", "shape": [tokens], "data_offsets": [0, 4 * tokens]},
            "layers": {
                "dtype": "U8",
                "shape": [count, row],
                "data_offsets": [4 * tokens, 4 * tokens + count * row],
            },
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGN)
        return len(text).to_bytes(8, "little") + text

    def parse(self, key: str, first: bytes | memoryview, size: int) -> Head | int:
        """Return the head of the record of ``size`` bytes that begins with ``first``; or, if ``first`` is too
        short for it, how many bytes it takes.

        Nothing is allocated on the record's own word: lengths are compared first, and then the whole header
        with the one that a record of this identity would have. Raises DamagedError.
        """
        if len(first) < 8:
            raise DamagedError(f"{key}: only {len(first)} bytes")
        length = int.from_bytes(first[:8], "little")
        if not 2 <= length <= _MAX_HEADER:
            raise DamagedError(f"{key}: a header of {length:,} bytes")
        if 8 + length > size:
            raise DamagedError(f"{key}: {size:,} bytes, cut off")
        if len(first) < 8 + length:
            return 8 + length
        try:
            fields = json.loads(bytes(first[8 : 8 + length]))
            (tokens,) = fields["token_ids"]["shape"]
            metadata = fields["__metadata__"]
            rows, context = str(metadata["rows"]), str(metadata.get("context", NO_CONTEXT))
            context.encode()  # a lone surrogate is in no key
            more, _, name = str(metadata.get("drafts", 0)).partition(" ")
            drafts = DraftLayers(name, int(more))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError(f"{key}: unreadable header ({type(error).__name__})") from error
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens <= _MAX_TOKENS:
            raise DamagedError(f"{key}: {tokens!r} tokens")
        if metadata.get("identity") != self.digest:
            raise DamagedError(f"{key}: made by another model, codec or version")
        begin, end = 8 + length, 8 + length + 4 * tokens
        checksums = tuple(rows[at : at + 16] for at in range(0, len(rows), 16))
        count = len(checksums)
        shards = self._shards(count, drafts)
        if not shards or size != end + count * self.row_bytes(tokens, shards, context):
            raise DamagedError(f"{key}: {size:,} bytes, {count:,} rows")
        if len(first) < end:
            return end
        ids: TokenIds = np.frombuffer(bytes(first[begin:end]), dtype="<i4")
        if self.header(key, ids, checksums, context, drafts) != bytes(first[:begin]):
            raise DamagedError(f"{key}: another record's header, or a changed one")
        # This way no record is larger than its chunk, whoever wrote it.
        if self.key_of(ids, context) != key:
            raise DamagedError(f"{key}: another chunk's tokens")
        return Head(self, key, ids, checksums, context, drafts)

    def key_of(self, ids: Sequence[int] | TokenIds, context: str) -> str:
        """Return the key of the record with these tokens, and this text before them."""
        return self.identity.chunk_key(ids, context)

    def _shards(self, rows: int, drafts: DraftLayers) -> int:
        """Return how many shards so many rows make; 0: not whole ones."""
        shards, rest = divmod(rows, max(1, self.num_layers + drafts.layers))
        few = 0 <= drafts.layers <= max(1, self.num_layers)  # whoever wrote it
        return shards if few and shards and not rest and self.heads % shards == 0 else 0


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The head of a record, before its layers: enough to read any layer, and to verify it.

    Row ``shard * num_layers + layer`` has the heads of that shard in that layer. drafts: the last of its
    layers.
    """

    layout: Layout
    key: str
    ids: TokenIds
    checksums: tuple[str, ...]
    context: str = NO_CONTEXT
    drafts: DraftLayers = NO_DRAFTS

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return len(self.checksums)

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers + self.drafts.layers

    @property
    def shards(self) -> int:
        return max(1, self.num_rows // max(1, self.num_layers))

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes(self.tokens, self.shards, self.context)

    @property
    def own_shards(self) -> range:
        """Return the shards with heads that this process has."""
        own, heads = self.layout.own, self.layout.heads // self.shards
        return range(own.start // heads, -(-own.stop // heads))

    @property
    def own_rows(self) -> range:
        """Return the rows of all layers of :attr:`own_shards`."""
        layers, shards = self.num_layers, self.own_shards
        return range(layers * shards.start, layers * shards.stop)

    @property
    def own_bytes(self) -> int:
        """Return the bytes of what this process reads of the record."""
        return self.begin + len(self.own_rows) * self.row_bytes

    @property
    def begin(self) -> int:
        """Return the bytes before the first layer."""
        return len(self.bytes())

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole record."""
        return self.begin + self.num_rows * self.row_bytes

    def bytes(self) -> bytes:
        """Return the record's bytes before the first layer."""
        header = self.layout.header(self.key, self.ids, self.checksums, self.context, self.drafts)
        return header + self.ids.tobytes()

    def starts_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether the chunk's tokens begin with these: ids are compared, too (decision D5)."""
        wanted = np.asarray(token_ids, dtype="<i4")
        return len(wanted) <= self.tokens and bool(np.array_equal(self.ids[: len(wanted)], wanted))

    def verify(self, first: int, rows: torch.Tensor) -> None:
        """Compare rows ``first``, ``first + 1``, ... with their checksums. Raises DamagedError."""
        for at, row in enumerate(rows, first):
            if checksum(row) != self.checksums[at]:
                raise DamagedError(f"{self.key}: checksum of layer {at % self.num_layers}")

    def decode(self, row: torch.Tensor, shard: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Decode a row of this shard into ``key`` and ``value``, [n, own heads, head_size] each, n <= tokens:
        those of its heads that this process has. Otherwise as :meth:`Codec.decode`."""
        codec, own = self.layout.codec_of(self.shards), self.layout.own
        begin = shard * codec.heads
        first, last = max(own.start, begin), min(own.stop, begin + codec.heads)
        into = slice(first - own.start, last - own.start)
        if last - first == codec.heads:
            codec.decode(row, self.tokens, key[:, into], value[:, into])
            return
        both = key.new_empty(2, len(key), codec.heads, codec.size)  # other ranks have the rest of the shard
        codec.decode(row, self.tokens, *both)
        key[:, into], value[:, into] = both[:, :, first - begin : last - begin]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A record in memory. rows: uint8 [rows, row], all of them, or those from ``first`` on that this process
    reads (:attr:`Head.own_rows`). Read only."""

    head: Head
    rows: torch.Tensor
    first: int = 0

    @property
    def key(self) -> str:
        return self.head.key

    @property
    def nbytes(self) -> int:
        """Return the bytes of the KV as it is stored."""
        return self.rows.numel()

    def bytes(self) -> bytes:
        """Return a whole record as servers keep it."""
        return b"".join((self.head.bytes(), self.rows.view(-1).numpy().data))

    @property
    def own(self) -> Record:
        """Return the record with only the rows that this process reads."""
        wanted = self.head.own_rows
        if len(self.rows) == len(wanted):
            return self
        at = wanted.start - self.first
        return Record(self.head, self.rows[at : at + len(wanted)].clone(), wanted.start)

    def decode(self) -> torch.Tensor:
        """Return [layers, 2 (K before RoPE, V), tokens, own heads, head_size], as exact as the codec is."""
        layout, layers = self.head.layout, self.head.num_layers
        kv = torch.empty((layers, 2, self.head.tokens, len(layout.own), layout.size), dtype=layout.dtype)
        for at in self.head.own_rows:
            shard, layer = divmod(at, layers)
            self.head.decode(self.rows[at - self.first], shard, *kv[layer])
        return kv


def checksum(row: torch.Tensor) -> str:
    """Return xxh3_64 of a row's bytes, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(row.numpy().data)
