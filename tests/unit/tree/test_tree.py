from __future__ import annotations

import errno
import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.errors import StoreError
from blendrag.eviction import POLICIES
from blendrag.eviction.gdsf import GDSF
from blendrag.files import sqlite as files
from blendrag.store import catalogue_file
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.local import LocalTier
from blendrag.tree.layout import NodeLayout
from blendrag.tree.path import Node, path_of, place, placed
from blendrag.tree.store import NodeMissingError, NodeStore, StoredNode
from blendrag.tree.tree import Tree
from closed import flip
from stored_trees import ROOT, TreeRig, check_tree, prompt
from stores import IDENTITY


def path(
    names: Sequence[str], identity: KVIdentity = IDENTITY, root: tuple[int, ...] = ROOT
) -> tuple[Node, ...]:
    return path_of(identity, *prompt(names, root))


class Rig(TreeRig):
    def grow(self, names: Sequence[str], root: tuple[int, ...] = ROOT, *, again: bool = False) -> None:
        """A prompt leaves its nodes behind; again: also those that are there."""
        ids, nodes = prompt(names, root)[0], path(names, root=root)
        held = 0 if again else self.tree.match(nodes)
        self.tree.expect(nodes[held:], ids)
        for node in nodes[held:]:
            rows = self.rows.get(node.key, self.some_rows(node.start, node.end))
            if self.store.put(StoredNode(node.key, node.parent, node.start, ids[: node.end]), rows):
                self.rows[node.key] = rows

    def use(self, names: Sequence[str], root: tuple[int, ...] = ROOT) -> int:
        ids, nodes = prompt(names, root)[0], path(names, root=root)
        held = self.tree.match(nodes)
        records = self.store.load([(node.key, ids[: node.end]) for node in nodes[:held]])
        assert all(torch.equal(one.rows, self.rows[one.key]) for one, _ in records)
        return held

    def forget(self, names: Sequence[str]) -> None:
        self.store.delete(self.tree.forget(names))


rig = Rig.opened


def test_node_of_other_ids_namespace_or_place_has_another_name() -> None:
    one = path("ab")
    assert [(node.start, node.end, node.document) for node in one] == [(0, 2, ""), (2, 5, "a"), (5, 12, "b")]
    others = [
        path("ba"),
        path("ab", replace(IDENTITY, namespace="other")),
        path("ab", replace(IDENTITY, weights="other")),
        path("ab", root=(1, 3)),
        path_of(IDENTITY, prompt("ab")[0], [("ab", 2, 10)]),
    ]
    for other in others:
        assert not {node.key for node in one[1:]} & {node.key for node in other[1:]}
    assert path("abc")[:3] == one
    assert path_of(IDENTITY, (1, 2, 3), []) == ()


def test_matching_ends_at_a_missing_node() -> None:
    with rig() as one:
        one.grow("abc")
        assert [one.tree.match(path(names)) for names in ("abc", "acb", "bac", "")] == [4, 2, 1, 0]
        one.store.delete([path("ab")[-1].key])
        one.tree.prune()
        assert one.tree.match(path("abc")) == 4, "the catalogue says what is there"
        with pytest.raises(NodeMissingError):
            one.use("abc")
        assert one.tree.match(path("abc")) == 2


@given(
    grown=st.lists(st.permutations("abc").flatmap(lambda p: st.sampled_from([p, p[:2], p[:1]])), max_size=4),
    asked=st.permutations("abcd"),
)
def test_no_document_is_lost_and_the_longest_stored_path_comes_first(
    grown: list[list[str]], asked: list[str]
) -> None:
    with rig() as one:
        for names in grown:
            one.grow(names)
        places = one.tree.order(["" if name == "d" else name for name in asked])
        assert sorted(places) == [0, 1, 2, 3]
        held = max((len(names) for names in grown), default=0)
        order = [asked[place] for place in places]
        assert order[:held] in [list(names) for names in grown] or not held
        assert order[held:] == [name for name in asked if name not in order[:held]]


@given(grown=st.lists(st.permutations("abc"), max_size=4), asked=st.permutations("abc"))
def test_match_is_the_longest_common_beginning(grown: list[list[str]], asked: list[str]) -> None:
    with rig() as one:
        for names in grown:
            one.grow(names)
        common = [next((at for at in range(3) if names[at] != asked[at]), 3) for names in grown]
        assert one.tree.match(path(asked)) == (1 + max(common) if common else 0) == one.use(asked)


def test_documents_behind_a_node_that_is_gone_do_not_come_first() -> None:
    with rig() as one:
        one.grow("cba")
        one.grow("ab")
        assert one.tree.order("abc") == [2, 1, 0]
        one.forget(["c"])
        assert one.tree.order("abc") == [*one.tree.order("ab"), 2] == [0, 1, 2]


