"""Records that ranks share: each reads the range of its heads, whoever has written them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.forward.ranks import Ranks
from blendrag.errors import ConfigError
from blendrag.load.loader import LayerLoader, LoadSpan, own_rows
from blendrag.load.trace import Trace
from blendrag.store.catalogue import Catalogue
from blendrag.store.codec import CODECS
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_reader import KVReader, read_rows
from blendrag.store.kv_store import KVStore
from blendrag.store.record import NO_DRAFTS, DamagedError, DraftLayers, Layout, Miss
from blendrag.store.tiers import Opened, Read, TierSpec
from closed import flip
from stores import Chunk, from_bytes, make_chunk, make_record, put, quarantined, register, wanted

HEADS, TOKENS = 12, 40
IDENTITY = KVIdentity("wide", "weights-1", "auto", num_layers=3, num_kv_heads=HEADS, head_size=8)
DIVISORS = [number for number in range(1, HEADS + 1) if HEADS % number == 0]
STACK = (TierSpec(kind="ram", bytes=1 << 22), TierSpec(kind="disk"))
CHUNK = make_chunk(1, TOKENS, identity=IDENTITY)


def heads_of(rank: int, size: int) -> range:
    ranks = Ranks()
    ranks.rank, ranks.size = rank, size
    return ranks.heads(HEADS)


@st.composite
def a_rank(draw: st.DrawFn) -> range:
    """The heads of one of several ranks, also of more ranks than heads."""
    size = draw(st.sampled_from([*DIVISORS, 2 * HEADS, 4 * HEADS]))
    return heads_of(draw(st.integers(0, size - 1)), size)


def test_every_head_is_read_once() -> None:
    for size in DIVISORS:
        assert [head for rank in range(size) for head in heads_of(rank, size)] == list(range(HEADS))
    shared = [heads_of(rank, 2 * HEADS) for rank in range(2 * HEADS)]
    assert shared == [range(rank // 2, rank // 2 + 1) for rank in range(2 * HEADS)]


def test_record_of_one_rank_is_the_bytes_of_before_there_were_several() -> None:
    record = make_record(make_chunk(1))
    assert xxhash.xxh3_128_hexdigest(record.bytes()) == "c3f5d8011c10cad522a574f5ff05bc44"


@given(
    st.sampled_from(DIVISORS),
    a_rank(),
    st.sampled_from(sorted(CODECS)),
    st.integers(1, 90),
    st.sampled_from([NO_DRAFTS, DraftLayers("head", 1), DraftLayers("model of two", 2)]),
)
def test_rank_reads_its_own_heads(
    shards: int, own: range, codec: str, tokens: int, drafts: DraftLayers
) -> None:
    """Also where shards and ranks do not divide each other, and of layers of a model that drafts."""
    identity = replace(IDENTITY, codec=codec)
    chunk = make_chunk(tokens, tokens, identity=identity, drafts=drafts)
    whole = make_record(chunk, Layout(identity, "bfloat16")).decode()
    data = make_record(chunk, Layout(identity, "bfloat16", shards=shards)).bytes()
    record = from_bytes(data, chunk.key, Layout(identity, "bfloat16", own)).own
    assert record.head.drafts == drafts and len(whole) == IDENTITY.num_layers + drafts.layers
    assert record.decode().equal(whole[:, :, :, own.start : own.stop])
    most = min(HEADS, (len(own) // (HEADS // shards) + 2) * (HEADS // shards))
    assert len(record.rows) * record.head.row_bytes <= most * len(whole) * (
        make_record(chunk, Layout(identity, "bfloat16", shards=HEADS)).head.row_bytes + 16 * 6
    )


def test_rank_reads_no_more_than_its_shard() -> None:
    """One range: all layers of a shard lie together."""
    data = make_record(CHUNK, Layout(IDENTITY, "bfloat16", shards=4)).bytes()
    for rank in range(4):
        head = from_bytes(data, CHUNK.key, Layout(IDENTITY, "bfloat16", heads_of(rank, 4))).head
        assert head.own_rows == range(3 * rank, 3 * rank + 3)


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 15, 3 * 24])
def test_rows_that_are_no_shards_are_refused(rows: int) -> None:
    layout = Layout(IDENTITY, "bfloat16")
    record = make_record(CHUNK, layout)
    data = layout.header(CHUNK.key, record.head.ids, ["0" * 16] * rows) + record.head.ids.tobytes()
    with pytest.raises(DamagedError):
        layout.parse(CHUNK.key, data, len(data) + rows * layout.codec.row_bytes(TOKENS))


# -- the owner's store, and what the others have of it ------------------------------------------------------


class Engine:
    """What its ranks open."""

    def __init__(self, root: Path, size: int, chunks: Sequence[Chunk] = ()) -> None:
        if chunks:
            register(root, chunks, identity=IDENTITY)
        self.owner = KVStore.open(root, IDENTITY, "bfloat16", STACK, heads_of(0, size), size)
        self.others = [
            KVReader.open(root, IDENTITY, "bfloat16", STACK, heads_of(rank, size), size)
            for rank in range(1, size)
        ]
        for chunk in chunks:
            put(self.owner, chunk)

    @property
    def ranks(self) -> list[KVReader]:
        return [self.owner, *self.others]

    def loaded(self, chunk: Chunk) -> torch.Tensor:
        """[layers, 2, tokens, heads, size], by all ranks, each of which fills its RAM on the way."""
        parts = []
        for store in self.ranks:
            (opened,) = store.open_records(wanted(chunk))
            assert isinstance(opened, Opened)
            kept = own_rows(opened.head) if store.replicas.wants(opened) else None
            loader, span = LayerLoader(2), LoadSpan(opened, len(chunk.token_ids), kept)
            filled = store.replicas.promote_behind
            with loader.load([span], store.layout, torch.device("cpu"), Trace(), filled) as layers:
                layers.fetch_kv(0)
                found = [torch.stack(layers.synchronize(at)) for at in range(IDENTITY.num_layers)]
            loader.drain()
            store.wait()
            parts.append(torch.stack(found))
        return torch.cat(parts, dim=3)

    def close(self) -> None:
        for store in reversed(self.ranks):
            store.close()


@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 3, 4])
def test_store_is_read_by_as_many_ranks_as_there_are(tmp_path: Path, written: int, read: int) -> None:
    Engine(tmp_path, written, [CHUNK]).close()
    engine = Engine(tmp_path, read)
    for _ in range(2):  # from disk, then from RAM
        assert engine.loaded(CHUNK).equal(CHUNK.kv)
    assert all(store.ram is not None and store.ram.has([CHUNK.key]) for store in engine.ranks)
    engine.close()


def test_ram_of_a_rank_holds_its_own_heads_only(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 4, [CHUNK])
    assert engine.loaded(CHUNK).equal(CHUNK.kv)
    whole = make_record(CHUNK, Layout(IDENTITY, "bfloat16")).nbytes
    for store in engine.ranks:
        assert store.ram is not None
        (held,) = store.ram.open([CHUNK.key]).values()
        assert isinstance(held, Opened)
        assert held.source.rows.untyped_storage().nbytes() == whole // 4  # type: ignore[attr-defined]
    engine.close()


def test_other_ranks_write_and_mark_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, [CHUNK])
    (path,) = tmp_path.glob("kv/??/*.safetensors")
    flip(path, -1)  # of the second rank's heads
    (other,) = engine.others
    assert other.get(CHUNK.key, CHUNK.token_ids) == Miss("damaged")
    assert path.exists() and not quarantined(tmp_path)
    (opened,) = KVReader.open(tmp_path, IDENTITY, "bfloat16", STACK[1:], heads_of(0, 2)).open_records(
        wanted(CHUNK)
    )
    assert isinstance(opened, Opened)
    read_rows(opened, opened.head.own_rows)  # the first rank sees no damage
    opened.tier.close_record(opened)
    engine.owner.damaged("disk", CHUNK.key)  # but hears of it
    assert not path.exists() and quarantined(tmp_path)
    engine.close()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    assert [entry.key for entry in catalogue.pending()] == [CHUNK.key]


def test_deleted_chunk_leaves_the_ram_of_every_rank(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, [CHUNK])
    engine.loaded(CHUNK)
    (other,) = engine.others
    assert engine.owner.delete([CHUNK.key]) == (1, [])
    assert other.delete([CHUNK.key]) == (0, [])
    assert all(store.open_records(wanted(CHUNK)) == [Miss("missing")] for store in engine.ranks)
    engine.close()


def test_kv_that_only_the_owner_can_have_is_refused_to_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ranks cannot share KV by RAM alone"):
        KVStore.open(tmp_path, IDENTITY, "bfloat16", STACK[:1], heads_of(0, 2), 2)


def test_part_of_a_record_is_read_from_ram_by_its_own_rows(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, [CHUNK])
    engine.loaded(CHUNK)
    (other,) = engine.others
    (opened,) = other.open_records(wanted(CHUNK))
    assert isinstance(opened, Opened) and opened.tier is other.ram
    into = torch.empty(2, opened.head.row_bytes, dtype=torch.uint8)
    (rows,) = opened.tier.read([Read(opened, 4, 6, into)])
    opened.head.verify(4, rows)
    engine.close()
