from __future__ import annotations

from collections.abc import Iterator

import pytest

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
