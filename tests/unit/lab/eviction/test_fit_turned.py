"""A workload that turns against what ``lpc+`` learned from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from blendrag.eviction import make_policy
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.eviction.fit_hazard import learned
from blendrag.lab.eviction.replay import ReplayOutcome, replay
from blendrag.lab.eviction.trace import Request, RequestTrace

LEARNED, TURN, END = 2_000, 4_000, 12_000  # requests
LAG, ROOM = 15, 60


def turning(seed: int) -> RequestTrace:
    """At first, what was asked for twice is asked for again and again, and all else once. Then everything is
    asked for twice, one after the other, and never again: what looks promising is over, and the reverse."""
    random = np.random.default_rng(seed)
    names = [
        f"liked {random.integers(100)}" if random.random() < 0.5 else f"passing {number}"
        for number in range(TURN)
    ]
    for pair in range((END - TURN) // 2):
        names += [f"pair {pair}", f"pair {pair - LAG}"]
    at = np.cumsum(random.exponential(size=END))
    requests = [Request(float(when), (name,), (1,)) for when, name in zip(at, names, strict=True)]
    return RequestTrace("turning", requests, prefix=False, unit="tokens")


def windows(outcome: ReplayOutcome) -> NDArray[np.float64]:
    """Hit ratios of ten parts of what comes after the part that was learned from."""
    share: NDArray[np.float64] = outcome.found[LEARNED:].reshape(10, -1).mean(axis=1)
    return share


@pytest.mark.parametrize("seed", range(2))
def test_what_was_learned_does_harm_for_a_window_at_most(seed: int) -> None:
    trace = turning(seed)
    fitted = learned(trace, LEARNED / END)
    assert fitted
    policy = LPCPlus(fitted)
    own, lru = (windows(replay(trace, one, ROOM)) for one in (policy, make_policy("lru")))
    assert own[0] > 1.1 * lru[0], "it learned nothing that could do harm"
    behind = own < 0.97 * lru
    assert not any(one and other for one, other in pairwise(behind)), (own, lru)
    assert not policy.learned
