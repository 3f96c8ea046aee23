"""A server blends by recipes of its own only: others would put blended KV under anyone's salt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.engine.compat.connector import KVConnectorRole, least_rows
from blendrag.engine.wire.prefixes import PATH, PrefixPath
from blendrag.engine.wire.recipe import FIELD, Recipe, is_sealed, sealed
from blendrag.engine.wire.recipe import SECRET as SECRET_VARIABLE
from blendrag.engine.worker.connector import BlendConnector
from blendrag.errors import ConfigError
from blendrag.settings import Settings
from tests.helpers.connector_halves import BLOCKS, SchedulerHalf, engine_config, request_of

SECRET = "of this server"
RECIPE = Recipe("store", (("key", 3, 5),))


def sent(params: dict[str, Any]) -> dict[str, Any]:
    """As it comes out at the other side."""
    return json.loads(json.dumps(params))


@pytest.mark.parametrize(
    ("change", "salt", "secret"),
    [
        ({"seal": None}, "salt", SECRET),
        ({"seal": ""}, "salt", SECRET),
        ({"ticket": "another"}, "salt", SECRET),
        ({FIELD: Recipe("store", (("key", 0, 5),)).transfer_params("t")[FIELD]}, "salt", SECRET),
        ({}, "another", SECRET),
        ({}, None, SECRET),
        ({}, "salt", "of another server"),
    ],
)
def test_only_a_servers_own_recipe_is_taken(change: dict[str, Any], salt: str | None, secret: str) -> None:
    params = sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET))
    assert is_sealed(params, "salt", SECRET)
    assert not is_sealed(params | change, salt, secret)


@pytest.fixture(scope="module")
def scheduler(model_dir: Path) -> Iterator[SchedulerHalf]:
    """The half of the connector that hears of a server's requests first."""
    config = engine_config(model_dir, Settings.load(), sealed=True, enable_prefix_caching=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, SECRET)
        yield SchedulerHalf(config)


def test_server_that_loads_no_plugin_does_not_start(
    scheduler: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would blend nothing, and ask nobody for a key."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="Rust"):
        SchedulerHalf(scheduler._vllm_config)


def test_engine_of_a_server_that_has_no_secret_does_not_start(
    scheduler: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray copies no variable that it does not know to the engines that it starts."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=SECRET_VARIABLE):
        SchedulerHalf(scheduler._vllm_config)
    BlendConnector(scheduler._vllm_config, KVConnectorRole.WORKER, BLOCKS)


def claimed(scheduler: SchedulerHalf, params: Any, salt: str | None = "salt") -> int | None:
    """How many tokens of a prompt of 64 the scheduler is told not to compute."""
    scheduler._asked.clear()
    return scheduler.claims(request_of(params, 64, salt))


def left_behind(scheduler: SchedulerHalf, params: Any, salt: str | None = "tenant:") -> list[str]:
    """The nodes that a request leaves in a tree when all of it is computed in one step."""
    request = request_of(params, 64, salt)
    scheduler._asked.clear()
    assert not scheduler.begins(request)
    metadata = scheduler.step(r=64)
    scheduler.request_finished(request, [])
    return [order.key for order in metadata.of("prefixes").others]


def test_only_what_the_server_has_sealed_is_blended(scheduler: SchedulerHalf) -> None:
    params = RECIPE.transfer_params("t")
    assert claimed(scheduler, sent(sealed(params, "salt", SECRET))) == 64 - least_rows()
    assert claimed(scheduler, sent(params)) == 0
    assert claimed(scheduler, sent(sealed(params, "salt", SECRET)), "another") == 0
    assert "not this server's" in str(scheduler._asked["r"].result)


def test_only_what_the_server_has_sealed_is_left_in_a_tree(scheduler: SchedulerHalf) -> None:
    params = PrefixPath("tree", (("a", 40),), 0, 1).transfer_params("t")
    assert left_behind(scheduler, sent(sealed(params, "tenant:", SECRET))) == ["a"]
    assert left_behind(scheduler, sent(params)) == []
    assert left_behind(scheduler, sent(sealed(params, "tenant:", SECRET)), "other:") == []
    assert left_behind(scheduler, sent(sealed(params, "blended", SECRET)), "blended") == []
    changed = sealed(params, "tenant:", SECRET)
    changed[PATH] = {**changed[PATH], "nodes": (("b", 40),)}
    assert left_behind(scheduler, sent(changed)) == []


ANYTHING = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(
    ANYTHING
    | st.fixed_dictionaries({}, optional={"seal": ANYTHING, "ticket": ANYTHING, FIELD: ANYTHING})
    | st.fixed_dictionaries({PATH: ANYTHING})
    | st.fixed_dictionaries(
        {FIELD: st.fixed_dictionaries({"store": ANYTHING, "spans": ANYTHING, "options": ANYTHING})}
    )
)
@example({"seal": "é", FIELD: {}})
@example({"seal": "\ud800", FIELD: {"spans": [["k", float("inf"), 1]]}})
def test_whatever_is_sent_is_refused(scheduler: SchedulerHalf, params: Any) -> None:
    assert claimed(scheduler, params) == 0
    assert left_behind(scheduler, params) == []
