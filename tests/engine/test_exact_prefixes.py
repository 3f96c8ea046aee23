"""Exact prefixes on the run's engine: what is put into the tree, and what comes out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from blendrag import Answer, BlendIndex
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from blendrag.tree import Nodes, path_of
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.store import NodeStore
from blendrag.tree.tree import Tree
from stored_trees import check_tree, tree_tiers
from waiting import until
from workbench import FIRST, Bench, Open, Prompt, assert_adds_up, distance

pytestmark = pytest.mark.engine

DISK = (TierSpec(kind="ram", bytes=1 << 28), TierSpec(kind="disk", bytes=1 << 30))


@dataclass
class Rig:
    """A tree of the test's own on the run's engine."""

    bench: Bench
    root: Path
    identity: KVIdentity
    tree: Tree = field(init=False)
    client: TreeClient = field(init=False)

    def __post_init__(self) -> None:
        self.tree, _ = Tree.open(self.root, self.identity)
        self.client = TreeClient.open(self.bench.engine, self.root, self.identity, DISK)

    def nodes(self, prompt: Prompt) -> Nodes:
        return path_of(self.identity, prompt.token_ids, prompt.spans)

    def path(self, prompt: Prompt, *, kept: bool = True) -> PrefixPath:
        """That of a prompt whose nodes are all wanted."""
        nodes = self.nodes(prompt)
        held = self.tree.match(nodes)
        self.tree.expect(nodes[held:] if kept else (), prompt.token_ids)
        named = tuple((node.key, node.end) for node in nodes)
        return PrefixPath(self.client.id, named, held, len(nodes) if kept else held)

    def ask(self, prompt: Prompt, sampling: Sampling = FIRST, **options: Any) -> Delta:
        """Without what vLLM's prefix cache has."""
        self.bench.reset()
        path = self.path(prompt, **options)
        return self.bench.engine.generate(prompt.token_ids, replace(sampling, path=path))

    def grow(self, prompt: Prompt) -> None:
        self.ask(prompt)
        until(lambda: self.tree.match(self.nodes(prompt)) == len(self.nodes(prompt)))

    def prompt(self, *words: Any) -> Prompt:
        return self.bench.prompt(*words, aligned=False)

    def close(self) -> None:
        self.client.close()
        self.tree.close()


@pytest.fixture
def rig(bench: Bench, identity: KVIdentity, tmp_path: Path) -> Iterator[Rig]:
    blocks = replace(identity, prefix=f"blocks {bench.engine.facts.blocks}")
    opened = Rig(bench, tmp_path / "tree", blocks)
    yield opened
    opened.close()


def test_exact_prefix_gives_the_answer_of_full_prefill(rig: Rig) -> None:
    """Of whole paths and of parts, which end within a block; in several steps, which prompts here take."""
    prompt = rig.prompt(rig.bench.pieces[:6])
    full = rig.bench.plain(prompt)
    rig.grow(prompt)
    longer = Sampling(max_tokens=6, logprobs=20)
    for other in (prompt, rig.prompt(rig.bench.pieces[:6], "\nOn the other hand, they")):
        whole, again = rig.bench.plain(other, longer), rig.ask(other, longer)
        assert again.report and again.report.exact == rig.nodes(other)[-1].end
        assert again.token_ids == whole.token_ids and distance(whole, again) < 1e-3
    part = rig.prompt((*rig.bench.pieces[:3], *rig.bench.pieces[7:9]))
    expected, exact = rig.bench.plain(part), rig.ask(part, kept=False)
    assert exact.report and exact.report.exact == rig.nodes(part)[3].end
    assert rig.nodes(part)[3].end % rig.bench.engine.facts.block_size
    assert distance(expected, exact) < 1e-3
    assert distance(full, rig.ask(prompt)) < 1e-3, "what is restored is not changed by who uses it"


