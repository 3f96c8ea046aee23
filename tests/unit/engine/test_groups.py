"""Requests of a model that has layers with and without windows, in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from blendrag.engine.blend.claims import BlendClaims
from blendrag.engine.client.launch import connector_args
from blendrag.engine.compat.connector import KVConnectorRole, least_rows
from blendrag.engine.compat.groups import LayerGroup, common_block_size, groups_of_config
from blendrag.engine.forward.slices import Pace, Sliced
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.engine.worker.connector import GroupsConnector
from blendrag.options import BlendOptions
from blendrag.settings import Settings
from connector_halves import Runner, asked, engine_config, needs_groups, plane, vllm_request
from stored_trees import tree_tiers

pytestmark = needs_groups

BLOCK, WINDOW = 32, 64
LONG = 32 * WINDOW + 20  # tokens; behind the windows more than the twelve that AVX2 leaves to the engine
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=BLOCK, **SHAPE)
WINDOWED = SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **SHAPE)
CHUNKED = ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=WINDOW, **SHAPE)
KINDS = {
    "some": [KVCacheGroupSpec(["a", "b"], WINDOWED), KVCacheGroupSpec(["c", "d"], FULL)],
    "several": [KVCacheGroupSpec([name], WINDOWED) for name in "ab"] + [KVCacheGroupSpec(["c"], FULL)],
    "all": [KVCacheGroupSpec(["a"], WINDOWED)],
    "chunks": [KVCacheGroupSpec(["a"], CHUNKED), KVCacheGroupSpec(["b"], FULL)],
}


class Steps:
    """A scheduler and its connector's halves, and the orders that the worker got."""

    def __init__(self, model_dir: Path, groups: list[Any]) -> None:
        blocks = KVCacheConfig(512, [], groups)
        config = engine_config(
            model_dir, Settings.load(), asynchronous=False, max_model_len=4096, max_num_batched_tokens=256
        )
        self.scheduler = Scheduler(config, blocks, StructuredOutputManager(config), block_size=BLOCK)
        self.runner = Runner(GroupsConnector(config, KVConnectorRole.WORKER, blocks))
        self.orders: list[BlendOrder] = []
        self.runner.connector.bind(plane(self._start))

    def _start(self, order: BlendOrder, pace: Pace) -> Sliced:
        self.orders.append(order)
        if pace.pause(1):
            yield
        return BlendReport(ms=dict.fromkeys(("load", "select", "recompute"), 0.0))

    def held(self, params: dict[str, Any] | None) -> tuple[list[int], int]:
        """How many blocks in each group a request has when its first token is computed, and the most that
        all of them were before."""
        self.scheduler.add_request(vllm_request("one", params, LONG))
        most = 0
        for _ in range(50):
            scheduled = self.scheduler.schedule()
            held = self.scheduler.kv_cache_manager.get_block_ids("one")
            each = [sum(block != 0 for block in ids) for ids in held]
            most = max(most, sum(each))
            output = self.runner.step(scheduled)
            computed = self.scheduler.requests["one"].num_computed_tokens
            output.sampled_token_ids = [[7] if computed >= LONG else [] for _ in output.req_ids]
            self.scheduler.update_from_output(scheduled, output)
            if computed >= LONG:
                return each, most
        raise AssertionError("it does not end")


@pytest.mark.parametrize("kind", KINDS)
def test_blended_prompt_takes_the_blocks_that_plain_prefill_takes_and_its_order_has_them(
    model_dir: Path, kind: str
) -> None:
    """Of each window the last blocks, not all thirty-two windows'."""
    recipe = Recipe("store", (("chunk", 40, LONG - 100),)).transfer_params("ticket")
    blended, plain = Steps(model_dir, KINDS[kind]), Steps(model_dir, KINDS[kind])
    (held, most), (of_plain, most_of_plain) = blended.held(recipe), plain.held(None)
    assert held == of_plain and most <= most_of_plain and not plain.orders
    (order,) = blended.orders
    claimed = LONG - least_rows()
    assert len(order.token_ids) == claimed
    windows = []
    for blocks, ids, group in zip(held, (order.block_ids, *order.others), KINDS[kind], strict=True):
        spec = group.kv_cache_spec
        if spec in (WINDOWED, CHUNKED):
            windows.append(blocks)
        behind = {WINDOWED: max(0, claimed - WINDOW + 1), CHUNKED: claimed // WINDOW * WINDOW}
        gone = behind.get(spec, 0) // BLOCK
        assert len(ids) == -(-claimed // BLOCK)
        assert [block == 0 for block in ids] == [number < gone for number in range(len(ids))]
    assert windows and max(windows) <= WINDOW // BLOCK + 1


@given(
    cached=st.integers(64, 1800),
    before=st.integers(0, 400),
    hit=st.integers(1, 60),
    ratio=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    window=st.sampled_from([0, 64, 4096]),
)
def test_rest_behind_a_hit_is_blended_where_that_computes_less(
    cached: int, before: int, hit: int, ratio: float, window: int
) -> None:
    """Rows behind it look for KV that vLLM gives up, so all of the prompt is blended anew, or none."""
    recipe = Recipe("store", (("chunk", before, cached),), BlendOptions(ratio))
    prompt, computed = before + cached + 30, hit * BLOCK
    of = BlendClaims([LayerGroup(BLOCK), LayerGroup(BLOCK, window)], salted=True)
    alone = BlendClaims([LayerGroup(BLOCK)], salted=True)
    known = asked(None, prompt, recipe)
    claimed, without_windows = (one.claim(known, computed) for one in (of, alone))
    if not without_windows:
        assert claimed == without_windows
        return
    end = computed + without_windows
    anew = window and end + 1 - window >= BLOCK
    rows = end - cached * (1 - ratio)
    assert claimed == (0 if anew and rows >= without_windows else without_windows)


@pytest.mark.parametrize(("sizes", "together"), [([32], 32), ([32, 64], 64), ([96, 64], 192)])
def test_hit_of_the_prefix_cache_ends_where_blocks_of_all_groups_do(sizes: list[int], together: int) -> None:
    assert common_block_size([LayerGroup(size) for size in sizes]) == together


def test_groups_of_a_configuration_are_vllms() -> None:
    groups = groups_of_config(KVCacheConfig(8, [], KINDS["some"]))
    assert groups == [
        LayerGroup(BLOCK, WINDOW, frozenset("ab")),
        LayerGroup(BLOCK, 0, frozenset("cd")),
    ]


def test_connector_among_others_leaves_the_groups_as_they_are() -> None:
    def among(settings: Settings) -> bool:
        children = [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, connector_args(settings)]
        extra = {"connectors": children}
        return MultiConnector.all_children_support_hma(
            KVTransferConfig(
                kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
        )

    assert among(Settings.load())
    assert not among(Settings.load(tiers=tree_tiers(disk=1 << 20))), "nodes have blocks of all layers"
