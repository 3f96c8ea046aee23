"""The interface of eviction policies, as a tier uses them, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from blendrag.errors import ConfigError
from blendrag.names import Registry


@dataclass(frozen=True, slots=True)
class Use:
    """The facts of one use of a chunk. Everything but ``at`` may be unknown.

    at: seconds, by any clock; where it runs backwards, or is NaN, time stands still.
    cost: seconds per unit of size that computing the chunk took (RAGCache eq. 3: Cost_i / NewSize_i of the
        request); None where nothing was computed, or nobody knows.
    depth: chunks before it in the prompt. length: chunks in the prompt. known: leading chunks of the prompt
        that were seen before.
    """

    at: float
    cost: float | None = None
    depth: int = 0
    length: int = 1
    known: int = 0


MayLeave = Callable[[str], bool]
"""A function that tells whether a chunk may leave now: of a tree, only leaves may (RAGCache, section 5.1)."""


def anything(key: str) -> bool:
    return True


class EvictionPolicy(ABC):
    """The interface of policies, which keep the order in which a tier's chunks leave. The tier serialises all
    calls.

    Chunks that are no longer held, or never were, may be named in any call but ``added``: they are ignored.
    """

    _clock: float = float("-inf")

    @abstractmethod
    def added(self, key: str, size: int, use: Use) -> None:
        """Note that a chunk came in (or was replaced); ``use`` did not find it. size: in the tier's units."""

    @abstractmethod
    def used(self, key: str, use: Use) -> None:
        """Note that a chunk was read."""

    @abstractmethod
    def removed(self, key: str) -> None:
        """Note that a chunk left, for whatever reason."""

    @abstractmethod
    def victim(self, may_leave: MayLeave = anything) -> str | None:
        """Return the chunk that should leave next, of those that may; None if there is none. Changes nothing:
        the chunk may yet stay."""

    def forecast(  # noqa: B027  (most policies do not care)
        self, key: str, probability: float, at: float, conversation: str = ""
    ) -> None:
        """Note that a conversation that used the chunk goes on with this probability, as it seemed at ``at``.

        conversation: its name, so that its next forecast replaces this one; others' stay.
        """

    @classmethod
    def fitted(cls, file: Path) -> Self:
        """Make a policy that uses what was fitted (:mod:`blendrag.eviction.fitted`). Raises ConfigError for
        policies that use nothing of the kind, PredictorError for a file that cannot be used."""
        raise ConfigError(f"the eviction policy goes by no file: leave out @{file}")

    @classmethod
    def uses_forecasts(cls) -> bool:
        """Return whether :meth:`forecast` does anything, so that forecasts are made."""
        return cls.forecast is not EvictionPolicy.forecast

    def _now(self, at: float) -> float:
        """Return the latest time that any call has named, this one included."""
        if at > self._clock:
            self._clock = at
        return self._clock


POLICIES = Registry[EvictionPolicy]("eviction policy")
register_policy = POLICIES.register


def make_policy(name: str) -> EvictionPolicy:
    """Make a policy called ``name``; behind an ``@``, the file that it uses. Raises ConfigError for an
    unknown one, PredictorError for a file that cannot be used."""
    kind, _, file = name.partition("@")
    return POLICIES[kind].fitted(Path(file)) if file else POLICIES[kind]()
