from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_store import KVStore
from closed import filled
from proxy import Proxy
from servers import KINDS, Served, serving


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as served:
        yield served


@pytest.fixture
def proxy(served: Served) -> Iterator[Proxy]:
    with Proxy(served.server.address) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each store and catalogue that a test opened, also one that it closed itself."""
    with ExitStack() as opened:
        for kind in (KVStore, Catalogue):

            def opens(*args: Any, open_it: Any = kind.open, **options: Any) -> Any:
                return opened.enter_context(closing(open_it(*args, **options)))

            monkeypatch.setattr(kind, "open", opens)
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed index of four chunks; the store and all its files are real."""
    return filled(tmp_path / "index")
