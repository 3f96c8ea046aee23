"""Nodes between a request's blocks and the tree, over a real store and a small cache. No engine."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.control.guard import LoadGuard
from blendrag.engine.compat.drafts import drafting_model
from blendrag.engine.compat.groups import LayerGroup
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.hooks import Orders, Step
from blendrag.engine.prefixes import exact_prefixes
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes, behind
from blendrag.engine.wire.prefixes import NodeLoad, NodeSave
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.store.identity import KVIdentity
from blendrag.tree import Nodes, path_of
from blendrag.tree.store import NodeMissingError
from blendrag.tree.tree import Tree

IDENTITY = KVIdentity("tiny", "weights-1", "float32", num_layers=2, num_kv_heads=1, head_size=2)
BLOCK, BLOCKS = 4, 40
STACK = [{"kind": "ram", "bytes": 1 << 22}]


def make_cache(dtype: torch.dtype = torch.float32, blocks: int = BLOCKS) -> PagedCache:
    """[blocks, block_size, 4] in each of two layers; the second lies otherwise in memory."""
    one = torch.randn(blocks, BLOCK, 4).to(dtype)
    other = torch.randn(BLOCK, 4, blocks).to(dtype).permute(2, 0, 1)
    return PagedCache(
        [SimpleNamespace(kv_cache=one), SimpleNamespace(kv_cache=other)], None, [LayerGroup(BLOCK)]
    )


def tokens_of(cache: PagedCache, blocks: Sequence[int], count: int) -> list[torch.Tensor]:
    """What the cache has of a request's first tokens, by layer: [count, 4]."""
    return [one.kv_cache[list(blocks)].reshape(-1, 4)[:count] for one in cache.attentions]


