"""``bench eviction``: what it writes, prints and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from blendrag.cli.bench import app
from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES
from blendrag.lab.progress import BenchProgress
from blendrag.lab.replay.compare import EvictionOptions, run_eviction
from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.plot import draw_side_by_side
from blendrag.lab.replay.source import Source
from blendrag.lab.replay.summary import WINDOWS
from blendrag.lab.replay.workload_dialogs import DialogLoad, dialog_trace
from blendrag.lab.training.dialogs import Dialog, Turn


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1000, "hash_ids": [0, 1 + i % 7]} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def talks() -> list[Dialog]:
    turns = (Turn(role="user", text="more " * 40), Turn(role="assistant", text="so " * 60))
    return [Dialog(id=f"c{i}", turns=turns * (1 + i % 5)) for i in range(80)]


def test_json_lacks_what_scripts_read(trace: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["eviction", "--trace", str(trace), "--sizes", "4,2,8", "--policies", "lru,gdsf", "--json"]
    result = CliRunner().invoke(app, [*arguments, str(out), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["sizes"] == [2, 4, 8]
    assert list(written["policies"]) == ["lru", "gdsf", "optimal"]
    assert all(len(values) == 3 for values in written["policies"].values())
    assert written["policies"]["lru"][2] == written["policies"]["optimal"][2] > 0.7
    assert all(len(windows) == WINDOWS for windows in written["windows"]["lru"])
    assert all(len(written[key]["gdsf"]) == 3 for key in ("saved", "saved_spread", "closed"))
    assert len(written["behind"]["optimal"]["lru"]) == 3
    assert imread(picture).shape[0] > 100
    assert "cache saved" in result.output and "blocks" in result.output


def test_picture_of_two_replays_shows_one(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--trace", str(trace), "--sizes", "2,4", "--policies", "lru", "--json", str(out)]
    CliRunner().invoke(app, ["eviction", *arguments], catch_exceptions=False)
    results = json.loads(out.read_text())
    widths = []
    for titles in (["one"], ["one", "two"]):
        draw_side_by_side(dict.fromkeys(titles, results), tmp_path / "out.png")
        widths.append(imread(tmp_path / "out.png").shape[1])
    assert widths[1] == pytest.approx(2 * widths[0], abs=2)


def test_all_policies_oracle_and_optimum_on_dialogues_without_a_spread() -> None:
    load = DialogLoad(gap_s=20.0, active=10, seconds=300.0)
    source = Source(lambda seed: dialog_trace(talks(), load, seed=seed), generated=True)
    options = EvictionOptions.parse("1000,4000", None, 3, 0.0)
    results = run_eviction(source, options, Costs(), BenchProgress())
    assert set(results["policies"]) == {*POLICIES, "oracle", "optimal"}
    assert results["config"]["traces"] == 3
    for name, hits in results["policies"].items():
        for hit, best, (low, high) in zip(
            hits, results["policies"]["optimal"], results["spread"][name], strict=True
        ):
            assert low <= hit <= high and hit <= best
    assert results["policies"]["lpc"] == results["policies"]["lru"]  # nobody told it anything
    assert results["policies"]["oracle"][0] > results["policies"]["lru"][0]


def test_warm_up_is_counted(trace: Path, tmp_path: Path) -> None:
    ratios = []
    for warmup in ("0", "0.5"):
        out = tmp_path / f"{warmup}.json"
        arguments = ["--trace", str(trace), "--sizes", "8", "--policies", "lru", "--warmup", warmup]
        CliRunner().invoke(app, ["eviction", *arguments, "--json", str(out)], catch_exceptions=False)
        ratios += json.loads(out.read_text())["policies"]["lru"]
    assert ratios[0] < ratios[1] == 1.0


@pytest.mark.parametrize(
    ("sizes", "policies"), [("", None), ("1,x", None), ("0", None), ("5", "fifo"), ("5", ",")]
)
def test_wrong_option_is_found_out_after_the_replay(sizes: str, policies: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--sizes|--policies"):
        EvictionOptions.parse(sizes, policies, 1, 0.0)
