"""``bench ttft`` without an engine: their axes, their arms, what they show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendrag.errors import ConfigError
from blendrag.lab.arms import Sample
from blendrag.lab.bench.axes import ALL, AXES, Point, axis_named, parse_ratios
from blendrag.lab.bench.ttft import CodecCost, TtftResults, _arms, measure_codec
from blendrag.lab.options import TtftOptions
from blendrag.lab.prompts import PromptMaker
from blendrag.lab.results import Setup
from blendrag.lab.statistics import summarise
from blendrag.options import STEPS
from blendrag.settings import Settings
from blendrag.store.codec import CODECS, make_codec
from blendrag.store.contexts import Chunk
from paper_machine import MACHINE
from shown import Case, check_case

START = Point(6, 512, 0.15, "raw")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.load()


@pytest.mark.parametrize("name", AXES)
def test_axis_has_values_by_default_and_reads_them(name: str, settings: Settings) -> None:
    axis = axis_named(name)
    values = axis.values(None, settings)
    assert len(values) >= 2 and axis.label
    assert axis.values(",".join(map(str, values)), settings) == tuple(values)
    for value in values:
        point = axis.at(START, value)
        assert getattr(point, name) == value and type(getattr(point, name)) is type(value)


BAD = [
    ("chunks", "1"), ("chunks", "2.5"), ("chunks", ""), ("chunk_tokens", "7"), ("ratio", "0"),
    ("ratio", "1.1"), ("ratio", "nan"), ("ratio", "some"), ("codec", "int3"), ("tier", "tape"),
]  # fmt: skip


@pytest.mark.parametrize(("axis", "text"), BAD)
def test_value_that_cannot_be_measured_is_refused(axis: str, text: str, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="--values"):
        axis_named(axis).values(text, settings)


def test_value_given_twice_is_measured_once(settings: Settings) -> None:
    assert axis_named("chunks").values("4, 2,4", settings) == (4, 2)
    assert parse_ratios("0.3, 0.15,0.30") == (0.3, 0.15)


def arms_of(name: str, values: tuple[Any, ...], tokenizer: Any, settings: Settings) -> Any:
    """Arms and cases over stores that nobody has filled."""
    axis = axis_named(name)
    points = {value: axis.at(Point(2, 8, 0.15, "raw"), value) for value in values}
    chunks = {store: [Chunk(f"{store} {n}", "", (n,) * 8) for n in range(6)] for store in ("raw", "int4")}
    stores: Any = {
        point.store: SimpleNamespace(id=point.codec, chunks=chunks[point.codec]) for point in points.values()
    }
    maker = PromptMaker(tokenizer, system_prompt="Answer.", separator="\n")
    return _arms(settings, TtftOptions(name, values, 2, 8, 3), maker, points, stores)


def test_arm_that_does_not_depend_on_the_axis_is_measured_once(tokenizer: Any, settings: Settings) -> None:
    arms, cases = arms_of("ratio", (0.1, 0.2), tokenizer, settings)
    assert len(arms) == 2 + 1 + 2
    assert [arms[key].name for key in cases[0.2].values()] == ["full", "prefix", "reuse", "blend@0.2"]
    arms, cases = arms_of("codec", ("raw", "int4"), tokenizer, settings)
    assert len(arms) == 2 + 2 + 2 and cases["raw"]["full"] == cases["int4"]["full"]
    prompts = [[trial.prompt for trial in arms[case["reuse"]].trials] for case in cases.values()]
    assert [prompt.token_ids for prompt in prompts[0]] == [prompt.token_ids for prompt in prompts[1]]
    assert all(key.startswith("int4 ") for prompt in prompts[1] for key, _, _ in prompt.spans)


def test_step_of_quality_is_measured_with_its_selector(tokenizer: Any, settings: Settings) -> None:
    steps = {**STEPS, ALL: ("all", 1.0)}
    arms, cases = arms_of("quality", tuple(steps), tokenizer, settings)
    assert len(arms) == 2 + 1 + len(steps)
    for name, step in steps.items():
        arm = arms[cases[name]["blended"]]
        recipe = arm.asked(arm.trials[0]).recipe
        assert recipe and arm.name == name
        options = recipe.options
        assert (options.selector, options.recompute_ratio) == step


# -- what is shown ----------------------------------------------------------------------------------------


def samples(ttft: float, recomputed: int, **split: float) -> list[Sample]:
    return [Sample(ttft + i, 5, {5: -0.2, 6: -2.0 - i}, recomputed, split) for i in range(5)]


def results(axis: str, *values: Any) -> TtftResults:
    each = {
        "full": samples(2000, 3072),
        "prefix": samples(1900, 2560),
        "reuse": samples(150, 0, load=60, select=0, recompute=50),
        "blended": samples(480, 461, load=60, select=12, recompute=350),
    }
    summaries = summarise(each, ("full", "prefix"))
    return TtftResults(
        {"blend@0.15" if name == "blended" else name: own for name, own in summaries.items()},
        dict.fromkeys(values, summaries),
        {"raw": CodecCost(23040, 0, 0), "int8": CodecCost(11745, 0.003, 0.007)},
        Setup(
            TtftOptions(axis, values, exact=axis == "ratio"), Settings(),
            replace(MACHINE, cpu="A CPU [model]"), (3140, 3142),
        ),
    )  # fmt: skip


CASES = [
    (results("ratio", 0.15), ("blend@0.15", "4.15x", "461")),
    (results("chunks", 2, 4, 12), ("2,002", "4.15x", "0.0000", "461")),
    (results("quality", "fast", "close"), ("fast", "close", "4.15x")),
    (results("codec", "raw", "int8"), ("int8", "3.95x", "1.96x", "0.70%")),
]


@pytest.mark.parametrize("case", CASES)
def test_table_is_whole_and_picture_opaque(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_json_has_the_fields_that_are_promised() -> None:
    read = json.loads(json.dumps(results("ratio", 0.15).to_dict(), allow_nan=False))
    assert list(read["arms"]) == ["full", "prefix", "reuse", "blend@0.15"]
    for arm in read["arms"].values():
        assert set(arm) == {
            "ttft_ms", "speedup_vs_full", "speedup_vs_prefix", "kl_first_token", "top1_agreement",
            "tokens_recomputed", "split_ms", "each_ms",
        }  # fmt: skip
        assert set(arm["ttft_ms"]) == set(arm["speedup_vs_full"]) == {"median", "p10", "p90"}
    (point,) = json.loads(json.dumps(results("chunks", 2).to_dict(), allow_nan=False))["points"]
    assert point["value"] == 2 and list(point["arms"]) == ["full", "prefix", "reuse", "blended"]


# -- what a codec costs, on KV made up here -------------------------------------------------------------


def test_codec_with_fewer_bits_has_a_larger_error_and_raw_has_none() -> None:
    records = [torch.randn(2, 2, 40, 2, 32).to(torch.bfloat16) for _ in range(2)]
    found = {name: measure_codec(make_codec(name, 2, 32, torch.bfloat16), records) for name in sorted(CODECS)}
    assert (found["raw"].k_error, found["raw"].v_error) == (0, 0)
    assert found["raw"].bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert 0 < found["int8"].k_error < found["fp8"].k_error < found["int4"].k_error < 0.2