@contextmanager
def opened(cache: PagedCache) -> Iterator[tuple[ExactPrefixes, Tree]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as writer:
        tree, _ = Tree.open(Path(folder), IDENTITY)
        prefixes = ExactPrefixes(cache, "float32", writer, LoadGuard())
        assert prefixes.open(folder, asdict(IDENTITY), STACK) == folder
        yield prefixes, tree
        prefixes.close()
        tree.close()


def save(
    prefixes: ExactPrefixes, tree: Tree, nodes: Nodes, ids: Sequence[int], blocks: Sequence[int], **at: Any
) -> None:
    tree.expect(nodes, ids)
    root = next(iter(prefixes._trees))
    orders = [
        NodeSave("r", root, node.key, node.parent, node.start, ids[: node.end], blocks) for node in nodes
    ]
    prefixes.save(orders, at.get("failed", set()))
    prefixes._writer.submit(lambda: None).result()


def load(
    prefixes: ExactPrefixes,
    nodes: Nodes,
    ids: Sequence[int],
    blocks: Sequence[int],
    written: int,
    *,
    use: bool = True,
) -> BlendReport | None:
    named = tuple((node.key, node.end) for node in nodes)
    root = next(iter(prefixes._trees))
    wanted = list(ids[: nodes[-1].end])
    return prefixes.load(NodeLoad("r", "t", root, named, wanted, blocks, written, use=use))


@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=5),
    start=st.integers(0, 5),
    written=st.integers(0, 5),
    numbers=st.permutations(range(BLOCKS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_restored_and_no_other_requests_block_is_touched(
    lengths: list[int], start: int, written: int, numbers: list[int], dtype: torch.dtype
) -> None:
    """Wherever nodes end, whatever the prefix cache has, whichever blocks there are."""
    cache = make_cache(dtype)
    documents, at = [], start
    for number, length in enumerate(lengths):
        documents.append((f"d{number}", at, length))
        at += length
    ids = tuple(range(at + 3))
    nodes, count = path_of(IDENTITY, ids, documents), -(-len(ids) // BLOCK)
    one, other = numbers[:count], numbers[count : 2 * count]
    with opened(cache) as (prefixes, tree):
        save(prefixes, tree, nodes, ids, one)
        assert tree.match(nodes) == len(nodes)
        expected = [layer.clone() for layer in tokens_of(cache, one, at)]
        written = min(written * BLOCK, at - 1)
        before = [one.kv_cache.clone() for one in cache.attentions]
        report = load(prefixes, nodes, ids, other, written)
        assert report is not None and (report.prefix, report.exact) == (written, at - written)
        first = written // BLOCK
        for layer, (now, was) in enumerate(zip(cache.attentions, before, strict=True)):
            kept = [block for block in range(BLOCKS) if block not in other[first:]]
            assert torch.equal(now.kv_cache[kept], was[kept])
            restored = tokens_of(cache, other, at)[layer][first * BLOCK :]
            assert torch.equal(restored, expected[layer][first * BLOCK :])


def path(*lengths: int) -> tuple[tuple[int, ...], Nodes]:
    documents, at = [], 2
    for number, length in enumerate(lengths):
        documents.append((f"d{number}", at, length))
        at += length
    ids = tuple(range(at + 3))
    return ids, path_of(IDENTITY, ids, documents)


def test_path_that_is_sooner_prefilled_than_loaded_is_left_to_the_engine() -> None:
    ids, nodes = path(200, 198)
    cache = make_cache(blocks=210)
    one, other = list(range(101)), list(range(101, 202))
    with opened(cache) as (prefixes, tree):
        save(prefixes, tree, nodes, ids, one)
        before = [layer.kv_cache.clone() for layer in cache.attentions]
        for _ in range(3):
            assert load(prefixes, nodes, ids, other, 0) is not None
        prefixes._guard.prefilled(400, 1e-9)
        named = tuple((node.key, node.end) for node in nodes)
        order = NodeLoad("r", "t", next(iter(prefixes._trees)), named, ids[:400], list(range(101)), 8)
        [(_, report)] = prefixes.bring(Step({"prefixes": Orders([order])}))
        assert isinstance(report, BlendReport) and (report.cause, report.prefix) == ("loading", 8)
        assert "398 tokens from tree ram" in str(report.fallback)
        for layer, was in zip(cache.attentions, before, strict=True):
            assert torch.equal(layer.kv_cache[one], was[one]), "nothing was written"
        behind = BlendOrder("r", "t", [*ids], one, 8, Recipe("", (), head=named, tree=order.tree))
        assert prefixes.put_head(behind) == (behind, None), "the rest of the prompt is blended"


def test_cache_whose_heads_lie_behind_its_tokens_is_restored() -> None:
    """As vLLM's do on GPUs: [blocks, heads, tokens, size], a token's heads side by side in memory."""
    layers = [torch.randn(BLOCKS, BLOCK, 2, 2).permute(0, 2, 1, 3) for _ in range(2)]
    cache = PagedCache([SimpleNamespace(kv_cache=layer) for layer in layers], None, [LayerGroup(BLOCK)])
    rows = cache.read_blocks([3, 1])
    before = [layer[[3, 1]].clone() for layer in layers]
    cache.write_blocks([7, 8], rows)
    assert all(torch.equal(layer[[7, 8]], was) for layer, was in zip(layers, before, strict=True))


def test_request_with_a_block_that_failed_to_load_leaves_no_node_in_that_step() -> None:
    ids, nodes = path(6, 6)
    blocks = list(range(5))
    with opened(make_cache()) as (prefixes, tree):
        save(prefixes, tree, nodes[:1], ids, blocks, failed={4})  # behind the root: of no matter to it
        assert tree.match(nodes) == 1
        save(prefixes, tree, nodes[1:2], ids, blocks, failed={1})
        save(prefixes, tree, nodes[1:], ids, blocks)
        assert tree.match(nodes) == 1
        prefixes.ended(["r"])
        save(prefixes, tree, nodes[1:], ids, blocks)
        assert tree.match(nodes) == 3


def test_nodes_that_wait_for_a_slow_disk_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are."""
    ids, nodes = path(6, 6, 6, 6)
    cache, slow = make_cache(), threading.Event()
    monkeypatch.setattr(exact_prefixes, "_MOST_WAITING", 5 * 2 * cache.block_bytes)
    with opened(cache) as (prefixes, tree):
        root = next(iter(prefixes._trees))
        prefixes._writer.submit(slow.wait)
        orders = [
            NodeSave("r", root, node.key, node.parent, node.start, ids[: node.end], list(range(7)))
            for node in nodes
        ]
        tree.expect(nodes, ids)
        prefixes.save(orders, set())
        slow.set()
        prefixes._writer.submit(lambda: None).result()
        assert tree.match(nodes) == 3, "of one block and two of two: full"
        prefixes.save(orders[3:], set())
        prefixes._writer.submit(lambda: None).result()
        assert tree.match(nodes) == 5, "what was waiting is stored"


def test_block_that_is_not_there_yet_is_not_written() -> None:
    """Of the last token, which is not claimed with the others."""
    ids, nodes = path(7)  # ends at 9, with one token in its third block
    cache = make_cache()
    with opened(cache) as (prefixes, tree):
        save(prefixes, tree, nodes[:2], ids, [0, 1, 2])
        expected = tokens_of(cache, [0, 1], 8)
        assert load(prefixes, nodes[:2], ids, [10, 11], 0) is not None
        assert all(map(torch.equal, tokens_of(cache, [10, 11], 8), expected))


def test_half_of_a_prefix_is_not_put_into_blocks() -> None:
    """A node is missing: nothing is touched, and the request is told."""
    ids, nodes = path(6, 6)
    cache = make_cache()
    with opened(cache) as (prefixes, tree):
        save(prefixes, tree, nodes[:2], ids, list(range(5)))
        before = [one.kv_cache.clone() for one in cache.attentions]
        with pytest.raises(NodeMissingError):
            load(prefixes, nodes, ids, list(range(10, 15)), 0)
        assert all(torch.equal(now.kv_cache, was) for now, was in zip(cache.attentions, before, strict=True))


def test_node_that_growth_loads_does_not_count_as_used() -> None:
    """Wholly, and in a part that the prefix cache has."""
    ids, nodes = path(6, 6)
    with opened(make_cache()) as (prefixes, tree):
        save(prefixes, tree, nodes, ids, list(range(5)))
        for use, uses in ((False, [0, 0, 0]), (True, [2, 2, 2])):
            for written in (0, 8):
                load(prefixes, nodes, ids, list(range(10, 15)), written, use=use)
            next(iter(prefixes._trees.values())).kv._usage.flush()
            assert [row.uses for row in tree.rows()] == uses


def test_use_of_a_tree_that_was_closed_is_reported_only_where_a_request_waits() -> None:
    """Else vLLM ends the engine."""
    with opened(make_cache()) as (prefixes, _):
        order = NodeLoad("r", "t", "closed", (("node", 8),), [], [1, 2], 8)
        assert prefixes.load(order) is None
        with pytest.raises(KeyError):
            prefixes.load(replace(order, token_ids=list(range(8))))


def test_head_that_is_gone_does_not_fail_a_blend() -> None:
    ids, nodes = path(6, 6)
    with opened(make_cache()) as (prefixes, tree):
        save(prefixes, tree, nodes[:2], ids, list(range(5)))
        root = next(iter(prefixes._trees))
        head = tuple((node.key, node.end) for node in nodes[:2])
        for recipe, written, there in (
            (Recipe("s", (("d1", 8, 6),), tree=root, head=head), 0, 8),
            (Recipe("s", (("d1", 8, 6),), tree=root, head=head), 8, None),  # the prefix cache has it
            (Recipe("s", (("d1", 8, 6),), tree=root, head=((head[0]), ("other", 8))), 0, None),
            (Recipe("s", (("d1", 8, 6),), tree="closed", head=head), 0, None),
            (Recipe("s", (("d1", 8, 6),)), 0, None),
        ):
            order = BlendOrder("r", "t", list(ids), [20, 21, 22, 23, 24], written, recipe)
            left, report = prefixes.put_head(order)
            assert left.written == (there or written)
            assert (report and report.exact) == there


def test_mixed_report_counts_the_head_as_exact() -> None:
    head = BlendReport(prefix=4, exact=20, tiers={"tree ram": 2}, ms={"load": 1.0})
    blend = BlendReport(prefix=24, cached=30, tiers={"ram": 1}, ms={"load": 2.0, "select": 3.0})
    both = behind(head, blend)
    assert (both.prefix, both.exact, both.cached) == (4, 20, 30)
    assert both.tiers == {"tree ram": 2, "ram": 1} and both.ms == {"load": 3.0, "select": 3.0}


@pytest.mark.parametrize(
    ("drafts", "found"),
    [
        (None, None),
        (SimpleNamespace(draft_model_config=None), None),
        (SimpleNamespace(draft_model_config=SimpleNamespace(model="target")), None),
        (SimpleNamespace(draft_model_config=SimpleNamespace(model="head")), Path("head")),
    ],
    ids=["none", "by a text's own words", "heads beside the weights", "another model"],
)
def test_model_that_drafts_is_told_from_heads_that_are_the_models_own(drafts: Any, found: Any) -> None:
    """Its KV is in the blocks, too: another one's is not taken for it."""
    target = SimpleNamespace(model="target")
    assert drafting_model(SimpleNamespace(model_config=target, speculative_config=drafts)) == found
