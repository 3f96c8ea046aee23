"""The tiers on servers, against real ones: what is each kind's own."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors import safe_open

from blendrag.errors import ConfigError, StoreFullError
from blendrag.store.record import DamagedError, Layout
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Opened, TierError
from blendrag.store.tiers.object import ObjectTier
from blendrag.store.tiers.redis import RedisTier
from places import DOCS, free_port
from servers import (
    BUCKET,
    IDENTITY,
    LAYOUT,
    S3_OPTIONS,
    Served,
    make_record,
    opened_of,
    redis_server,
    rows_of,
    running,
    serving,
    tier_at,
)

A = make_record(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("redis", tmp_path_factory.mktemp("redis")) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.server.port) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        yield client


def test_record_that_somebody_is_reading_is_not_replaced(server: Served, client: redis.Redis) -> None:
    """KV computed twice may differ in its last bits: rows of one and checksums of the other do not fit."""
    tier = server.tier()
    tier.put(A)
    opened = opened_of(tier, A)
    other = LAYOUT.encode(A.key, A.head.ids, A.decode() + 1)
    tier.put(other)
    assert rows_of(tier, opened).equal(A.rows)
    assert tier.delete([A.key]) == 1
    tier.put(other)
    assert server.kept(A.key) == other.bytes()


def test_chunk_that_is_put_again_does_not_expire_as_an_old_one(server: Served, client: redis.Redis) -> None:
    name = f"blendrag:{LAYOUT.digest}:{A.key}"
    server.tier().put(A)
    assert client.ttl(name) == -1
    tier = server.tier(expire_s=1000)
    tier.put(A)
    assert 0 < client.ttl(name) <= 1000
    client.expire(name, 5)
    tier.put(A)
    assert client.ttl(name) > 900


def test_record_that_left_while_it_was_read_is_not_damaged(server: Served, client: redis.Redis) -> None:
    tier = server.tier()
    tier.put(A)
    opened = opened_of(tier, A)
    client.flushall()
    with pytest.raises(TierError, match="gone"):
        rows_of(tier, opened)
    assert tier.open([A.key]) == {}, "the server answered, so it is asked again"


def test_record_that_was_cut_off_while_it_was_read_is_damaged(server: Served, client: redis.Redis) -> None:
    tier = server.tier()
    tier.put(A)
    opened = opened_of(tier, A)
    server.keep(A.key, A.bytes()[:-1])
    with pytest.raises(DamagedError, match="cut off"):
        rows_of(tier, opened)
    assert tier.has([A.key]) == {A.key}


def test_value_of_another_type_is_one_record_s_trouble(server: Served, client: redis.Redis) -> None:
    tier, other = server.tier(), make_record(2)
    client.lpush(f"blendrag:{LAYOUT.digest}:{A.key}", "1")
    tier.put(other)
    found = tier.open([A.key, other.key])
    assert isinstance(found[A.key], DamagedError)
    assert isinstance(found[other.key], Opened)


def test_full_server_is_a_full_store_and_still_read(server: Served, client: redis.Redis) -> None:
    tier = server.tier()
    tier.put(A)
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreFullError, match="maxmemory"):
        tier.put(make_record(2))
    assert isinstance(tier.open([A.key])[A.key], Opened)


def test_password_is_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(redis_server(tmp_path, "--requirepass", "0pen-sesame")) as server:

        def tier(password: str) -> RedisTier:
            url = f"redis://:{password}@127.0.0.1:{server.port}/0"
            return RedisTier(TierSpec(kind="redis", url=url, cooldown_s=0.001), LAYOUT)

        tier("0pen-sesame").put(A)
        with pytest.raises(TierError) as error:
            tier("0pen-sesam").put(A)
        with pytest.raises(TierError) as missing:
            tier_at("redis", server.port).put(A)
        server.kill()
        with pytest.raises(TierError) as gone:
            tier("0pen-sesame").put(A)
    assert "uthentication" in str(error.value)
    shown = [str(error.value), str(missing.value), str(gone.value), caplog.text, tier("0pen-sesame").name]
    assert not any("0pen" in text for text in shown)


def test_tier_that_was_closed_leaves_no_connection(server: Served, client: redis.Redis) -> None:
    before = len(client.client_list())
    tier = server.tier()
    tier.put(A)
    assert len(client.client_list()) == before + 1
    tier.close()
    tier.close()
    assert len(client.client_list()) == before


def test_unix_socket_is_as_good(tmp_path: Path) -> None:
    with running(redis_server(tmp_path, "--unixsocket", str(tmp_path / "s"))):
        tier = RedisTier(TierSpec(kind="redis", url=f"unix://{tmp_path / 's'}"), LAYOUT)
        tier.put(A)
        opened = opened_of(tier, A)
        assert rows_of(tier, opened).equal(A.rows)


# -- two namespaces on one Redis server ----------------------------------------------------------------

PAGE = DOCS / "security.md"
OURS, THEIRS = (Layout(replace(IDENTITY, namespace=name), "bfloat16") for name in ("a", "b"))


def test_credentials_of_the_page_suffice_and_open_no_other_namespace(tmp_path: Path) -> None:
    (line,) = re.findall(r"^ACL (SETUSER engine-42 .*)$", PAGE.read_text(), re.MULTILINE)
    with running(redis_server(tmp_path)) as server, redis.Redis(port=server.port) as client:
        client.execute_command("ACL", *line.replace("LAYOUT", OURS.digest).split())
        url = f"redis://engine-42:a-long-password@127.0.0.1:{server.port}"
        ours, theirs = (RedisTier(TierSpec(kind="redis", url=url), layout) for layout in (OURS, THEIRS))
        record = make_record(1, layout=OURS)
        ours.put(record)
        opened = opened_of(ours, record)
        assert rows_of(ours, opened).equal(record.rows)
        assert ours.has([record.key]) == {record.key} and ours.delete([record.key]) == 1

        secret = make_record(1, layout=THEIRS)
        client.set(f"blendrag:{THEIRS.digest}:{secret.key}", secret.head.bytes())
        assert isinstance(theirs.open([secret.key])[secret.key], TierError)
        with pytest.raises(TierError):
            theirs.has([secret.key])
        with pytest.raises(TierError):
            theirs.put(secret)
        with pytest.raises(TierError):
            theirs.delete([secret.key])
        assert client.exists(f"blendrag:{THEIRS.digest}:{secret.key}")


# -- the object tier, against a real S3 server over HTTP, a folder, and memory --------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("object", tmp_path_factory.mktemp("s3")) as served:
        yield served


def test_object_can_be_read_by_other_tools(s3: Served) -> None:
    s3.tier().put(A)
    path = s3.folder / BUCKET / "kv" / LAYOUT.digest / A.key[:2] / f"{A.key}.safetensors"
    assert path.read_bytes() == A.bytes()
    with safe_open(path, "pt") as file:
        assert file.get_tensor("layers").equal(A.rows)


def test_rows_of_an_object_that_replaced_the_opened_one_are_not_taken(s3: Served) -> None:
    tier = s3.tier()
    tier.put(A)
    opened = opened_of(tier, A)
    tier.put(LAYOUT.encode(A.key, A.head.ids, A.decode() + 1))
    with pytest.raises(TierError, match="replaced"):
        rows_of(tier, opened)
    tier.delete([A.key])
    with pytest.raises(TierError, match="gone"):
        rows_of(tier, opened)
    assert tier.open([A.key]) == {}, "the server answered, so it is asked again"


def test_empty_object_is_one_record_s_trouble(s3: Served) -> None:
    tier, other = s3.tier(), make_record(2)
    tier.put(other)
    s3.keep(A.key, b"")
    found = tier.open([A.key, other.key])
    assert isinstance(found[A.key], DamagedError)
    assert isinstance(found[other.key], Opened)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_store_that_is_no_server_is_as_good(scheme: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a/b" if scheme == "file" else "memory:///"
    tier = ObjectTier(TierSpec(kind="object", url=url), LAYOUT)
    assert tier.open([A.key]) == {}
    tier.put(A)
    opened = opened_of(tier, A)
    assert rows_of(tier, opened).equal(A.rows)
    assert (tier.has([A.key, "00"]), tier.delete([A.key, "00"]), tier.has([A.key])) == ({A.key}, 1, set())
    tier.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://:s3cr3t@host/", None),
        ("redis://:s3cr/3t@host:6379", None),  # "/" has to be written %2F
        ("redis://:s3cr?3t@host:6379", None),
        ("redis://host:port/?password=s3cr3t", None),
        ("redis://host/0?no_such_option=s3cr3t", None),
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
def test_url_that_cannot_be_used_is_named_without_secrets(url: str, options: dict[str, Any] | None) -> None:
    """options: of an object tier."""
    with pytest.raises(ConfigError, match="host" if options is None else "tiers") as error:
        if options is None:
            RedisTier(TierSpec(kind="redis", url=url), LAYOUT)
        else:
            ObjectTier(TierSpec(kind="object", url=url, options=options), LAYOUT)
    assert "s3cr" not in str(error.value)
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


def test_tier_that_was_closed_leaves_no_thread(s3: Served) -> None:
    before = threading.active_count()
    tier = s3.tier()
    tier.put(A)
    assert threading.active_count() > before
    tier.close()
    tier.close()
    assert threading.active_count() == before
    with pytest.raises(TierError):
        tier.open([A.key])


def test_object_that_another_engine_has_just_deleted_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, record = ObjectTier(TierSpec(kind="object", url=f"file://{tmp_path}"), LAYOUT), make_record(1)
    with closing(tier):
        tier.put(record)
        has = tier._has

        def has_and_loses(keys: Sequence[str]) -> set[str]:
            found = has(keys)
            for file in tmp_path.rglob("*.safetensors"):
                file.unlink()
            return found

        monkeypatch.setattr(tier, "_has", has_and_loses)
        assert tier.delete([record.key]) == 1
        assert tier.stats()["errors"] == 0
