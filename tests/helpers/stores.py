"""Small stores of real parts, shared by the tests in this folder and the processes they start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_reader import read_whole
from blendrag.store.kv_store import KVStore
from blendrag.store.record import NO_DRAFTS, DamagedError, DraftLayers, Head, Layout, Miss, Record
from blendrag.store.stack import DEFAULT_POLICY
from blendrag.store.tiers import Opened, TierSpec

if TYPE_CHECKING:
    from blendrag.serving.library import Library

IDENTITY = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=2, num_kv_heads=1, head_size=4)
LAYOUT = Layout(IDENTITY, "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What is put into a store. kv: [layers, 2, tokens, kv_heads, head_size], ``drafts`` the last layers."""

    key: str
    token_ids: tuple[int, ...]
    kv: torch.Tensor
    drafts: DraftLayers = NO_DRAFTS


def make_chunk(
    seed: int,
    tokens: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    identity: KVIdentity = IDENTITY,
    drafts: DraftLayers = NO_DRAFTS,
) -> Chunk:
    """A chunk of its own tokens and random KV; the same one for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    ids = (seed, *torch.randint(0, 50_000, (tokens - 1,), generator=generator).tolist())
    layers = identity.num_layers + drafts.layers
    shape = (layers, 2, tokens, identity.num_kv_heads, identity.head_size)
    return Chunk(identity.chunk_key(ids), ids, torch.randn(shape, generator=generator).to(dtype), drafts)


def make_record(chunk: Chunk, layout: Layout = LAYOUT) -> Record:
    return layout.encode(chunk.key, chunk.token_ids, chunk.kv, drafts=chunk.drafts)


def size(chunk: Chunk) -> int:
    """Bytes of a chunk's record, in every tier."""
    return make_record(chunk).head.nbytes


def open_stack(
    root: Path, *stack: TierSpec, identity: KVIdentity = IDENTITY, dtype: str = "bfloat16"
) -> KVStore:
    return KVStore.open(root, identity, dtype, stack)


def open_store(
    root: Path,
    *,
    ram: int = 0,
    disk: int | None = None,
    dtype: str = "bfloat16",
    policy: str = DEFAULT_POLICY,
) -> KVStore:
    """RAM over disk; reads come from disk unless it is given RAM."""
    over = TierSpec(kind="ram", bytes=ram, policy=policy)
    return open_stack(root, over, TierSpec(kind="disk", bytes=disk, policy=policy), dtype=dtype)


def shared(path: Path, **options: Any) -> TierSpec:
    """A disk tier in a folder of its own, which other stores may use as well."""
    return TierSpec(kind="disk", path=path, **options)


def wanted(*chunks: Chunk) -> list[tuple[str, Sequence[int]]]:
    """What a request asks a store for."""
    return [(chunk.key, chunk.token_ids) for chunk in chunks]


def holds(store: KVStore, *chunks: Chunk) -> list[list[bool]]:
    """Per tier, which of the chunks it has."""
    return [[chunk.key in tier.has([chunk.key]) for chunk in chunks] for tier in store.tiers]


def put(store: KVStore, *chunks: Chunk) -> int:
    """One after another. Returns the bytes that are kept of them."""
    return sum(store.put(chunk.key, chunk.token_ids, chunk.kv, drafts=chunk.drafts) for chunk in chunks)


def get(store: KVStore, chunk: Chunk) -> Record | Miss:
    return store.get(chunk.key, chunk.token_ids)


def ask(store: KVStore, *chunks: Chunk) -> None:
    """A prompt with these chunks: they are used, and the faster tiers get them."""
    found = [one for one in store.open_records(wanted(*chunks), use=True) if isinstance(one, Opened)]
    for one in {one.head.key: one for one in found}.values():
        store.replicas.promote(read_whole(one), one.tier)
    store.close_records(found)


def register(
    root: Path, chunks: Sequence[Chunk], owner: str = "doc", identity: KVIdentity = IDENTITY
) -> None:
    """Make ``chunks`` known, as the client process does before the worker writes their KV."""
    with closing(Catalogue.open(root, identity)) as catalogue:
        catalogue.register(owner, [(chunk.key, f"text {chunk.key}", chunk.token_ids) for chunk in chunks])


def release(root: Path) -> list[str]:
    """Delete what was registered, as the client process does, also while no engine runs."""
    with closing(Catalogue.open(root, IDENTITY)) as catalogue:
        return catalogue.release("doc")


