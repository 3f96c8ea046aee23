"""What a store saves does not wear off, however many questions nobody has asked before are put to it."""

from __future__ import annotations

import random

import pytest

from workbench import Bench

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

QUESTIONS, DOCUMENTS = 120, 3


def test_every_novel_question_reuses_all_its_documents_and_stores_nothing(bench: Bench) -> None:
    """Never the same documents in the same order, each question with words of its own."""
    draw = random.Random(7)
    before = bench.client.stats().tiers
    asked = set()
    while len(asked) < QUESTIONS:
        pieces = draw.sample(bench.pieces, DOCUMENTS)
        if (order := tuple(piece.key for piece in pieces)) in asked:
            continue
        asked.add(order)
        report = bench.blended(bench.prompt(pieces, f"\nOf number {len(asked)}, these say that")).report
        assert report is not None
        assert (sum(report.tiers.values()), report.missing) == (DOCUMENTS, {}), f"question {len(asked)}"
    after = bench.client.stats().tiers
    for tier in ("ram", "disk"):
        for count in ("chunks", "bytes", "puts", "evictions", "misses"):
            assert after[tier][count] == before[tier][count], (tier, count)
