"""Trace files: what is in them, and what may be wrong with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import ConfigError, SourceError
from blendrag.eviction import make_policy
from blendrag.lab.replay.azure import Arrival, read_azure
from blendrag.lab.replay.belady import optimum
from blendrag.lab.replay.mooncake import read_mooncake
from blendrag.lab.replay.run import Outcome, replay
from blendrag.lab.replay.source import Workload, open_source
from places import DATA

TRACES = DATA / "traces"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def data(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(
            f"needs the public trace {name}: put it into {TRACES}, or name the folder that has it by the"
            " environment variable TRACES"
        )
    return TRACES / name


def record(at: int = 0, length: int = 600, ids: Any = (0, 1)) -> str:
    return json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": list(ids)})


def test_blocks_of_a_prompt_are_told_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{record()}\n\n{record(1500, 1024, (0, 2))}\n")
    first, second = read_mooncake(path).requests
    assert (first.keys, first.sizes, first.at) == (("0", "1"), (512, 88), 0.0)
    assert (second.keys, second.sizes, second.at) == (("0", "2"), (512, 512), 1.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        (f"{record(5)}\n{record(4)}", "line 2: timestamp: earlier"),
        (f"{record()}\n\n{record(1, 513, (0,))}", "line 3: input_length: 513 tokens are not 1 blocks"),
        (f"{record()}\n{record(1, 512)}", "line 2: input_length"),
        (f"{record()}\n{record(1, 600, ())}", "line 2: hash_ids"),
        (f"{record()}\n{{'broken", "line 2: .*JSON"),
        (f"{record()}\n{{}}", "line 2: timestamp"),
        (record(0, 600, ("a", "b")), "line 1: hash_ids.0"),
        (record().replace("600", "NaN"), "line 1"),
        (record(-1), "line 1: timestamp"),
        ("not a record", "line 1: not JSON"),
    ],
)
def test_wrong_mooncake_line_is_read_or_not_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SourceError, match=f"trace.jsonl.*{says}"):
        open_source(path, Workload())


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[:-20], lambda packed: packed[:40] + b"?" + packed[41:]]
)
def test_damaged_archive_is_a_traceback(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = "\n".join(record(at, 600, (0, at)) for at in range(1, 2000))
    path.write_bytes(damage(gzip.compress(lines.encode())))
    with pytest.raises(SourceError, match=r"trace\.jsonl\.gz"):
        read_mooncake(path)


@pytest.mark.parametrize("read", [read_mooncake, read_azure, lambda path: open_source(path, Workload())])
def test_wrong_path_is_a_traceback(tmp_path: Path, read: Callable[[Path], object]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SourceError, match=path.name):
            read(path)


def test_azure_times_are_not_seconds_since_the_first(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n")
    assert read_azure(path) == [Arrival(0.0, 4808, 10), Arrival(0.5, 3180, 8)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "no requests"),
        (HEAD + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:03,1,1\n", "line 3: TIMESTAMP: earlier"),
        (HEAD + "2023-11-16 18:17:04,1\n", "line 2"),
        (HEAD + "yesterday,1,1\n", "line 2"),
        (HEAD + "2023-11-16 18:17:04,1,-1\n", "line 2: a negative"),
        (HEAD + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:04+00:00,1,1\n", "line 3"),
        ("\xff\xfe", "line 1"),
    ],
)
def test_wrong_azure_line_is_read_or_not_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=f"azure.csv.*{says}"):
        read_azure(path)


def test_times_alone_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + "2023-11-16 18:17:04,1,1\n")
    with pytest.raises(ConfigError, match="--arrivals"):
        open_source(path, Workload())


@pytest.mark.parametrize(("name", "count"), [("code", 8_819), ("conv", 19_366)])
def test_public_azure_traces_are_not_read_wholly(name: str, count: int) -> None:
    assert len(read_azure(data(f"azure_2023_{name}.csv.gz"))) == count


def test_hit_ratios_on_mooncake_are_not_the_known_ones() -> None:
    """8,000 blocks; by hand, in blocks, .172 and .341; tokens make it a little more."""
    trace = read_mooncake(data("mooncake_conversation.first30min.jsonl.gz"))
    assert (len(trace.requests), sum(len(one.keys) for one in trace.requests)) == (5_719, 146_464)

    def hit(outcome: Outcome) -> float:
        return float(outcome.found.sum() / outcome.asked.sum())

    assert hit(replay(trace, make_policy("lru"), 8_000)) == pytest.approx(0.1755, abs=5e-4)
    assert hit(replay(trace, make_policy("gdsf"), 8_000)) == pytest.approx(0.194, abs=2e-3)
    assert hit(optimum(trace, 8_000)) == pytest.approx(0.347, abs=1e-3)
