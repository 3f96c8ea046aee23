"""What ranks agree on, two of them in processes of their own; no engine is started."""

from __future__ import annotations

from typing import Any

import pytest

from several_ranks import on_two_ranks


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank; all from the same two processes, as importing takes longer than the tests."""
    names = "agreements slices job has_no_room opens_alone checks_unknown_structure fails_alone checks_alone"
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), *names.split())


def test_ranks_agree(answers: list[dict[str, Any]]) -> None:
    both = {
        "sum": [3.0] * 3,
        "choose": {"rank": 0},
        "everyone": [0, 1],
        "all": [True, False],
        "outcome": 0,
        "full": "StoreFullError: full",
        "gone": "EngineError: OSError: gone",
    }
    assert [own["agreements"] for own in answers] == [both | {"whole": True}, both | {"whole": False}]


def test_ranks_go_by_one_clock(answers: list[dict[str, Any]]) -> None:
    first, second = (own["slices"] for own in answers)
    assert first == second
    assert max(at for *_, at in first) > 2


def test_job_pauses_where_the_other_rank_does(answers: list[dict[str, Any]]) -> None:
    first, second = (own["job"] for own in answers)
    assert first == second and first[-1] is True


def test_rank_that_fails_alone_is_not_waited_for(answers: list[dict[str, Any]]) -> None:
    assert [own["fails_alone"] for own in answers] == [True, 1]


def test_prompt_that_one_rank_has_no_room_for_is_given_up_by_all(answers: list[dict[str, Any]]) -> None:
    first, second = (own["has_no_room"] for own in answers)
    assert first == ["memory", "ring of 2 GiB", "layers"]
    assert second == ["memory", "ring of 2 GiB", "records"]


def test_store_that_one_rank_could_not_open_is_open_on_none(answers: list[dict[str, Any]]) -> None:
    both = ["OSError: too many open files", "open"]
    assert [own["opens_alone"] for own in answers] == [both, both]


def test_self_check_that_fails_on_one_rank_is_not_waited_for_by_the_others(
    answers: list[dict[str, Any]],
) -> None:
    assert [own["checks_alone"] for own in answers] == [None, 1]


def test_structure_that_is_unknown_to_all_ranks_is_reported_by_all(answers: list[dict[str, Any]]) -> None:
    first, second = (own["checks_unknown_structure"] for own in answers)
    assert first == second and "no such norm" in first
