"""Small stores of real parts, shared by the tests in this folder and the processes they start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from blendrag.store.catalogue import Catalogue
from blendrag.store.chunk import Chunk
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_store import KVStore

IDENTITY = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=2, num_kv_heads=1, head_size=4)
FOLDERS = [str(Path(__file__).parents[3] / "src"), str(Path(__file__).parent)]


def make_chunk(seed: int, tokens: int = 8, dtype: torch.dtype = torch.bfloat16) -> Chunk:
    """A chunk of its own tokens and random KV; the same one for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    ids = (seed, *torch.randint(0, 50_000, (tokens - 1,), generator=generator).tolist())
    return Chunk(IDENTITY.chunk_key(ids), ids, torch.randn(2, 2, tokens, 1, 4, generator=generator).to(dtype))


def open_store(root: Path, *, ram: int = 0, disk: int | None = None) -> KVStore:
    """A store that reads from disk unless it is given RAM."""
    return KVStore.open(root, IDENTITY, ram_bytes=ram, disk_bytes=disk)


def register(root: Path, chunks: Sequence[Chunk], owner: str = "doc") -> None:
    """Make ``chunks`` known, as the client process does before the worker writes their KV."""
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue.register(owner, [(chunk.key, f"text {chunk.key}", chunk.token_ids) for chunk in chunks])
    catalogue.close()


def states(root: Path) -> dict[str, str]:
    """State by key, read by a connection of its own."""
    catalogue = Catalogue.open(root, IDENTITY)
    try:
        return {entry.key: entry.state for entry in catalogue.entries()}
    finally:
        catalogue.close()


def filled(root: Path, chunks: Sequence[Chunk], *, ram: int = 0, disk: int | None = None) -> KVStore:
    """An open store that was asked to keep ``chunks``, in this order."""
    register(root, chunks)
    store = open_store(root, ram=ram, disk=disk)
    for chunk in chunks:
        store.put(chunk)
    return store


def record_of(root: Path, key: str) -> Path:
    (file,) = (root / "kv").glob(f"*/{key}.safetensors")
    return file


def files(root: Path) -> set[str]:
    """Names of all files of the disk tier, unfinished ones too."""
    return {path.name for path in (root / "kv").rglob("*") if path.is_file()}


def same(found: object, chunk: Chunk) -> bool:
    """Whether what the store gave is that chunk, bit by bit."""
    return (
        isinstance(found, Chunk)
        and (found.key, found.token_ids, found.kv.dtype) == (chunk.key, chunk.token_ids, chunk.kv.dtype)
        and found.kv.shape == chunk.kv.shape
        and found.kv.contiguous().view(torch.uint8).equal(chunk.kv.contiguous().view(torch.uint8))
    )


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process running ``script``, with blendrag and this module importable."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)},
    )


A, B, C, D = (make_chunk(seed) for seed in range(4))
RECORD = A.nbytes + 4 * len(A.token_ids) + 512  # what the disk tier counts for one of them


def gone(root: Path, chunk: Chunk) -> bool:
    """Whether a damaged record was dropped, its chunk wanted again, and a later put welcome."""
    catalogue = Catalogue.open(root, IDENTITY)
    pending = [entry.key for entry in catalogue.pending()]
    nbytes = catalogue.totals().bytes
    catalogue.close()
    return pending == [chunk.key] and nbytes == 0 and not files(root)
