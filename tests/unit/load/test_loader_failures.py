"""What a loader does when a record or its tier fails on the way, or when nobody waits any more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.load.loader import LoadFailedError
from blendrag.store.record import Miss
from stores import get, record_of, same

LAYERS = 12


def flip(bench: Any, number: int, layer: int) -> None:
    """One bit of one layer of a chunk's record."""
    file = record_of(bench.root, bench.chunks[number].key)
    data = bytearray(file.read_bytes())
    (opened,) = bench.open(bench.chunks[number])
    data[opened.head.begin + layer * opened.head.row_bytes + 3] ^= 1
    bench.store.close_records([opened])
    file.write_bytes(data)


def records_open() -> int:
    """Descriptors of records that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return sum(".safetensors" in os.readlink(link) for link in links if link.is_symlink())


@pytest.mark.parametrize("layer", [0, 5, 11])
def test_damaged_layer_names_its_record_after_the_sound_layers_came(bench: Any, layer: int) -> None:
    flip(bench, 1, layer)
    opened = bench.open()
    with bench.load(opened) as layers:
        layers.fetch_kv(0)
        for number in range(layer):
            layers.synchronize(number)
        with pytest.raises(LoadFailedError, match=f"checksum of layer {layer}") as caught:
            layers.synchronize(layer)
    assert (caught.value.opened, caught.value.reason) == ([opened[1]], "damaged")
    bench.store.damaged(opened[1].tier.name, opened[1].head.key)
    assert [one.head.key for one in bench.open()] == [bench.chunks[n].key for n in (0, 2)]


def test_layers_that_cannot_be_loaded_end_no_rank(bench: Any) -> None:
    """Others would wait for it: it goes on with zeros, and tells of the first failure."""
    flip(bench, 1, 2)
    with bench.load(bench.open()) as layers:
        layers.steady = True
        layers.fetch_kv(0)
        assert all(part.any() for number in (0, 1) for part in layers.synchronize(number))
        for number in range(2, LAYERS):
            key, value = layers.synchronize(number)
            assert key.dtype == torch.bfloat16 and key.shape == value.shape == (54, 2, 8)
            assert not key.any()
            key.fill_(1)  # the tensors are the caller's to overwrite
            assert not value.any()
            assert layers.ready(number + 1)
        assert "checksum of layer 2" in str(layers.failure)


def test_record_cut_off_on_the_way_is_damaged(bench: Any) -> None:
    opened = bench.open()
    os.truncate(record_of(bench.root, bench.chunks[2].key), opened[2].head.begin + 7)
    with bench.load(opened) as layers:
        layers.fetch_kv(0)
        with pytest.raises(LoadFailedError, match="cut off") as caught:
            layers.synchronize(0)
    assert (caught.value.opened, caught.value.reason) == ([opened[2]], "damaged")


def test_tier_in_trouble_names_all_of_its_records_and_blames_none(make_bench: Callable[..., Any]) -> None:
    bench = make_bench("raw", 1 << 22)
    bench.store.ram.delete([bench.chunks[n].key for n in (0, 2)])
    opened = bench.open()
    assert [one.tier.name for one in opened] == ["disk", "ram", "disk"]
    opened[2].source.close()  # its descriptor is no good any more
    with bench.load(opened) as layers:
        layers.fetch_kv(0)
        with pytest.raises(LoadFailedError) as caught:
            layers.synchronize(0)
    assert (caught.value.opened, caught.value.reason) == ([opened[0], opened[2]], "unavailable")
    assert all(same(get(bench.store, chunk), chunk) for chunk in bench.chunks)


def test_damage_in_a_layer_nobody_asked_for_keeps_the_record_out_of_ram(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench("raw", 1 << 22)
    bench.store.ram.delete([chunk.key for chunk in bench.chunks])
    flip(bench, 1, 0)
    with bench.load(bench.open(), filled=bench.store.replicas.promote_behind) as layers:
        layers.fetch_kv(1)
        for number in range(1, LAYERS):
            layers.synchronize(number)  # the request itself has what it needs
    bench.finish()
    assert bench.chunks[1].key not in bench.store.ram.has([chunk.key for chunk in bench.chunks])
    assert get(bench.store, bench.chunks[1]) == Miss("damaged")


# -- giving up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [None, 0, 1, 6, LAYERS])
@pytest.mark.parametrize("group", [1, 4])
def test_closed_loading_gives_back_its_files_and_its_thread(
    bench: Any, monkeypatch: pytest.MonkeyPatch, used: int | None, group: int
) -> None:
    """None: closed before it began. A loader that waits for room for several layers is woken up, too."""
    monkeypatch.setattr(bench.store.tiers[1], "group", group, raising=False)
    for _ in range(3):
        layers = bench.load(bench.open(), in_flight=8)
        assert records_open() == 3
        if used is not None:
            layers.fetch_kv(0)
            for number in range(used):
                layers.synchronize(number)
            time.sleep(0.005)  # it fills its buffers, and waits
        layers.close()
        layers.close()
        bench.finish()
        assert records_open() == 0


def test_failed_loading_gives_back_its_files(bench: Any) -> None:
    flip(bench, 0, 3)
    with bench.load(bench.open()) as layers:
        layers.fetch_kv(0)
        with pytest.raises(LoadFailedError):
            for number in range(LAYERS):
                layers.synchronize(number)
    bench.finish()
    assert records_open() == 0
