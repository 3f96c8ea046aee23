"""vLLM's own pool of blocks, and the order in which it gives up conversations. No engine is started here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from blendrag.engine.client.generation import Sampling, vllm_sampling
from blendrag.engine.compat.connector import FreeBlocks
from blendrag.engine.recipe import CONVERSATION, conversation_of
from blendrag.engine.worker.connector import BlendConnector
from blendrag.engine.worker.prefix_order import UNLIKELY, PrefixOrder

pytestmark = pytest.mark.slow  # vLLM's modules alone take ten seconds

BLOCK = 4
SYSTEM = list(range(1000, 1000 + BLOCK))
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def text(name: str, blocks: int) -> list[int]:
    """Tokens that no other name has."""
    first = 10_000 * (1 + ord(name[0]))
    return list(range(first, first + blocks * BLOCK))


class Pool:
    """vLLM's cache manager with so many blocks, and the order beside it, if there is one."""

    def __init__(self, blocks: int, ordered: bool = True) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one is the null block
        self.manager = KVCacheManager(config, 4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self.pool = self.manager.block_pool
        free = FreeBlocks.of(self.pool)
        assert free is not None
        self.order = PrefixOrder(free) if ordered else None
        self._ids = itertools.count()

    def begin(self, whose: str, tokens: Sequence[int]) -> Request:
        """As the scheduler does; the tokens that were found are in ``num_cached_tokens``."""
        params = SamplingParams(max_tokens=1, extra_args={CONVERSATION: whose})
        request = Request(f"r{next(self._ids)}", list(tokens), params, None, block_hasher=HASHER)
        if self.order:
            self.order.began(whose)
        found, count, _ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, request.num_tokens - count, count, found) is not None
        request.num_computed_tokens, request.num_cached_tokens = request.num_tokens, count
        return request

    def end(self, request: Request) -> None:
        (blocks,) = self.manager.get_block_ids(request.request_id)
        if self.order:
            self.order.finished(conversation_of(request), blocks)
        self.manager.free(request)
        if self.order:
            self.order.settle()

    def ask(self, whose: str, tokens: Sequence[int]) -> int:
        """Blocks that were found."""
        request = self.begin(whose, tokens)
        self.end(request)
        return int(request.num_cached_tokens) // BLOCK

    def forecast(self, whose: str, probability: float) -> None:
        assert self.order is not None
        self.order.forecast(whose, probability)
        self.order.settle()

    def held(self, tokens: Sequence[int]) -> int:
        """Blocks of the prompt that would be found. Asking changes nothing."""
        request = Request("look", [*tokens, 0], SamplingParams(max_tokens=1), None, block_hasher=HASHER)
        return int(self.manager.get_computed_blocks(request)[1]) // BLOCK

    def taken(self) -> list[int]:
        """Free blocks in the order in which they would be taken."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]


def test_conversation_that_is_over_outlives_an_older_one_that_goes_on() -> None:
    pool = Pool(8)
    pool.ask("lively", text("a", 4))
    pool.ask("over", text("b", 4))
    pool.forecast("lively", 0.9)
    pool.forecast("over", 0.01)
    pool.ask("new", text("c", 2))
    assert (pool.held(text("a", 4)), pool.held(text("b", 4))) == (4, 2)  # the end of it first
    pool.ask("new", text("d", 2))
    assert (pool.held(text("a", 4)), pool.held(text("b", 4))) == (4, 0)


def test_forecast_that_comes_before_the_answer_is_finished_is_lost() -> None:
    pool = Pool(8)
    pool.ask("lively", text("a", 4))
    request = pool.begin("over", text("b", 4))
    pool.forecast("over", 0.01)
    pool.end(request)
    pool.ask("new", text("c", 4))
    assert (pool.held(text("a", 4)), pool.held(text("b", 4))) == (4, 0)


def test_block_of_two_conversations_leaves_with_the_one_that_is_over() -> None:
    pool = Pool(7)
    pool.ask("over", SYSTEM + text("b", 2))
    pool.ask("lively", SYSTEM + text("a", 2))
    pool.forecast("over", 0.0)
    pool.ask("new", text("c", 4))
    assert pool.held(SYSTEM + text("a", 2)) == 3
    pool.forecast("lively", 0.0)
    pool.forecast("new", 0.5)
    pool.ask("newer", text("d", 3))
    assert (pool.held(SYSTEM), pool.held(text("c", 4))) == (0, 4)


def test_block_that_somebody_asks_for_just_now_is_moved() -> None:
    pool = Pool(7)
    pool.ask("over", SYSTEM + text("b", 2))
    request = pool.begin("late", SYSTEM + text("c", 2))
    pool.forecast("over", 0.0)
    pool.end(request)
    pool.ask("new", text("d", 4))
    assert pool.held(SYSTEM + text("c", 2)) == 3


def test_last_turns_forecast_ends_the_next_turn() -> None:
    """Who comes back was not over; until there is another forecast, nothing is known."""
    pool = Pool(8)
    pool.ask("other", text("a", 4))
    pool.ask("back", text("b", 2))
    pool.forecast("back", 0.0)
    assert pool.ask("back", text("b", 4)) == 2
    pool.ask("new", text("c", 2))
    assert (pool.held(text("a", 4)), pool.held(text("b", 4))) == (2, 4)


def test_kv_is_given_up_while_there_are_blocks_without_any() -> None:
    pool = Pool(600)
    pool.ask("over", text("b", 4))
    pool.forecast("over", 0.0)
    for number in range(5):
        pool.ask("new", text(chr(ord("c") + number), 119))  # 599 in all
        assert pool.held(text("b", 4)) == 4
    pool.ask("newer", text("z", 3))
    assert (pool.held(text("b", 4)), pool.held(text("c", 119))) == (2, 119)


@pytest.mark.parametrize("nonsense", [-0.1, 1.1, float("nan")])
def test_nonsense_for_a_forecast_moves_a_conversation(nonsense: float) -> None:
    pool = Pool(4)
    pool.ask("one", text("a", 2))
    pool.ask("two", text("b", 2))
    before = pool.taken()
    pool.forecast("two", nonsense)
    assert pool.taken() == before


CALL = st.tuples(
    st.sampled_from(["begin", "end", "tell"]), st.integers(0, 5), st.floats(0, 1), st.integers(1, 4)
)


@given(st.lists(CALL, max_size=60))
def test_block_is_lost_or_found_for_what_it_does_not_hold(calls: list[tuple[str, int, float, int]]) -> None:
    """Requests of six conversations, some at once, in a pool that is always full."""
    pool = Pool(24)
    running: dict[int, Request] = {}
    turns = dict.fromkeys(range(6), 0)
    for call, who, number, blocks in calls:
        if call == "tell":
            pool.forecast(str(who), number)
        elif call == "begin" and who not in running and len(running) < 3:
            turns[who] = turns[who] % 6 + 1
            tokens = SYSTEM + text("abcdef"[who], turns[who]) + list(range(blocks))
            running[who] = pool.begin(str(who), tokens)
        elif call == "end" and who in running:
            pool.end(running.pop(who))
        free = pool.taken()
        assert len(free) == len(set(free)) == pool.pool.get_num_free_blocks()
        assert set(free) == {b.block_id for b in pool.pool.blocks if b.ref_cnt == 0 and not b.is_null}
        used = {block for one in running.values() for block in pool.manager.get_block_ids(one.request_id)[0]}
        assert len(used) + len(free) == 24
    assert pool.order is not None
    for one in running.values():
        pool.end(one)
    assert not pool.order._asking and not pool.order._told
    assert pool.pool.reset_prefix_cache(), "all blocks are free again"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.floats(UNLIKELY, 1)), max_size=40))
def test_lively_conversations_are_kept_otherwise_than_by_vllm(asked: list[tuple[int, int, float]]) -> None:
    ours, theirs = Pool(16), Pool(16, ordered=False)
    for who, blocks, chance in asked:
        tokens = text("abcdef"[who], blocks)
        assert ours.ask(str(who), tokens) == theirs.ask(str(who), tokens)
        ours.forecast(str(who), chance)
        assert ours.taken() == theirs.taken()


def test_conversations_that_never_end_fill_the_memory() -> None:
    pool = Pool(8)
    for number in range(200):
        pool.ask(f"talk {number}", list(range(100 * number, 100 * number + 4 * BLOCK)))
    assert pool.order is not None
    assert pool.order._remembered == sum(map(len, pool.order._held.values())) <= 4 * 9
    assert sum(pool.order._users.values()) == pool.order._remembered


def connector(role: KVConnectorRole, **extra: Any) -> BlendConnector:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=BLOCK),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
    )
    return BlendConnector(config, role, None)


def step(scheduler: BlendConnector, worker: BlendConnector) -> None:
    meta = worker.build_connector_worker_meta()
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta, invalid_block_ids=set()))


@pytest.mark.parametrize(("said", "whose"), [("lively", "lively"), (None, "r")])
def test_conversation_that_a_client_names_is_another_for_the_scheduler(said: str | None, whose: str) -> None:
    params = vllm_sampling(Sampling(conversation=said), 8, None, "ticket")
    assert conversation_of(Request("r", SYSTEM, params, None)) == whose


@pytest.mark.parametrize(("wanted", "left"), [(True, (4, 0)), (False, (0, 4))])
def test_forecast_does_not_come_from_the_worker_to_the_scheduler(wanted: bool, left: tuple[int, int]) -> None:
    pool = Pool(8, ordered=False)
    scheduler = connector(KVConnectorRole.SCHEDULER, prefix_forecasts=wanted)
    worker = connector(KVConnectorRole.WORKER, prefix_forecasts=wanted)
    told: list[dict[str, float]] = []
    worker.bind(SimpleNamespace(take_forecasts=lambda: told.pop() if told else {}))  # type: ignore[arg-type]
    scheduler.bind_gpu_block_pool(pool.pool)
    for whose, tokens in (("lively", text("a", 4)), ("over", text("b", 4)), ("new", text("c", 4))):
        request = pool.begin(whose, tokens)
        scheduler.on_new_request(request)
        told.append({whose: 0.01 if whose == "over" else 0.9})
        step(scheduler, worker)
        scheduler.request_finished(request, pool.manager.get_block_ids(request.request_id)[0])
        pool.manager.free(request)
        step(scheduler, worker)
    assert (pool.held(text("a", 4)), pool.held(text("b", 4))) == left
    assert worker.build_connector_worker_meta() is None


def test_pool_of_another_vllm_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = connector(KVConnectorRole.SCHEDULER, prefix_forecasts=True)
    scheduler.bind_gpu_block_pool(SimpleNamespace(blocks=[], free_block_queue=None))
    assert scheduler._order is None
    scheduler.bind_gpu_block_pool(Pool(4).pool)
    request = Request("r", SYSTEM, SamplingParams(max_tokens=1), None)
    scheduler.on_new_request(request)
    assert scheduler._order is not None
    assert scheduler.request_finished(request, [99]) == (False, None)  # no such block
    assert scheduler._order is None and "prefix cache" in caplog.text
