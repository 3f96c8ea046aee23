"""What an interrupted run keeps and refuses, and how answers are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError, ModelError
from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.run import EvalOptions, run_eval
from blendrag.lab.evaluate.samples import AnswerSample, Lost, SampleLog
from blendrag.lab.evaluate.summary import f1, same_text
from blendrag.progress import SILENT
from blendrag.settings import Settings

CONFIG = {"model": "SmolLM2", "seed": 0, "arms": ("full", "reuse")}
SAMPLE = AnswerSample(
    "row 1", "hkvd@0.15", 1.5, [{7: -0.5, 12: -2.0}, {9: -1.0}], "a\n是", None, 100.0, 80, 12, {}
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0)
samples = st.builds(
    AnswerSample, st.text(), st.text(), numbers,
    st.lists(st.dictionaries(counts, numbers)), st.text(),
    st.none() | st.text(), numbers, counts, counts,
    st.dictionaries(st.text(), numbers), st.none() | numbers,
    st.none() | st.builds(Lost, numbers, counts),
)  # fmt: skip


def opened(path: Path, config: dict[str, Any]) -> None:
    with SampleLog.open(path, config):
        pass


@given(samples)
def test_sample_does_not_change_on_its_way_through_the_file(sample: AnswerSample) -> None:
    line = sample.to_json()
    assert AnswerSample.from_json(line) == sample
    assert "\n" not in line


def test_number_that_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError):
        AnswerSample("row", "full", float("nan"), [], "", None, 1.0, 0, 0, {}).to_json()


def test_line_cut_anywhere_by_a_kill_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, second, third = (replace(SAMPLE, question=f"row {number}") for number in (1, 2, 3))
    with SampleLog.open(path, CONFIG) as file:
        file.append(first)
        file.append(second)
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [first, second][: max(0, sum(end <= cut for end in ends) - 1)]
        with SampleLog.open(path, CONFIG) as file:
            assert file.samples == kept
            file.append(third)
        with SampleLog.open(path, CONFIG) as file:
            assert file.samples == [*kept, third]


def test_sample_is_in_the_file_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with SampleLog.open(path, CONFIG) as file:
        for count in (1, 2):
            file.append(SAMPLE)
            assert path.read_text().splitlines()[1:] == [SAMPLE.to_json()] * count


def test_samples_of_another_configuration_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    opened(path, CONFIG)
    with pytest.raises(ConfigError, match=r"another run \(limit was null, is 3; seed was 0, is 1\)"):
        opened(path, CONFIG | {"seed": 1, "limit": 3})
    opened(path, CONFIG)


@pytest.mark.parametrize(
    "content",
    ["question,answer\n", "draft", '{"question": "?"}\n', "[]\n", "\n", "[" * 100_000 + "\n"],
    ids=["table", "draft", "record", "list", "blank", "nested"],
)
def test_file_of_another_kind_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no file of samples"):
        opened(path, CONFIG)
    assert path.read_text() == content


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with SampleLog.open(path, CONFIG) as file:
        file.append(SAMPLE)
    with path.open("a") as damaged:
        damaged.write('{"row": 1}\n')
    with pytest.raises(ConfigError, match="line 3, is no sample"):
        opened(path, CONFIG)


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        opened(tmp_path / "nowhere" / "rows.jsonl", CONFIG)


# -- how answers are compared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("The Eiffel Tower!", ["Eiffel tower"], 1.0),
        ("in Paris, France", ["Paris"], 0.5),
        ("Paris", ["Lyon", "paris"], 1.0),
        ("Paris Paris", ["Paris"], 2 / 3),
        ("London", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("1,000", ["1000"], 1.0),
        ("洛杉矶的国王队。", ["洛杉矶国王队"], 12 / 13),
        ("136次", ["136 次"], 1.0),
        ("Röntgen", ["röntgen"], 1.0),
    ],
)
def test_f1_is_that_by_hand(text: str, answers: list[str], score: float) -> None:
    assert f1(text, answers) == pytest.approx(score)


@given(st.text(), st.text())
def test_answer_that_is_the_same_does_not_lose(text: str, other: str) -> None:
    assert f1(text, [text]) == 1.0
    assert f1(text, [other]) == pytest.approx(f1(other, [text]))
    assert f1(text, [other, text]) == 1.0
    assert 0.0 <= f1(text, [other]) <= 1.0
    if same_text(text, other):
        assert f1(text, [other]) == 1.0


def test_blank_answers_to_both_do_not_count_as_different() -> None:
    assert f1(" ", ["\n"]) == 1.0
    assert same_text("The.", "")


def test_order_of_words_is_not_ignored_by_the_exact_text() -> None:
    assert f1("Ada met Bob", ["Bob met Ada"]) == 1.0
    assert not same_text("Ada met Bob", "Bob met Ada")
    assert same_text("Ada met Bob.", "ada met  the Bob")


# -- what a run refuses before an engine starts ---------------------------------------------------------

DEPENDED_ON = (
    "commit", "vllm", "blendrag", "cpu", "omp_threads", "shared_prefix", "context_tokens", "blend_share",
)  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a folder that holds no model: runs end where the engine would start."""
    return Settings.load(model=str(tmp_path))


@pytest.fixture
def options(tmp_path: Path, settings: Settings) -> EvalOptions:
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps({"question": "Where?", "answer": "Here.", "documents": ["It is here."]}))
    return EvalOptions(data, "jsonl", parse_arms(["reuse"], None, settings), rows=tmp_path / "rows.jsonl")


@pytest.fixture
def config(settings: Settings, options: EvalOptions) -> dict[str, Any]:
    """What a run leaves in its file at once."""
    assert options.rows
    with pytest.raises(ModelError):
        run_eval(settings, options, SILENT)
    found = json.loads(options.rows.read_text())["config"]
    options.rows.unlink()
    return dict(found)


@pytest.mark.parametrize("name", DEPENDED_ON)
def test_samples_made_by_something_else_are_not_gone_on_with(
    name: str, config: dict[str, Any], settings: Settings, options: EvalOptions
) -> None:
    assert options.rows
    with SampleLog.open(options.rows, config | {name: "another"}):
        pass
    said = rf'\({name} was "another", is .*\): name another file, or delete this one to start again'
    with pytest.raises(ConfigError, match=said):
        run_eval(settings, options, SILENT)


def test_version_of_the_engine_is_known(config: dict[str, Any]) -> None:
    assert config["vllm"] and config["blendrag"] and "commit" in config
