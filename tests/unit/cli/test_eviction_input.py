"""``bench eviction`` and ``fit`` with wrong files and options: a line that says so, and no more."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Blendrag = Callable[..., Result]

BLOCKS = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
TALK = {"id": "a", "turns": [{"role": "user", "text": "hi"}]}


def line(record: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**record, **changes}).encode() + b"\n"


FILES = {
    "nothing": (b"", "empty"),
    "blank": (b"\n\n", "empty"),
    "text": (b"hello\n", "not JSON"),
    "binary": (bytes(range(256)), "cannot read"),
    "brackets": (b"[" * 100_000 + b"\n", "not JSON"),
    "number": (b"3\n", "neither a list nor lines"),
    "list": (b"[1, 2]\n", "SQuAD's format: item 1: "),
    "another format": (b'{"id": "a"}\n', "paragraphs: Field required (other traces have hash_ids or turns)"),
    "no gzip": (b"\x1f\x8bhello", "cannot read"),
    "cut": (gzip.compress(line(BLOCKS) * 500)[:-12], "cannot read"),
    "negative": (line(BLOCKS, input_length=-600), "line 1: input_length"),
    "infinite": (line(BLOCKS, timestamp=0).replace(b'"timestamp": 0', b'"timestamp": 1e999'), "timestamp"),
    "nobody asks": (line(TALK, turns=[{"role": "assistant", "text": "hi"}]) * 3, "does a user say anything"),
    "no turns": (line(TALK, turns=[]), "does a user say anything"),
    "half a character": (line(TALK).replace(b"hi", b"\\ud800"), "line 1: Invalid JSON"),
    "no questions": (b'{"data": [{"paragraphs": [{"context": "x", "qas": []}]}]}', "has no questions"),
    "cut questions": (b'{\n"data": [{"paragraphs": [{"context": "x"', "line 2: not JSON"),
}


def refused(result: Result, *hints: str) -> None:
    assert result.exit_code == 1 and not result.stdout, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(hint in result.stderr for hint in hints), result.stderr


@pytest.mark.parametrize("name", FILES)
def test_broken_trace_is_refused_in_a_line(blendrag: Blendrag, workdir: Path, name: str) -> None:
    content, hint = FILES[name]
    (workdir / "trace.jsonl").write_bytes(content)
    refused(blendrag("bench", "eviction", "--trace", "trace.jsonl", "--sizes", "10"), "trace.jsonl", hint)


def test_folder_without_a_trace_is_refused_in_a_line(blendrag: Blendrag, workdir: Path) -> None:
    (workdir / "folder").mkdir()
    for name in ("folder", "nowhere.jsonl"):
        refused(blendrag("bench", "eviction", "--trace", name, "--sizes", "10"), name)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--sizes", "0"], "must hold 1 or more"),
        (["--sizes", "-5"], "must hold 1 or more"),
        (["--sizes", "1e3"], "whole numbers"),
        (["--sizes", "5", "--policies", "lruu"], "unknown 'lruu'; there are"),
        (["--sizes", "5", "--policies", "lru,"], "unknown ''"),
    ],
)
def test_wrong_value_of_an_option_is_refused_in_a_line(
    blendrag: Blendrag, workdir: Path, options: list[str], hint: str
) -> None:
    (workdir / "trace.jsonl").write_bytes(line(BLOCKS))
    refused(blendrag("bench", "eviction", "--trace", "trace.jsonl", *options), hint)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--polices", "lru"], "--policies"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--seeds", "0"], "--seeds"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--warmup", "1"], "--warmup"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--warmup", "nan"], "--warmup"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--seconds", "nan"], "--seconds"),
        (["bench", "eviction", "--trace", "t"], "--sizes"),
        (["bench", "evictoin"], "eviction"),
        (["fit", "--dta", "t"], "--data"),
    ],
)
def test_typo_is_told_what_was_meant(blendrag: Blendrag, words: list[str], hint: str) -> None:
    result = blendrag(*words)
    assert result.exit_code == 2 and hint in result.stderr and "Traceback" not in result.output


def test_arrivals_are_read_before_anything_is_embedded(
    blendrag: Blendrag, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blendrag.lab.eviction import source

    monkeypatch.setattr(source, "embedded", lambda *arguments: pytest.fail("embedded"))
    paragraphs = [{"context": "x", "qas": [{"question": "y"}]}]
    (workdir / "set.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (workdir / "azure.csv").write_text("yesterday\n")
    options = ("--sizes", "5", "--arrivals", "azure.csv")
    refused(blendrag("bench", "eviction", "--trace", "set.json", *options), "azure.csv")