def rows(*keys: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """What to register under an owner: a text and three tokens for each key."""
    return [(key, f"text of {key}", (1, 2, 3)) for key in keys]


def states(root: Path) -> dict[str, str]:
    """State by key, read by a connection of its own."""
    with closing(Catalogue.open(root, IDENTITY)) as catalogue:
        return {entry.key: entry.state for entry in catalogue.entries()}


def filled(
    root: Path, chunks: Sequence[Chunk], *, ram: int = 0, disk: int | None = None, dtype: str = "bfloat16"
) -> KVStore:
    """An open store that was asked to keep ``chunks``, in this order."""
    register(root, chunks)
    store = open_store(root, ram=ram, disk=disk, dtype=dtype)
    put(store, *chunks)
    return store


def filled_stack(
    root: Path,
    chunks: Sequence[Chunk],
    *stack: TierSpec,
    identity: KVIdentity = IDENTITY,
    dtype: str = "bfloat16",
) -> KVStore:
    """An open store of these tiers that was asked to keep ``chunks``, in this order."""
    register(root, chunks, identity=identity)
    store = open_stack(root, *stack, identity=identity, dtype=dtype)
    put(store, *chunks)
    return store


def record_of(root: Path, key: str) -> Path:
    (file,) = (root / "kv").glob(f"??/{key}.safetensors")
    return file


def files(root: Path) -> set[str]:
    """Names of all files of the disk tier, unfinished ones too; not those put aside as damaged."""
    found = {path for path in (root / "kv").rglob("*") if path.is_file()}
    return {path.name for path in found if path.parent.name != "quarantine"}


def quarantined(root: Path) -> set[str]:
    return {path.name for path in (root / "kv" / "quarantine").glob("*")}


def same(found: object, chunk: Chunk) -> bool:
    """Whether what the store gave is that chunk, bit by bit."""
    if not isinstance(found, Record):
        return False
    kv = found.decode()
    return (
        (found.key, tuple(found.head.ids.tolist()), kv.dtype) == (chunk.key, chunk.token_ids, chunk.kv.dtype)
        and kv.shape == chunk.kv.shape
        and kv.view(torch.uint8).equal(chunk.kv.contiguous().view(torch.uint8))
    )


def gone(root: Path, chunk: Chunk) -> bool:
    """Whether a damaged record was put aside, its chunk wanted again, and a later put welcome."""
    with closing(Catalogue.open(root, IDENTITY)) as catalogue:
        pending = [entry.key for entry in catalogue.pending()]
        nbytes = catalogue.totals().bytes
    aside = quarantined(root) == {f"{chunk.key}.safetensors"}
    return pending == [chunk.key] and nbytes == 0 and not files(root) and aside


def from_bytes(data: bytes, key: str, layout: Layout = LAYOUT) -> Record:
    """A record from all of its bytes, verified. Raises DamagedError."""
    head = layout.parse(key, data, len(data))
    assert isinstance(head, Head)
    rows = torch.frombuffer(bytearray(data[head.begin :]), dtype=torch.uint8).view(head.num_rows, -1)
    head.verify(0, rows)
    return Record(head, rows)


def problems(root: Path) -> list[str]:
    """Read every file of the disk tier and compare with the catalogue; a line per problem, by key."""
    with closing(Catalogue.open(root, IDENTITY)) as catalogue:
        recorded = dict(catalogue.recent())
    found = {path.stem: path for path in (root / "kv").glob("??/*")}
    lines = [f"{path.name}: half-written" for path in (root / "kv" / "tmp").glob("*")]
    for key in sorted(found.keys() | recorded):
        if key not in found:
            lines.append(f"{key}: no file")
        elif key not in recorded:
            lines.append(f"{key}: no row")
        else:
            try:
                record = from_bytes(found[key].read_bytes(), key)
            except DamagedError as error:
                lines.append(str(error))
            else:
                if record.head.nbytes != recorded[key]:
                    lines.append(f"{key}: the row says {recorded[key]} bytes")
    return lines


A, B, C, D = (make_chunk(seed) for seed in range(4))
RECORD = size(A)  # bytes of any of them


def keys_of(library: Library, texts: Iterable[str]) -> set[str]:
    """The keys of the chunks that have these texts, all of which there are."""
    wanted = {text.strip() for text in texts}
    found = [entry for entry in library.catalogue.entries() if entry.text in wanted]
    assert {entry.text for entry in found} == wanted
    return {entry.key for entry in found}
