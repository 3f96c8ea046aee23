"""Replays, against the simplest caches and every future there is; and ``bench eviction`` over them."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from blendrag.cli.bench import app
from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy
from blendrag.eviction.interface import MayLeave, anything
from blendrag.lab.eviction.compare import run_eviction
from blendrag.lab.eviction.replay import optimum, prefill_cost, replay
from blendrag.lab.eviction.source import TraceSource, dialog_trace
from blendrag.lab.eviction.trace import Dialog, DialogTurn, Request, RequestTrace
from blendrag.lab.options import EvictionOptions
from blendrag.progress import SILENT


def requests_of(*prompts: str, size: int = 10) -> list[Request]:
    """A prompt per second, a chunk per letter."""
    return [Request(float(at), tuple(text), (size,) * len(text)) for at, text in enumerate(prompts)]


def blocks(*prompts: str) -> RequestTrace:
    return RequestTrace("test", requests_of(*prompts), prefix=True, unit="blocks")


@st.composite
def block_traces(draw: st.DrawFn) -> RequestTrace:
    """Chained blocks: a block's name is all that leads to it."""
    paths = draw(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=12))
    requests = []
    for at, path in enumerate(paths):
        keys = tuple("".join(path[: depth + 1]) for depth in range(len(path)))
        last = draw(st.booleans()) and len(keys) > 1
        finished = at + draw(st.sampled_from([0.0, 0.5, 2.5]))
        requests.append(Request(float(at), keys, (16,) * len(keys), answer=int(last), finished=finished))
    return RequestTrace("drawn", requests, prefix=True, unit=draw(st.sampled_from(["blocks", "tokens"])))


@st.composite
def chunk_traces(draw: st.DrawFn) -> RequestTrace:
    sizes = {key: draw(st.integers(1, 9)) for key in "abcdef"}
    chosen = st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=3, unique=True)
    prompts = draw(st.lists(chosen, min_size=1, max_size=14))
    requests = [
        Request(float(at), tuple(keys), tuple(sizes[key] for key in keys)) for at, keys in enumerate(prompts)
    ]
    return RequestTrace("drawn", requests, prefix=False, unit="tokens")


@st.composite
def path_traces(draw: st.DrawFn) -> RequestTrace:
    """Nodes of a tree: a name is all that leads to it, and has a size of its own."""
    names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)
    requests = []
    for at, path in enumerate(draw(st.lists(names, min_size=1, max_size=20))):
        keys = tuple("".join(path[: depth + 1]) for depth in range(len(path)))
        requests.append(Request(float(at), keys, tuple(1 + ord(key[-1]) % 3 for key in keys)))
    return RequestTrace("paths", requests, prefix=True, unit="tokens", tree=True)


class Watched(EvictionPolicy):
    """A policy that also checks what it is told."""

    def __init__(self, inner: EvictionPolicy, capacity: int) -> None:
        self.inner, self.capacity, self.held = inner, capacity, dict[str, int]()

    def added(self, key: str, size: int, use: Use) -> None:
        assert key not in self.held, "added twice"
        self.held[key] = size
        self.inner.added(key, size, use)

    def used(self, key: str, use: Use) -> None:
        assert key in self.held
        self.inner.used(key, use)

    def removed(self, key: str) -> None:
        del self.held[key]
        self.inner.removed(key)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        assert sum(self.held.values()) <= self.capacity
        return self.inner.victim(may_leave)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(st.one_of(block_traces(), chunk_traces(), path_traces()), st.integers(1, 40))
def test_no_policy_beats_the_optimum_and_the_cache_keeps_to_its_capacity(
    name: str, trace: RequestTrace, capacity: int
) -> None:
    policy = Watched(make_policy(name), capacity)
    outcome, best = replay(trace, policy, capacity), optimum(trace, capacity)
    assert sum(policy.held.values()) <= capacity
    assert outcome.found.sum() <= best.found.sum()
    assert (outcome.found <= outcome.asked).all() and (best.found <= best.asked).all()


