from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from blendrag.load import loader
from blendrag.load.loader import LoadFailedError, StoredLayers
from blendrag.load.slots import CudaSlots
from blendrag.store.codec import CODECS
from blendrag.store.record import NO_DRAFTS, DraftLayers, Record
from blendrag.store.tiers import Read, Tier, TierError
from stand_in_device import DEVICE, stand_in
from stores import get, same
from waiting import until

LAYERS = 12


def expected(bench: Any, lengths: Sequence[int]) -> torch.Tensor:
    """[layers, 2, tokens, heads, size] of the chunks' beginnings, decoded as whole records."""
    kv = []
    for chunk, length in zip(bench.chunks, lengths, strict=True):
        record = get(bench.store, chunk)
        assert isinstance(record, Record)
        kv.append(record.decode()[:, :, :length])
    return torch.cat(kv, dim=2)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def fetched(layers: StoredLayers, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
    layers.fetch_kv(numbers[0])
    return {number: torch.stack(layers.synchronize(number)).clone() for number in numbers}


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("ram", [0, 1 << 22])
@pytest.mark.parametrize("lengths", [(5, 40, 9), (5, 33, 1)])
def test_layers_are_what_the_records_hold(
    make_bench: Callable[..., Any], codec: str, ram: int, lengths: Sequence[int]
) -> None:
    bench = make_bench(codec, ram)
    whole = expected(bench, lengths)
    with bench.load(bench.open(), lengths) as layers:
        found = fetched(layers, range(LAYERS))
    assert all(bits(found[layer]).equal(bits(whole[layer])) for layer in range(LAYERS))


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("ram", [0, 1 << 22])
@pytest.mark.parametrize(("first", "in_flight", "group"), [(0, 4, 1), (0, 8, 4), (3, 7, 3), (1, 8, 4)])
def test_layers_on_a_device_are_what_the_records_hold(
    make_bench: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    ram: int,
    first: int,
    in_flight: int,
    group: int,
) -> None:
    bench, lengths = make_bench(codec, ram), (5, 33, 1)
    whole, opened = expected(bench, lengths), bench.open()
    monkeypatch.setattr(loader, "make_slots", CudaSlots)
    monkeypatch.setattr(loader, "sent_at_once", lambda _: group)
    with torch.inference_mode(), stand_in(monkeypatch):  # as the worker is
        with bench.load(opened, lengths, in_flight, device=DEVICE) as layers:
            found = fetched(layers, range(first, LAYERS))
        assert {each.device for each in found.values()} == {DEVICE}
        found = {layer: each.cpu() for layer, each in found.items()}
    assert all(bits(found[layer]).equal(bits(whole[layer])) for layer in range(first, LAYERS))


@pytest.mark.parametrize("numbers", [[0, 11], [2, 3, 7, 11], [11], list(range(LAYERS))])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 100])
def test_layer_that_was_asked_after_comes_and_is_the_right_one(
    bench: Any, monkeypatch: pytest.MonkeyPatch, numbers: list[int], in_flight: int
) -> None:
    whole, disk, held = expected(bench, (5, 40, 9)), bench.store.tiers[1], threading.Event()
    read = disk.read
    monkeypatch.setattr(disk, "read", lambda wanted: held.wait(30) and read(wanted))
    with bench.load(bench.open(), in_flight=in_flight) as layers:
        layers.fetch_kv(numbers[0])
        assert not layers.ready(numbers[0])
        held.set()
        for number in numbers:
            until(partial(layers.ready, number))
            assert layers.ready(number)
            found = torch.stack(layers.synchronize(number))
            assert bits(found).equal(bits(whole[number]))


def test_failure_of_a_layer_that_was_asked_after_is_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = bench.store.tiers[1]

    def fails(_: Sequence[Read]) -> list[torch.Tensor]:
        raise TierError("the server has gone")

    monkeypatch.setattr(disk, "read", fails)
    with bench.load(bench.open()) as layers:
        layers.fetch_kv(0)
        until(lambda: layers.ready(0))
        with pytest.raises(LoadFailedError, match="gone"):
            layers.synchronize(0)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("in_flight", [2, 3, 8, 100])
