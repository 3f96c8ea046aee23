"""States of hybrid models: which blocks they are in, and their way into the tree and back. No engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from blendrag.control.guard import LoadGuard
from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.compat.states import HybridLayers, StateBlocks, StateGroups
from blendrag.engine.forward.blocks import KVBlocks
from blendrag.engine.hooks import Asked, Orders
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes
from blendrag.engine.prefixes.prefix_claims import PrefixClaims
from blendrag.engine.wire.prefixes import NodeLoad, NodeSave, PrefixPath
from blendrag.store.identity import KVIdentity
from blendrag.tree.states import StateTree
from blendrag.tree.store import NodeMissingError
from connector_halves import asked

IDENTITY = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=1, num_kv_heads=1, head_size=2)
BLOCK, BLOCKS, PARTS = 8, 12, 2
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=BLOCK, shapes=((3, 5), (2, 4)), dtypes=(torch.bfloat16, torch.float32))
# As prefix caching has it, beside drafts of two tokens.
DRAFTED = replace(STATE, mamba_cache_mode="align", num_speculative_blocks=2)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.bfloat16, sliding_window=4
)


def config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(BLOCKS, [], groups)


def made() -> tuple[Any, Any]:
    """vLLM's configuration and runner of a model with a state in two layers, and KV in the third, whose
    backend has two blocks of its own in each; as in vLLM, the parts of a state lie in one page."""
    layers: dict[str, Any] = {}
    for number in (0, 2):
        pages = torch.randint(256, (BLOCKS, 96), dtype=torch.uint8)
        conv = pages[:, :30].view(torch.bfloat16).view(BLOCKS, 3, 5)
        layers[f"layer {number}"] = SimpleNamespace(
            kv_cache=[conv, pages[:, 32:64].view(torch.float32).view(BLOCKS, 2, 4)]
        )
    kv = torch.randn(PARTS * BLOCKS, 1, BLOCK // PARTS, 4).to(torch.bfloat16)
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layers["layer 1"] = SimpleNamespace(kv_cache=kv, attn_backend=backend)
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        parallel_config=ParallelConfig(),
    )
    return vllm_config, SimpleNamespace(kv_cache_config=config(STATE, FULL, STATE))


def bits(layers: dict[str, Any], name: str, block: int) -> list[bytes]:
    return [part[block].contiguous().view(torch.uint8).numpy().tobytes() for part in layers[name].kv_cache]


def test_groups_of_a_hybrid_are_told_apart() -> None:
    assert StateGroups.of(config(STATE, FULL, STATE)) == StateGroups(1, ((0, BLOCK), (2, BLOCK)))
    assert StateGroups.of(config(FULL, DRAFTED)) == StateGroups(0, ((1, BLOCK),))
    for others in (
        (FULL,),
        (FULL, FULL, STATE),
        (FULL, WINDOW),
        (STATE,),
        (FULL, WINDOW, STATE),
        (FULL, replace(STATE, mamba_cache_mode="all")),
    ):
        assert StateGroups.of(config(*others)) is None


def test_state_of_all_layers_goes_into_other_blocks_bit_for_bit() -> None:
    vllm_config, runner = made()
    layers = vllm_config.compilation_config.static_forward_context
    found = HybridLayers.of(vllm_config, runner)
    assert found is not None and found.state_bytes == 2 * (30 + 32)
    expected = [bits(layers, "layer 0", 3), bits(layers, "layer 2", 5)]
    before = bits(layers, "layer 0", 5)
    found.write_state([7, 9], found.read_state([3, 5]))
    assert [bits(layers, "layer 0", 7), bits(layers, "layer 2", 9)] == expected
    assert bits(layers, "layer 0", 5) == before


def test_model_whose_groups_are_of_other_kinds_has_no_states() -> None:
    vllm_config, _ = made()
    assert HybridLayers.of(vllm_config, SimpleNamespace(kv_cache_config=config(FULL))) is None
    assert HybridLayers.of(vllm_config, SimpleNamespace()) is None


def test_state_is_the_same_however_layers_are_grouped() -> None:
    vllm_config, runner = made()
    other = SimpleNamespace(kv_cache_config=config(STATE, FULL, STATE))
    other.kv_cache_config.kv_cache_groups.reverse()
    one, two = HybridLayers.of(vllm_config, runner), HybridLayers.of(vllm_config, other)
    assert one is not None and two is not None and one.format == two.format
    assert torch.equal(one.read_state([3, 5]), two.read_state([5, 3]))


def test_worker_that_has_only_a_part_of_the_layers_keeps_none() -> None:
    """Those of another one's would have the same names."""
    vllm_config, runner = made()
    vllm_config.parallel_config.pipeline_parallel_size = 2
    assert HybridLayers.of(vllm_config, runner) is None


