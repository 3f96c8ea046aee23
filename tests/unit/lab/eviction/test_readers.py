"""Trace files: what is in them, and what may be wrong with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import SourceError
from blendrag.eviction import make_policy
from blendrag.lab.eviction.replay import optimum, replay
from blendrag.lab.eviction.source import open_source
from blendrag.lab.eviction.trace import read_dialogs, read_mooncake
from blendrag.lab.options import EvictionOptions
from blendrag.lab.questions import read_azure
from places import public

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def record(at: int = 0, length: int = 600, ids: Any = (0, 1)) -> str:
    return json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": list(ids)})


PACKED = gzip.compress("\n".join(record(at, 600, (0, at)) for at in range(1, 2000)).encode())


def test_blocks_of_a_prompt_are_told_rightly(tmp_path: Path) -> None:
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
        (record().replace("600", "-600"), "line 1: input_length"),
        (record().replace(": 0", ": 1e999"), "line 1: timestamp"),
        (record(-1), "line 1: timestamp"),
        ("not a record", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("3", "neither a list nor lines"),
        ("[1, 2]", "SQuAD's format: item 1: "),
        ('{"id": "a"}', r"paragraphs: Field required \(other traces have hash_ids or turns\)"),
        ('{"data": [{"paragraphs": [{"context": "x", "qas": []}]}]}', "has no questions"),
        ('{\n"data": [{"paragraphs": [{"context": "x"', "line 2: not JSON"),
        ('{"id": "a", "turns": []}', "in none of its conversations does a user say anything"),
        ('{"id": "a", "turns": [{"role": "assistant", "text": "hi"}]}', "does a user say anything"),
        ('{"id": "a", "turns": [{"role": "user", "text": "\\ud800"}]}', "line 1: Invalid JSON"),
    ],
)
def test_wrong_trace_is_refused_and_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SourceError, match=f"trace.jsonl.*{says}"):
        open_source(EvictionOptions(path, "1"))


@pytest.mark.parametrize(
    "content",
    [PACKED[:-20], PACKED[:40] + b"?" + PACKED[41:], b"\x1f\x8bhello", bytes(range(256))],
    ids=["cut", "changed", "no gzip", "no text"],
)
def test_file_that_cannot_be_unpacked_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"cannot read .*trace\.jsonl\.gz"):
        open_source(EvictionOptions(path, "1"))


@pytest.mark.parametrize(
    "read", [read_azure, read_dialogs, lambda path: open_source(EvictionOptions(path, "1"))]
)
def test_wrong_path_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SourceError, match=path.name):
            read(path)


def test_azure_times_are_seconds_since_the_first(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n")
    assert read_azure(path) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "no requests"),
        (HEAD + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:03,1,1\n", "line 3: TIMESTAMP: earlier"),
        (HEAD + "2023-11-16 18:17:04,1\n", "line 2"),
        (HEAD + "yesterday,1,1\n", "line 2"),
        (HEAD + "2023-11-16 18:17:04,1,-1\n", "line 2: .*not two numbers"),
        (HEAD + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:04+00:00,1,1\n", "line 3"),
        ("\xff\xff", "line 1"),
    ],
)
def test_wrong_azure_line_is_refused_and_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=f"azure.csv.*{says}"):
        read_azure(path)


@pytest.mark.parametrize(("name", "count"), [("code", 8_819), ("conv", 19_366)])
def test_public_azure_traces_are_read_wholly(name: str, count: int) -> None:
    assert len(read_azure(public(f"traces/azure_2023_{name}.csv.gz"))) == count


def test_hit_ratios_on_mooncake_are_the_known_ones() -> None:
    """8,000 blocks; by hand, in blocks, .172 and .341; tokens make it a little more."""
    trace = read_mooncake(public("traces/mooncake_conversation.first30min.jsonl.gz"))
    assert (len(trace.requests), sum(len(one.keys) for one in trace.requests)) == (5_719, 146_464)

    assert replay(trace, make_policy("lru"), 8_000).hit_ratio() == pytest.approx(0.1755, abs=5e-4)
    assert replay(trace, make_policy("gdsf"), 8_000).hit_ratio() == pytest.approx(0.194, abs=2e-3)
    assert optimum(trace, 8_000).hit_ratio() == pytest.approx(0.347, abs=1e-3)


GOOD = '{"id": "a", "turns": [{"role": "user", "text": "hi"}]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"turns": []}', "id"),
        ('{"id": "", "turns": []}', "id"),
        ('{"id": "b"}', "turns"),
        ('{"id": "b", "turns": [{"role": "user"}]}', "turns.0.text"),
        ('{"id": "b", "turns": [{"role": "user", "text": 7}]}', "turns.0.text"),
        ('{"id": "b", "turns": ["hi"]}', "turns.0"),
    ],
)
def test_line_that_is_no_conversation_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "wrong.jsonl", GOOD, "", line)
    with pytest.raises(SourceError, match=r"wrong.jsonl', line 3: ") as error:
        read_dialogs(path)
    assert says in str(error.value)


def test_gzip_is_read_as_plain(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", GOOD, GOOD.replace('"a"', "7"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert read_dialogs(tmp_path / "a.gz") == read_dialogs(plain)
    assert [dialog.id for dialog in read_dialogs(plain)] == ["a", "7"]


@pytest.mark.parametrize("name", ["sgd", "convai2018"])
def test_public_conversations_are_read_rightly(name: str) -> None:
    path = public(f"dialogs/{name}*.jsonl*")
    content = path.read_bytes()
    records = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    dialogs = read_dialogs(path)
    assert [len(dialog.prompts) for dialog in dialogs] == [json.loads(record)["n_user"] for record in records]
