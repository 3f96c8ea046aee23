"""The base of tiers on servers: opening records from their first bytes, and surviving the server."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from blendrag.errors import BlendragError
from blendrag.store.record import HEAD_READ, DamagedError, Head, Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Opened, Read, Tier, TierError

_SLOWEST = 25e6  # bytes per second; a server slower than that has failed
_MAX_TEXT = 200  # characters of a library's message that are passed on

_BATCH = 500  # keys that are asked for or deleted in one call

T = TypeVar("T")

_log = logging.getLogger(__name__)


class GarbageError(Exception):
    """The error for an answer that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class First:
    """The first bytes of a record on a server, its size as the server says it, and its version."""

    data: bytes
    size: int
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The place where the rows of an opened record begin, and the version of the record."""

    begin: int
    version: str | None


class Breaker:
    """A circuit breaker. Closed: calls may go ahead. ``failure`` opens it for ``cooldown_s``: none may. After
    that, one call, the probe, finds out whether the server is back: ``success`` closes it, ``failure`` opens
    it again.

    Thread-safe. A call that was admitted has to end in ``success`` or ``failure``. clock: seconds that never
    go backwards.
    """

    def __init__(self, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cooldown_s, self._clock = cooldown_s, clock
        self._lock = threading.Lock()
        self._until: float | None = None  # None: closed
        self._probing = False

    def admits(self) -> bool:
        """Return whether a call may be made now."""
        with self._lock:
            if self._until is None:
                return True
            if self._probing or self._clock() < self._until:
                return False
            self._probing = True
            return True

    def success(self) -> None:
        """Note that a call was answered."""
        with self._lock:
            self._until, self._probing = None, False

    def failure(self) -> None:
        """Note that a call was not answered, or not in a way that makes sense."""
        with self._lock:
            self._until, self._probing = self._clock() + self._cooldown_s, False


class RemoteTier(Tier):
    """A tier on a server that others share. Limits are the server's business: nothing is evicted from here.

    A subclass talks to its server in ``_first``, ``_rows``, ``_put``, ``_delete`` and ``_has``, and may raise
    its library's errors there: they mean that the server cannot be used, and open the breaker. A TierError or
    DamagedError raised there is an answer, and does not.
    """

    group = 4

    def __init__(self, spec: TierSpec, layout: Layout) -> None:
        super().__init__(spec, layout)
        self._breaker = Breaker(spec.cooldown_s)

    # -- what a kind of server has to do -------------------------------------------------------------------

    @abstractmethod
    def _first(self, wanted: Mapping[str, int]) -> Mapping[str, First | Exception]:
        """Return the first so many bytes of each record that is there."""

    @abstractmethod
    def _rows(self, wanted: Sequence[Read]) -> None:
        """Fill ``into`` of each; ``opened.source`` is a Place. Raises DamagedError, TierError."""

    @abstractmethod
    def _put(self, record: Record) -> None:
        """Store the record. Raises StoreFullError, TierError."""

    @abstractmethod
    def _delete(self, keys: Sequence[str]) -> int: ...

    @abstractmethod
    def _has(self, keys: Sequence[str]) -> set[str]: ...

    # -- Tier ----------------------------------------------------------------------------------------------

    def _open(self, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        found: dict[str, Opened | Exception] = {}
        wanted = dict.fromkeys(keys, HEAD_READ)
        while wanted:
            with self._call():
                firsts = self._first(wanted)
            longer = {}
            for key, first in firsts.items():
                head = self._head(key, first, wanted[key])
                if isinstance(head, int):
                    longer[key] = head
                else:
                    found[key] = head
            wanted = longer
        return found

    def _head(self, key: str, first: First | Exception, asked: int) -> Opened | Exception | int:
        if isinstance(first, Exception):
            return first
        if len(first.data) != min(asked, first.size):
            return DamagedError(f"{key}: {len(first.data):,} bytes where {first.size:,} should be")
        try:
            head = self.layout.parse(key, first.data, first.size)
        except DamagedError as error:
            return error
        if isinstance(head, Head):
            return Opened(self, head, Place(head.begin, first.version))
        return head

    def read(self, wanted: Sequence[Read]) -> list[torch.Tensor]:
        with self._call():
            self._rows(wanted)
        return [one.into for one in wanted]

    def put(self, record: Record) -> None:
        with self._call():
            self._put(record)
        self.count(puts=1)

    def delete(self, keys: Iterable[str]) -> int:
        return sum(self._in_batches(self._delete, keys))

    def has(self, keys: Iterable[str]) -> set[str]:
        return set().union(*self._in_batches(self._has, keys))

    def _in_batches(self, ask: Callable[[Sequence[str]], T], keys: Iterable[str]) -> Iterator[T]:
        """Ask for the keys in batches, each in a call of its own, with a call's time."""
        left = iter(keys)
        while batch := list(itertools.islice(left, _BATCH)):
            with self._call():
                answer = ask(batch)
            yield answer

    # -- failures ------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Guard all that is asked of the server: what fails becomes a TierError, and opens the breaker."""
        if not self._breaker.admits():
            self.count(refused=1)
            raise TierError(f"{self.name}: not asked, it failed less than {self.spec.cooldown_s:g} s ago")
        try:
            yield
        except (DamagedError, BlendragError):
            self._breaker.success()
            raise
        except TierError:
            self._breaker.success()
            self.count(errors=1)
            raise
        except Exception as error:
            self._breaker.failure()
            self.count(errors=1)
            reason = f"{self.name}: {describe(error)}"
            _log.warning("%s; left alone for %g s", reason, self.spec.cooldown_s)
            raise TierError(reason) from None  # the cause may show what is secret
        except BaseException:  # Ctrl-C, for example: nothing is known, and a probe must not stay out for ever
            self._breaker.failure()
            raise
        else:
            self._breaker.success()

    def _seconds(self, nbytes: int) -> float:
        """Return how long a call may take that moves so many bytes."""
        return self.spec.timeout_s + nbytes / _SLOWEST


def describe(error: BaseException) -> str:
    """Return an error's class and the first line of its message, without secrets that a URL may carry."""
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r"//[^\s/]*@", "//", re.sub(r"\?\S+", "?...", line))
    return f"{type(error).__name__}: {line[:_MAX_TEXT]}".removesuffix(": ")


def public(url: str) -> str:
    """Return a URL as it may be shown: without user, password and query."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]
