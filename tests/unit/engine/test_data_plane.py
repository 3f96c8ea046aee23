"""The worker's halves of all mechanisms together, around a small model and without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.engine.compat.connector import KVConnectorRole
from blendrag.engine.forward.slices import exhaust
from blendrag.engine.hooks import Orders, Reports, Step
from blendrag.engine.wire.prefixes import NodeLoad
from blendrag.engine.wire.recipe import BlendOrder, EvictionOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.engine.worker.connector import BlendConnector, BlendReports
from blendrag.engine.worker.data_plane import DataPlane
from blendrag.options import DEFAULTS, BlendOptions
from chunked_prompt import BLOCK_IDS, ChunkedPrompt
from small_decoder import small_model
from stores import register

LAYERS = 2
WHOLE = "the answer ended with its first tokens"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    made = DataPlane(small_model(tmp_path / "model", LAYERS))
    yield made
    made.close()


@pytest.fixture
def connector(plane: DataPlane) -> BlendConnector:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=plane.model.cache.block_size),
    )
    made = BlendConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[]))
    made.bind(plane)
    return made


def step(connector: BlendConnector, **orders: Orders) -> tuple[set[str], BlendReports | None]:
    """Who is there after a step with these orders, and what the worker says."""
    connector.bind_connector_metadata(Step(dict(orders)))
    connector.start_load_kv(None)
    connector.wait_for_save()
    said: Any = connector.build_connector_worker_meta()
    return connector.get_finished(set())[1] or set(), said


def opened(plane: DataPlane, prompt: ChunkedPrompt, root: Path, *tiers: dict[str, Any]) -> str:
    """The id of a store in these tiers, with the prompt's chunks."""
    register(root, prompt.chunks, identity=prompt.identity)
    operations = plane.operations()
    store: str = operations["open_store"](str(root), asdict(prompt.identity), tiers)
    chunks = [(chunk.key, chunk.token_ids, (), "") for chunk in prompt.chunks]
    assert exhaust(operations["ingest"](store, chunks)).tokens == sum(len(ids) for _, ids, *_ in chunks)
    assert exhaust(operations["flush"](store)) > 0
    return store


def blended(
    connector: BlendConnector, store: str, prompt: ChunkedPrompt, options: BlendOptions = DEFAULTS
) -> BlendReport:
    recipe = Recipe(store, tuple(prompt.spans), options)
    order = BlendOrder("r", "ticket", prompt.ids, BLOCK_IDS, 0, recipe)
    there, said = step(connector, blend=Orders([order]))
    for _ in range(100):
        if there:
            break
        there, said = step(connector)
    assert there == {"r"} and said is not None
    return said.reports["r"]


def test_chunks_that_a_client_ingests_are_blended_and_the_prompt_is_evicted(
    plane: DataPlane, connector: BlendConnector, tmp_path: Path
) -> None:
    prompt, told = ChunkedPrompt(LAYERS), plane.operations()["report"]
    store = opened(plane, prompt, tmp_path / "index", {"kind": "disk"})
    report = blended(connector, store, prompt, BlendOptions(selector="none", kv_budget="64:uniform"))
    assert report == told("ticket")
    assert report.fallback is None and not report.missing
    assert report.tiers == {"disk": 2}, "the last chunk is in a block with fresh tokens"
    assert report.kv_whole == WHOLE
    order = EvictionOrder("r", "ticket", BLOCK_IDS, len(prompt.ids))
    _, said = step(connector, budget=Orders(others=[order]))
    assert said is not None
    assert told("ticket").kv_whole == said.messages["budget"]["r"].whole != WHOLE


def test_prompt_whose_chunks_are_sooner_prefilled_than_loaded_is_left_to_the_engine(
    plane: DataPlane, connector: BlendConnector, tmp_path: Path
) -> None:
    prompt = ChunkedPrompt(LAYERS, (300, 250))
    store = opened(plane, prompt, tmp_path / "index", {"kind": "disk", "throttle": 1_000_000})
    plane.guard.prefilled(300, 0.001)
    for _ in range(3):
        report = blended(connector, store, prompt)
        assert report.tiers == {"disk": 2}, report
        assert not connector.get_block_ids_with_load_errors()
    report = blended(connector, store, prompt)
    assert report.cause == "loading" and "550 tokens from disk" in str(report.fallback)
    assert connector.get_block_ids_with_load_errors() == set(BLOCK_IDS)


def test_refused_chunks_are_in_memory_the_next_time(
    plane: DataPlane, connector: BlendConnector, tmp_path: Path
) -> None:
    prompt = ChunkedPrompt(LAYERS, (300, 250))
    tiers = {"kind": "ram", "bytes": 1 << 24}, {"kind": "disk"}
    store = opened(plane, prompt, tmp_path / "index", *tiers)
    assert blended(connector, store, prompt).tiers == {"ram": 2}, "how fast we compute is known now"
    plane.stores.get(store).kv.empty_ram()
    for _ in range(3):
        plane.guard.loaded(plane.stores.tiers[1], 300, 3000.0)
    assert blended(connector, store, prompt).cause == "loading"
    while plane.stores.get(store).prefetcher.stats()["read"] < 2:
        time.sleep(0.01)
    assert blended(connector, store, prompt).tiers == {"ram": 2}


def test_what_cannot_be_blended_is_left_to_the_engine(connector: BlendConnector) -> None:
    order = BlendOrder("r", "ticket", list(range(300)), BLOCK_IDS, 0, Recipe("closed", (("key", 0, 200),)))
    there, said = step(connector, blend=Orders([order]))
    assert there == {"r"} and said is not None
    assert "not open" in str(said.reports["r"].fallback)
    bound: Any = connector._data_plane
    assert bound.reports.get("ticket") == said.reports["r"], "a stream asks for it"
    assert connector.get_block_ids_with_load_errors() == set(BLOCK_IDS)


def test_report_is_there_until_a_stream_ends_beside_a_thousand_others() -> None:
    reports = Reports()
    for number in range(1500):
        reports.keep(str(number), BlendReport(cached=number))
    assert reports.get("0") == BlendReport(cached=0)


def test_use_of_nodes_that_cannot_be_noted_spoils_no_block_of_a_running_request(
    connector: BlendConnector,
) -> None:
    """Nor is it waited for: the engine has that KV itself."""
    plane: Any = connector._data_plane
    broken: Any = SimpleNamespace(kv=SimpleNamespace(tiers=[]), close=lambda: None)  # as by a policy's error
    next(hook for hook in plane.hooks if hook.name == "prefixes")._trees["tree"] = broken
    order = NodeLoad("r", "ticket", "tree", (("node", 200),), [], BLOCK_IDS, 0)
    assert step(connector, prefixes=Orders([order])) == (set(), None)
    assert connector.get_block_ids_with_load_errors() == set()
