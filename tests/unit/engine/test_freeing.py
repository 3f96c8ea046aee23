"""Blocks that eviction gives back, in vLLM's own manager of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from blendrag.engine.budget.freeing import BlockFreeing
from blendrag.engine.compat.connector import RequestBlocks, SchedulerStep
from blendrag.engine.hooks import Asked
from blendrag.engine.wire.recipe import EvictionOrder, Recipe
from blendrag.engine.wire.report import Eviction
from blendrag.options import BlendOptions

BLOCK, BLOCKS = 32, 40
RECIPE = Recipe("store", (("a", 0, 100),), BlendOptions(kv_budget=96))


@pytest.fixture
def manager() -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 4096, BLOCK, BLOCK)


def request(name: str, tokens: int) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    asked = SamplingParams(extra_args={"kv_transfer_params": RECIPE.transfer_params(f"ticket of {name}")})
    return Request(name, list(range(tokens)), asked, None, cache_salt=name, block_hasher=hasher)


def started(manager: KVCacheManager, name: str, tokens: int) -> Request:
    """A prompt in its blocks, all of it computed."""
    found = request(name, tokens)
    assert manager.allocate_slots(found, tokens) is not None
    found.num_computed_tokens = tokens
    return found


def free_blocks(manager: KVCacheManager) -> int:
    return manager.block_pool.get_num_free_blocks()


def freeing(manager: KVCacheManager) -> BlockFreeing:
    blocks = RequestBlocks.of(manager)
    assert blocks is not None
    half = BlockFreeing()
    half.bind(blocks)
    return half


def due(half: BlockFreeing, scheduled: list[str]) -> list[EvictionOrder]:
    """What the worker is to evict in a step with these requests."""
    step = SchedulerStep(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1)))
    return list(half.orders(step).others)


def evicted(half: BlockFreeing, found: Request) -> Eviction:
    half.allocated(Asked(found, RECIPE), [[]], 1)
    (order,) = due(half, [found.request_id])
    return Eviction(tokens=96, first=2, last=(order.tokens - 1) // BLOCK, first_block=order.block_ids[0])


def test_evicted_blocks_are_free_and_not_found_by_their_tokens(manager: KVCacheManager) -> None:
    half, found = freeing(manager), started(manager, "a", 10 * BLOCK + 5)
    assert free_blocks(manager) == BLOCKS - 1 - 11
    eviction = evicted(half, found)
    half.received("a", eviction, None)
    assert eviction.freed == 8 and free_blocks(manager) == BLOCKS - 1 - 3
    again = request("a", 10 * BLOCK + 5)
    assert manager.get_computed_blocks(again)[1] == 0
    half.received("a", eviction, None)  # told twice
    assert free_blocks(manager) == BLOCKS - 1 - 3


def test_answer_that_goes_on_or_ends_loses_no_block_and_frees_each_once(manager: KVCacheManager) -> None:
    half, found = freeing(manager), started(manager, "a", 10 * BLOCK + 5)
    half.received("a", evicted(half, found), None)
    for token in range(3 * BLOCK):
        found.num_computed_tokens = found.num_tokens
        found.append_output_token_ids(token)
        assert manager.allocate_slots(found, 1) is not None
    assert free_blocks(manager) == BLOCKS - 1 - 3 - 3
    ids = [block.block_id for block in manager.coordinator.single_type_managers[0].req_to_blocks["a"]]
    assert len(ids) == 14 and ids[2:10] == [manager.block_pool.null_block.block_id] * 8
    manager.free(found)
    assert free_blocks(manager) == BLOCKS - 1


@pytest.mark.parametrize("returns", [False, True])
def test_report_of_a_request_that_lost_its_blocks_frees_none(manager: KVCacheManager, returns: bool) -> None:
    half, found = freeing(manager), started(manager, "a", 10 * BLOCK)
    eviction = evicted(half, found)
    manager.free(found)
    if returns:  # after another took its first blocks
        started(manager, "b", BLOCK)
        found.num_computed_tokens = 0
        assert manager.allocate_slots(found, 10 * BLOCK) is not None
    before = free_blocks(manager)
    half.received("a", eviction, None)
    assert free_blocks(manager) == before


def test_request_preempted_before_the_report_finds_none_of_what_was_evicted(manager: KVCacheManager) -> None:
    """The next step may be planned, and preempt it, while the worker evicts."""
    half, found = freeing(manager), started(manager, "a", 10 * BLOCK + 5)
    found.num_computed_tokens = 10 * BLOCK + 5
    evicted(half, found)
    manager.free(found)
    assert manager.get_computed_blocks(request("a", 10 * BLOCK + 5))[1] == 0


def test_prompt_is_evicted_after_its_first_token_and_only_when_asked(manager: KVCacheManager) -> None:
    half, found = freeing(manager), started(manager, "a", 100)
    half.allocated(Asked(found, Recipe("store", RECIPE.spans)), [[]], 1)
    assert due(half, ["a"]) == []
    half.allocated(Asked(found, RECIPE), [[]], 1)
    found.num_computed_tokens = 99
    assert due(half, ["a"]) == [], "the step computes its last token"
    found.num_computed_tokens = 100
    assert due(half, []) == due(half, ["b"]) == [], "it is not in the step"
    assert [(order.tokens, order.ticket) for order in due(half, ["a"])] == [(100, "ticket of a")]
    assert due(half, ["a"]) == [], "once"
    half.allocated(Asked(found, RECIPE), [[]], 1)
    half.finished("a")
    assert due(half, ["a"]) == []


def test_step_waits_for_one_eviction(manager: KVCacheManager) -> None:
    half = freeing(manager)
    for name in ("a", "b", "c"):
        half.allocated(Asked(started(manager, name, 100), RECIPE), [[]], 1)
    running = ["c", "b"]
    assert [[order.request_id for order in due(half, running)] for _ in range(3)] == [["b"], ["c"], []]
    assert [order.request_id for order in due(half, ["a"])] == ["a"]


def test_manager_of_another_kind_is_not_taken_for_one_that_is_known() -> None:
    for other in (object(), type("Manager", (), {"coordinator": None})()):
        assert RequestBlocks.of(other) is None
    half = BlockFreeing()
    asked: Any = request("a", 100)
    half.allocated(Asked(asked, RECIPE), [[]], 1)
    asked.num_computed_tokens = 100
    assert [order.block_ids for order in due(half, ["a"])] == [[]], "the worker says why nothing is evicted"
    half.received("a", Eviction(1, 1, 2, 0), None)
