"""The two halves by which a mechanism takes part in requests: in the scheduler's process, and in every
worker's.

A half is made by one line in one list (``worker/connector.py``, ``worker/data_plane.py``). The connector and
the data plane know mechanisms by these interfaces only; a method that a mechanism does not define does
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from blendrag.engine.compat.connector import (
    KVConnectorMetadata,
    RequestBlocks,
    SchedulerRequest,
    SchedulerStep,
)
from blendrag.engine.forward.slices import Finished
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport, Cause, Tally
from blendrag.store.tiers import Tier

if TYPE_CHECKING:
    from blendrag.engine.forward.prompt_forward import Note

_KEPT_REPORTS = 2048  # more than vLLM has requests at a time on large GPUs, 1024: a stream asks at its end


@dataclass(slots=True)
class Asked(SchedulerRequest):
    """A request between its arrival and its end, in the scheduler's process.

    recipe: how it is blended; None: it is not. state: ``new``; ``ordered``: the worker was told to compute
    what was claimed for it; ``here``: the worker has done that; ``failed``: the engine prefills it itself.
    result: the report that its answer carries, once that is known. counts: whether somebody has asked it.
    prefix: how many of its tokens the engine's prefix cache had.
    """

    recipe: Recipe | None = None
    state: Literal["new", "ordered", "here", "failed"] = "new"
    result: BlendReport | None = None
    refused: bool = False  # the worker has never heard of it
    counts: bool = True
    prefix: int = 0

    @property
    def ticket(self) -> str:
        """Return the name that the request's client has given it."""
        return str((self.params or {}).get("ticket", ""))

    @property
    def plain(self) -> bool:
        """Return whether it is not to be blended, and nothing has failed for it."""
        return self.recipe is None and self.state != "failed"

    @property
    def computed_plainly(self) -> int:
        """Return how many tokens of its prompt the engine has computed, not found or been brought."""
        done, report = min(self.prompt, self.computed) - self.prefix, self.result
        return max(0, done - (report.exact + report.cached + report.fresh if report else 0))

    def refuse(self, cause: Cause, why: str) -> None:
        """Have the engine prefill the request, and its answer say why."""
        self.recipe, self.state, self.refused = None, "failed", True
        self.result = BlendReport(cause=cause, fallback=why)


class Orders(NamedTuple):
    """The orders of one mechanism to its workers' halves in a step. claims: those that requests wait for.
    others: whatever else."""

    claims: Sequence[Any] = ()
    others: Sequence[Any] = ()


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler's message to the worker in every step.

    orders: by mechanism. busy: whether the step computes anything for running requests. follows: whether it
    comes right after the last one, as it does while an answer is being generated. ended: requests that have
    ended, or given up. preempted: requests that have lost their blocks. refused: reports by ticket on those
    that no worker hears of otherwise, since streams ask a worker.
    """

    orders: dict[str, Orders] = field(default_factory=dict)
    busy: bool = False
    follows: bool = False
    ended: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
    refused: dict[str, BlendReport] = field(default_factory=dict)

    def of(self, name: str) -> Orders:
        return self.orders.get(name, Orders())


class SchedulerHook:
    """A mechanism's half in the scheduler's process. name: the same as the worker's half's."""

    name: ClassVar[str]

    def bind(self, blocks: RequestBlocks | None) -> None:
        """Take the blocks of requests; None where they are in several groups, or this vLLM has another
        manager of them."""

    def arrived(self, asked: Asked) -> None:
        """Note a request. Raises any exception for parameters that cannot be read."""

    def claim(self, asked: Asked, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` ones this mechanism brings; None: the request has to
        wait. Called in every step for a request that waits."""
        return 0

    def allocated(self, asked: Asked, block_ids: Sequence[list[int]], claimed: int) -> None:
        """Note the blocks of a request in each group of layers; ``claimed`` of its tokens are to be
        brought."""

    def orders(self, step: SchedulerStep) -> Orders:
        """Return what the workers have to do in the step at hand."""
        return Orders()

    def reported(self, asked: Asked, report: BlendReport) -> None:
        """Note what has become of a claim."""

    def received(self, request_id: str, message: Any, asked: Asked | None) -> Tally:
        """Note what the worker's half says of a request; if it has ended, ``asked`` is None. Returns
        what is counted."""
        return {}

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""


class Blending(NamedTuple):
    """The part of a mechanism in another's blend. order: what is left to blend. note: is told of queries.
    finish: makes the report out of the blend's."""

    order: BlendOrder
    note: Note | None = None
    finish: Callable[[BlendReport], BlendReport] | None = None


class WorkerHook:
    """A mechanism's half in a worker. Methods run on the worker's own thread, on all ranks alike."""

    name: ClassVar[str]

    @property
    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """Return what a client may call by name, with plain data."""
        return {}

    @property
    def tiers(self) -> list[Tier]:
        """Return the tiers of its own."""
        return []

    def before_forward(self, step: Step) -> dict[str, Any]:
        """Do what comes before the engine's forward. Returns what the scheduler's half is to hear, by
        request."""
        return {}

    def bring(self, step: Step) -> Iterable[Finished]:
        """Go on with what requests wait for. vLLM calls it in every step, before or behind its forward."""
        return ()

    def after_forward(self, step: Step, failed: Set[int]) -> None:
        """Do what comes behind the engine's forward. failed: blocks without what should be in them."""

    def blending(self, order: BlendOrder) -> Blending:
        """Take part in a blend that begins."""
        return Blending(order)

    def closing(self, store: str) -> None:
        """Leave a store that is about to close."""

    def close(self) -> None:
        """End, once all stores are closed."""


class Reports:
    """The latest reports by ticket, for requests whose output left without one: they ended in the step that
    blended them, or their output is a server's stream."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, BlendReport] = OrderedDict()

    def keep(self, ticket: str, report: BlendReport) -> None:
        self._latest[ticket] = report
        if len(self._latest) > _KEPT_REPORTS:
            self._latest.popitem(last=False)

    def get(self, ticket: str) -> BlendReport | None:
        return self._latest.get(ticket)
