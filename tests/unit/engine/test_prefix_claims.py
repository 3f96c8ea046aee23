from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.hooks import Asked, Orders
from blendrag.engine.prefixes.prefix_claims import PrefixClaims
from blendrag.engine.wire.prefixes import PATH, PrefixPath, read_path
from connector_halves import asked

BLOCK = 4
NODES = (("root", 3), ("a", 9), ("b", 14))


def request(held: int = 1, kept: int = 3, tokens: int = 20, salt: str | None = None, **other: Any) -> Asked:
    params = PrefixPath("tree", NODES, held, kept).transfer_params("ticket")
    params[PATH] = {**params[PATH], **other}
    return asked(params, tokens, salt=salt)


def orders(
    claims: PrefixClaims, tokens: int = 0, new: Iterable[int] = (), resumed: Sequence[str] = ()
) -> Orders:
    """Those of a step that computes so many tokens of the request, and has new blocks for it."""
    cached = SimpleNamespace(req_ids=["r"], new_block_ids=[(list(new),)], resumed_req_ids=resumed)
    scheduled = SimpleNamespace(num_scheduled_tokens={"r": tokens}, scheduled_cached_reqs=cached)
    return claims.orders(SchedulerStep(scheduled))


@given(st.lists(st.integers(1, 7), min_size=1), st.integers(0, 3), st.integers(0, 3))
def test_node_is_stored_once_it_is_complete_and_once(steps: list[int], held: int, kept: int) -> None:
    """Whatever the steps are, with the blocks that the request has by then."""
    claims, one = PrefixClaims(1), request(held, max(held, kept))
    done = claimed = claims.claim(one, 0)
    one.request.num_computed_tokens = done
    blocks = list(range(100, 100 + -(-done // BLOCK)))
    claims.allocated(one, [blocks], claimed)
    saved: list[str] = []
    for tokens in steps:
        tokens = min(tokens, one.prompt - done)
        if not tokens:
            break
        more = range(100 + len(blocks), 100 + -(-(done + tokens) // BLOCK))
        blocks += more
        saves = orders(claims, tokens, more).others
        done += tokens
        for order in saves:
            end = dict(NODES)[order.key]
            assert end <= done < end + tokens and order.token_ids == list(range(end))
            assert (
                order.block_ids == blocks and order.start == ([0, *dict(NODES).values()])[len(saved) + held]
            )
            saved.append(order.key)
        one.request.num_computed_tokens = done
    assert saved == [key for key, end in NODES[held : max(held, kept)] if end <= done]


def test_what_is_claimed_is_what_is_loaded() -> None:
    claims = PrefixClaims(1)
    for computed, claimed in ((0, 14), (8, 6), (16, 0)):
        one = request(held=3)
        assert claims.claim(one, computed) == claimed
        claims.allocated(one, [[1, 2, 3, 4]], claimed)
        (load,) = orders(claims).claims
        assert (load.nodes, load.ticket) == (NODES, "ticket")
        assert list(load.token_ids) == (list(range(14)) if claimed else []), "a use, where nothing is loaded"
        assert not claimed or load.written == computed
        claims.finished("r")
    whole = request(held=3, tokens=14)
    assert claims.claim(whole, 0) == 13, "the last token is the engine's"
    claims.allocated(whole, [[1, 2, 3, 4]], 13)
    assert orders(claims).claims[0].written == 0


def test_growth_does_not_count_as_a_use_of_what_it_grows_behind() -> None:
    """Of each node before it, once a slice: popular would be what has many children."""
    for grows in (False, True):
        claims, one = PrefixClaims(1), request(held=2, grows=grows)
        claims.allocated(one, [[1, 2, 3]], 0)
        assert (len(orders(claims).claims), one.counts) == (0 if grows else 1, not grows)
        claims.finished("r")
        claims.allocated(one, [[1, 2, 3]], 5)  # the prefix cache has lost a part
        (load,) = orders(claims).claims
        assert load.use is not grows


def test_few_tokens_are_not_claimed() -> None:
    one = request(held=3)
    assert [PrefixClaims(least).claim(one, 4) for least in (10, 11)] == [10, 0]


def test_blended_prompt_leaves_no_nodes_behind() -> None:
    """Its salt is a recipe's, whatever it says."""
    for salt, takes in ((None, True), ("", True), ("tenant:", True), ("tenant:0123", False), (":01", False)):
        claims, one = PrefixClaims(1), request(salt=salt)
        assert bool(claims.claim(one, 0)) is takes
        claims.allocated(one, [[1, 2, 3, 4, 5]], 0)
        assert bool(orders(claims, 20).others) is takes


def test_request_stores_nothing_after_its_prefix_could_not_be_loaded() -> None:
    claims, one = PrefixClaims(1), request()
    claims.allocated(one, [[1, 2, 3, 4, 5]], claims.claim(one, 0))
    claims.finished("r")
    assert orders(claims, 20).others == []


def test_blocks_that_a_request_had_to_give_up_are_not_stored() -> None:
    claims, one = PrefixClaims(1), request(held=0, kept=2)
    claims.allocated(one, [[1]], 0)
    assert [order.key for order in orders(claims, 4).others] == ["root"]
    claims.allocated(one, [[7, 8, 9]], 0)  # preempted, and back from the beginning
    (again,) = orders(claims, 12, (7, 8, 9), resumed=("r",)).others
    assert (again.key, again.block_ids) == ("a", [7, 8, 9])


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": [["root", 3], ["a", 3]]},
        {"nodes": [["root", 3], ["a", 21]]},
        {"nodes": [["root", 0]]},
        {"held": 4},
        {"held": -1},
        {"kept": 0},
        {"nodes": 1},
        {"nodes": [["a"]]},
        {"tree": None, "held": "x"},
    ],
)
def test_path_that_no_client_of_ours_sends_is_not_followed(wrong: dict[str, Any]) -> None:
    claims, one = PrefixClaims(1), request(**wrong)
    with pytest.raises(Exception):  # noqa: B017  (the connector takes any for a plain request)
        claims.claim(one, 0)
    claims.allocated(one, [[1, 2]], 0)
    assert orders(claims, 20) == ([], [])


def test_no_path_is_read_where_there_is_none() -> None:
    assert read_path(None, 5) is None and read_path({}, 5) is None
