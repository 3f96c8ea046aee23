"""Files of conversations, right and wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import SourceError
from blendrag.forecast.window import PROMPTS
from blendrag.lab.training.dialogs import Dialog, Turn, examples, read_dialogs
from places import DATA

DIALOGS = DATA / "dialogs"
GOOD = '{"id": "a", "turns": [{"role": "user", "text": "hi"}]}'
ROLES = st.sampled_from(["user", "assistant", "system"])


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
        ('{"id": "b", "turns": [{"role": "user", "text": "x", "at": "soon"}]}', "turns.0.at"),
        ('{"id": "b", "turns": ["hi"]}', "turns.0"),
    ],
)
def test_line_that_is_no_conversation_is_not_passed_over(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "wrong.jsonl", GOOD, "", line)
    with pytest.raises(SourceError, match=r"wrong.jsonl', line 3: ") as error:
        read_dialogs(path)
    assert says in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_file_without_conversations_is_not_trained_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(SourceError, match="no conversations"):
        read_dialogs(tmp_path / "empty.jsonl")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD.encode() * 50)
    for name, content in {"cut.gz": packed[:-9], "broken.gz": packed[:12] + b"\xff" * 20}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match=name):
            read_dialogs(tmp_path / name)
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(SourceError, match="cannot read"):
            read_dialogs(path)


def test_gzip_is_not_read_otherwise_than_plain(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", GOOD, GOOD.replace('"a"', "7"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert read_dialogs(tmp_path / "a.gz") == read_dialogs(plain)
    assert [dialog.id for dialog in read_dialogs(plain)] == ["a", "7"]


@given(st.lists(st.tuples(ROLES, st.text(max_size=3)), max_size=20))
def test_outcome_never_shows_in_what_is_known(turns: list[tuple[str, str]]) -> None:
    said = tuple(Turn(role=role, text=text) for role, text in turns)
    prompts = [text for role, text in turns if role == "user"]
    found = list(examples([Dialog(id="a", turns=said)]))
    assert [each.continues for each in found] == [True] * (len(prompts) - 1) + [False] * bool(prompts)
    for number, each in enumerate(found, start=1):
        assert each.window.turns == number
        assert list(each.window.prompts) == prompts[max(0, number - PROMPTS) : number]


@pytest.mark.parametrize("name", ["sgd", "convai2018"])
def test_public_conversations_are_not_misread(name: str) -> None:
    found = sorted(DIALOGS.glob(f"{name}*.jsonl*"))
    if not found:
        pytest.skip(
            f"needs the conversations {name}*.jsonl: put them into {DIALOGS}, or name the folder that has"
            " them by the environment variable DIALOGS"
        )
    content = found[0].read_bytes()
    records = (gzip.decompress(content) if found[0].suffix == ".gz" else content).splitlines()
    dialogs = read_dialogs(found[0])
    assert [len(dialog.prompts) for dialog in dialogs] == [json.loads(record)["n_user"] for record in records]
