"""Two namespaces on one server: what docs/security.md says keeps them apart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from blendrag.store.record import Layout
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Opened, TierError
from blendrag.store.tiers.redis import RedisTier
from places import DOCS
from servers import IDENTITY, make_record, redis_server, rows_of, running

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
        opened = ours.open([record.key])[record.key]
        assert isinstance(opened, Opened) and rows_of(ours, opened).equal(record.rows)
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
