"""The object tier against a real S3 server over HTTP, a folder, and memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from blendrag.errors import ConfigError
from blendrag.store.record import DamagedError
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Opened, TierError
from blendrag.store.tiers.object import ObjectTier
from servers import BUCKET, LAYOUT, S3_OPTIONS, Served, free_port, make_record, raw, rows_of, serving

A = make_record(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("object", tmp_path_factory.mktemp("s3")) as served:
        yield served


def test_object_can_be_read_by_other_tools(server: Served) -> None:
    server.tier().put(A)
    path = server.folder / BUCKET / "kv" / LAYOUT.digest / A.key[:2] / f"{A.key}.safetensors"
    assert path.read_bytes() == raw(A)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("layers").equal(A.rows)


def test_rows_of_an_object_that_replaced_the_opened_one_are_not_taken(server: Served) -> None:
    tier = server.tier()
    tier.put(A)
    opened = tier.open([A.key])[A.key]
    assert isinstance(opened, Opened)
    tier.put(LAYOUT.encode(A.key, A.head.ids, A.decode() + 1))
    with pytest.raises(TierError, match="replaced"):
        rows_of(tier, opened)
    tier.delete([A.key])
    with pytest.raises(TierError, match="gone"):
        rows_of(tier, opened)
    assert tier.open([A.key]) == {}, "the server answered, so it is asked again"


def test_empty_object_is_one_record_s_trouble(server: Served) -> None:
    tier, other = server.tier(), make_record(2)
    tier.put(other)
    server.keep(A.key, b"")
    found = tier.open([A.key, other.key])
    assert isinstance(found[A.key], DamagedError)
    assert isinstance(found[other.key], Opened)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_store_that_is_no_server_is_as_good(scheme: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a/b" if scheme == "file" else "memory:///"
    tier = ObjectTier(TierSpec(kind="object", url=url), LAYOUT)
    assert tier.open([A.key]) == {}
    tier.put(A)
    opened = tier.open([A.key])[A.key]
    assert isinstance(opened, Opened)
    assert rows_of(tier, opened).equal(A.rows)
    assert (tier.has([A.key, "00"]), tier.delete([A.key, "00"]), tier.has([A.key])) == ({A.key}, 1, set())
    tier.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://", {}),
        ("s3://key:s3cr3t@bucket/x", {}),
        ("https://example.com/x?sig=s3cr3t", {}),
        ("bucket", {"secret_access_key": "s3cr3t"}),
        ("s3://bucket", {"secret_acess_key": "s3cr3t"}),
        ("s3://bucket", {"region": ["s3cr3t"]}),
        ("s3://bucket", {"timeout": "s3cr3t"}),  # obstore panics at this one
        ("file:///proc/nowhere", {}),
    ],
)
def test_url_that_cannot_be_used_is_named_without_secrets(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tiers") as error:
        ObjectTier(TierSpec(kind="object", url=url, options=options), LAYOUT)
    assert "s3cr3t" not in str(error.value)
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_secret_of_a_store_that_fails_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    at = {"endpoint": f"http://127.0.0.1:{free_port()}", "allow_http": True}
    s3 = ObjectTier(TierSpec(kind="object", url="s3://bucket", options={**S3_OPTIONS, **at}), LAYOUT)
    sas = {"account_name": "me", "sas_key": "?sv=1&sig=s3cr3t", **at}
    azure = ObjectTier(TierSpec(kind="object", url="az://container/x", options=sas), LAYOUT)
    for tier in (s3, azure):
        with pytest.raises(TierError) as error:
            tier.open([A.key])
        assert "s3cr3t" not in str(error.value) + caplog.text
        assert error.value.__cause__ is None and error.value.__suppress_context__


def test_tier_that_was_closed_leaves_no_thread(server: Served) -> None:
    before = threading.active_count()
    tier = server.tier()
    tier.put(A)
    assert threading.active_count() > before
    tier.close()
    tier.close()
    assert threading.active_count() == before
    with pytest.raises(TierError):
        tier.open([A.key])
