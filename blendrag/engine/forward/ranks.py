"""The agreement of an engine's ranks: each has some heads of every layer, and a process of its own.

All of them take the same steps through the same layers, whose sums wait for every rank. So whatever a rank
alone finds out (from a clock, a disk, an error) is shared with all before it changes what is done next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed

from blendrag.errors import BlendragError, EngineError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Closable(Protocol):
    """An object that can be closed."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


def attempt(work: Callable[[], T]) -> tuple[T | None, BlendragError | None]:
    """Return the result of ``work``, or the error that the client is told of."""
    try:
        return work(), None
    except BlendragError as error:
        return None, error
    except Exception as error:
        return None, EngineError(f"{type(error).__name__}: {error}")


class Ranks:
    """A single rank, and the interface of several. The first rank is the *owner*: it writes and has the
    catalogue.

    Methods are called by all ranks in the same order, in the worker's own thread.
    """

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def heads(self, total: int) -> range:
        """Return which of ``total`` KV heads this rank has. If there are more ranks than heads, several have
        the same."""
        first = self.rank * total // self.size
        return range(first, first + max(1, total // self.size) if total else 0)

    def shards(self, total: int) -> int:
        """Return how many shards of heads the ranks cut the records into that they write."""
        return max(1, min(self.size, total))

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum of what every rank has of its heads. May overwrite ``numbers``, float32."""
        return numbers

    def whole(self, kv: torch.Tensor, total: int) -> torch.Tensor | None:
        """Return KV [..., own heads, head_size] with all heads; None except on the owner."""
        return kv

    def choose(self, value: T) -> T:
        """Return the owner's value."""
        return value

    def everyone(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        return [value]

    def all(self, value: bool) -> bool:
        """Return whether the value is true on all ranks."""
        return value

    def outcome(self, work: Callable[[], T]) -> T:
        """Return the result, plain data, of ``work``, which the owner does. All ranks raise its error."""
        return work()

    def together(self, *agreed: type[Exception]) -> AbstractContextManager[None]:
        """End this rank's process, and with it the engine, on an error inside that only one rank has: the
        others would wait for it. agreed: errors that all ranks have together."""
        return nullcontext()


ALONE = Ranks()


def open_on_all(ranks: Ranks, begin: Callable[[], C]) -> C:
    """Open a store on the owner, and then on the other ranks, which find what it has made; or on none:
    otherwise only some would take part in what all do next. Raises a BlendragError on all of them."""
    opened, error = attempt(begin) if ranks.first else (None, None)
    if (error := ranks.choose(error)) is None and not ranks.first:
        opened, error = attempt(begin)
    error = next(filter(None, ranks.everyone(error)), None)
    if error is not None:
        if opened is not None:
            opened.close()
        raise error
    assert opened is not None
    return opened


class SeveralRanks(Ranks):
    """One of several ranks. group: vLLM's tensor-parallel group (``compat.parallel``)."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank_in_group, group.world_size

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(numbers)

    def whole(self, kv: torch.Tensor, total: int) -> torch.Tensor | None:
        own = kv.cpu().contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.first else None
        torch.distributed.gather(own, parts, self._group.ranks[0], self._group.cpu_group)
        if parts is None:
            return None
        step = self.size // self.shards(total)  # so many ranks have the same heads
        return torch.cat([part.view(kv.dtype) for part in parts[::step]], dim=-2)

    def choose(self, value: T) -> T:
        return self._group.broadcast_object(value if self.first else None)

    def everyone(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, self._group.cpu_group)
        return values

    def all(self, value: bool) -> bool:
        agreed = torch.tensor(int(value))
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, self._group.cpu_group)
        return bool(agreed)

    def outcome(self, work: Callable[[], T]) -> T:
        result, error = None, None
        if self.first:
            result, error = attempt(work)
        result, error = self.choose((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @contextmanager
    def together(self, *agreed: type[Exception]) -> Iterator[None]:
        try:
            yield
        except agreed:
            raise
        except Exception as error:
            _log.critical("rank %d fails alone, and the engine with it", self.rank, exc_info=error)
            os._exit(1)
