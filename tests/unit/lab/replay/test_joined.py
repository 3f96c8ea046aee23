"""Workloads that change: traces in turn, and where a policy falls behind LRU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blendrag.cli.bench import app
from blendrag.errors import ConfigError
from blendrag.eviction import make_policy
from blendrag.lab.replay.against import slump
from blendrag.lab.replay.events import finished
from blendrag.lab.replay.joined import in_turn, joined
from blendrag.lab.replay.request import Request, Trace
from blendrag.lab.replay.run import replay
from blendrag.lab.replay.source import Source


def trace(name: str, *prompts: str, prefix: bool = True, unit: str = "blocks") -> Trace:
    requests = [
        Request(float(at), tuple(text), (1,) * len(text), finished=at + 5.0, conversation=text[0])
        for at, text in enumerate(prompts)
    ]
    return Trace(name, requests, prefix, unit)


def found(*traces: Trace) -> list[int]:
    return replay(joined(traces), make_policy("lru"), 100).found.tolist()


def test_block_is_found_that_another_trace_left() -> None:
    one = trace("a", "ab")
    assert found(one, one) == [0, 0]
    assert joined([one, one]).requests[0].conversation != joined([one, one]).requests[1].conversation


def test_chunk_of_the_same_corpus_is_another_one() -> None:
    one, other = trace("a", "ab", prefix=False), trace("b", "ab", prefix=False)
    assert found(one, one) == [0, 2]
    assert found(one, other) == [0, 0]


def test_a_trace_begins_before_the_last_one_ends() -> None:
    both = joined([trace("a", "ab", "ac"), trace("b", "de", "fg"), trace("c", "h")])
    assert both.name == "a, b, c" and both.starts == (0, 2, 4)
    assert [request.at for request in both.requests] == sorted(request.at for request in both.requests)
    for start in both.starts[1:]:
        assert both.requests[start].at > max(map(finished, both.requests[:start]))


@pytest.mark.parametrize(("prefix", "unit"), [(False, "blocks"), (True, "tokens")])
def test_traces_of_different_caches_are_joined(prefix: bool, unit: str) -> None:
    with pytest.raises(ConfigError, match=r"a \(prefixes, sizes in blocks\) and b .*one by one"):
        joined([trace("a", "ab"), trace("b", "ab", prefix=prefix, unit=unit)])


def test_forecasts_of_one_file_are_taken_for_another_s() -> None:
    def source(name: str, chance: float | None) -> Source:
        def forecasts(part: Trace) -> Sequence[float] | None:
            assert part.name == "a, b"
            return None if chance is None else [chance] * len(part.requests)

        return Source(lambda seed: trace(name, *["ab"] * (2 + seed % 7)), True, forecasts, (name, "both"))

    both = in_turn([source("a", 0.25), source("b", 0.75)])
    assert both.notes == ("a", "both", "b") and both.generated
    made = both.trace(0)
    told = both.forecasts(made)
    assert told == [0.25] * 2 + [0.75] * (len(made.requests) - 2)
    half = in_turn([source("a", 0.25), source("b", None)])
    assert half.forecasts(half.trace(0)) is None


@pytest.mark.parametrize(
    ("windows", "rows"),
    [
        ([0.97, 0.98, 2.0], 0),
        ([0.96, 0.98, 0.96], 1),
        ([0.5, 0.5, None, 0.5], 3),
        ([0.5, 1.0, 0.5, 0.5], 2),
        ([None, None], 0),
    ],
)
def test_windows_below_lru_are_miscounted(windows: list[float | None], rows: int) -> None:
    assert slump(windows, [1.0] * len(windows)) == rows


def test_files_in_turn_are_not_replayed_in_turn(tmp_path: Path) -> None:
    rows = [{"timestamp": 100 * i, "input_length": 600, "hash_ids": [0, 1 + i % 2]} for i in range(30)]
    other = [{"timestamp": 100 * i, "input_length": 600, "hash_ids": [0, 1 + i % 9]} for i in range(30)]
    arguments = ["eviction", "--sizes", "4", "--policies", "lru,lpc+", "--json", str(tmp_path / "out.json")]
    for name, lines in (("a", rows), ("b", other)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        arguments += ["--trace", str(tmp_path / name)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["config"]["requests"] == 60
    windows = written["windows"]["lru"][0]
    assert min(windows[1:5]) > 0.9 > max(windows[5:])
    assert written["slump"] == {"lpc+": [0], "optimal": [0]}
