"""A server blends by recipes of its own only: others would put blended KV under anyone's salt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from blendrag.engine.client.launch import connector_args
from blendrag.engine.compat.connector import KVConnectorRole, least_rows
from blendrag.engine.wire.prefixes import PATH, PrefixPath
from blendrag.engine.wire.recipe import FIELD, Recipe, is_sealed, sealed
from blendrag.engine.wire.recipe import SECRET as SECRET_VARIABLE
from blendrag.engine.worker.connector import BlendConnector
from blendrag.errors import ConfigError
from blendrag.settings import Settings

SECRET = "of this server"
RECIPE = Recipe("store", (("key", 3, 5),))


def sent(params: dict[str, Any]) -> dict[str, Any]:
    """As it comes out at the other side."""
    return json.loads(json.dumps(params))


def test_own_recipe_is_taken() -> None:
    assert is_sealed(sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET)), "salt", SECRET)


@pytest.mark.parametrize(
    "change",
    [
        {"seal": None},
        {"seal": ""},
        {"ticket": "another"},
        {FIELD: Recipe("store", (("key", 0, 5),)).transfer_params("t")[FIELD]},
    ],
)
def test_forged_recipe_is_refused(change: dict[str, Any]) -> None:
    params = sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET)) | change
    assert not is_sealed(params, "salt", SECRET)


def test_recipe_is_refused_under_another_salt() -> None:
    params = sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET))
    assert not is_sealed(params, "another", SECRET)
    assert not is_sealed(params, None, SECRET)


def test_recipe_of_another_server_is_refused() -> None:
    assert not is_sealed(sent(sealed(RECIPE.transfer_params("t"), "salt", "theirs")), "salt", SECRET)


@pytest.fixture(scope="module")
def scheduler(model_dir: Path) -> Iterator[BlendConnector]:
    """The half of the connector that hears of a server's requests first."""
    transfer = KVTransferConfig(**connector_args(Settings.load(), sealed=True))
    config = EngineArgs(str(model_dir), max_model_len=512, kv_transfer_config=transfer).create_engine_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, SECRET)
        yield BlendConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], []))


def test_server_that_loads_no_plugin_does_not_start(
    scheduler: BlendConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would blend nothing, and ask nobody for a key."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="Rust"):
        BlendConnector(scheduler._vllm_config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], []))


def test_engine_of_a_server_that_has_no_secret_does_not_start(
    scheduler: BlendConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray copies no variable that it does not know to the engines that it starts."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=SECRET_VARIABLE):
        BlendConnector(scheduler._vllm_config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], []))
    BlendConnector(scheduler._vllm_config, KVConnectorRole.WORKER, KVCacheConfig(8, [], []))


def claimed(scheduler: BlendConnector, params: Any, salt: str | None = "salt") -> int | None:
    """How many tokens of a prompt of 64 the scheduler is told not to compute."""
    scheduler._asked.clear()
    return scheduler.get_num_new_matched_tokens(request_of(params, salt), 0)[0]


def request_of(params: Any, salt: str | None = "salt") -> Any:
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        cache_salt=salt,
        num_prompt_tokens=64,
        num_computed_tokens=0,
        num_preemptions=0,
        all_token_ids=[0] * 64,
    )


def left_behind(scheduler: BlendConnector, params: Any, salt: str | None = "tenant:") -> list[str]:
    """The nodes that a request leaves in a tree when all of it is computed in one step."""
    request = request_of(params, salt)
    scheduler._asked.clear()
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    step = SimpleNamespace(
        num_scheduled_tokens={"r": 64},
        finished_req_ids=set(),
        scheduled_cached_reqs=cached,
        preempted_req_ids=None,
    )
    metadata: Any = scheduler.build_connector_meta(step)
    scheduler.request_finished(request, [])
    return [order.key for order in metadata.of("prefixes").others]


def test_only_what_the_server_has_sealed_is_blended(scheduler: BlendConnector) -> None:
    params = RECIPE.transfer_params("t")
    assert claimed(scheduler, sent(sealed(params, "salt", SECRET))) == 64 - least_rows()
    assert claimed(scheduler, sent(params)) == 0
    assert claimed(scheduler, sent(sealed(params, "salt", SECRET)), "another") == 0
    assert "not this server's" in str(scheduler._asked["r"].result)


def test_only_what_the_server_has_sealed_is_left_in_a_tree(scheduler: BlendConnector) -> None:
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
def test_whatever_is_sent_is_refused(scheduler: BlendConnector, params: Any) -> None:
    assert claimed(scheduler, params) == 0
    assert left_behind(scheduler, params) == []