# -- the worker's half ------------------------------------------------------------------------------------


@dataclass
class Rig:
    prefixes: ExactPrefixes
    tree: StateTree
    layers: dict[str, Any]

    def save(self, ids: tuple[int, ...], blocks: list[int], states: list[int]) -> PrefixPath:
        """Keep all of a prompt, which is one document."""
        nodes = self.tree.path(ids, [("d", 0, len(ids))])
        coming = self.tree.next(nodes, 0, ids)
        self.tree.expect(coming.new, ids)
        root, (key, end) = next(iter(self.prefixes._trees)), coming.named[0]
        kv = NodeSave("r", root, key, "", 0, ids, blocks)
        self.prefixes.save([kv, NodeSave("r", root, coming.kept_state, key, end, ids, states)], set())
        self.prefixes._writer.submit(lambda: None).result()
        return PrefixPath(root, coming.named, 1, 1, state=coming.kept_state)

    def load(self, path: PrefixPath, ids: tuple[int, ...], blocks: list[int], states: list[int]) -> None:
        order = NodeLoad("r", "t", path.tree, path.nodes, ids, blocks, 0, True, path.state, states)
        report = self.prefixes.load(order)
        assert report is not None and report.exact == len(ids)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with opened() as one:
        yield one


@contextmanager
def opened() -> Iterator[Rig]:
    vllm_config, runner = made()
    layers = HybridLayers.of(vllm_config, runner)
    assert layers is not None
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as writer:
        tree, _ = StateTree.open(Path(folder), IDENTITY)
        prefixes = ExactPrefixes(KVBlocks(layers.attentions, BLOCK, layers), "bfloat16", writer, LoadGuard())
        prefixes.open(folder, asdict(IDENTITY), [{"kind": "ram", "bytes": 1 << 20}])
        yield Rig(prefixes, tree, vllm_config.compilation_config.static_forward_context)
        prefixes.close()
        tree.close()


