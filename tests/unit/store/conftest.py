from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed index of four chunks; the store and all its files are real."""
    return filled(tmp_path / "index")
