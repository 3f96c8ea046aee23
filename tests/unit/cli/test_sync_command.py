"""``blendrag sync``: a server of Chroma's in, a server's collection out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from typer.testing import Result

from blendrag.cli import sync
from blendrag.cli.console import INTERRUPTED
from keeping_server import Keeping
from places import ROOT
from scripted_server import scripted
from vector_stores import Running, chroma

Blendrag = Callable[..., Result]
TEXTS = {"a": "A.", "b": "B.", "c": "C."}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ExitStack() as stack:
        yield chroma(tmp_path_factory.mktemp("chroma"), stack)


@pytest.fixture
def store(running: Running) -> Iterator[Running]:
    running.put(TEXTS)
    yield running
    running.delete([*TEXTS, "new"])


def test_server_holds_what_the_store_does(blendrag: Blendrag, store: Running, server: Keeping) -> None:
    first = blendrag("sync", store.url, "--server", server.url)
    assert first.exit_code == 0, first.output
    assert f"{store.url}: 3 texts added, 0 changed, 0 unchanged, 0 removed" in first.stdout
    assert server.texts == sorted(TEXTS.values())
    store.put({"new": "New."})
    store.delete(["a"])
    again = blendrag("sync", store.url, "-s", server.url, "--json")
    told = json.loads(again.stdout)
    assert (told["added"], told["unchanged"], told["removed"]) == (1, 2, 1) and told["store"] == store.url
    assert server.texts == ["B.", "C.", "New."]


def test_each_server_is_told(blendrag: Blendrag, store: Running, server: Keeping) -> None:
    with scripted() as script:
        other = Keeping(script)
        assert blendrag("sync", store.url, "-s", server.url, "-s", other.url).exit_code == 0
    assert server.texts == other.texts == sorted(TEXTS.values())


def test_collection_has_the_name_that_is_given(blendrag: Blendrag, store: Running, server: Keeping) -> None:
    assert blendrag("sync", store.url, "-s", server.url, "--name", "handbook").exit_code == 0
    assert {path for _, path, _ in server.script.asked} == {"/v1/kb/collections/handbook"}


def test_watching_goes_on_when_a_store_is_away_for_a_while(
    blendrag: Blendrag, store: Running, server: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    collection = store.store.client.get_collection("handbook")

    def meanwhile(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            collection.modify(name="elsewhere")
        elif len(waited) == 2:
            collection.modify(name="handbook")
            store.put({"new": "New."})
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(sync.time, "sleep", meanwhile)
    done = blendrag("sync", store.url, "-s", server.url, "--watch", 5)
    assert done.exit_code == INTERRUPTED and waited == [300, 300, 300]
    assert "no such collection" in done.stderr and "the next try is in 5 minutes" in done.stderr
    assert "goes on from there" in done.stderr
    assert server.texts == sorted([*TEXTS.values(), "New."])


def test_error_is_one_line_and_the_key_is_in_none(blendrag: Blendrag, server: Keeping) -> None:
    for url in ("chroma://me:s3cr3t@127.0.0.1:1/x", "chrom://me:s3cr3t@h/x", "chroma://me:s3cr3t@h"):
        done = blendrag("sync", url, "-s", server.url, "--watch", 5)
        assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1
        assert "s3cr3t" not in done.output


def test_key_may_be_in_the_environment(
    blendrag: Blendrag, store: Running, server: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sync.STORE_KEY, "s3cr3t")
    done = blendrag("sync", store.url, "-s", server.url)
    assert done.exit_code == 0 and "s3cr3t" not in done.output
    assert "s3cr3t" not in blendrag("sync", "--help").stdout


def test_code_that_is_shown_runs(store: Running, server: Keeping, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "stores.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shown = shown.replace("http://localhost:8000", server.url)
    exec(shown.replace("qdrant://localhost/handbook", str(store.url)), {})
    assert capsys.readouterr().out == "3 0\n"
    assert server.texts == sorted(TEXTS.values())
