"""The disk tier: one safetensors file per chunk, written atomically, its checksum verified on every read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

from blendrag.errors import StoreError, StoreFullError
from blendrag.store.chunk import Chunk
from blendrag.store.codec import Codec, make_codec
from blendrag.store.tier import DamagedError, Tier

_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_HEADER = 512  # more than the header of a record takes
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskTier(Tier):
    """Files in ``root``, sharded by the first two digits of the key.

    ``recent`` gives the known keys, least recently used first: what was read before the last start still
    counts for eviction. Files of unknown keys are left to the caller (:meth:`keys`).
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        limit: int | None,
        *,
        codec: str = "raw",
        recent: Iterable[str] = (),
        policy: str = "lru",
        on_evict: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(limit, policy, on_evict)
        self._root = root
        self._codec: Codec = make_codec(codec)
        try:
            root.mkdir(parents=True, exist_ok=True)
            found = dict(self._scan())
        except OSError as error:
            raise StoreError(f"cannot open the KV store {str(root)!r}: {error.strerror}") from error
        for key in recent:
            if key in found:
                self._note(key, found.pop(key))
        for key, size in found.items():
            self._note(key, size)

    def path(self, key: str) -> Path:
        """Where a chunk's file is, or would be."""
        return self._root / key[:2] / f"{key}{_SUFFIX}"

    def _scan(self) -> Iterable[tuple[str, int]]:
        for shard in os.scandir(self._root):
            if shard.is_dir():
                for file in os.scandir(shard.path):
                    if file.name.endswith(_SUFFIX):
                        yield file.name.removesuffix(_SUFFIX), file.stat().st_size
                    elif file.name.endswith(_TEMPORARY):  # a write that was cut off by a crash
                        os.unlink(file.path)

    def _size(self, chunk: Chunk) -> int:
        return chunk.nbytes + 4 * len(chunk.token_ids) + _HEADER

    def _write(self, chunk: Chunk) -> None:
        tensors = self._codec.encode(chunk.kv)
        tensors["token_ids"] = torch.tensor(chunk.token_ids, dtype=torch.int32)
        record = save(tensors, {"checksum": _checksum(tensors), "key": chunk.key})
        path = self.path(chunk.key)
        temporary = path.with_suffix(f".{os.getpid()}{_TEMPORARY}")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in _NO_ROOM:
                raise StoreFullError(
                    f"no room for a chunk of {len(record):,} bytes in {str(self._root)!r}: free disk space"
                    " and ingest again, what is stored stays"
                ) from error
            raise StoreError(f"cannot write to {str(self._root)!r}: {error.strerror}") from error

    def _read(self, key: str) -> Chunk | None:
        # Read, not mapped: a mapped file that someone truncates kills the process with SIGBUS.
        try:
            record = self.path(key).read_bytes()
        except FileNotFoundError:
            with self._lock:
                self._forget(key)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                raise DamagedError(f"{key}: {error.strerror}") from error
            return None  # too many open files, say: no reason to drop the record
        try:
            metadata = _metadata(record)
            tensors = load(record)
            if metadata.get("key") != key or metadata.get("checksum") != _checksum(tensors):
                raise DamagedError(f"{key}: checksum")
            return Chunk(key, tuple(tensors.pop("token_ids").tolist()), self._codec.decode(tensors))
        except (SafetensorError, ValueError, KeyError, struct.error) as error:
            raise DamagedError(f"{key}: {error}") from error

    def _remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self.path(key).unlink(missing_ok=True)


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    """xxh3_128 over names, shapes, types and bytes of a record's tensors."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _metadata(record: bytes) -> dict[str, str]:
    (length,) = struct.unpack("<Q", record[:8])
    header = json.loads(record[8 : 8 + length])
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return metadata if isinstance(metadata, dict) else {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
