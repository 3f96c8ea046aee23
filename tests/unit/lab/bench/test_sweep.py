"""What a sweep measures, without an engine: its points, its jobs, its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.errors import ConfigError
from blendrag.lab.arms import Arm, Sample
from blendrag.lab.bench.sweep import Job, SweepOptions, measure_in_turns, summarise_point
from blendrag.lab.bench.sweep_plot import _labels
from blendrag.lab.bench.sweep_points import AXES, Point, axis_named
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import Prompt, Trial
from blendrag.lab.texts import questions_of
from blendrag.prompt import encode_document
from blendrag.settings import Settings

START = Point(6, 512, 0.15, "raw")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.load()


@pytest.mark.parametrize("name", AXES)
def test_axis_has_no_values_by_default_or_cannot_read_them(name: str, settings: Settings) -> None:
    axis = axis_named(name)
    values = axis.values(None, settings)
    assert len(values) >= 2 and axis.label
    assert axis.values(",".join(map(str, values)), settings) == tuple(values)
    for value in values:
        point = axis.at(START, value)
        assert getattr(point, name) == value and type(getattr(point, name)) is type(value)


BAD = [
    ("chunks", "1"), ("chunks", "2.5"), ("chunks", ""), ("chunk_tokens", "7"), ("ratio", "0"),
    ("ratio", "1.1"), ("ratio", "nan"), ("ratio", "some"), ("question_tokens", "-4"), ("batch", "0"),
    ("codec", "int3"), ("tier", "tape"),
]  # fmt: skip


@pytest.mark.parametrize(("axis", "text"), BAD)
def test_value_that_cannot_be_measured_is_accepted(axis: str, text: str, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="--values"):
        axis_named(axis).values(text, settings)


def test_value_given_twice_is_measured_twice(settings: Settings) -> None:
    assert axis_named("chunks").values("4, 2,4", settings) == (4, 2)


def test_unknown_axis_is_a_key_error() -> None:
    with pytest.raises(ConfigError, match="no axis 'chunk', but chunks, chunk_tokens"):
        axis_named("chunk")


@pytest.mark.parametrize("options", [{"chunks": 1}, {"repeats": 0}, {"values": ()}, {"chunk_tokens": 4}])
def test_sweep_of_nothing_is_accepted(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a sweep needs"):
        SweepOptions(**{"axis": "chunks", "values": (2,), **options})


@pytest.mark.parametrize("tokens", [4, 16, 200])
def test_question_has_another_length_than_was_asked_for(tokens: int, tokenizer: Any) -> None:
    questions = questions_of(tokenizer, tokens)
    assert len(questions) > 1
    assert {len(encode_document(tokenizer, question)) for question in questions} == {tokens}


def sample(ttft_ms: float) -> Sample:
    return Sample(ttft_ms, 5, {5: -0.1, 6: -3.0}, 7, {})


class Counting(Arm):
    """Takes as many ms as its number in the log, which all arms share."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    async def prepare(self, engine: Any, trials: Any) -> None:
        self._log.append(f"{self.name} prepares {len(trials)}")

    async def ask(self, engine: Any, trial: Trial) -> Sample:
        self._log.append(self.name)
        return sample(len(self._log))


def test_job_of_two_points_is_measured_twice_or_the_warm_up_is_kept() -> None:
    log: list[str] = []
    trial = Trial(Prompt((1,), ()), Prompt((1,), ()))
    full, one, two = (Job(Counting(name, log), [[trial, trial]] * 3) for name in ("full", "one", "two"))
    cases = {1: {"full": full, "b": one}, 2: {"full": full, "b": two}}
    samples = measure_in_turns(None, cases, BenchProgress())
    assert set(samples) == {full, one, two}
    assert all(len(own) == 2 and all(len(batch) == 2 for batch in own) for own in samples.values())
    assert log.count("full") == 3 * 2 and log.count("full prepares 2") == 3
    assert min(found.ttft_ms for own in samples.values() for batch in own for found in batch) > 9
    assert len({log[at] for at in (0, 9, 18)}) == 3, "every repeat begins with the same arm"


def test_speed_up_is_not_of_the_means_of_one_repeat() -> None:
    samples = {
        "full": [[sample(100), sample(300)], [sample(400), sample(400)]],
        "prefix": [[sample(100), sample(100)], [sample(200), sample(200)]],
        "reuse": [[sample(50), sample(50)], [sample(100), sample(100)]],
        "blended": [[sample(50), sample(150)], [sample(50), sample(150)]],
    }
    found = summarise_point(samples)
    assert list(found) == list(samples)
    assert found["blended"]["ttft_ms"]["median"] == 100
    assert found["blended"]["each_ms"] == [[50, 150], [50, 150]]
    assert found["blended"]["speedup_vs_full"] == pytest.approx({"median": 3, "p10": 2.2, "p90": 3.8})
    assert found["reuse"]["speedup_vs_prefix"]["median"] == 2
    assert found["blended"]["kl_first_token"] == 0 and found["blended"]["tokens_recomputed"] == 7


def test_label_of_a_value_stands_on_that_of_its_neighbour() -> None:
    assert _labels([0.02, 0.05, 0.1, 0.15, 0.5]) == ["0.02", "", "0.1", "0.15", "0.5"]
    assert _labels([512]) == ["512"]
