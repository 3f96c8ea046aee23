"""The price table, and what a corpus costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blendrag.control.plan import record_bytes
from blendrag.control.prices import Prices, per_month, read_prices
from blendrag.errors import ConfigError
from blendrag.store.identity import KVIdentity
from blendrag.store.record import Layout

IDENTITY = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=2, num_kv_heads=1, head_size=4)


def table(folder: Path, text: str) -> Prices:
    path = folder / "prices.yaml"
    path.write_text(text)
    return read_prices(path)


def test_users_prices_are_not_ignored(tmp_path: Path) -> None:
    prices = table(tmp_path, "currency: EUR\nram: 2\ntiers: {disk: network_disk, disk two: 0.5}\n")
    assert (prices.currency, prices.of("ram"), prices.of("redis")) == ("EUR", 2, 2)
    assert prices.of("disk") == prices.of("disk elsewhere") == Prices().network_disk
    assert prices.of("disk two") == 0.5
    assert prices.of("tape") is None


def test_empty_table_is_the_example(tmp_path: Path) -> None:
    assert table(tmp_path, "") == Prices()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ramm: 1", "ramm"),
        ("ram: -1", "ram"),
        ("ram: .inf", "ram"),
        ("ram: cheap", "ram"),
        ("- 1", "prices.yaml"),
        ("ram: [", "prices.yaml"),
        ("tiers: {disk: -1}", "tiers.disk"),
    ],
)
def test_wrong_price_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        table(tmp_path, text)


def test_missing_table_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prices\.yaml"):
        read_prices(tmp_path / "prices.yaml")


def test_price_that_refers_to_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="tape"):
        Prices(tiers={"disk": "tape"}).of("disk")


def test_record_is_not_larger_than_what_is_paid_for() -> None:
    ids = list(range(40))
    record = Layout(IDENTITY, "bfloat16").encode("0" * 32, ids, torch.zeros(2, 2, 40, 1, 4))
    assert record_bytes(IDENTITY, "bfloat16", 40) == record.head.nbytes


def test_month_of_a_thousand_gigabytes() -> None:
    assert per_month(10**12, 0.12) == pytest.approx(120)
