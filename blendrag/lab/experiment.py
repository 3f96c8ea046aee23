"""The loop of everything that is measured here: arms are asked in turn, and what they took is kept.

A trial is what every arm is given: a prompt, or a row of a data set. All arms have had a
trial before the next one begins, and every trial begins with another arm: what disturbs the machine disturbs
all arms, and an arm is compared with the others trial by trial. The first trial warms up. Arms that time
first tokens (:mod:`blendrag.lab.arms`) carry their prompts, and are asked by :func:`measure`; whatever else
is an arm uses the loop itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from blendrag.engine.client.engine import Engine
from blendrag.lab.arms import Arm, Sample
from blendrag.progress import Progress

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArmTurn(Generic[K, A, T]):
    """A turn: ``arm``, called ``key``, is asked ``trial``. number: of it, below 0 as a warm-up."""

    number: int
    trial: T
    key: K
    arm: A

    @property
    def warms_up(self) -> bool:
        return self.number < 0


def in_turn(
    arms: Mapping[K, A],
    trials: Sequence[T],
    progress: Progress,
    *,
    warm_up: int = 1,
    done: Callable[[T, K], bool] = lambda trial, key: False,
) -> Iterator[ArmTurn[K, A, T]]:
    """Yield all trials of all arms, in the order of the trials; a turn is over when the next one is asked
    for.

    warm_up: how many of the first trials are not to be kept. done: what need not be asked any more.
    """
    keys, count = list(arms), len(trials) - warm_up
    step = max(1, len(keys) // len(trials)) if trials else 1
    turns = []
    for number, trial in enumerate(trials):
        shift = number * step % len(keys)
        order = (*keys[shift:], *keys[:shift])
        turns += [ArmTurn(number - warm_up, trial, key, arms[key]) for key in order if not done(trial, key)]
    progress.total(len(turns))
    for turn in turns:
        where = "warm-up" if turn.warms_up else f"{turn.number + 1} of {count}"
        progress.note(f"{where}: {turn.key}")
        yield turn
        progress.advance()


def measure(engine: Engine, arms: Mapping[K, Arm], progress: Progress) -> dict[K, list[Sample]]:
    """Return per arm its samples, in the order of the trials.

    All arms have as many trials. Each request begins with an empty prefix cache. Raises EngineError, also
    for a prompt that was not answered in the arm's way.
    """
    samples: dict[K, list[Sample]] = {key: [] for key in arms}
    trials = min((len(arm.trials) for arm in arms.values()), default=0)
    for turn in in_turn(arms, range(trials), progress):
        found = turn.arm.run(engine, turn.trial)
        if not turn.warms_up:
            samples[turn.key].append(found)
    return samples