@given(block_traces(), st.integers(1, 5))
def test_optimum_finds_as_much_as_the_best_of_all_futures(trace: RequestTrace, capacity: int) -> None:
    """By trying every choice of what to hold, for prompts whose blocks are kept at once."""
    requests = [Request(one.at, one.asked, (1,) * len(one.asked)) for one in trace.requests[:6]]
    small = RequestTrace("small", requests, prefix=True, unit="blocks")

    @cache
    def best(place: int, held: frozenset[str]) -> int:
        if place == len(requests):
            return 0
        keys = requests[place].keys
        found = len(list(itertools.takewhile(held.__contains__, keys)))
        there = sorted(held | set(keys))
        choices = itertools.combinations(there, min(capacity, len(there)))
        return found + max(best(place + 1, frozenset(chosen)) for chosen in choices)

    assert optimum(small, capacity).found.sum() == best(0, frozenset())


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_replay_of_single_chunks_is_a_textbook_lru(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    asked = [rng.choice("abcdefghijklmnop") for _ in range(120)]
    order: list[str] = []
    found = []
    for key in asked:
        found.append(10 * (key in order))
        order = [*(other for other in order if other != key), key][-capacity:]
    trace = RequestTrace("single", requests_of(*asked), prefix=False, unit="blocks")
    assert replay(trace, make_policy("lru"), capacity).found.tolist() == found


def test_end_of_a_prompt_leaves_before_its_beginning() -> None:
    outcome = replay(blocks("abcd", "x", "abcd"), make_policy("lru"), 4)
    assert outcome.found.tolist() == [0, 0, 30]  # x took d's place, not a's


def test_prompt_larger_than_the_cache_leaves_its_beginning_there() -> None:
    outcome = replay(blocks("abcdef", "abcdef"), make_policy("lru"), 3)
    assert outcome.found.tolist() == [0, 30]


def test_blocks_in_use_stay_while_others_of_their_prompt_come() -> None:
    """ab is the oldest when abxy comes, and is held all the while."""
    outcome = replay(blocks("ab", "pq", "abxy", "ab"), make_policy("lru"), 4)
    assert outcome.found.tolist() == [0, 0, 20, 20]


def test_block_behind_a_gap_is_not_found_in_a_prefix_cache() -> None:
    policy = make_policy("lfu")
    requests = requests_of("ab", "b", "b", "c", "ab")
    for prefix, last in ((True, 0), (False, 10)):
        trace = RequestTrace("gap", requests, prefix=prefix, unit="blocks")
        assert replay(trace, policy, 2).found[-1] == last
        policy = make_policy("lfu")


def test_answer_is_found_once_it_was_given() -> None:
    first = Request(0.0, ("a", "b"), (8, 8), answer=1, finished=5.0)
    again = [Request(at, ("a", "b", "c"), (8, 8, 8)) for at in (1.0, 9.0)]
    trace = RequestTrace("answers", [first, *again], prefix=True, unit="tokens")
    outcome = replay(trace, make_policy("lru"), 100)
    assert outcome.asked.tolist() == [8, 24, 24]
    assert outcome.found.tolist() == [0, 0, 24]


def test_chunk_larger_than_the_cache_does_not_empty_it() -> None:
    requests = [Request(float(at), (key,), (size,)) for at, (key, size) in enumerate([("a", 5), ("big", 50)])]
    trace = RequestTrace("large", [*requests, Request(2.0, ("a",), (5,))], prefix=False, unit="tokens")
    assert optimum(trace, 10).found.tolist() == [0, 0, 5]
    assert replay(trace, make_policy("lru"), 10).found.tolist() == [0, 0, 5]


def test_conversation_that_is_forecast_to_be_over_leaves_first() -> None:
    turns = [
        Request(float(at), (name,), (1,), conversation=name)
        for at, name in enumerate(("on", "over", "new", "on"))
    ]
    trace = RequestTrace("talks", turns, prefix=True, unit="blocks")
    found = [
        replay(trace, make_policy("lpc"), 2, forecasts=forecasts).found.sum()
        for forecasts in (None, (1.0, 0.0, 1.0, 0.0))
    ]
    assert found == [0, 1]


@given(path_traces(), st.integers(1, 12), st.sampled_from(["lru", "lfu", "gdsf", "pgdsf"]))
def test_node_is_never_left_without_what_it_stands_behind(
    trace: RequestTrace, capacity: int, name: str
) -> None:
    policy = Watched(make_policy(name), capacity)
    outcome = replay(trace, policy, capacity)
    assert outcome.held == policy.held.keys() and sum(policy.held.values()) <= capacity
    assert all(key[:-1] in outcome.held for key in outcome.held if len(key) > 1)


@given(path_traces())
def test_node_is_kept_from_its_second_sighting_on(trace: RequestTrace) -> None:
    outcome = replay(trace, make_policy("lru"), 10_000)
    sightings = [key for request in trace.requests for key in request.keys]
    assert outcome.held == {key for key in sightings if sightings.count(key) > 1}
    for number, request in enumerate(trace.requests):
        before = [key for one in trace.requests[:number] for key in one.keys]
        twice = [size for key, size in zip(request.keys, request.sizes, strict=True) if before.count(key) > 1]
        assert outcome.found[number] == sum(twice)


def test_chunk_behind_a_long_prefix_costs_more() -> None:
    assert prefill_cost(0, 0) is None
    assert prefill_cost(1000, 10) > prefill_cost(0, 10) > 0  # type: ignore[operator]


# -- ``bench eviction``: what it compares, writes, prints and draws -------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1000, "hash_ids": [0, 1 + i % 7]} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def talks() -> list[Dialog]:
    turns = (DialogTurn(role="user", text="more " * 40), DialogTurn(role="assistant", text="so " * 60))
    return [Dialog(id=f"c{i}", turns=turns * (1 + i % 5)) for i in range(80)]


def test_json_has_what_scripts_read(trace: Path) -> None:
    arguments = ["eviction", "--trace", str(trace), "--sizes", "4,2,8", "--policies", "lru,gdsf", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert written["sizes"] == [2, 4, 8]
    assert list(written["policies"]) == ["lru", "gdsf", "optimal"]
    assert all(len(values) == 3 for values in written["policies"].values())
    assert written["policies"]["lru"][2] == written["policies"]["optimal"][2] > 0.7
    assert len(written["closed"]["gdsf"]) == 3
    assert "closed" in result.output and "blocks" in result.output


def test_all_policies_and_optimum_on_dialogues() -> None:
    source = TraceSource(
        lambda seed: dialog_trace(talks(), seconds=300.0, gap_s=20.0, active=10, seed=seed), generated=True
    )
    options = EvictionOptions(Path("t"), "1000,4000", seeds=3)
    results = run_eviction(source, options, SILENT)
    assert set(results.policies) == {*POLICIES, "optimal"}
    assert results.config["traces"] == 3
    for name, hits in results.policies.items():
        assert all(hit <= best for hit, best in zip(hits, results.policies["optimal"], strict=True)), name
    assert results.policies["lpc"] == results.policies["lru"]  # nobody told it anything


def test_warm_up_is_not_counted(trace: Path) -> None:
    ratios = []
    for warmup in ("0", "0.5"):
        arguments = ["--trace", str(trace), "--sizes", "8", "--policies", "lru", "--warmup", warmup]
        result = CliRunner().invoke(app, ["eviction", *arguments, "--json"], catch_exceptions=False)
        ratios += json.loads(result.stdout)["policies"]["lru"]
    assert ratios[0] < ratios[1] == 1.0


def test_gap_that_is_closed_is_the_share_of_the_optimums() -> None:
    requests = [Request(float(at), (key,), (1,)) for at, key in enumerate("abcdaabcdbaabcd" * 3)]
    source = TraceSource(
        lambda seed: RequestTrace("t", requests, prefix=False, unit="blocks"), generated=False
    )
    results = run_eviction(source, EvictionOptions(Path("t"), "2,3,9", "lru,lfu"), SILENT)
    for place in (0, 1):
        low, own, high = (results.policies[name][place] for name in ("lru", "lfu", "optimal"))
        assert results.closed["lfu"][place] == pytest.approx((own - low) / (high - low))
    assert results.closed["lfu"][2] is None, "there is no gap"
    assert set(results.closed) == {"lfu", "optimal"}
    alone = run_eviction(source, EvictionOptions(Path("t"), "2", "lfu"), SILENT)
    assert not alone.closed