def test_part_that_the_prefix_cache_has_is_left_as_it_is(rig: Rig) -> None:
    """Blocks that other requests use are left as they are; what is missing behind them is loaded."""
    prompt = rig.prompt(rig.bench.pieces[:6])
    rig.grow(prompt)
    full, size = rig.bench.plain(prompt), rig.bench.engine.facts.block_size
    rig.bench.reset()
    rig.bench.engine.generate(prompt.token_ids[: 2 * size + 5], FIRST)
    behind = rig.bench.engine.generate(prompt.token_ids, replace(FIRST, path=rig.path(prompt)))
    assert behind.report and (behind.report.prefix, behind.report.exact) == (
        2 * size,
        rig.nodes(prompt)[-1].end - 2 * size,
    )
    assert distance(full, behind) < 1e-3
    there = rig.bench.engine.generate(prompt.token_ids, replace(FIRST, path=rig.path(prompt)))
    assert distance(full, there) < 1e-3


def test_restored_blocks_are_the_same_bytes(rig: Rig, tmp_path: Path) -> None:
    """Those that a request got from one tree are stored in another one, and compared."""
    prompt, size = rig.prompt(rig.bench.pieces[:6]), rig.bench.engine.facts.block_size
    rig.grow(prompt)
    rig.ask(prompt)
    other = Rig(rig.bench, tmp_path / "other", rig.identity)
    path = other.path(prompt)
    rig.bench.engine.generate(prompt.token_ids, replace(FIRST, path=path))  # behind the restored blocks
    until(lambda: other.tree.match(other.nodes(prompt)) == len(path.nodes))
    rig.client.close()
    other.close()
    compared = 0
    for node in rig.nodes(prompt):
        rows = []
        for root in (rig.root, other.root):
            (file,) = root.rglob(f"{node.key}.safetensors")
            layers, blocks = rig.identity.num_layers, -(-node.end // size) - node.start // size
            kv = 2 * rig.identity.num_kv_heads * rig.identity.head_size * size * 4 * blocks
            rows.append([file.read_bytes()[-(layers - at) * kv :][:kv] for at in range(layers)])
            whole = kv // blocks * (node.end // size - node.start // size)  # behind the end, they are others'
        assert [row[:whole] for row in rows[0]] == [row[:whole] for row in rows[1]]
        compared += whole
    assert compared
    rig.client = TreeClient.open(rig.bench.engine, rig.root, rig.identity, DISK)


@pytest.mark.parametrize("selector", ["hkvd", "query", "first_k"])
def test_mixed_prompt_gives_the_answer_of_full_prefill(rig: Rig, selector: str) -> None:
    """At ratio 1. Tokens of the exact head are neither computed nor repaired; without it, all is blended."""
    pieces = rig.bench.pieces
    prompt = rig.prompt(pieces[:6])
    rig.grow(rig.prompt(pieces[:3]))
    nodes = rig.nodes(prompt)
    head = tuple((node.key, node.end) for node in nodes[:4])
    full = rig.bench.plain(prompt)
    for ratio, bound in ((1.0, 1e-3), (0.15, 2.0)):
        recipe = replace(rig.bench.recipe(prompt, ratio, selector), tree=rig.client.id, head=head)
        rig.bench.reset()
        mixed = rig.bench.engine.generate(prompt.token_ids, FIRST, recipe)
        report = mixed.report
        assert report and not report.fallback and not report.missing
        assert report.prefix == 0 and report.exact == nodes[3].end
        assert report.cached == sum(length for _, _, length in prompt.spans[3:])
        rest = rig.bench.engine.facts.block_size  # where documents end
        assert report.recomputed <= ratio * report.cached + 3 + rest, "rounded up, in each chunk"
        assert distance(full, mixed) < bound
    rig.client.delete(rig.tree.withdraw(nodes))
    rig.bench.reset()
    recipe = replace(rig.bench.recipe(prompt, 1.0, selector), tree=rig.client.id, head=head)
    alone = rig.bench.engine.generate(prompt.token_ids, FIRST, recipe)
    assert alone.report and alone.report.exact == 0 and not alone.report.fallback
    assert distance(full, alone) < 2e-3
    assert not rig.tree.rows(), "nothing that was blended is stored"


def test_damaged_node_gives_full_prefills_answer_and_what_stood_behind_it_goes(rig: Rig) -> None:
    prompt = rig.prompt(rig.bench.pieces[:6])
    full = rig.bench.plain(prompt)
    rig.grow(rig.prompt(rig.bench.pieces[:4]))
    rig.client.close()
    rig.client = TreeClient.open(rig.bench.engine, rig.root, rig.identity, DISK)  # nothing in RAM
    (file,) = rig.root.rglob(f"{rig.nodes(prompt)[2].key}.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    answer = rig.ask(prompt)
    assert answer.report and answer.report.fallback and answer.token_ids == full.token_ids
    assert distance(full, answer) < 1e-3
    rig.bench.reset()
    assert rig.tree.match(rig.nodes(prompt)) == 2 and not rig.tree.rows()[-1].stored
    assert distance(full, rig.ask(prompt)) < 1e-3, "the nodes before it are still good"


def test_cancelled_request_gives_its_blocks_back(rig: Rig) -> None:
    prompt = rig.prompt(rig.bench.pieces[:6])
    rig.grow(prompt)
    for seen in range(3):
        rig.bench.reset()
        sampling = Sampling(max_tokens=50, path=rig.path(prompt))
        pieces = rig.bench.engine.stream(prompt.token_ids, sampling)
        for _ in range(seen):
            next(pieces)
        pieces.close()
    rig.bench.reset()


def test_many_at_once_get_the_answers_of_one_by_one(rig: Rig) -> None:
    """Some of which store nodes that others load, or compute too; exact, plain, mixed and blended."""
    import asyncio

    pieces, three = rig.bench.pieces, Sampling(max_tokens=3)
    prompts = [rig.prompt((*pieces[: at % 4 + 1], pieces[4 + at % 3])) for at in range(12)]
    first = rig.prompt(pieces[10:12])
    rig.grow(first)
    head = tuple((node.key, node.end) for node in rig.nodes(first))
    others = [(*pieces[10:12], pieces[at]) for at in (4, 5, 6)], [pieces[at : at + 3] for at in (13, 14, 15)]
    blends: list[tuple[Prompt, Recipe]] = []
    for given, kind in zip(((rig.client.id, head), ("", ())), others, strict=True):
        for prompt in map(rig.prompt, kind):
            recipe = rig.bench.recipe(prompt)
            blends.append((prompt, replace(recipe, tree=given[0], head=given[1])))
    expected = [rig.bench.plain(prompt, three).token_ids for prompt in prompts]
    rig.bench.reset()
    for prompt, recipe in blends:
        alone = rig.bench.engine.generate(prompt.token_ids, three, recipe)
        assert alone.report and bool(alone.report.exact) == bool(recipe.head) and alone.report.cached
        expected.append(alone.token_ids)

    async def ask(prompt: Prompt) -> Delta:
        sampling = replace(three, path=rig.path(prompt))
        return await rig.bench.engine.agenerate(prompt.token_ids, sampling)

    async def all_of_them() -> Sequence[Delta]:
        blended = [rig.bench.engine.agenerate(prompt.token_ids, three, recipe) for prompt, recipe in blends]
        return await asyncio.gather(*map(ask, prompts), *blended)

    for _ in range(2):
        rig.bench.reset()
        answers = asyncio.run(all_of_them())
        assert [answer.token_ids for answer in answers] == expected
        assert [bool(answer.report and answer.report.exact) for answer in answers[12:]] == [True] * 3 + [
            False
        ] * 3
    rig.client.close()
    store = NodeStore.open(rig.root, rig.identity, "float32", DISK, _blocks(rig))
    check_tree(store)
    store.close()
    rig.client = TreeClient.open(rig.bench.engine, rig.root, rig.identity, DISK)


def _blocks(rig: Rig) -> NodeBlocks:
    size, identity = rig.bench.engine.facts.block_size, rig.identity
    return NodeBlocks(size, 2 * identity.num_kv_heads * identity.head_size * size * 4)


# -- over an index ----------------------------------------------------------------------------------------


def ask(index: BlendIndex, question: str, **options: Any) -> Answer:
    index.start().reset_prefix_cache()
    return index.ask(question, **options)


def settled(index: BlendIndex) -> None:
    """Nothing grows any more, and everything is stored."""
    prefixes = index._library.sidecars.prefixes
    assert prefixes is not None
    until(lambda: not prefixes.growth.waiting)
    prefixes.client.delete([])  # waits for what is being stored


def test_prompt_that_comes_again_is_answered_from_its_exact_prefix(open_index: Open, folder: Path) -> None:
    """Its prefix grows beside answers, from the second sighting on; nothing that was blended is in it."""
    index = open_index(tiers=tree_tiers(1 << 28))
    index.ingest(folder)
    question = "What does the package do?"
    modes, expected = [], ask(index, question, blend=False, max_tokens=8)
    for _ in range(3):
        answer = ask(index, question, max_tokens=8)
        modes.append(answer.evidence.mode)
        settled(index)
    assert expected.evidence.mode == "plain" and modes == ["blended", "exact", "exact"]
    assert answer.text == expected.text
    evidence = answer.evidence
    assert 0 < evidence.exact == evidence.reused and not evidence.recomputed and evidence.plain is None
    assert evidence.reused + evidence.fresh + evidence.prefix == evidence.prompt
    assert index.stats()["tree"]["nodes"] == 5


def test_prompt_that_begins_as_an_earlier_one_is_exact_at_its_beginning(
    open_index: Open, folder: Path
) -> None:
    index = open_index(tiers=tree_tiers(1 << 28))
    index.ingest(folder)
    texts = [hit.text for hit in index.retrieve("packages", 6)]

    def about(count: int) -> Answer:
        content = "\n\n".join([*texts[:count], "What is this?"])
        return ask(index, [{"role": "user", "content": content}])  # type: ignore[arg-type]

    for _ in range(2):
        first = about(3)
        settled(index)
    answer = about(6)
    modes = [one.evidence.mode for one in (first, answer, about(3))]
    assert modes == ["blended", "mixed", "exact"]
    assert 0 < answer.evidence.exact < answer.evidence.reused
    assert_adds_up(answer)


def test_documents_whose_prefix_is_stored_come_first(open_index: Open, folder: Path) -> None:
    index = open_index(tiers=tree_tiers(1 << 28), order="tree")
    index.ingest(folder)
    question = "What does the package do?"
    texts = [hit.text for hit in index.retrieve(question)]
    places = list(range(len(texts)))
    assert index._chat.order(["unknown", *texts]) == [0, *(1 + place for place in places)]
    for _ in range(2):
        ask(index, question)
        settled(index)
    assert index._chat.order(["unknown", *texts[::-1]]) == [*(1 + place for place in places[::-1]), 0]
    hits = index.retrieve(question)
    index.retrieve = lambda *_: hits[::-1]  # type: ignore[method-assign]
    assert ask(index, question).evidence.mode == "exact"


def test_deleted_document_is_in_no_prefix_and_no_other_namespace_has_it(
    open_index: Open, folder: Path
) -> None:
    index = open_index(tiers=tree_tiers(1 << 28))
    index.ingest(folder)
    question, mode = "What does the package do?", ""
    for _ in range(3):
        mode = ask(index, question, blend=False).evidence.mode
        settled(index)
    assert mode == "exact"
    prefixes = index._library.sidecars.prefixes
    assert prefixes is not None
    before = {row.node.document for row in prefixes.tree.rows()}
    (source,) = {hit.source for hit in index.retrieve(question)[:1]}
    index.delete(source)
    left = prefixes.tree.rows()
    assert len(left) < 5 and {row.node.document for row in left} < before
    assert prefixes.client.stats()["tree ram"]["chunks"] == len(left)
    assert ask(index, question, blend=False, max_tokens=8).evidence.mode == "plain"
    other = open_index("other", tiers=tree_tiers(1 << 28), namespace="other")
    other.ingest(folder)
    assert ask(other, question, blend=False).evidence.mode == "plain"


@pytest.mark.parametrize("way", ["replace", "purge"])
def test_document_that_was_replaced_or_purged_is_in_no_prefix(
    open_index: Open, folder: Path, tmp_path: Path, way: str
) -> None:
    index = open_index(tiers=tree_tiers(1 << 28, 1 << 28))
    index.ingest(folder)
    question = "What does the package do?"
    for _ in range(3):
        mode = ask(index, question, blend=False).evidence.mode
        settled(index)
    assert mode == "exact"
    prefixes, source = index._library.sidecars.prefixes, index.retrieve(question)[0].source
    assert prefixes is not None
    before = {row.node.document for row in prefixes.tree.rows()}
    if way == "purge":
        index.purge(source)
    else:
        Path(source).write_text("Nothing of what was here.")
        index.ingest(folder)
    left = prefixes.tree.rows()
    known = index._library.catalogue.known()
    assert {row.node.document for row in left} - {""} <= before & known < before
    found = prefixes.client.stats()
    assert found["tree ram"]["chunks"] == found["tree disk"]["chunks"] == len(left)
    files = {file.stem for file in (index.root / "tree").rglob("*.safetensors")}
    assert files == {row.node.key for row in left}
    assert ask(index, question, blend=False, max_tokens=8).evidence.mode == "plain"


def test_other_system_prompt_has_no_common_prefix(open_index: Open, folder: Path) -> None:
    index = open_index(tiers=tree_tiers(1 << 28))
    index.ingest(folder)
    for _ in range(3):
        texts = [hit.text for hit in index.retrieve("packages")]
        content = "\n\n".join([*texts, "What is this?"])
        mode = ask(index, [{"role": "user", "content": content}], blend=False).evidence.mode  # type: ignore[arg-type]
        settled(index)
    assert mode == "exact"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert ask(index, said, blend=False).evidence.mode == "plain"  # type: ignore[arg-type]


def test_question_that_was_warmed_up_is_exact(
    open_index: Open, folder: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    """And what is on disk is not there when the index is opened again."""
    index, tiers = tmp_path / "index", json.dumps(tree_tiers(disk=1 << 28))
    question = "What does the package do?"
    (tmp_path / "questions.txt").write_text(f"{question}\n\n")
    small = {"chunk_tokens": "64", "min_cached_tokens": "16", "similarity_top_k": "4"}
    small = {f"BLENDRAG_{name.upper()}": value for name, value in small.items()}
    command("ingest", str(folder), "--index", str(index), **small)
    words = ("ingest", "--index", str(index), "--questions", str(tmp_path / "questions.txt"))
    warmed = command(*words, BLENDRAG_TIERS=tiers, **small)
    assert "5 nodes grown" in warmed.stdout
    assert "5 nodes" in command("stats", "--tree", "--index", str(index)).stdout
    opened = open_index(tiers=tree_tiers(disk=1 << 28))
    assert ask(opened, question).evidence.mode == "exact"


def test_new_questions_keep_to_the_limits_of_the_tree_and_leave_what_is_asked(
    open_index: Open, folder: Path
) -> None:
    """Turnovers of orders of documents, of which one comes again and again."""
    import itertools

    index = open_index(tiers=tree_tiers(40 << 20))
    index.ingest(folder)
    texts, prefixes = [hit.text for hit in index.retrieve("packages", 4)], index._library.sidecars.prefixes
    assert prefixes is not None

    def about(order: Sequence[int]) -> str:
        content = "\n\n".join([*(texts[at] for at in order), "What is this?"])
        said: Any = [{"role": "user", "content": content}]
        return ask(index, said, blend=False, max_tokens=1).evidence.mode

    modes = []
    for order in itertools.permutations(range(4), 3):
        modes.append(about((0, 1, 2, 3)))
        for _ in range(2):
            about(order)
        settled(index)
        assert prefixes.client.stats()["tree ram"]["bytes"] <= 40 << 20
    assert prefixes.client.stats()["tree ram"]["evictions"]
    assert modes.count("exact") >= len(modes) - 4, modes
