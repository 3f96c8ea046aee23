"""``bench load --kv-budget``: what it prints."""

from __future__ import annotations

import json

from blendrag.lab.bench.decode import ARMS, MEASURES, DecodeResults
from blendrag.lab.options import DecodeOptions
from blendrag.lab.results import Setup
from blendrag.lab.statistics import Spread
from blendrag.settings import Settings
from paper_machine import MACHINE
from shown import check_table


def spread(median: float) -> Spread:
    return Spread(median, 0.9 * median, 1.1 * median)


def test_every_arm_is_shown_with_its_numbers() -> None:
    own, ratio = (2.5, 0.48, 0.031, 0.068), (1.01, 1.1, 0.55, 0.07)
    numbers = dict(zip(MEASURES, own, strict=True))
    numbers |= {f"ratio_{name}": number for name, number in zip(MEASURES, ratio, strict=True)}
    rows = {
        (arm, count): {name: spread(n * number) for name, number in numbers.items()}
        for count in (1, 8)
        for n, arm in enumerate(ARMS, start=1)
    }
    setup = Setup(DecodeOptions(512), Settings(), MACHINE, (7512, 7530))
    results = DecodeResults(rows, 497, 219, setup)
    shown = (*ARMS, "2,500", "5,000", "960", "93.0", "6.8%", "497 tokens a head", "7,530")
    check_table(results.show, *shown)
    assert len(json.loads(json.dumps(results.to_dict()))["rows"]) == 6