def test_node_of_other_tokens_is_no_hit() -> None:
    with rig() as one:
        one.grow("a")
        (_, node), ids = path("a"), prompt("a")[0]
        for wrong in ((*ids[: node.end - 1], 7), ids[: node.end - 1], ids[: node.end + 1]):
            with pytest.raises(NodeMissingError):
                one.store.load([(node.key, wrong)])
        assert one.use("a") == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["grow", "grow", "use", "forget"]), st.permutations("abc"), st.integers(1, 3)
        ),
        max_size=14,
    ),
    ram=st.integers(400, 4000),
    disk=st.none() | st.integers(1500, 12_000),
)
@settings(max_examples=15, deadline=None)
def test_no_node_outlives_its_parent_and_limits_are_kept(
    policy: str, calls: list[tuple[str, list[str], int]], ram: int, disk: int | None
) -> None:
    """In any tier, whatever the policy."""
    stack = [TierSpec(kind="ram", bytes=ram, policy=policy)]
    if disk is not None:
        stack.append(TierSpec(kind="disk", bytes=disk, policy=policy))
    with rig(*stack) as one:
        for call, names, count in calls:
            if call == "grow":
                one.grow(names[:count])
            elif call == "use":
                one.use(names[:count])
            else:
                one.forget(names[:1])
                held = {row.node.document for row in one.tree.rows()}
                assert names[0] not in held
            one.store.kv.wait()
            check_tree(one.store)
            for tier, limit in zip(one.store.kv.tiers, (ram, disk), strict=False):
                assert limit is not None
                assert tier.stats()["bytes"] <= limit


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_full_tiers_keep_their_limits_and_write_a_node_once(tmp_path: Path, policy: str) -> None:
    """While ten times as much comes as they hold. What has left RAM and comes back is a copy of what stays on
    disk; what two prompts have computed at once is kept once."""
    ram, disk = 4000, 12_000
    stack = [TierSpec(kind="ram", bytes=ram, policy=policy), TierSpec(kind="disk", bytes=disk, policy=policy)]
    with rig(*stack, root=tmp_path) as one:
        quick, slow = one.store.kv.tiers
        for number in itertools.count():
            names, root = ("abc", "cab", "bca")[number % 3], (number // 3, 1)
            one.grow(names, root)
            one.grow(names, root, again=True)
            for back in range(4):
                one.use(names, (max(0, number // 3 - back), 1))
            one.store.kv.wait()
            check_tree(one.store)
            files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
            found, there = slow.stats(), quick.stats()
            assert sum(files) <= disk and found["bytes"] <= disk and there["bytes"] <= ram
            assert found["puts"] == found["evictions"] + len(files)
            if found["puts"] * sum(files) > 10 * disk * len(files):
                break
        assert there["promotions"] > 20, "they came back"


def test_clock_of_one_tier_is_not_that_of_another() -> None:
    with rig(TierSpec(kind="ram", bytes=3000), TierSpec(kind="disk", bytes=1 << 20)) as one:
        for number in range(5):
            one.grow("ab", (number, 1))
        quick, slow = (tier._policy for tier in one.store.kv.tiers if isinstance(tier, LocalTier))
        assert isinstance(quick, GDSF) and isinstance(slow, GDSF)
        assert quick._aging > slow._aging == 0


def test_document_leaves_every_path_when_it_is_deleted() -> None:
    with rig() as one:
        for names in ("ab", "ac", "ba", "cb"):
            one.grow(names)
        one.forget("a")
        assert [one.tree.match(path(names)) for names in ("ab", "ac", "ba", "cb")] == [1, 1, 2, 3]
        keys = {key for tier in one.store.kv.tiers for key in tier.has(one.rows)}
        assert keys == {node.key for node in (*path("b"), *path("cb"))}


def test_node_that_is_being_saved_when_its_document_is_deleted_is_dropped() -> None:
    with rig() as one:
        ids, nodes = prompt("a")[0], path("a")
        one.tree.expect(nodes, ids)
        one.forget("a")
        node = StoredNode(nodes[1].key, nodes[1].parent, 2, ids[:5])
        assert not one.store.put(node, one.some_rows(2, 5))
        assert one.tree.match(nodes) == 0 and not one.store.kv.tiers[0].has([nodes[1].key])
        assert nodes[1].key not in one.store._parents, "for ever"


def test_node_whose_child_is_not_known_any_more_may_leave() -> None:
    with rig() as one:
        one.grow("ab")
        (tier,), child = one.store.kv.tiers, path("ab")[-1].key
        assert isinstance(tier, LocalTier)
        del one.store._parents[child]
        tier.delete([child])
        assert path("ab")[1].key not in tier._children


def test_node_that_is_about_to_be_stored_is_not_pruned() -> None:
    with rig() as one:
        ids, documents = prompt("abc")
        for number in range(100):
            others = prompt("ab", root=(number, 1))
            one.tree.expect(path_of(IDENTITY, *others), others[0])
        nodes = path_of(IDENTITY, ids, documents)
        one.tree.expect(nodes, ids)
        assert one.tree.prune(nodes)
        assert {row.node.key for row in one.tree.rows()} == {node.key for node in nodes}


def test_nodes_on_disk_outlive_the_engine_and_those_in_memory_do_not(tmp_path: Path) -> None:
    disk = (TierSpec(kind="ram", bytes=1 << 20), TierSpec(kind="disk", bytes=1 << 20))
    for stack, kept in ((disk, 3), (disk[:1], 0)):
        root = tmp_path / str(kept)
        with rig(*stack, root=root) as one:
            one.grow("ab")
            rows = one.rows
        with rig(*stack, root=root) as again:
            again.rows = rows
            assert not again.emptied and again.use("ab") == kept
            check_tree(again.store)


def test_blocks_of_another_layout_are_dropped(tmp_path: Path) -> None:
    disk = TierSpec(kind="disk", bytes=1 << 20)
    with rig(disk, root=tmp_path / "tree") as one:
        one.grow("ab")
    with rig(disk, root=tmp_path / "tree", identity=replace(IDENTITY, prefix="blocks other")) as other:
        assert other.emptied and not other.tree.rows() and not list(tmp_path.rglob("*.safetensors"))


def test_damaged_catalogue_of_a_tree_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_text("no database")
    with rig(root=tmp_path) as one:
        assert one.emptied and one.tree.rows() == []


def test_sound_tree_that_cannot_be_opened_just_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room, or there are too many open files."""
    disk = TierSpec(kind="disk", bytes=1 << 20)
    with rig(disk, root=tmp_path) as one:
        one.grow("ab")

    def too_many(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def full(db: sqlite3.Connection, root: Path) -> None:
        db.execute("PRAGMA max_page_count = 1")
        db.execute("CREATE TABLE more (text TEXT)")

    for module, name, broken in ((files, "make_file", too_many), (catalogue_file, "stored_identity", full)):
        with monkeypatch.context() as patched, pytest.raises(StoreError):
            patched.setattr(module, name, broken)
            Tree.open(tmp_path, IDENTITY)
    with rig(disk, root=tmp_path) as one:
        assert not one.emptied and one.tree.match(path("ab")) == 3


def test_damaged_node_is_not_loaded(tmp_path: Path) -> None:
    with rig(TierSpec(kind="disk", bytes=1 << 20), root=tmp_path) as one:
        one.grow("ab")
        (file,) = tmp_path.rglob(f"{path('ab')[-1].key}.safetensors")
        flip(file, -3)
        with pytest.raises(NodeMissingError, match="checksum"):
            one.use("ab")
        assert one.use("ab") == 2


def test_each_rank_reads_its_own_part_of_a_node(tmp_path: Path) -> None:
    stack, sizes = [TierSpec(kind="disk", bytes=1 << 20)], Rig.sizes
    (ids, _), (node, *_) = prompt("a"), path("a")
    tree, _ = Tree.open(tmp_path, IDENTITY)
    tree.expect([node], ids)
    ranks = [NodeStore.open(tmp_path, IDENTITY, "bfloat16", stack, sizes, rank, 2) for rank in (0, 1)]
    rows = torch.randint(256, (4, sizes.nbytes), dtype=torch.uint8)
    assert ranks[0].put(StoredNode(node.key, node.parent, node.start, ids[: node.end]), rows)
    wanted = [(node.key, ids[: node.end])]
    parts = [store.load(wanted)[0][0].own.rows for store in ranks]
    assert torch.equal(torch.cat(parts), rows)
    (file,) = tmp_path.rglob(f"{node.key}.safetensors")
    flip(file, -1)
    with pytest.raises(NodeMissingError, match="checksum") as missing:
        ranks[1].load(wanted)
    assert missing.value.damaged is not None and tree.match([node]) == 1, "the first rank has to be told"
    ranks[0].kv.damaged(*missing.value.damaged)
    assert tree.match([node]) == 0
    with pytest.raises(NodeMissingError, match="missing") as missing:
        ranks[1].load(wanted)
    assert missing.value.damaged == ("tree disk", node.key)
    for store in reversed(ranks):
        store.close()
    tree.close()


def test_nodes_that_are_gone_are_forgotten() -> None:
    with rig(TierSpec(kind="ram", bytes=4000)) as one:
        for number in range(400):
            ids, documents = prompt("ab", root=(number, 1))
            nodes = path_of(IDENTITY, ids, documents)
            one.tree.expect(nodes, ids)
            one.store.delete(one.tree.prune())
        assert len(one.tree.rows()) < 300


@given(st.text(max_size=12) | st.from_regex(r"\d{1,6}:[0-9a-f]{0,4}", fullmatch=True))
def test_context_that_no_node_has_is_refused(context: str) -> None:
    layout = NodeLayout(IDENTITY, "bfloat16", Rig.sizes)
    try:
        start, parent = placed(context)
    except ValueError:
        with pytest.raises(Exception, match="a node's record"):
            layout.row_bytes(9, 1, context)
    else:
        assert int(context.partition(":")[0]) == start and place(start, parent).partition(":")[2] == parent
