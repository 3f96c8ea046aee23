"""``lpc+`` learns from a store's own log, and no model takes the place of a better one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import PredictorError, SourceError
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.hazard_file import NAME, load_hazard, save_hazard
from blendrag.forecast.trace_log import TraceLog, parts, trace_path
from blendrag.lab.eviction.learn_hazard import LEAST, HazardComparison, largest_log, learn_from_trace
from blendrag.progress import SILENT, Progress

pytestmark = pytest.mark.slow


def traffic(folder: Path, prompts: int, name: str = "trace-a.jsonl", limit: int = 10**9) -> Path:
    """Twenty documents that are asked for again and again, each among three that nobody wants twice."""
    random, now = np.random.default_rng(0), 0.0
    log = TraceLog(folder / name, limit=limit, clock=lambda: now)
    for number in range(prompts):
        now += random.exponential()
        once = [(f"{number}.{place}", 100) for place in range(3)]
        log.note([(f"often {random.integers(20)}", 100), *once], 500, 10)
    log.close(60.0)
    assert log.counts.written == prompts
    return log.path


def learn(log: Path) -> HazardComparison:
    return learn_from_trace(log, log.parent, SILENT)


def test_model_that_beats_lru_stays_away_or_is_worse_later(tmp_path: Path) -> None:
    log = traffic(tmp_path, 600)
    first = learn(log)
    assert first.live and first.old is None and first.new > first.lru + 0.02
    assert first.gdsf > first.lru + 0.02, "what is used often is told from what is used once"
    assert first.kept == first.new
    hazard, facts = load_hazard(tmp_path)
    assert not hazard.prefix and facts["prompts"] == "600" and facts["source"] == str(log)
    kept = (tmp_path / NAME).read_bytes()
    again = learn(log)
    assert not again.live and again.new == again.old == again.kept
    assert (tmp_path / NAME).read_bytes() == kept


def test_old_model_that_is_bad_keeps_its_place(tmp_path: Path) -> None:
    log = traffic(tmp_path, 600)
    wrong = Hazard((0.0, 1000.0), {"count": (2.0,)}, np.array([[-9.0]]), np.zeros(1), False)
    save_hazard(tmp_path, wrong, {})
    compared = learn(log)
    assert compared.live and compared.old is not None and compared.new > compared.old
    assert load_hazard(tmp_path)[0].weights.tolist() != [[-9.0]]
    (tmp_path / NAME).write_bytes(b"damaged")
    assert learn(log).old is None
    assert load_hazard(tmp_path)


def test_model_that_does_not_beat_lru_takes_its_place(tmp_path: Path) -> None:
    """Every document twice in a row: LRU finds all that can be found."""
    log = TraceLog(tmp_path / "trace-a.jsonl", clock=iter(float(at) for at in range(1000)).__next__)
    for number in range(500):
        log.note([(str(number // 2), 100)], 200, 10)
    log.close()
    compared = learn(log.path)
    assert compared.lru == 0.5 and not compared.live and compared.kept is None
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("prompts", [1, LEAST - 1])
def test_short_log_teaches_something(tmp_path: Path, prompts: int) -> None:
    with pytest.raises(PredictorError, match="too few"):
        learn(traffic(tmp_path, prompts))
    assert not (tmp_path / NAME).exists()


def test_log_in_which_nothing_comes_again_teaches_something(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / "trace-a.jsonl")
    for number in range(LEAST + 10):
        log.note([(str(number), 100)], 200, 10)
    log.close()
    with pytest.raises(PredictorError, match="too few"):
        learn(log.path)


def test_damaged_log_is_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "trace-a.jsonl").write_text("{}\n{}\n")
    with pytest.raises(SourceError, match=r"trace-a"):
        learn(tmp_path / "trace-a.jsonl")


def test_log_that_was_rotated_is_learned_from_in_part(tmp_path: Path) -> None:
    log = traffic(tmp_path, 600, limit=100_000)
    traffic(tmp_path, 60, limit=100_000)
    assert len(parts(log)) == 2
    assert learn(log).prompts == 660


def test_small_log_is_taken_for_the_largest(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="outcome_log"):
        largest_log(tmp_path)
    busy, quiet = (trace_path(tmp_path, tmp_path / name) for name in ("busy", "quiet"))
    traffic(tmp_path, 40, busy.name, limit=6000)
    traffic(tmp_path, 30, quiet.name)
    traffic(tmp_path, 10, busy.name, limit=6000)
    assert len(parts(busy)) == 2 and largest_log(tmp_path) == busy


def test_interrupted_learning_changes_the_model(tmp_path: Path) -> None:
    class Interrupted(Progress):
        def advance(self, amount: int = 1) -> None:
            raise KeyboardInterrupt

    log = traffic(tmp_path, 300)
    with pytest.raises(KeyboardInterrupt):
        learn_from_trace(log, tmp_path, Interrupted())
    assert not (tmp_path / NAME).exists()
