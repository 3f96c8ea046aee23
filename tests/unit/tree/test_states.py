"""Exact prefixes of hybrid models: states behind documents, and the KV between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.store.record import DamagedError
from blendrag.store.stack import TierSpec
from blendrag.tree.layout import NodeBlocks, NodeLayout
from blendrag.tree.path import Nodes, place
from blendrag.tree.states import StateTree
from blendrag.tree.store import NodeMissingError, StoredNode
from stored_trees import TreeRig, check_tree, prompt
from stores import IDENTITY

SIZES = NodeBlocks(tokens=4, nbytes=32, state=11)
ORDERS = st.permutations("abc").flatmap(lambda order: st.sampled_from([order[:1], order[:2], order]))


class Rig(TreeRig):
    kind, sizes = StateTree, SIZES

    def path(self, names: Sequence[str]) -> Nodes:
        return self.tree.path(*prompt(names))

    def grow(self, names: Sequence[str]) -> int:
        """Have a prompt's last state, as growing does. Returns where the node with its KV begins."""
        ids, nodes = prompt(names)[0], self.path(names)
        held = self.tree.match(nodes)
        if held == len(nodes):
            return -1
        coming = self.tree.next(nodes, held, ids)
        self.tree.expect(coming.new, ids)
        key, end = coming.named[-1]
        parent, start = coming.named[-2] if len(coming.named) > 1 else ("", 0)
        state = self.store.layout.state_rows(torch.randint(256, (SIZES.state,), dtype=torch.uint8))
        for node, rows in (
            (StoredNode(key, parent, start, ids[:end]), self.some_rows(start, end)),
            (StoredNode(coming.kept_state, key, end, ids[:end]), state),
        ):
            there = self.store.kv.holds(node.key)
            if self.store.put(node, rows) and not there:
                self.rows[node.key] = rows
        return start

    def use(self, names: Sequence[str]) -> list[int]:
        """Load what is stored of a prompt. Returns where its nodes with KV end."""
        ids, nodes = prompt(names)[0], self.path(names)
        nodes = nodes[: self.tree.match(nodes)]
        named, state = self.tree.held(nodes), self.tree.state(nodes)
        if not named:
            return []
        wanted = [*((key, ids[:end]) for key, end in named), (state, ids[: named[-1][1]])]
        found = [record for part in (wanted[:-1], wanted[-1:]) for record, _ in self.store.load(part)]
        assert all(torch.equal(record.rows, self.rows[record.key]) for record in found)
        return [end for _, end in named]

    def lose(self, key: str) -> None:
        """Drop a record from the worker's tiers, as eviction does."""
        self.store.kv.delete([key])
        self.tree._catalogue.mark([key], "evicted")


opened = Rig.opened


def test_one_node_has_the_kv_up_to_a_state_whatever_documents_it_is_of() -> None:
    with opened() as rig:
        assert rig.grow("abc") == 0
        assert rig.use("abc") == [22] and rig.use("ab") == []
        assert rig.use("abca") == [22], "what follows is computed"


def test_path_that_goes_on_stands_on_the_last_state() -> None:
    with opened() as rig:
        rig.grow("a")
        assert rig.grow("abc") == 5 and rig.grow("ac") == 5
        assert rig.use("abc") == [5, 22] and rig.use("acb") == [5, 15] and rig.use("ab") == [5]


def test_inner_state_may_leave_before_the_kv_behind_which_others_stand() -> None:
    with opened() as rig:
        rig.grow("a")
        rig.grow("ab")
        rig.lose(rig.path("a")[-1].key)
        assert rig.use("a") == [] and rig.use("ab") == [5, 12]


def test_state_that_was_lost_is_stored_again_behind_other_nodes() -> None:
    with opened() as rig:
        rig.grow("ab")
        rig.lose(rig.path("ab")[-1].key)
        rig.grow("a")
        assert rig.grow("ab") == 5
        assert rig.use("ab") == [5, 12]


def test_state_behind_damaged_kv_is_not_found_until_that_has_grown_again() -> None:
    with opened(TierSpec(kind="disk", bytes=1 << 20)) as rig:
        rig.grow("a")
        rig.grow("ab")
        (root, _), _ = rig.tree.held(rig.path("ab"))
        rig.store.kv.damaged("tree disk", root)
        assert rig.use("ab") == rig.use("a") == []
        assert rig.grow("a") == 0
        assert rig.use("a") == [5] and rig.use("ab") == [5, 12]
        check_tree(rig.store)


def test_order_follows_nodes_of_one_document_and_those_before_them() -> None:
    with opened() as rig:
        rig.grow("ab")
        assert rig.tree.order("ab") == [0, 1] and rig.tree.order("ba") == [0, 1]
        rig.grow("c")
        assert rig.tree.order("abc") == [2, 0, 1]
        rig.grow("ca")
        assert rig.tree.order("abc") == [2, 0, 1] and rig.tree.order("bac") == [2, 1, 0]
        assert rig.tree.order("ba") == [0, 1], "there is none behind the root"


@pytest.mark.parametrize("gone", "abc")
def test_document_that_is_deleted_takes_every_state_behind_it(gone: str) -> None:
    with opened() as rig:
        for names in ("a", "abc", "b"):
            rig.grow(names)
        rig.store.delete(rig.tree.forget([gone]))
        assert [bool(rig.use(names)) for names in ("a", "abc", "b")] == [
            gone != "a",
            rig.use("abc") == [5] and gone != "a",
            gone != "b",
        ]
        assert all(gone not in row.node.document for row in rig.tree.rows())


@given(st.lists(st.tuples(st.sampled_from(["grow", "forget", "lose"]), ORDERS), max_size=12))
@settings(max_examples=60, deadline=None)
def test_whatever_grows_and_goes_what_is_found_is_what_was_stored(steps: list[tuple[str, list[str]]]) -> None:
    with opened() as rig:
        for what, names in steps:
            if what == "grow":
                rig.grow(names)
            elif what == "forget":
                rig.store.delete(rig.tree.forget(names[:1]))
            else:
                rig.lose(rig.path(names)[-1].key)
            for order in ("abc", "acb", "bac", "cab", names):
                ends = rig.use(order)
                assert ends == sorted(set(ends))
        check_tree(rig.store)


def test_full_tier_keeps_no_state_without_the_kv_before_it() -> None:
    with opened(TierSpec(kind="ram", bytes=2400)) as rig:
        for names in ("a", "ab", "abc", "b", "bc", "c", "ca", "cab"):
            rig.grow(names)
            for order in ("abc", "bca", "cab"):
                try:
                    rig.use(order)
                except NodeMissingError:  # the catalogue hears of it when it is looked for
                    rig.use(order)
        assert rig.store.kv.stats()["tree ram"]["evictions"]
        check_tree(rig.store)


def test_record_of_a_state_is_no_record_where_there_are_no_states() -> None:
    layout = NodeLayout(IDENTITY, "bfloat16", SIZES)
    assert layout.row_bytes(5, 1, place(5, "parent")) == 6, "11 bytes in two rows"
    for sizes, start in ((SIZES._replace(state=0), 5), (SIZES, 6)):
        with pytest.raises(DamagedError, match="begins at"):
            NodeLayout(IDENTITY, "bfloat16", sizes).row_bytes(5, 1, place(start, "parent"))