def test_prompt_is_restored_with_its_state(rig: Rig) -> None:
    ids = tuple(range(100, 119))
    cache = rig.layers["layer 1"].kv_cache
    path = rig.save(ids, [4, 2, 6], [3, 5])
    assert rig.tree.match(rig.tree.path(ids, [("d", 0, len(ids))])) == 1
    expected = cache.view(BLOCKS, PARTS, BLOCK // PARTS, 4)[[4, 2, 6]].clone()
    states = bits(rig.layers, "layer 0", 3), bits(rig.layers, "layer 2", 5)
    rig.load(path, ids, [8, 9, 10], [11, 1])
    assert torch.equal(cache.view(BLOCKS, PARTS, BLOCK // PARTS, 4)[[8, 9, 10]], expected)
    assert (bits(rig.layers, "layer 0", 11), bits(rig.layers, "layer 2", 1)) == states


def test_state_without_a_block_is_neither_stored_nor_loaded(rig: Rig) -> None:
    ids = tuple(range(100, 119))
    nodes = rig.tree.path(ids, [("d", 0, len(ids))])
    rig.save(ids, [4, 2, 6], [3, 0])
    assert rig.tree.match(nodes) == 0
    rig.prefixes.ended(["r"])
    path = rig.save((*ids, 1), [4, 2, 6], [3, 5])
    before = rig.layers["layer 1"].kv_cache.clone()
    with pytest.raises(NodeMissingError, match="no block"):
        rig.load(path, (*ids, 1), [8, 9, 10], [11, 0])
    assert torch.equal(rig.layers["layer 1"].kv_cache, before)


def test_prompt_whose_state_has_gone_is_not_restored_in_part(rig: Rig) -> None:
    ids = tuple(range(100, 119))
    path = rig.save(ids, [4, 2, 6], [3, 5])
    rig.prefixes._trees[path.tree].delete([path.state])
    before = rig.layers["layer 1"].kv_cache.clone()
    with pytest.raises(NodeMissingError, match="missing"):
        rig.load(path, ids, [8, 9, 10], [11, 1])
    assert torch.equal(rig.layers["layer 1"].kv_cache, before)


@pytest.mark.parametrize("loaded", [0, 17, 24])
def test_state_of_a_prompt_whose_answer_is_drafted_has_a_block_of_its_own(loaded: int) -> None:
    """In vLLM's own manager: behind what is loaded, and behind each step of the prefill."""
    kept = replace(config(FULL, DRAFTED), num_blocks=40)
    manager = KVCacheManager(kept, 4096, BLOCK, BLOCK, use_eagle=True)
    blocks = StateBlocks(StateGroups(0, ((1, BLOCK),)), manager)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    asked = Request("r", list(range(60)), SamplingParams(), None, block_hasher=hasher)
    before = 0
    if loaded:
        manager.allocate_slots(asked, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True)
        (before,) = blocks.states("r", loaded)
        assert before
    asked.num_computed_tokens = loaded
    for reached in (33, 40, 60):
        assert manager.allocate_slots(asked, reached - asked.num_computed_tokens, num_lookahead_tokens=2)
        if loaded:
            assert before in manager.get_block_ids("r")[1], "vLLM copies it from there"
        (found,) = blocks.states("r", reached)
        assert found and manager.get_block_ids("r")[1].count(found) == 1
        asked.num_computed_tokens, before, loaded = reached, found, reached


# -- the scheduler's half ---------------------------------------------------------------------------------

HELD = {"r": ([1, 2, 3], [0, 0, 7], [0, 8, 9])}


def claims() -> PrefixClaims:
    manager = SimpleNamespace(get_block_ids=HELD.__getitem__)
    return PrefixClaims(1, StateBlocks(StateGroups(0, ((1, BLOCK), (2, BLOCK))), manager))


def request(path: PrefixPath, tokens: int) -> Asked:
    return asked(path.transfer_params("ticket"), tokens)


def orders(one: PrefixClaims, tokens: int = 0) -> Orders:
    return one.orders(SchedulerStep(SimpleNamespace(num_scheduled_tokens={"r": tokens})))


@pytest.mark.parametrize(
    ("state", "tokens", "computed", "claimed"),
    [("s", 30, 0, 20), ("s", 30, 8, 12), ("", 30, 0, 0), ("s", 20, 0, 0), ("s", 30, 24, 0)],
    ids=["all", "behind a hit", "no state", "nothing behind it", "behind a longer hit"],
)
def test_only_tokens_up_to_a_state_are_claimed(state: str, tokens: int, computed: int, claimed: int) -> None:
    one, known = claims(), request(PrefixPath("t", (("n", 20),), 1, 1, state=state), tokens)
    assert one.claim(known, computed) == claimed
    one.allocated(known, HELD["r"], claimed)
    (load,) = orders(one).claims
    assert load.state == state and load.state_blocks == ([7, 9] if claimed else [])
    assert not claimed or (load.written == computed and list(load.token_ids) == list(range(20)))


@pytest.mark.parametrize("reached", [19, 20, 21])
def test_state_is_stored_by_the_step_that_ends_at_its_token(reached: int) -> None:
    one, known = claims(), request(PrefixPath("t", (("n", 20),), 0, 1, grows=True, kept_state="s"), 21)
    one.allocated(known, HELD["r"], 0)
    saves = orders(one, reached).others
    expected = [] if reached < 20 else [("n", "", 0, [1, 2, 3])]
    expected += [("s", "n", 20, [7, 9])] if reached == 20 else []
    assert [(save.key, save.parent, save.start, save.block_ids) for save in saves] == expected
