"""Engine tests that matter, on engines of other kinds: with claims as GPUs have them, and in bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from places import ROOT

pytestmark = [pytest.mark.own_engine, pytest.mark.variant, pytest.mark.slow, pytest.mark.timeout(1500)]

SAME_ANSWER = "test_same_answer.py"
TESTS = (
    SAME_ANSWER,
    "test_exact_prefixes.py::test_exact_prefix_is_another_answer_than_full_prefill",
    "test_exact_prefixes.py::test_damaged_node_gives_another_answer_or_what_was_computed_behind_it_is_kept",
    "test_exact_prefixes.py::test_many_at_once_are_other_answers_than_one_by_one",
    "test_boundaries.py::test_recomputing_every_token_gives_full_prefills_answer",
    "test_prefix_cache.py::test_the_same_recipe_again_hits_the_prefix_cache",
    "test_prefix_cache.py::test_blend_that_fails_leaves_blocks_that_spoil_the_next_answer",
    "test_prompts.py::test_a_damaged_file_is_recomputed_reported_and_replaced",
    "test_prompts.py::test_whatever_fails_in_the_fused_prefill_ends_in_plain_prefills_answer",
    "test_serving.py::test_16_requests_at_once_give_the_texts_they_give_one_by_one",
    "test_serving.py::test_preempted_requests_give_the_texts_of_undisturbed_ones",
    "test_slices.py::test_request_that_gives_up_while_it_is_blended_keeps_its_blocks",
)


@pytest.mark.parametrize(
    ("setting", "names"),
    [({"BLENDRAG__CLAIM": "async"}, TESTS), ({"TESTS_DTYPE": "bfloat16"}, [SAME_ANSWER])],
    ids=["asynchronous", "bfloat16"],
)
def test_what_holds_for_synchronous_claims_in_float32_does_not_for_others(
    setting: dict[str, str], names: Sequence[str]
) -> None:
    tests = [str(ROOT / "tests" / "engine" / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "engine", *tests],
        cwd=ROOT,
        env=os.environ | setting,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
