"""Which nodes are wanted, and when: over a real tree, and an engine that remembers what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import EngineError, StoreError
from blendrag.progress import SILENT
from blendrag.prompt import PromptPlan, Segment
from blendrag.serving import growth
from blendrag.serving.prefill import PrefillReport
from blendrag.serving.prefixes import Prefixes, tree_identity
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.stack import TierSpec
from blendrag.tree import path_of
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.states import StateTree
from blendrag.tree.store import NodeStore, StoredNode
from blendrag.tree.tree import Tree
from stored_trees import tree_tiers
from stores import IDENTITY, A, B, make_chunk, register
from waiting import until

BLOCK, STATE, RECIPE = 4, 12, Recipe("store", ())


@dataclass
class Engine:
    """Stores what a request leaves behind, as the worker does."""

    store: NodeStore
    facts: Any = field(default_factory=lambda: SimpleNamespace(block_size=BLOCK))
    idle: bool = True
    alive: bool = True
    asked: list[int] = field(default_factory=list)
    waits: threading.Event = field(default_factory=threading.Event)

    def generate(self, ids: tuple[int, ...], sampling: Sampling, recipe: None, namespace: str) -> Delta:
        self.waits.set()
        self.asked.append(len(ids))
        path = sampling.path
        assert path is not None and path.grows, "else it would count as a prompt's use"
        for at in range(path.held, path.kept):
            (key, end), start, parent = path.nodes[at], path.start(at), path.parent(at)
            rows = torch.zeros(2, 32 * len(self.store.layout.blocks(start, end)), dtype=torch.uint8)
            self.store.put(StoredNode(key, parent, start, ids[:end]), rows)
            if path.kept_state:
                state = torch.zeros(2, STATE // 2, dtype=torch.uint8)
                self.store.put(StoredNode(path.kept_state, key, end, ids[:end]), state)
        return Delta("", [], 0.0)

    def call(self, operation: str, tree: str, *args: Any) -> Any:
        if operation == "delete_nodes":
            self.store.delete(*args)
        return {}

    def call_later(self, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self.call(*args))
        return done


Rig = tuple[Prefixes, Engine, Catalogue]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with opened(tmp_path, Tree, 1 << 20) as made:
        yield made


@contextmanager
def opened(root: Path, kind: type[Tree], room: int) -> Iterator[Rig]:
    """kind: of tree. room: its bytes in RAM."""
    register(root, [A, B])
    catalogue = Catalogue.open(root, IDENTITY)
    tree, _ = kind.open(root / "tree", IDENTITY)
    sizes = NodeBlocks(BLOCK, 32, STATE if kind is StateTree else 0)
    ram = [TierSpec(kind="ram", bytes=room)]
    store = NodeStore.open(root / "tree", IDENTITY, "bfloat16", ram, sizes)
    engine: Any = Engine(store)
    prefixes = Prefixes(tree, TreeClient(engine, "tree"), catalogue, sliced=True)
    yield prefixes, engine, catalogue
    prefixes.close()
    store.close()
    catalogue.close()


def plan(*chunks: Any, root: tuple[int, ...] = (1, 2, 3)) -> PromptPlan:
    cached = [Segment(f"text {one.key}", one.token_ids, one.key) for one in chunks]
    return PromptPlan((Segment("root", root), *cached, Segment("question", (9, 9))), ())


def test_prompt_is_kept_once_it_is_seen_twice(rig: Rig) -> None:
    prefixes, engine, _ = rig
    assert prefixes.path(plan(A, B), None) == (None, None)
    path, _ = prefixes.path(plan(A), None)
    assert path is not None and (path.held, path.kept) == (0, 2), "root and A come again, B does not"
    path, _ = prefixes.path(plan(B, A), None)
    assert path is not None and path.kept == 1 and not engine.asked


def test_prompt_without_documents_has_no_path(rig: Rig) -> None:
    prefixes, *_ = rig
    assert [prefixes.path(plan(), RECIPE) for _ in range(3)] == [(None, RECIPE)] * 3


def test_blended_prompt_grows_piece_by_piece_while_the_engine_is_idle(rig: Rig) -> None:
    prefixes, engine, _ = rig
    engine.idle = False
    for _ in range(2):
        assert prefixes.path(plan(A, B), RECIPE) == (None, RECIPE)
    time.sleep(0.1)
    assert prefixes.growth.waiting == 1 and not engine.asked
    engine.idle = True
    until(lambda: not prefixes.growth.waiting)
    assert engine.asked == [3, 9, 11, 17, 19], "nodes end at 3, 11 and 19, slices behind two blocks each"
    path, recipe = prefixes.path(plan(A, B), RECIPE)
    assert recipe is None and path is not None and path.held == 3 and prefixes.growth.grown == 3


def test_prompt_that_begins_with_stored_documents_is_exact_at_its_beginning(rig: Rig) -> None:
    prefixes, *_ = rig
    prefixes.grow(plan(A))
    path, recipe = prefixes.path(plan(A, B), RECIPE)
    assert path is None and recipe is not None and recipe.tree == "tree"
    assert [end for _, end in recipe.head] == [3, 11]
    assert prefixes.path(plan(B, A), RECIPE)[1] == RECIPE, "the root alone is not worth it"


def test_document_that_is_deleted_between_plan_and_growth_is_not_stored(rig: Rig) -> None:
    prefixes, engine, catalogue = rig
    planned = plan(B, A)
    catalogue.register("doc", [])
    prefixes.forget([B.key])
    for _ in range(3):
        path, _ = prefixes.path(planned, None)
    assert path is None or path.kept == path.held
    prefixes.grow(planned)
    assert {row.node.document for row in prefixes.tree.rows()} <= {""}
    nodes = path_of(IDENTITY, planned.token_ids, planned.spans)
    assert not engine.store.kv.tiers[0].has(node.key for node in nodes[1:])


def test_document_whose_deletion_was_cut_short_leaves_exact_prefixes(tmp_path: Path) -> None:
    """It has left the catalogue, and the tree was not told."""
    register(tmp_path, [A])
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    identity = tree_identity(IDENTITY, "blocks", IDENTITY.num_layers)
    tree, _ = Tree.open(tmp_path / "tree", identity)
    for planned in (plan(A, B), plan(B, A)):
        tree.expect(path_of(identity, planned.token_ids, planned.spans), planned.token_ids)
    tree.close()
    facts = SimpleNamespace(blocks="blocks", block_size=BLOCK, block_layers=IDENTITY.num_layers, states=False)
    engine: Any = SimpleNamespace(facts=facts, alone=True, alive=True, call=lambda *_: "tree")
    prefixes = Prefixes.open(tmp_path, Settings.load(tiers=tree_tiers(disk=1 << 20)), catalogue, engine)
    assert prefixes is not None
    assert [row.node.document for row in prefixes.tree.rows()] == ["", A.key]
    prefixes.close()
    catalogue.close()


def test_growth_that_fails_does_not_end_growing(rig: Rig) -> None:
    prefixes, engine, _ = rig
    broken, engine.generate = engine.generate, None  # type: ignore[method-assign, assignment]
    assert prefixes.grow(plan(A)) == 0
    engine.generate = broken  # type: ignore[method-assign]
    assert prefixes.grow(plan(A)) == 2


def test_node_that_cannot_be_stored_is_not_computed_again_and_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes, engine, _ = rig
    monkeypatch.setattr(growth, "_STORED_S", 0.05)
    monkeypatch.setattr(engine.store, "put", lambda *_: False)
    for _ in range(2):
        assert prefixes.grow(plan(A)) == 0
    assert engine.asked == [3] and prefixes.stats()["refused"] == 1
    assert len(caplog.records) == 1


def test_document_that_was_deleted_while_it_grew_or_was_refused_once_grows_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, engine, catalogue = rig
    monkeypatch.setattr(growth, "_STORED_S", 0.05)
    put, planned = engine.store.put, plan(A)
    both = [(one.key, f"text {one.key}", one.token_ids) for one in (A, B)]

    def deleted(node: StoredNode, rows: torch.Tensor) -> bool:
        if node.start:
            catalogue.register("doc", [])
            prefixes.forget([A.key])
        return put(node, rows)

    monkeypatch.setattr(engine.store, "put", deleted)
    assert prefixes.grow(planned) == 1 and not prefixes.growth.refused
    catalogue.register("doc", both)
    monkeypatch.setattr(engine.store, "put", lambda *_: False)
    assert prefixes.grow(planned) == 0 and len(prefixes.growth.refused) == 1
    catalogue.register("doc", [])
    prefixes.forget([A.key])
    catalogue.register("doc", both)
    monkeypatch.setattr(engine.store, "put", put)
    assert prefixes.grow(planned) == 1


def test_node_is_refused_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while it is tried again, and after enough others."""
    prefixes, engine, _ = rig
    monkeypatch.setattr(growth, "_STORED_S", 0.05)
    monkeypatch.setattr(growth, "_MOST_REFUSED", 2)
    put = engine.store.put
    monkeypatch.setattr(engine.store, "put", lambda *_: False)
    for root in ((1, 2, 3), (1, 2, 4), (1, 2, 5)):
        assert prefixes.grow(plan(A, root=root)) == 0
    assert len(prefixes.growth.refused) == 2
    monkeypatch.setattr(engine.store, "put", put)
    assert [prefixes.grow(plan(A, root=root)) for root in ((1, 2, 5), (1, 2, 3))] == [0, 2]
    prefixes.growth.refused |= dict.fromkeys(prefixes.growth.refused, 0.0)
    assert prefixes.grow(plan(A, root=(1, 2, 5))) == 2


