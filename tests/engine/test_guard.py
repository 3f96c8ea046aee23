"""An engine that serves prefills what it would load for longer; the laboratory's, which other tests use,
loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag import BlendIndex
from places import EXAMPLES

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

QUESTIONS = [
    f"When is the office in {town} closed, and who approves travel?"
    for town in ("Bergen", "Oslo", "Turku", "Malmö", "Aarhus")
]


def test_answer_over_a_slow_tier_is_that_of_full_prefill_from_the_fourth_prompt_on(
    model_dir: Path, tmp_path: Path
) -> None:
    slow = {"kind": "disk", "throttle": 3_000_000}  # where every processor prefills sooner
    options = {"max_model_len": 3072, "kv_cache_gib": 1, "dtype": "float32", "max_tokens": 12}
    with BlendIndex.open(tmp_path / "index", model=str(model_dir), tiers=[slow], **options) as index:
        index.ingest(EXAMPLES / "handbook", progress=False)
        found = [index.ask(question) for question in QUESTIONS]
        for blended in found[:3]:
            assert blended.evidence.mode == "blended" and blended.evidence.reused >= 256
        for question, refused in zip(QUESTIONS[3:], found[3:], strict=True):
            assert refused.evidence.mode == "plain" and not refused.evidence.reused
            assert "tokens from disk would take" in str(refused.evidence.plain)
            assert refused.text == index.ask(question, blend=False).text
