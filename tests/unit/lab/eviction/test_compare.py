"""``bench eviction``: what it compares, writes, prints and draws."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from typer.testing import CliRunner

from blendrag.cli.bench import app
from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES
from blendrag.lab.eviction.compare import EvictionOptions, needed, run_eviction, saved
from blendrag.lab.eviction.readers import Dialog, DialogTurn
from blendrag.lab.eviction.source import TraceSource
from blendrag.lab.eviction.trace import Request, RequestTrace
from blendrag.lab.eviction.workloads import DialogLoad, dialog_trace
from blendrag.progress import SILENT


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1000, "hash_ids": [0, 1 + i % 7]} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def talks() -> list[Dialog]:
    turns = (DialogTurn(role="user", text="more " * 40), DialogTurn(role="assistant", text="so " * 60))
    return [Dialog(id=f"c{i}", turns=turns * (1 + i % 5)) for i in range(80)]


def test_json_lacks_what_scripts_read(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    arguments = ["eviction", "--trace", str(trace), "--sizes", "4,2,8", "--policies", "lru,gdsf", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert written["sizes"] == [2, 4, 8]
    assert list(written["policies"]) == ["lru", "gdsf", "optimal"]
    assert all(len(values) == 3 for values in written["policies"].values())
    assert written["policies"]["lru"][2] == written["policies"]["optimal"][2] > 0.7
    assert all(len(written[key]["gdsf"]) == 3 for key in ("saved", "closed"))
    assert imread(picture).shape[0] > 100
    assert "cache saved" in result.output and "blocks" in result.output


def test_all_policies_oracle_and_optimum_on_dialogues_without_a_spread() -> None:
    load = DialogLoad(gap_s=20.0, active=10, seconds=300.0)
    source = TraceSource(lambda seed: dialog_trace(talks(), load, seed=seed), generated=True)
    options = EvictionOptions.parse("1000,4000", None, 3, 0.0)
    results = run_eviction(source, options, SILENT)
    assert set(results.policies) == {*POLICIES, "oracle", "optimal"}
    assert results.traces == 3
    for name, hits in results.policies.items():
        for hit, best, (low, high) in zip(
            hits, results.policies["optimal"], results.spread[name], strict=True
        ):
            assert low <= hit <= high and hit <= best
    assert results.policies["lpc"] == results.policies["lru"]  # nobody told it anything
    assert results.policies["oracle"][0] > results.policies["lru"][0]


def test_warm_up_is_counted(trace: Path) -> None:
    ratios = []
    for warmup in ("0", "0.5"):
        arguments = ["--trace", str(trace), "--sizes", "8", "--policies", "lru", "--warmup", warmup]
        result = CliRunner().invoke(app, ["eviction", *arguments, "--json"], catch_exceptions=False)
        ratios += json.loads(result.stdout)["policies"]["lru"]
    assert ratios[0] < ratios[1] == 1.0


@pytest.mark.parametrize(
    ("sizes", "policies"), [("", None), ("1,x", None), ("0", None), ("5", "fifo"), ("5", ",")]
)
def test_wrong_option_is_found_out_after_the_replay(sizes: str, policies: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--sizes|--policies"):
        EvictionOptions.parse(sizes, policies, 1, 0.0)


SIZES = [100, 200, 400]


@st.composite
def curves(draw: st.DrawFn) -> tuple[list[int], list[float], list[float]]:
    """Ascending sizes, and two hit ratios that do not fall: with plateaus, and with equal values."""
    sizes = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=8)))
    hit = st.integers(0, 20).map(lambda twentieth: twentieth / 20)
    lists = st.lists(hit, min_size=len(sizes), max_size=len(sizes)).map(sorted)
    return sizes, draw(lists), draw(lists)


@given(curves())
def test_cache_is_saved_where_no_replay_tells(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, hits = drawn
    for wanted, share in zip(lru, saved(sizes, lru, hits), strict=True):
        assert (share is None) == (not hits[0] <= wanted <= hits[-1])


@given(curves())
def test_less_cache_than_that_finds_as_much(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, _, hits = drawn
    for wanted in np.linspace(hits[0], hits[-1], 7):
        need = needed(sizes, hits, float(wanted))
        assert need is not None and sizes[0] <= need <= sizes[-1]
        assert np.interp(need, sizes, hits) == pytest.approx(wanted)
        below = [size for size in sizes if size < need - 1e-6]  # nearer than that, rounding decides
        assert not below or np.interp((below[-1] + need) / 2, sizes, hits) < wanted
    needs = [needed(sizes, hits, float(wanted)) for wanted in np.linspace(hits[0], hits[-1], 7)]
    assert all(low <= high for low, high in pairwise(needs))  # type: ignore[operator]


@given(curves())
def test_policy_that_finds_more_saves_less(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, hits = drawn
    better = [max(pair) for pair in zip(lru, hits, strict=True)]
    assert all(share is None or share >= -1e-9 for share in saved(sizes, lru, better))
    for some, more in zip(saved(sizes, lru, hits), saved(sizes, lru, better), strict=True):
        assert some is None or more is None or more >= some - 1e-9


@given(curves())
def test_lru_saves_cache_against_itself(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, _ = drawn
    assert saved(sizes, lru, lru) == [0.0] * len(sizes)


def test_cache_that_is_saved_is_not_read_off_the_line() -> None:
    assert saved(SIZES, [0.1, 0.2, 0.4], [0.15, 0.25, 0.4]) == [None, pytest.approx(0.25), 0.0]
    assert saved(SIZES, [0.3, 0.3, 0.5], [0.2, 0.3, 0.4]) == [pytest.approx(-1.0), pytest.approx(-1.0), None]


def test_cache_that_lru_does_not_need_either_counts_as_saved() -> None:
    assert saved(SIZES, [0.1, 0.4, 0.4], [0.4, 0.4, 0.4]) == [None, 0.5, 0.5]


def test_gap_that_is_closed_is_another_share() -> None:
    requests = [Request(float(at), (key,), (1,)) for at, key in enumerate("abcdaabcdbaabcd" * 3)]
    source = TraceSource(
        lambda seed: RequestTrace("t", requests, prefix=False, unit="blocks"), generated=False
    )
    results = run_eviction(source, EvictionOptions((2, 3, 9), ("lru", "lfu"), 1), SILENT)
    for place in (0, 1):
        low, own, high = (results.policies[name][place] for name in ("lru", "lfu", "optimal"))
        assert results.closed["lfu"][place] == pytest.approx((own - low) / (high - low))
    assert results.closed["lfu"][2] is None, "there is no gap"
    assert set(results.closed) == set(results.saved) == {"lfu", "optimal"}
    alone = run_eviction(source, EvictionOptions((2,), ("lfu",), 1), SILENT)
    assert not {"saved", "closed"} & alone.to_dict().keys()