def test_loader_runs_ahead_and_never_further_than_it_may(
    bench: Any, monkeypatch: pytest.MonkeyPatch, in_flight: int, group: int
) -> None:
    disk = bench.store.tiers[1]
    monkeypatch.setattr(disk, "group", group, raising=False)
    read, loaded = disk.read, []

    def noting(wanted: Sequence[Read]) -> list[torch.Tensor]:
        loaded.append(wanted[0].last)
        assert wanted[0].last - wanted[0].first <= max(1, in_flight // 2)
        return read(wanted)

    monkeypatch.setattr(disk, "read", noting)
    with bench.load(bench.open(), in_flight=in_flight) as layers:
        layers.fetch_kv(0)
        for layer in range(LAYERS):
            layers.synchronize(layer)
            ahead = min(LAYERS, layer + in_flight)
            together = max(1, min(group, min(in_flight, LAYERS) // 2))
            reached = LAYERS if ahead == LAYERS else ahead // together * together
            ends = time.monotonic() + 30
            while loaded[-1] < reached and time.monotonic() < ends:
                time.sleep(0.001)
            time.sleep(0.002)  # it would go on at once, if it could
            assert loaded[-1] == reached
    assert loaded == sorted(loaded)


@pytest.mark.parametrize("again", [[0], [11], [0, 1, 2, 5, 7, 8, 11], list(range(LAYERS))])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("in_flight", [2, 7, 100])
def test_layers_that_are_needed_again_come_a_second_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch, in_flight: int, group: int, first: int, again: list[int]
) -> None:
    monkeypatch.setattr(bench.store.tiers[1], "group", group, raising=False)
    whole = expected(bench, (5, 40, 9))
    with bench.load(bench.open(), in_flight=in_flight) as layers:
        layers.fetch_kv(first, again)
        for layer in [*range(first, LAYERS), *again]:
            key, value = layers.synchronize(layer)
            assert bits(torch.stack((key, value))).equal(bits(whole[layer]))
            key.zero_()  # it is the caller's to overwrite


def test_layers_that_are_needed_again_are_read_once_for_ram(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("raw", 1 << 22)
    whole, (ram, disk) = expected(bench, (5, 40, 9)), bench.store.tiers
    ram.delete([chunk.key for chunk in bench.chunks])
    read, kept = [], []
    reads = disk.read

    def noting(wanted: Sequence[Read]) -> list[torch.Tensor]:
        read.extend(layer for one in wanted for layer in range(one.first, one.last))
        return reads(wanted)

    monkeypatch.setattr(disk, "read", noting)
    with bench.load(bench.open(), filled=lambda records, _: kept.extend(records)) as layers:
        layers.fetch_kv(0, [2, 3, 9])
        for layer in [*range(LAYERS), 2, 3, 9]:
            assert bits(torch.stack(layers.synchronize(layer))).equal(bits(whole[layer]))
    bench.finish()
    assert sorted(read) == sorted(3 * [*range(LAYERS)])
    assert len(kept) == 3


def test_rows_in_ram_are_decoded_where_they_lie(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("raw", 1 << 22)
    codec, decoded = bench.store.layout.codec, []
    decode = codec.decode

    def noting(row: torch.Tensor, *rest: Any) -> None:
        decoded.append(row.data_ptr())
        decode(row, *rest)

    opened = bench.open()
    monkeypatch.setattr(codec, "decode", noting)
    with bench.load(opened, device=torch.device("cpu")) as layers:
        fetched(layers, range(LAYERS))
    rows = [one.source.rows for one in opened]
    assert decoded == [chunk[layer].data_ptr() for layer in range(LAYERS) for chunk in rows]


def test_what_the_caller_writes_into_a_layer_does_not_reach_the_record(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench("raw", 1 << 22)
    with bench.load(bench.open()) as layers:
        layers.fetch_kv(0)
        for layer in range(LAYERS):
            for tensor in layers.synchronize(layer):
                tensor.zero_()
    assert all(same(get(bench.store, chunk), chunk) for chunk in bench.chunks)


def test_request_after_one_that_was_given_up_gets_its_own_layers(bench: Any) -> None:
    """Both use the same buffers."""
    whole = expected(bench, (5, 40, 9))
    for give_up_at in (0, 1, 5, None):
        with bench.load(bench.open()) as layers:
            numbers = range(LAYERS if give_up_at is None else give_up_at + 1)
            found = fetched(layers, numbers)
        assert all(bits(found[layer]).equal(bits(whole[layer])) for layer in numbers)


# -- for the faster tier --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [NO_DRAFTS, DraftLayers("head", 2)], ids=["", "drafts"])
@pytest.mark.parametrize("first_layer", [0, 1, 7])
def test_records_read_whole_are_handed_over_with_the_layers_nobody_asked_for(
    make_bench: Callable[..., Any], first_layer: int, drafts: DraftLayers
) -> None:
    bench = make_bench("raw", 1 << 22, drafts=drafts)
    bench.store.ram.delete([chunk.key for chunk in bench.chunks])
    opened = bench.open()
    assert {one.tier.name for one in opened} == {"disk"}
    with bench.load(opened, (5, 40, 1), filled=bench.store.replicas.promote_behind) as layers:
        fetched(layers, range(first_layer, LAYERS))
    bench.finish()
    for file in bench.root.glob("kv/??/*"):
        file.unlink()
    assert all(same(get(bench.store, chunk), chunk) for chunk in bench.chunks)
    assert bench.store.stats()["ram"]["promotions"] == 3


@pytest.mark.parametrize("name", ["head", "another"])
def test_layers_of_a_model_that_drafts_come_behind_the_others_if_they_are_its_own(
    make_bench: Callable[..., Any], name: str
) -> None:
    bench, own = make_bench("raw", drafts=DraftLayers("head", 2)), DraftLayers(name, 2)
    with bench.load(bench.open(), drafts=own) as layers:
        assert layers.num_layers == LAYERS + 2 * (name == "head")
        found = fetched(layers, range(layers.num_layers))
    for layer in range(layers.num_layers):
        stored = torch.cat([chunk.kv[layer] for chunk in bench.chunks], 1)
        assert bits(found[layer]).equal(bits(stored))


def test_record_that_was_read_in_part_is_not_handed_over(make_bench: Callable[..., Any]) -> None:
    bench = make_bench("raw", 1 << 22)
    bench.store.ram.delete([chunk.key for chunk in bench.chunks])
    handed = []
    with bench.load(bench.open(), filled=lambda *given: handed.append(given)) as layers:
        fetched(layers, range(2))
    bench.finish()
    assert handed == []


def test_only_records_that_ram_lacks_and_would_keep_are_gathered(make_bench: Callable[..., Any]) -> None:
    bench = make_bench("raw", 9_000)  # the second chunk is larger than that
    bench.store.ram.delete([bench.chunks[0].key])
    handed = []
    opened = bench.open()
    assert [one.tier.name for one in opened] == ["disk", "disk", "ram"]
    with bench.load(opened, filled=lambda records, tiers: handed.append((records, tiers))) as layers:
        fetched(layers, range(LAYERS))
    bench.finish()
    (((record,), (tier,)),) = handed
    assert same(record, bench.chunks[0]) and tier is bench.store.tiers[1]


def test_trace_has_every_layer_that_was_loaded(bench: Any) -> None:
    with bench.load(bench.open()) as layers:
        fetched(layers, range(LAYERS))
    bench.finish()
    assert [name for lane, name, *_ in bench.trace.events if lane == "load"] == [
        f"layer {layer}" for layer in range(LAYERS)
    ]


@pytest.mark.parametrize(("first", "again"), [(0, ()), (0, (1, 2)), (3, ())])
def test_what_a_tier_takes_for_all_layers_is_told_and_for_a_part_is_not(
    bench: Any, first: int, again: tuple[int, ...]
) -> None:
    told: list[tuple[str, int]] = []

    def note(tier: Tier, tokens: int, seconds: float) -> None:
        assert seconds > 0
        told.append((tier.name, tokens))

    bench._loader._timed = note
    with bench.load(bench.open()) as layers:
        layers.fetch_kv(first, again)
        for layer in (*range(first, LAYERS), *again):
            layers.synchronize(layer)
    bench.finish()
    assert told == ([] if first else [("disk", sum(len(chunk.token_ids) for chunk in bench.chunks))])
