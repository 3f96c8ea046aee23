"""What an interrupted run keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.lab.evaluate.samples import AnswerSample, Lost, SampleLog

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


def test_interrupted_run_does_not_start_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with SampleLog.open(path, CONFIG) as first:
        assert first.samples == []
        first.append(SAMPLE)
    with SampleLog.open(path, CONFIG) as second:
        assert second.samples == [SAMPLE]
        second.append(SAMPLE)
    with SampleLog.open(path, CONFIG) as third:
        assert third.samples == [SAMPLE, SAMPLE]


def test_line_cut_anywhere_by_a_kill_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with SampleLog.open(path, CONFIG) as file:
        file.append(SAMPLE)
        file.append(SAMPLE)
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with SampleLog.open(path, CONFIG) as file:
            assert len(file.samples) == max(0, sum(end <= cut for end in ends) - 1)
            file.append(SAMPLE)
        with SampleLog.open(path, CONFIG) as file:
            assert set(map(AnswerSample.to_json, file.samples)) == {SAMPLE.to_json()}


def test_killed_process_loses_at_most_the_sample_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    code = f"""
from pathlib import Path
from blendrag.lab.evaluate.samples import AnswerSample, SampleLog
with SampleLog.open(Path({str(path)!r}), {{}}) as log:
    while True:
        number = str(len(log.samples))
        log.append(AnswerSample(number, "full", 1.0, [], "x" * 10_000, None, 1.0, 0, 0, {{}}))
        print(len(log.samples), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(0.2)
        os.kill(writer.pid, signal.SIGKILL)
        told = [line for line in writer.stdout.read().split("\n") if line]
    with SampleLog.open(path, {}) as file:
        assert [sample.question for sample in file.samples] == [str(n) for n in range(len(file.samples))]
        assert len(file.samples) >= int(told[-2] if len(told) > 1 else 1)


def test_samples_of_another_configuration_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    opened(path, CONFIG)
    with pytest.raises(ConfigError, match=r"another run \(limit was null, is 3; seed was 0, is 1\)"):
        opened(path, CONFIG | {"seed": 1, "limit": 3})
    opened(path, CONFIG)


@pytest.mark.parametrize("content", ["question,answer\n", "draft", '{"question": "?"}\n', "[]\n", "\n"])
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
