"""When chunks are used again: rows from traces, and the fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from blendrag.errors import PredictorError
from blendrag.eviction import make_policy
from blendrag.eviction.hazard import FEATURES
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.eviction.fit_hazard import LEAST, Uses, fit_hazard, learn_table, learned, uses_of
from blendrag.lab.eviction.replay import ReplayOutcome, replay
from blendrag.lab.eviction.trace import Request, RequestTrace


def trace(*requests: Request, prefix: bool = True) -> RequestTrace:
    return RequestTrace("t", requests, prefix, "blocks")


def ask(at: float, keys: str, answer: int = 0, **more: object) -> Request:
    return Request(at, tuple(keys), (1,) * len(keys), answer, **more)  # type: ignore[arg-type]


def column(uses: Uses, name: str) -> list[float]:
    return uses.features[:, FEATURES.index(name)].tolist()


def test_uses_are_told_of_when_they_happen_and_in_their_order() -> None:
    uses = uses_of(trace(ask(0.0, "ab", finished=5.0), ask(3.0, "ac"), ask(7.0, "abd", answer=1)))
    # c and a of the second request (3 s), b and a of the first (5 s), d, b and a of the third (7 s)
    assert uses.at.tolist() == [3.0, 3.0, 5.0, 5.0, 7.0, 7.0, 7.0]
    assert column(uses, "count") == [1, 1, 1, 2, 1, 2, 3]
    assert column(uses, "gap") == [-1, -1, -1, 2, -1, 2, 2]
    assert column(uses, "first") == [0, 0, 0, 2, 0, 2, 4]
    assert column(uses, "depth") == [1, 0, 1, 0, 2, 1, 0]
    assert column(uses, "new") == [1, 1, 2, 2, 1, 1, 1]  # what is asked is seen at once; d is an answer
    assert column(uses, "fresh") == [1, 0, 1, 1, 1, 0, 0]
    assert uses.next.tolist() == [np.inf, np.inf, 2.0, 2.0, np.inf, np.inf, np.inf]


def test_no_future_shines_through() -> None:
    uses = uses_of(trace(*(ask(float(at), "ab") for at in range(0, 100, 10))))
    known = uses.before(35.0)
    assert known.at.tolist() == [0, 0, 10, 10, 20, 20, 30, 30]
    assert known.next.tolist() == [10, 10, 10, 10, 10, 10, np.inf, np.inf]
    assert known.until == 35.0
    cut = uses_of(trace(*(ask(float(at), "ab") for at in range(0, 40, 10))))
    assert np.array_equal(known.features, cut.features)
    assert uses.since(85.0).at.tolist() == [90, 90]


def poisson(count: int, seed: int = 0) -> RequestTrace:
    """Chunks that nobody wants twice, each behind one of two that are wanted at two rates."""
    rng = np.random.default_rng(seed)
    events = [(float(at), 0) for at in np.cumsum(rng.exponential(4.0, count))]
    events += [(float(at), 3) for at in np.cumsum(rng.exponential(40.0, count // 10))]
    requests = []
    for number, (at, depth) in enumerate(sorted(events)):
        keys = (*(f"once {number}.{i}" for i in range(depth)), f"often {depth}")
        requests.append(Request(at, keys, (1,) * len(keys)))
    return trace(*requests, prefix=False)


def test_rates_are_those_of_the_trace() -> None:
    fitted = fit_hazard(uses_of(poisson(4000)), prefix=False)
    assert fitted is not None
    values = {"count": 1000.0, "gap": 4.0, "first": 4000.0, "length": 1.0, "last": 1.0}
    often = fitted.case(tuple(values.get(name, 0.0) for name in FEATURES))
    values |= {"count": 1.0, "gap": -1.0, "first": 0.0, "length": 4.0, "last": 0.0, "new": 3.0, "fresh": 1.0}
    once = fitted.case(tuple(values.get(name, 0.0) for name in FEATURES))
    rates = fitted.rates(np.array([often, once]))
    assert rates[0, :6] == pytest.approx(np.full(6, 0.25), rel=0.3)
    assert (rates[1] < 0.02).all()


def test_one_trace_gives_one_model() -> None:
    one, other = (fit_hazard(uses_of(traffic(100)), prefix=False) for _ in range(2))
    assert one is not None and other is not None
    assert np.array_equal(one.weights, other.weights)


NOTHING = [[], [ask(0.0, "abc")], [ask(0.0, "a")] * 9, [ask(float(i), str(i)) for i in range(9)]]


@pytest.mark.parametrize("requests", NOTHING)
def test_trace_that_teaches_nothing_gives_no_model(requests: list[Request]) -> None:
    assert fit_hazard(uses_of(trace(*requests)), prefix=True) is None
    assert learned(trace(*requests), 0.5) is None
    assert not LPCPlus(None).learned


def test_forecast_is_read() -> None:
    """Half of all conversations go on, and the forecast tells which."""
    rng = np.random.default_rng(0)
    requests, chances = [], []
    for number in range(600):
        goes_on = bool(rng.random() < 0.5)
        for turn in range(1 + goes_on):
            at, whose = number + 50.0 * turn, str(number)
            requests.append(Request(at, (whose,), (1,), conversation=whose))
            chances.append(0.9 if goes_on and not turn else 0.1)
    order = sorted(range(len(requests)), key=lambda place: requests[place].at)
    known = trace(*(requests[place] for place in order))
    fitted = learned(known, 0.5, [chances[place] for place in order])
    assert fitted is not None
    use = dict.fromkeys(FEATURES, 0.0) | {"count": 1.0, "gap": -1.0, "length": 1.0, "last": 1.0, "fresh": 1.0}
    told = [fitted.case(tuple((use | {"continues": chance}).values())) for chance in (0.9, 0.1)]
    goes_on, ends = fitted.rates(np.array(told)).max(axis=1)
    assert goes_on > 3.0 * ends


def traffic(prompts: int) -> RequestTrace:
    """Twenty documents that are asked for again and again, each among three that nobody wants twice."""
    random, now, requests = np.random.default_rng(0), 0.0, []
    for number in range(prompts):
        now += random.exponential()
        keys = (f"often {random.integers(20)}", *(f"{number}.{place}" for place in range(3)))
        requests.append(Request(now, keys, (100,) * 4))
    return RequestTrace("traffic", requests, prefix=False, unit="tokens")


def test_table_finds_more_than_lru_where_there_is_something_to_learn() -> None:
    found = learn_table(traffic(600))
    assert found.found > found.lru + 0.02 and found.prompts == 600 and not found.hazard.prefix
    assert found.gdsf > found.lru + 0.02, "what is used often is told from what is used once"


def test_table_finds_no_more_than_lru_where_that_finds_all() -> None:
    """Every document twice in a row."""
    requests = [Request(float(at), (str(at // 2),), (100,)) for at in range(500)]
    found = learn_table(RequestTrace("twice", requests, prefix=False, unit="tokens"))
    assert found.lru == 0.5 >= found.found


@pytest.mark.parametrize(
    "few", [traffic(1), traffic(LEAST - 1), trace(*(ask(float(i), chr(i)) for i in range(300)))]
)
def test_traces_that_teach_too_little_are_refused(few: RequestTrace) -> None:
    with pytest.raises(PredictorError, match="too few"):
        learn_table(few)


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
    return outcome.found[LEARNED:].reshape(10, -1).mean(axis=1)


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