def test_question_that_is_asked_again_and_again_leaves_the_others_in_the_queue(rig: Rig) -> None:
    prefixes, engine, _ = rig
    engine.idle = False
    for names, times in (((B, A), 2), ((A, B), 100)):
        for _ in range(times):
            prefixes.path(plan(*names), RECIPE)
    assert prefixes.growth.waiting == 3, "the second's root alone, too"
    engine.idle = True
    until(lambda: not prefixes.growth.waiting)
    assert prefixes.growth.grown == 5, "the root, and two behind it in both orders"


def test_growing_does_not_wait_for_a_growth_that_has_ended(rig: Rig) -> None:
    prefixes, *_ = rig
    prefixes.growth.close()
    waits = threading.Thread(target=lambda: prefixes.grow(plan(A)), daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive()


def test_closing_does_not_wait_for_an_engine_that_is_never_idle(rig: Rig) -> None:
    prefixes, engine, _ = rig
    engine.idle = False
    for _ in range(2):
        prefixes.path(plan(A, B), RECIPE)
    prefixes.growth.close()
    assert not engine.asked


# -- documents of a hybrid model, in first place ----------------------------------------------------------

ROOT = tuple(range(100, 160))
OTHERS = tuple(make_chunk(seed) for seed in range(11, 14))


def ingested(
    prefixes: Prefixes, catalogue: Catalogue, room: int = 1 << 20, root: tuple[int, ...] = ROOT
) -> PrefillReport:
    report = PrefillReport()
    prefixes.grow_first(catalogue.pending(), root, room, report, SILENT, lambda: None)
    return report


def test_documents_grow_in_first_place_until_there_is_no_room(tmp_path: Path) -> None:
    with opened(tmp_path, StateTree, 1 << 20) as (prefixes, engine, catalogue):
        assert ingested(prefixes, catalogue).chunks == 2 and ingested(prefixes, catalogue).chunks == 0
        full = prefixes.tree.totals().bytes
        register(tmp_path, OTHERS, "others")
        asked = len(engine.asked)
        assert ingested(prefixes, catalogue, full).chunks == 0
        assert len(engine.asked) == asked, "nothing that is there had to leave for another"
        assert ingested(prefixes, catalogue, full + full // 2).chunks == 1


def test_state_behind_too_few_tokens_to_be_loaded_is_not_wanted(tmp_path: Path) -> None:
    with opened(tmp_path, StateTree, 1 << 20) as (prefixes, _, catalogue):
        assert ingested(prefixes, catalogue, root=(1, 2, 3)).chunks == 0
        for one in (A, B, A):
            prefixes.path(plan(one, root=ROOT), None)
        prefixes.growth.wait()
        assert [(row.node.document, row.node.end) for row in prefixes.tree.rows()] == [(A.key, 68)] * 2


def test_document_that_is_deleted_while_it_grows_keeps_no_other_from_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, StateTree, 1 << 20) as (prefixes, engine, catalogue):
        register(tmp_path, OTHERS, "others")
        put = engine.store.put

        def deleted(node: StoredNode, rows: torch.Tensor) -> bool:
            if catalogue.known([A.key]):
                catalogue.register("doc", [])
                prefixes.forget([A.key, B.key])
            return put(node, rows)

        monkeypatch.setattr(growth, "_STORED_S", 0.05)
        monkeypatch.setattr(engine.store, "put", deleted)
        assert ingested(prefixes, catalogue).chunks == len(OTHERS)
        assert prefixes.tree.documents() == {one.key for one in OTHERS}


def test_engine_that_ends_while_documents_grow_is_told(tmp_path: Path) -> None:
    with opened(tmp_path, StateTree, 1 << 20) as (prefixes, engine, catalogue):

        def ended(*_: Any) -> Any:
            engine.alive = False
            raise EngineError("it has ended")

        engine.generate = engine.call = ended  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="has ended"):
            ingested(prefixes, catalogue)


def test_engine_that_dies_while_prefixes_are_closed_leaves_nothing_open(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, engine, _ = rig
    closing = Mock(side_effect=EngineError("the engine died at close_tree"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", closing)
        prefixes.close()
    assert closing.called
    with pytest.raises(StoreError, match="closed"):
        prefixes.tree.totals()
